"""Bytes of a mapped file that go from file to file within the system, and where they cannot.

Seen red: an offset counted from the tensor, bytes of another file that took the source's place, a
fault of the disk taken for a system that cannot.
"""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import OutputError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.mapped_file import MappedFile, mapped_origin
from aprfmt.tensors import memory_compare as module
from aprfmt.tensors.memory_compare import bytes_equal

pytestmark = pytest.mark.skipif(
    not hasattr(os, "copy_file_range"), reason="NOT-RUN: no copy_file_range on this system"
)
SIZE = (3 << 20) + 77
AT = 4099  # no multiple of anything


@pytest.fixture
def source(tmp_path: Path) -> MappedFile:
    path = tmp_path / "source"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return MappedFile(path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The offset and the size of every copy that the system was asked for."""
    found: list[tuple[int, int]] = []
    real = os.copy_file_range

    def noted(fd_in: int, fd_out: int, count: int, offset: int, to: int | None = None) -> int:
        found.append((offset, count))
        return real(fd_in, fd_out, min(count, 1 << 20), offset, to)

    monkeypatch.setattr(os, "copy_file_range", noted)
    return found


def written(folder: Path, *parts: bytes | memoryview) -> bytes:
    with FileSet() as files:
        out = files.create(folder / "made")
        for part in parts:
            out.write(part)
    return (folder / "made").read_bytes()


def test_it_lies_where_it_should(
    source: MappedFile, calls: list[tuple[int, int]], tmp_path: Path
) -> None:
    whole = source.path.read_bytes()
    found = written(tmp_path, b"head", source.view[AT:], b"tail")
    assert found == b"head" + whole[AT:] + b"tail"
    assert [at for at, _ in calls] == [AT, AT + (1 << 20), AT + (2 << 20)][: len(calls)] and calls


def test_small_pieces_and_other_memory_are_written(
    source: MappedFile, calls: list[tuple[int, int]], tmp_path: Path
) -> None:
    other = bytes(source.view)
    assert written(tmp_path, source.view[:100_000], other) == other[:100_000] + other
    assert not calls and mapped_origin(memoryview(other)) is None


@pytest.mark.parametrize("answer", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, 0])
def test_where_the_system_cannot_it_is_written(
    source: MappedFile, answer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: Any) -> int:
        if answer:
            raise OSError(answer, os.strerror(answer))
        return 0

    monkeypatch.setattr(os, "copy_file_range", refused)
    assert written(tmp_path, source.view) == bytes(source.view)


def test_a_fault_of_the_disk_is_one(
    source: MappedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OutputError, match="free some space"):
        written(tmp_path, source.view)
    assert not (tmp_path / "made").exists()


def test_another_file_in_its_place_is_not_copied(source: MappedFile, tmp_path: Path) -> None:
    whole = bytes(source.view)
    (tmp_path / "other").write_bytes(bytes(SIZE))
    os.replace(tmp_path / "other", source.path)
    assert source.descriptor() is None
    assert written(tmp_path, source.view) == whole


def test_a_closed_file_has_no_descriptor(source: MappedFile) -> None:
    fd = source.descriptor()
    assert fd is not None and os.fstat(fd).st_size == SIZE
    source.close()
    with pytest.raises(OSError):
        os.fstat(fd)


@pytest.mark.parametrize("native", [True, False])
def test_equal_is_equal(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        absent: Callable[[], None] = lambda: None  # noqa: E731
        monkeypatch.setattr(module, "_memcmp", absent)
    x = np.frombuffer(random.Random(2).randbytes(100_003), np.uint8)
    for at in (0, 1, 50_000, 100_002):
        y = x.copy()
        assert bytes_equal(x, y) and bytes_equal(x[1:], y[1:])
        y[at] ^= 1
        assert not bytes_equal(x, y)
    assert not bytes_equal(x, x[1:]) and bytes_equal(x[:0], x[5:5])
