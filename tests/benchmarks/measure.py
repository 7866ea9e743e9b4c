"""Timing whole processes and reporting rows; shared by every benchmark."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def aligned_array(count: int) -> NDArray[np.float32]:
    """Return a new float32 array [count] that begins on a cache line, for streaming stores."""
    larger = np.empty(count + 16, np.float32)
    skip = -larger.ctypes.data % 64 // 4
    result: NDArray[np.float32] = larger[skip : skip + count]
    return result


def compile_as_installed(folder: Path) -> None:
    """Let this program's children keep compiled modules in `folder`, as pip does on installing."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its peer: seconds (lower is better) and peak resident MiB."""

    work: str
    case: str
    unit: str
    ours: float
    peer: float | None
    peer_name: str
    ours_rss_mib: float | None = None
    peer_rss_mib: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's."""
        return None if not self.peer else self.ours / self.peer


@dataclass(frozen=True, slots=True)
class Process:
    """Of several runs of a command: median wall seconds, peak resident MiB, processor seconds.

    Processor time is that of all threads, user and system: the median too.
    """

    seconds: float
    rss_mib: float
    processor: float


def run_process(
    command: Sequence[str],
    *,
    runs: int = 3,
    before: Callable[[], None] | None = None,
    environment: dict[str, str] | None = None,
    fine: Sequence[int] = (0,),
) -> Process:
    """Run a command several times; `before` cleans up ahead of each.

    Raises for an exit code that is not `fine`.
    """
    times, peaks, processor = [], [], []
    for _ in range(runs):
        if before is not None:
            before()
        began = time.perf_counter()
        child = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )
        assert child.stderr is not None
        error = child.stderr.read()
        _, status, usage = os.wait4(child.pid, 0)
        times.append(time.perf_counter() - began)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode not in fine:
            raise RuntimeError(f"{' '.join(command)}: {error.decode(errors='replace')[-400:]}")
        peaks.append(usage.ru_maxrss / 1024)
        processor.append(usage.ru_utime + usage.ru_stime)
    return Process(statistics.median(times), max(peaks), statistics.median(processor))


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def report(rows: Sequence[Row], path: str | None) -> None:
    """Print the table; write the rows as JSON where a path is given."""
    print(f"{'work':28} {'case':34} {'ours':>9} {'peer':>9} {'ratio':>6}  {'RSS':>6}  peer")
    for row in rows:
        peer = "-" if row.peer is None else f"{row.peer:9.3f}"
        ratio = "-" if row.ratio is None else f"{row.ratio:6.2f}"
        rss = "-" if row.ours_rss_mib is None else f"{row.ours_rss_mib:6.0f}"
        print(
            f"{row.work:28} {row.case:34} {row.ours:9.3f} {peer:>9} {ratio:>6}  {rss:>6}  "
            f"{row.peer_name}"
        )
    if path:
        machine = {"cpu": cpu_name(), "cpus": os.cpu_count(), "python": sys.version.split()[0]}
        data = {"machine": machine, "rows": [asdict(row) for row in rows]}
        Path(path).write_text(json.dumps(data, indent=1) + "\n")
