"""Stores fetched bytes of remote files in temporary files, for commands that read them again.

The files are in the folder of temporary files (TMPDIR), and take at most a quarter of what is free
there, for all files together; what finds no room is fetched again. A file is mapped, as a file on
this machine is, so that what a reader keeps takes no memory of its own.
"""

import mmap
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from io import FileIO

from aprfmt.base.memory import release_pages

SHARE = 4  # of what is free, this part at most


class _Room:
    """Counts the disk space that all temporary files take together, up to a limit."""

    def __init__(self) -> None:
        """Start with no bytes reserved."""
        self._lock = threading.Lock()
        self.taken = 0

    def take(self, count: int) -> bool:
        """Reserve `count` bytes, and return True; False where there is no room for them."""
        with self._lock:
            free = shutil.disk_usage(tempfile.gettempdir()).free
            if (SHARE - 1) * (self.taken + count) > free:
                return False
            self.taken += count
            return True

    def give(self, count: int) -> None:
        """Release `count` bytes that were reserved."""
        with self._lock:
            self.taken -= count


ROOM = _Room()


class TemporaryRanges:
    """The fetched ranges of one file of `size` bytes, in a temporary file; safe for any thread.

    A range that is being fetched is not requested twice.
    """

    def __init__(self, size: int) -> None:
        """Start without bytes; the temporary file is made when the first ones come."""
        self._size = size
        self._turn = threading.Condition()
        self._file: FileIO | None = None  # made when something comes
        self._map: mmap.mmap | None = None
        self._ranges: list[
            tuple[int, int]
        ] = []  # that lie in the file: in order, none touches another
        self._coming: list[tuple[int, int]] = []
        self._taken, self._closed = 0, False

    def get(self, start: int, stop: int, fetch: Callable[[int, int], memoryview]) -> memoryview:
        """Return bytes [start, stop), from the temporary file or fetched and stored there.

        `fetch(first, last)` is called for what is missing. A range that another thread is fetching
        is waited for.
        """
        with self._turn:
            self._turn.wait_for(lambda: not any(b < stop and start < e for b, e in self._coming))
            first, last = gap = self._missing_range(start, stop)
            self._coming.append(gap)
        data = memoryview(b"")
        try:
            if first < last:
                data = fetch(first, last)
        finally:
            with self._turn:
                self._store(first, data)
                self._coming.remove(gap)
                self._turn.notify_all()
        with self._turn:
            if self._map is not None and self._missing_range(start, stop) == (stop, stop):
                return memoryview(self._map)[start:stop]
        return data if gap == (start, stop) else fetch(start, stop)

    def _missing_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range (first, end) of [start, stop) not stored; (stop, stop) for none.

        It is one range, from the first missing byte to the last.
        """
        first, last = start, stop
        for begin, end in self._ranges:
            if begin <= start < end:
                first = end
            if begin < stop <= end:
                last = begin
        return (first, last) if first < last else (stop, stop)

    def _store(self, start: int, data: memoryview) -> None:
        """Write fetched bytes to the temporary file; none where the disk is full.

        `start` is the offset of `data` in the file.
        """
        stop = start + len(data)
        try:
            if stop == start or self._closed or not ROOM.take(len(data)):
                return
            self._taken += len(data)
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)
                self._file.truncate(self._size)
            self._file.seek(start)
            if self._file.write(data) != len(data):
                return
            if self._map is None:
                self._map = mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_READ)
        except OSError:
            return
        joined = [each for each in self._ranges if each[0] <= stop and start <= each[1]]
        apart = [each for each in self._ranges if each not in joined]
        first, last = min([start, *(b for b, _ in joined)]), max([stop, *(e for _, e in joined)])
        self._ranges = sorted([*apart, (first, last)])

    def drop(self, start: int, stop: int) -> None:
        """Release the memory pages of [start, stop), which stay on disk."""
        with self._turn:
            if self._map is not None:
                release_pages(self._map, start, stop)

    def close(self) -> None:
        """Delete the temporary file; views of it stay valid, and fetches under way still return."""
        with self._turn:
            self._closed, self._ranges = True, []
            if self._map is not None:
                with suppress(BufferError):
                    self._map.close()
                self._map = None
            if self._file is not None:
                self._file.close()
            ROOM.give(self._taken)
