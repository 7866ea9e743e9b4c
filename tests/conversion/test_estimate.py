"""What `--dry-run` expects of a conversion: disk to the byte, memory at most, time."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from aprfmt.conversion import convert
from aprfmt.conversion import estimate as module
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="NOT-RUN: no /proc")


def peak_of(*words: object) -> int:
    """Return the peak resident bytes of a command in a process of its own."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom aprfmt.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "lines = Path('/proc/self/status').read_text().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=ROOT,
        timeout=PATIENCE,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return int(run.stdout.splitlines()[-1]) * 1024


@LINUX
@pytest.mark.parametrize(
    "options",
    [(), ("--encoding", "F16"), ("--quantize", "Q4_0"), ("--quantize", "Q4_0", "--jobs", "3")],
)
def test_memory_is_an_upper_bound_and_disk_is_exact(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    source = llama_folder(tmp_path / "m", "BF16", hidden=1024, layers=2, ffn=4096, vocab=8192)
    dst = tmp_path / "x.gguf"
    found: Any = aprfmt("convert", source, dst, *options, "--dry-run", "--json").json["estimate"]
    assert not dst.exists() and [path.name for path in tmp_path.iterdir()] == ["m"]
    assert peak_of("convert", source, dst, *options, "--quiet") <= found["memory_bytes"]
    assert found["disk_bytes"] == dst.stat().st_size
    seconds = found["seconds"]
    assert all(value >= 0 for value in seconds.values())
    assert seconds["total"] >= max(seconds["write"], seconds["hash"])
    assert seconds["encode"] > 0, "norms become F32 at least"


@LINUX
def test_threads_count(tmp_path: Path) -> None:
    """Seen red: 64 threads kept 31 MB that 2 did not, and the bound was the same."""
    source = llama_folder(tmp_path / "m", "BF16", hidden=1024, layers=2, ffn=4096, vocab=8192)
    bounds, peaks = [], []
    for threads in (2, 64):
        words = (
            "quantize",
            source,
            tmp_path / f"{threads}.gguf",
            "--type",
            "F16",
            "--threads",
            threads,
        )
        found: Any = aprfmt(*words, "--dry-run", "--json").json["estimate"]
        bounds.append(found["memory_bytes"])
        peaks.append(peak_of(*words, "--quiet"))
    assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True))
    assert peaks[1] - peaks[0] <= bounds[1] - bounds[0]


def test_a_place_that_cannot_be_written_has_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*of: Any, **more: Any) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    source = llama_folder(tmp_path / "m", "BF16")
    report = convert(source, tmp_path / "x.gguf", dry_run=True)
    assert report.estimate is not None
    assert report.estimate["seconds"]["write"] is None
    assert report.estimate["seconds"]["total"] is None


def test_a_run_that_writes_estimates_nothing(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "m", "BF16")
    done = aprfmt("convert", source, tmp_path / "x.gguf", "--json")
    assert "estimate" not in done.json
    assert convert(source, tmp_path / "y.gguf").estimate is None


def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_free_disk_bytes", lambda folder: 1000)
    source = llama_folder(tmp_path / "m", "BF16")
    done = aprfmt("convert", source, tmp_path / "x.gguf", "--dry-run")
    assert "of 1.0 kB free" in done.out


def test_free_bytes_are_those_of_the_disk_that_is_written_to(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "m", "BF16", hidden=64, layers=1, ffn=96, vocab=64)
    for dst in (tmp_path / "x.gguf", tmp_path / "not" / "yet" / "x.gguf"):
        done = aprfmt("convert", source, dst, "--dry-run", "--json").json
        disk = os.statvfs(tmp_path)
        free = done["estimate"]["disk_free_bytes"]
        assert 0 < free <= disk.f_frsize * disk.f_blocks
        assert free == pytest.approx(disk.f_frsize * disk.f_bavail, rel=0.2)
    assert module._free_disk_bytes(tmp_path / "nowhere") is None
