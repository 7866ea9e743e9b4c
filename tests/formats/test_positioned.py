"""Reading and writing at an offset, with and without the system calls for it."""

import hashlib
import os
from pathlib import Path

import pytest

import aprfmt
from aprfmt.formats.positional_io import read_at, write_at
from aprfmt.inference.running import make_request, run_and_trace


@pytest.fixture(params=["system calls", "none"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take pread and pwrite away, as on Windows."""
    if request.param == "none":
        for name in ("pread", "pwrite", "preadv", "pwritev"):
            monkeypatch.delattr(os, name, raising=False)


@pytest.mark.usefixtures("calls")
def test_the_position_stays_and_the_bytes_are_those(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, bytes(range(100)))
        write_at(fd, memoryview(b"abc"), 10)
        assert os.lseek(fd, 0, os.SEEK_CUR) == 100
        assert read_at(fd, 5, 9) == bytes([9]) + b"abc" + bytes([13])
        assert read_at(fd, 50, 90) == bytes(range(90, 100))
        assert read_at(fd, 5, 200) == b""
        os.write(fd, b"end")
        assert read_at(fd, 10, 98) == bytes([98, 99]) + b"end"
    finally:
        os.close(fd)


@pytest.mark.usefixtures("calls")
def test_conversions_need_neither(demo_model: Path, tmp_path: Path) -> None:
    """The source's hash is written over a placeholder of its length."""
    aprfmt.convert(demo_model, tmp_path / "demo.apr")
    with aprfmt.open(tmp_path / "demo.apr") as model:
        digest = model.metadata["aprfmt.source.sha256"]
    with aprfmt.open(demo_model) as model:
        held = b"".join(path.read_bytes() for path in model.source.files)
    assert digest == hashlib.sha256(held).hexdigest()


@pytest.mark.usefixtures("calls")
def test_values_of_a_running_trace_need_neither(demo_model: Path) -> None:
    with run_and_trace(make_request(demo_model, ids=(1, 2, 3), wanted=("L0.attn_out",))) as trace:
        values = trace.recorded_values("L0.attn_out")
        assert values is not None and values.shape[0] == 3
