"""Large files are synced while they are written; what that was refused is never published."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from aprfmt.errors import OutputError
from aprfmt.formats import output
from aprfmt.formats.atomic import FileSet

SIZE = 256 << 10


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_EARLY", SIZE)


def write(path: Path, pieces: int = 4, *, force: bool = False) -> None:
    with FileSet(force=force) as files:
        out = files.create(path)
        for number in range(pieces):
            out.write(bytes([number]) * SIZE)


def test_a_file_is_synced_while_more_is_written_and_once_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = os.fsync, []

    def sync(fd: int) -> None:
        seen.append((threading.current_thread().name, os.fstat(fd).st_size))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    write(tmp_path / "x")
    of_file = [row for row in seen if row[1] >= SIZE]
    assert of_file[0][0] == "aprfmt-sync"
    assert of_file[-1] == ("MainThread", 4 * SIZE), "the last one sees every byte"
    assert (tmp_path / "x").read_bytes() == b"".join(bytes([n]) * SIZE for n in range(4))


def test_small_files_are_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: names.append(threading.current_thread().name))
    with FileSet() as files:
        files.create(tmp_path / "x").write(b"small")
    assert set(names) == {"MainThread"}


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_a_refused_sync_publishes_nothing(
    pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells of a lost write once: by the sync that hears of it, early or not."""
    (tmp_path / "x").write_bytes(b"old")
    real = os.fsync
    told: list[str] = []

    def once(fd: int) -> None:
        if not told:
            told.append(threading.current_thread().name)
            raise OSError(errno.EIO, "lost")
        real(fd)

    monkeypatch.setattr(os, "fsync", once)
    with pytest.raises(OutputError, match="disk reports a fault"):
        write(tmp_path / "x", pieces, force=True)
    assert told == ["aprfmt-sync"]
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_file_that_is_given_up_waits_for_its_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_then: list[Any] = []
    real = os.fsync

    def sync(fd: int) -> None:
        real(fd)
        open_then.append(os.fstat(fd).st_size)  # EBADF if it were closed meanwhile

    monkeypatch.setattr(os, "fsync", sync)

    def fails() -> None:
        with FileSet() as files:
            files.create(tmp_path / "x").write(bytes(SIZE))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert open_then == [SIZE]
    assert not list(tmp_path.iterdir())
