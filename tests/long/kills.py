"""Kill and interrupt every writer hundreds of times: 500 SIGKILL, 50 SIGTERM and 50 SIGINT each.

Conversions with --resume: 50 SIGKILL each, and the bytes of one run after the last.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.conversion.resume_driver import SUBJECTS
from tests.formats.publishing import SCENARIOS
from tests.formats.writers import WRITERS

ROOT = Path(__file__).resolve().parents[2]
KILLS = {"random": 500, "SIGTERM": 50, "SIGINT": 50}
EVERY = (*SCENARIOS, *WRITERS)
RESUMED = 50
CODES = {"random": -9, "SIGTERM": 143, "SIGINT": 130}


def kill(subject: str, what: str, times: int) -> dict[str, Any]:
    """Run one experiment; the driver ends with a traceback where a promise is broken."""
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.formats.kill_driver",
                what,
                subject,
                f"{folder}/x",
                str(times),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    row: dict[str, Any] = {"writer": subject, "signal": what, "date": time.strftime("%Y-%m-%d")}
    if run.returncode:
        return row | {"passed": False, "error": run.stderr[-2000:]}
    records = json.loads(run.stdout)
    codes = Counter(record["exit"] for record in records)
    litter = sum(bool(record["litter"]) for record in records)
    pending = sum(bool(record["pending"]) for record in records)
    passed = set(codes) == {CODES[what]} and (what == "random" or not litter + pending)
    return row | {
        "passed": passed,
        "kills": len(records),
        "exits": dict(codes),
        "with_leftovers": litter,
        "half_published": pending,
    }


def kill_and_resume(subject: str) -> dict[str, Any]:
    """Kill conversions that are continued each time; their bytes must be those of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.conversion.resume_driver",
                subject,
                f"{folder}/x",
                str(RESUMED),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    row: dict[str, Any] = {"resumed": subject, "date": time.strftime("%Y-%m-%d")}
    if run.returncode:
        return row | {"passed": False, "error": run.stderr[-2000:]}
    kills = len(json.loads(run.stdout))
    return row | {"passed": kills >= RESUMED, "kills": kills}


def main(names: list[str]) -> int:
    """Run all experiments, print a JSON line for each; 1 if a promise was broken."""
    failed = False
    for subject in [name for name in names if name not in SUBJECTS] if names else EVERY:
        for what, times in KILLS.items():
            row = kill(subject, what, times)
            failed |= not row["passed"]
            print(json.dumps(row), flush=True)
    for subject in [name for name in names if name in SUBJECTS] or (() if names else SUBJECTS):
        row = kill_and_resume(subject)
        failed |= not row["passed"]
        print(json.dumps(row), flush=True)
    return int(failed)
