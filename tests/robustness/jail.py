"""Commands under limits: each in a forked process with bounded memory, and an end.

    results = run([Job("a", ("inspect", "/tmp/a.gguf"))])
    results["a"].code, results["a"].err, results["a"].peak

One process imports the command line once and forks for every job, so a job costs milliseconds and
none can harm another. A job beyond a limit dies by a signal: its code is negative. The limit of
time is so far away that it only ends what would never end; `python -m tests.fuzz` judges seconds.
"""

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

HEAP = 256 << 20  # bytes of private memory beyond what the process has before the job
OUTPUT = 4 << 20  # bytes kept of each stream
UNSAID = 70  # a job that could not even say what went wrong (no memory left to print it)


@dataclass(frozen=True)
class Job:
    """One command line; `reader` names another reader of READERS, whose argument is `args[0]`."""

    id: str
    args: tuple[str, ...]
    reader: str = ""
    heap: int = HEAP


@dataclass(frozen=True)
class Done:
    """How a job ended. `peak` is its highest resident memory in bytes beyond the parent's."""

    id: str
    code: int
    out: str
    err: str
    peak: int


def run(jobs: Sequence[Job], warm: Sequence[tuple[str, ...]] = ()) -> dict[str, Done]:
    """Run all jobs one after the other; returns what became of them by id. NOT-RUN off Linux.

    `warm` are harmless command lines run first without limits, so that what they import is there.
    """
    if not Path("/proc/self/status").is_file():
        from tests.conftest import not_run

        not_run("the limits of the jail are those of Linux")
    assert len({job.id for job in jobs}) == len(jobs)
    done = subprocess.run(
        [sys.executable, "-m", "tests.robustness.jail"],
        input=json.dumps({"jobs": [asdict(job) for job in jobs], "warm": list(warm)}),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {row["id"]: Done(**row) for row in json.loads(done.stdout)}


def _aprfmt(*args: str) -> int:
    from aprfmt.cli.main import main

    try:
        main(list(args))
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _gguf_py(path: str) -> int:
    """Open as the gguf package does, and touch every tensor."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    print(len(reader.fields), [tensor.data.nbytes for tensor in reader.tensors])
    return 0


def _libgguf(path: str) -> int:
    """Open as libgguf's inspector does."""
    from libgguf.inspect import inspect_gguf

    print(len(inspect_gguf(path).tensors))
    return 0


def _gguf_validate(path: str) -> int:
    """Judge as libgguf's validator does: an error is a refusal, a warning is not."""
    from libgguf.inspect import validate_gguf

    errors = [issue for issue in validate_gguf(path).issues if issue.severity == "error"]
    print([str(issue) for issue in errors])
    return 1 if errors else 0


def _safetensors(path: str) -> int:
    """Read as the reference library does."""
    from safetensors import deserialize

    print(len(deserialize(Path(path).read_bytes())))  # type: ignore[no-untyped-call]
    return 0


READERS: dict[str, Callable[..., int]] = {
    "": _aprfmt, "gguf-py": _gguf_py, "libgguf": _libgguf, "gguf-validate": _gguf_validate,
    "safetensors": _safetensors,
}  # fmt: skip


def _preload(jobs: Sequence[Job]) -> None:
    """Import before forking what jobs would each import again."""
    import importlib

    wanted = {"gguf-py": "gguf", "libgguf": "libgguf.inspect", "gguf-validate": "libgguf.inspect"}
    for reader in {job.reader for job in jobs}:
        importlib.import_module(wanted.get(reader, "numpy"))
    if any(not job.reader for job in jobs):
        for module in (
            "aprfmt.cli.main",
            "aprfmt.codecs.native",
            "aprfmt.model",
            "aprfmt.model.resolve",
            "aprfmt.checks.table",
            "aprfmt.arch.llama",
            "aprfmt.tensors.stats",
            "aprfmt.formats.apr.reader",
            "aprfmt.formats.safetensors.reader",
        ):
            importlib.import_module(module)


def _child(job: Job, out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    signal.alarm(PATIENCE)  # also for what waits for a pipe or a lock
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = _kilobytes("VmData") + job.heap // 1024
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data * 1024, most))
    code = UNSAID
    try:
        code = READERS[job.reader](*job.args)
        sys.stdout.flush()
    except BaseException as error:
        # Our own main() lets nothing through; other readers refuse by raising. Saying so takes
        # memory, and Python can try for ever to get some: what has failed is settled by now.
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = UNSAID if not job.reader else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def _kilobytes(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0])


def _one(job: Job) -> Done:
    before = _kilobytes("VmRSS")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            _child(job, out.fileno(), err.fileno())
        _, status, usage = os.wait4(pid, 0)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read(OUTPUT).decode("utf-8", "surrogateescape"))
    code = os.waitstatus_to_exitcode(status)
    peak = max(0, usage.ru_maxrss - before) * 1024
    return Done(job.id, code, texts[0], texts[1], peak)


def main() -> None:
    """Read jobs from stdin, write results to stdout, both JSON."""
    work: Any = json.load(sys.stdin)
    jobs = [Job(**{**row, "args": tuple(row["args"])}) for row in work["jobs"]]
    _preload(jobs)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for args in work["warm"]:
            _aprfmt(*args)
    print(json.dumps([asdict(_one(job)) for job in jobs]))


if __name__ == "__main__":
    main()
