"""The disk begins with large files while they are written; one refused a sync is not published.

Seen red: the disk told of nothing, of small files too, a refused sync let pass.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aprfmt.errors import OutputError
from aprfmt.formats import output, writeback
from aprfmt.formats.atomic import FileSet

SIZE = 256 << 10


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(output, "_EARLY", SIZE)
    writeback._sync_file_range.cache_clear()
    yield
    writeback._sync_file_range.cache_clear()


def write(path: Path, pieces: int = 4, *, force: bool = False) -> None:
    with FileSet(force=force) as files:
        out = files.create(path)
        for number in range(pieces):
            out.write(bytes([number]) * SIZE)


@pytest.mark.parametrize("pieces", [0, 1, 4])
def test_the_disk_begins_while_more_is_written(
    pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    synced: list[int] = []
    real = os.fsync

    def begin(fd: int) -> None:
        begun.append(os.fstat(fd).st_size)
        writeback.begin_writing(fd)

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(output, "begin_writing", begin)
    monkeypatch.setattr(os, "fsync", sync)
    write(tmp_path / "x", pieces)
    assert begun == [SIZE * n for n in range(1, pieces + 1)]
    assert synced[0] == pieces * SIZE, "the sync sees every byte"
    assert (tmp_path / "x").read_bytes() == b"".join(bytes([n]) * SIZE for n in range(pieces))


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_a_refused_sync_publishes_nothing(
    pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells of a lost write once, and only a sync hears of it."""
    (tmp_path / "x").write_bytes(b"old")
    real = os.fsync
    told: list[int] = []

    def once(fd: int) -> None:
        if not told:
            told.append(fd)
            raise OSError(errno.EIO, "lost")
        real(fd)

    monkeypatch.setattr(os, "fsync", once)
    with pytest.raises(OutputError, match="disk reports a fault"):
        write(tmp_path / "x", pieces, force=True)
    assert told
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_without_the_call_and_with_its_errors_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writeback.begin_writing(99_999)  # EBADF: fsync would say so
    with monkeypatch.context() as patch:
        patch.setattr("ctypes.CDLL", lambda *of, **options: object())
        writeback._sync_file_range.cache_clear()
        assert writeback._sync_file_range() is None
        write(tmp_path / "x")
    assert (tmp_path / "x").stat().st_size == 4 * SIZE
