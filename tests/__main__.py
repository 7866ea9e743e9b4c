"""`python -m tests`: ruff, format check, mypy --strict and pytest in one go.

    python -m tests               what every change has to pass; of tests that try every
                                  combination, a part (tests/scope.py)
    python -m tests --fast        without mypy and the slow tests; needs no torch
    python -m tests --of PATH     lint, and the tests that reach a file (tests/reaching.py)
    python -m tests --everything  all combinations, then every parser fuzzed, every writer killed
                                  and the memory of commands on large files measured

Other arguments go to pytest. Exits non-zero if any step fails; the other steps still run, so that
one run shows everything that is wrong.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.reaching import tests_of
from tests.scope import SAMPLED, SCOPE

ROOT = Path(__file__).resolve().parent.parent

STYLE = (("ruff", "check", "."), ("ruff", "format", "--check", "."))
MYPY = ("mypy",)
FUZZ_SECONDS = 60  # of each target; tests.long takes more
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Files in memory, and the bytes free there that it takes: tests hold a quarter of that.
MEMORY, ROOM = Path("/dev/shm"), 6 << 30
SCOPES = ("--fast", "--of", "--everything")


def steps(scope: str, extra: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the modules to run with their arguments, in order."""
    tests = ["pytest"]
    if importlib.util.find_spec("xdist") is not None and "-n" not in extra:
        tests += ["-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadgroup"]
    if scope == "--fast":
        return [*STYLE, (*tests, "-m", "not slow", *extra)]
    if scope == "--of":
        return [*STYLE, (*tests, *extra)]
    found: list[tuple[str, ...]] = [*STYLE, MYPY, (*tests, *extra)]
    if scope == "--everything":
        logs = tempfile.mkdtemp(prefix="aprfmt-fuzz-")
        found += [
            ("tests.long", "fuzz", "--seconds", str(FUZZ_SECONDS), "--out", logs),
            ("tests.long", "kills"),
            ("tests.long", "memory", "--gigabytes", "1"),
        ]
    return found


def main(arguments: Sequence[str]) -> int:
    """Run every step and print a line for each; return 0 if all passed."""
    scope = next((word for word in arguments if word in SCOPES), "")
    extra = [word for word in arguments if word not in SCOPES]
    if scope == "--of":
        paths = [word for word in extra if Path(ROOT, word).exists()]
        reached = sorted({test for path in paths for test in tests_of(path)})
        if not reached:
            print("--of: name files of the product", file=sys.stderr)
            return 2
        extra = [*reached, *(word for word in extra if word not in paths)]
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # commands would compile every module again
    for name in THREADS:  # every core has a worker: more threads of libraries wait for each other
        environment.setdefault(name, "1")
    if scope != "--everything":
        environment[SCOPE] = SAMPLED
        if roomy(MEMORY):
            environment.setdefault("TMPDIR", str(MEMORY))  # much of the time is a disk's, else
    failed = []
    beside = []
    for step in steps(scope, extra):
        if step == MYPY:  # on one core while the tests take the rest; said when they are done
            beside.append((step, _begun(step, environment)))
            continue
        began = time.monotonic()
        code = subprocess.run(_command(step), cwd=ROOT, env=environment, check=False).returncode
        failed += _judged(step, code, f"  ({time.monotonic() - began:.0f} s)")
    for step, run in beside:
        print(run.communicate()[0], end="")
        failed += _judged(step, run.returncode)
    return 1 if failed else 0


def roomy(folder: Path) -> bool:
    """Say whether what tests write has room in a folder, and may lie there."""
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= ROOM


def _begun(step: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Begin a step that says little, and goes on beside others."""
    return subprocess.Popen(
        _command(step),
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _command(step: Sequence[str]) -> list[str]:
    name, *args = step
    return [sys.executable, "-m", name, *args]


def _judged(step: Sequence[str], code: int, more: str = "") -> list[str]:
    """Print a step's line; return its name if it failed."""
    print(f"{'FAIL' if code else 'PASS'}  {' '.join(step)}{more}", flush=True)
    return [step[0]] if code else []


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
