"""The disk takes large files while they are written; one refused a sync is not published.

Seen red: no early sync, one for small files too, two at a time, a refused sync let pass (early, or
at the end), a file closed while it is synced.
"""

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from aprfmt.errors import OutputError
from aprfmt.formats import output_file
from aprfmt.formats.atomic import FileSet

SIZE = 256 << 10


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_file, "_EARLY", SIZE)


def write(path: Path, pieces: int = 4, *, force: bool = False, wait: bool = False) -> None:
    with FileSet(force=force) as files:
        out = files.create(path)
        for number in range(pieces):
            out.write(bytes([number]) * SIZE)
            if wait:
                for thread in threading.enumerate():
                    if thread.name == "aprfmt-sync":
                        thread.join()


@pytest.mark.parametrize("pieces", [0, 1, 4])
def test_the_disk_begins_while_more_is_written(
    pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    synced: list[int] = []
    real = os.fsync

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(output_file, "_SYNC", lambda fd: begun.append(os.fstat(fd).st_size))
    monkeypatch.setattr(os, "fsync", sync)
    write(tmp_path / "x", pieces, wait=True)
    assert begun == [SIZE * n for n in range(1, pieces + 1)]
    assert synced[0] == pieces * SIZE, "the sync at the end sees every byte"
    assert (tmp_path / "x").read_bytes() == b"".join(bytes([n]) * SIZE for n in range(pieces))


@pytest.mark.parametrize("how", ["published", "abandoned"])
def test_one_sync_at_a_time_and_none_when_the_file_is_closed(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    started, closing, ended = threading.Event(), threading.Event(), threading.Event()
    real = output_file.BackgroundSync.end

    def sync(fd: int) -> None:
        begun.append(fd)
        started.set()
        closing.wait(20)
        threading.Event().wait(0.05)
        os.fstat(fd)  # raises where it is closed
        ended.set()

    def end(early: output_file.BackgroundSync) -> None:
        closing.set()
        real(early)

    monkeypatch.setattr(output_file, "_SYNC", sync)
    monkeypatch.setattr(output_file.BackgroundSync, "end", end)
    with suppress(KeyboardInterrupt), FileSet() as files:
        out = files.create(tmp_path / "x")
        for _ in range(4):
            out.write(bytes(SIZE))
        assert started.wait(20) and len(begun) == 1
        if how == "abandoned":
            raise KeyboardInterrupt
    assert ended.is_set()


def test_a_small_file_is_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(output_file, "_SYNC", begun.append)
    monkeypatch.setattr(output_file, "_EARLY", 4 * SIZE + 1)
    write(tmp_path / "x")
    assert begun == []


@pytest.mark.parametrize("when", ["early", "at the end"])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_a_refused_sync_publishes_nothing(
    when: str, pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    if when == "early":
        monkeypatch.setattr(output_file, "_SYNC", once)
    else:
        monkeypatch.setattr(os, "fsync", once)
    with pytest.raises(OutputError, match="disk reports a fault"):
        write(tmp_path / "x", pieces, force=True)
    assert told
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_without_the_call_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_file, "_SYNC", None)
    write(tmp_path / "x")
    assert (tmp_path / "x").stat().st_size == 4 * SIZE


@pytest.mark.parametrize("again", [False, True])
def test_a_refused_sync_is_said_once_by_the_next_call(again: bool, tmp_path: Path) -> None:
    """The system says it once: a second sync of the same file would succeed."""
    early = output_file.BackgroundSync()
    read, written = os.pipe()  # a pipe cannot be synced
    with (tmp_path / "x").open("wb") as file:
        try:
            assert early.begin(written)
            for thread in threading.enumerate():
                if thread.name == "aprfmt-sync":
                    thread.join()
            with pytest.raises(OSError, match=r"Invalid argument|Errno"):
                early.begin(file.fileno()) if again else early.end()
            assert early.begin(file.fileno()), "said, and nothing was begun"
            early.end()
        finally:
            os.close(read)
            os.close(written)
