"""`python -m tests.fuzz NAME`: fuzz one target with Atheris until time or executions are used up.

    python -m tests.fuzz gguf --seconds 10
    python -m tests.fuzz apr --runs 5000000 --corpus DIR

The engine's statistics end what it prints. A broken promise ends the run with exit code 77, a
traceback and the input as `crash-*` in the folder of `--findings`. Exit code 3: Atheris is not
installed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

MAX_BYTES = 4096  # of an input; every rule can be broken in that much
SLOWEST = 60  # wall seconds of one input before the engine gives up; `contract` is stricter


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("target", help="a name of tests.fuzz.targets, or module:attribute")
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--runs", type=int, default=-1)
    parser.add_argument("--patience", type=int, default=SLOWEST, help="wall seconds of one input")
    parser.add_argument("--cpu-seconds", type=float, help="processor time of one input")
    parser.add_argument("--seed", type=int, default=0, help="0: a fresh one")
    parser.add_argument("--corpus", type=Path, help="folder that keeps what was found")
    parser.add_argument("--findings", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    try:
        import atheris
    except ImportError:
        print("NOT-RUN: atheris is not installed: pip install atheris", file=sys.stderr)
        raise SystemExit(3) from None
    with atheris.instrument_imports(include=["aprfmt", "tests.fuzz.broken"]):
        from tests.fuzz.targets import find

        target = find(arguments.target)
    from tests.fuzz.contract import MEMORY, SECONDS, judge

    corpus = arguments.corpus or Path(tempfile.mkdtemp(prefix=f"aprfmt-fuzz-{target.name}-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number:04d}").write_bytes(seed)
    arguments.findings.mkdir(parents=True, exist_ok=True)

    seconds = arguments.cpu_seconds or SECONDS

    def one(data: bytes) -> None:
        judge(target, data, seconds)

    options = [
        f"-max_len={MAX_BYTES}",
        f"-timeout={arguments.patience}",
        f"-rss_limit_mb={MEMORY >> 20}",
        f"-artifact_prefix={arguments.findings}/",
        f"-max_total_time={arguments.seconds}",
        f"-runs={arguments.runs}",
        f"-seed={arguments.seed}",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one)
    atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
