"""`python -m tests`: ruff, format check, mypy --strict and pytest in one go.

Extra arguments go to pytest. Exits non-zero if any step fails; every step runs all the same, so
that one run shows everything that is wrong.
"""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

STEPS: tuple[tuple[str, ...], ...] = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("pytest",),
)


def main() -> int:
    """Run every step and print a line for each; return 0 if all passed."""
    environment = dict(os.environ)
    failed = []
    for name, *args in STEPS:
        command = [sys.executable, "-m", name, *args]
        if name == "pytest":
            if importlib.util.find_spec("xdist") is not None and "-n" not in sys.argv:
                command += ["-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadgroup"]
            command += sys.argv[1:]
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        verdict = "PASS" if code == 0 else "FAIL"
        print(f"{verdict}  {name} {' '.join(args)}  ({time.monotonic() - began:.0f} s)", flush=True)
        if code:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
