"""Long fuzzing runs: every target for millions of executions, a few at a time, at low priority."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
# Wall seconds of one input. A run of hours may be stopped for a while; `contract` counts CPU time.
PATIENCE = 3600


@dataclass(frozen=True)
class Limits:
    """When a run is over: after so many executions, or after so many seconds if that is not 0."""

    runs: int
    seconds: int = 0


def fuzz(name: str, limits: Limits, out: Path) -> dict[str, Any]:
    """Run one target; its log, corpus and findings lie in `out`."""
    log = out / f"{name}.log"
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        name,
        f"--runs={limits.runs}",
        f"--seconds={limits.seconds}",
        f"--patience={PATIENCE}",
        f"--corpus={out / 'corpus' / name}",
        f"--findings={out / 'findings' / name}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    with log.open("wb") as written:
        code = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    text = log.read_text(errors="replace")
    found = re.search(r"stat::number_of_executed_units:\s*(\d+)", text)
    peak = re.search(r"stat::peak_rss_mb:\s*(\d+)", text)
    return {
        "target": name,
        "exit": code,
        "executions": int(found[1]) if found else 0,
        "seconds": round(time.monotonic() - began),
        "peak_mib": int(peak[1]) if peak else 0,
        "findings": len(list((out / "findings" / name).glob("*-*"))),
        "date": time.strftime("%Y-%m-%d"),
    }


def main(names: list[str], limits: Limits, jobs: int, out: Path) -> int:
    """Run targets, print a JSON line for each; 1 if one of them was broken."""
    out.mkdir(parents=True, exist_ok=True)
    os.nice(19)
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda name: fuzz(name, limits, out), names or list(TARGETS)):
            failed |= row["exit"] != 0
            print(json.dumps(row), flush=True)
    return int(failed)
