"""`aprfmt scan` over many tiny models: 1, 2 and 4 workers, memory as models grow, Ray's overhead.

python tests/benchmarks/fleet.py [--models 2000] [--runs 3] [--json FILE]

Memory is the highest sum over all processes of the scan of their proportional set size (shared
pages count once), read ten times a second. Ray is asked on one node of this machine with two CPUs,
where `aprfmt[fleet]` is installed; its overhead is the difference to two workers, over the units.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.measure import Row, report
from tests.fleet.stores import folder

SCAN = [sys.executable, "-m", "aprfmt", "scan"]
FEW = 10  # the part of the models whose memory is compared with all


@dataclass(frozen=True)
class Scan:
    """Wall seconds and the peak memory in MiB of one scan, and its rows."""

    seconds: float
    mib: float
    rows: int


def make(root: Path, count: int) -> None:
    """Write models of one shape and different weights."""
    for seed in range(count):
        folder(root / f"{seed:05d}", seed)


def proportional(process: int) -> int:
    """Return the proportional set size of a process and its children, in KiB."""
    total = 0
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = int(line.split()[1])
        for thread in os.listdir(f"/proc/{process}/task"):
            children = Path(f"/proc/{process}/task/{thread}/children").read_text().split()
            total += sum(proportional(int(child)) for child in children)
    return total


def scan(root: Path, *options: str, watched: bool = False) -> Scan:
    """Scan once into a new results file; memory only where `watched`, since reading it costs."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "rows.jsonl"
        began = time.perf_counter()
        child = subprocess.Popen(
            [*SCAN, str(root), "-o", str(out), *options, "--quiet"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        peak = 0
        while child.poll() is None:
            if watched:
                peak = max(peak, proportional(child.pid))
            time.sleep(0.1 if watched else 0.01)
        seconds = time.perf_counter() - began
        if child.returncode != 0:
            assert child.stderr is not None
            raise RuntimeError(child.stderr.read().decode(errors="replace")[-400:])
        return Scan(seconds, peak / 1024, sum(1 for _ in out.open()))


def median(run: Callable[[], Scan], runs: int) -> float:
    """Return the median wall seconds."""
    return statistics.median(run().seconds for _ in range(runs))


@contextmanager
def cluster(cpus: int) -> Iterator[str]:
    """Run a Ray node of this machine; yield its address."""
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    start = ["start", "--head", "--port", "6399", "--num-cpus", str(cpus), "--disable-usage-stats"]
    subprocess.run([*ray, *start], check=True, stdout=subprocess.DEVNULL)
    try:
        yield "127.0.0.1:6399"
    finally:
        subprocess.run([*ray, "stop", "--force"], check=True, stdout=subprocess.DEVNULL)


def measured(root: Path, few: Path, runs: int) -> tuple[list[Row], list[str]]:
    """Return the rows of the table, and what is said below it."""
    alone = median(lambda: scan(root, "--jobs", "1"), runs)
    rows = [Row("scan", "1 worker", "s", alone, alone, "1 worker")]
    for jobs in (2, 4):
        seconds = median(partial(scan, root, "--jobs", str(jobs)), runs)
        rows.append(Row("scan", f"{jobs} workers", "s", seconds, alone, "1 worker"))
    many, some = (scan(each, "--jobs", "2", watched=True) for each in (root, few))
    rows.append(Row("memory", "2 workers", "MiB", many.mib, some.mib, f"1/{FEW} of the models"))
    said = [f"{many.rows} rows"]
    if importlib.util.find_spec("ray") is None:
        return rows, [*said, "Ray: NOT-RUN, aprfmt[fleet] is not installed"]
    with cluster(2) as address:
        seconds = median(lambda: scan(root, "--ray", address), runs)
    rows.append(Row("scan", "Ray, 2 CPUs", "s", seconds, rows[1].ours, "2 workers"))
    each = 1000 * (seconds - rows[1].ours) / many.rows
    return rows, [*said, f"Ray's overhead: {each:.2f} ms a unit"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the models, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        root, few = Path(name) / "all", Path(name) / "few"
        make(root, asked.models)
        make(few, asked.models // FEW)
        rows, said = measured(root, few, asked.runs)
    report(rows, asked.json)
    print("\n".join(said))
    if asked.json:
        found = json.loads(Path(asked.json).read_text())
        Path(asked.json).write_text(json.dumps(found | {"notes": said}, indent=1))


if __name__ == "__main__":
    main()
