"""Files of a file system that keeps them in memory, written through a mapping.

Such a system lets one `write` at a time into a file, and copies at the rate of one core; stores
into mapped pages have no such limit. The pages must be there before: a store for which there is no
room would end the program.
"""

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_DONTNEED, _POPULATE_WRITE = 4, 23  # of linux/mman.h; the second since Linux 5.14

KINDS = frozenset(("tmpfs", "ramfs"))
_MOUNTS = Path("/proc/self/mountinfo")


def lies_in_memory(fd: int) -> bool:
    """Say whether an open file lies in memory, and rooms of it can be made sure of."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        device = os.fstat(fd).st_dev
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return kind_of(mounts, f"{os.major(device)}:{os.minor(device)}") in KINDS


def kind_of(mounts: str, device: str) -> str:
    """Return what file system a device has by the lines of mountinfo; "" if none names it."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split(" ")[2:3] == [device]:
            return after.split(" ")[0]
    return ""


class MappedRoom:
    """Room for a tensor in an open file that lies in memory, mapped for who fills parts of it.

    Several threads may, each its own part: pages are made, and zeroed, by the thread that fills
    them. Raises OSError where there is no room for pages.
    """

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        self._fd = fd
        self._first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._skip = start - self._first
        self._held = mmap.mmap(fd, self._skip + nbytes, offset=self._first)

    def fill(self, offset: int, nbytes: int, make: Callable[[memoryview], T]) -> T:
        """Have `make` fill bytes [offset, offset + nbytes) of the room; return what it returns."""
        begin = self._skip + offset
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        size = begin + nbytes - first
        self._make_sure(first, size)
        with memoryview(self._held) as whole, whole[begin : begin + nbytes] as part:
            made = make(part)
        self._advise(first, size, _DONTNEED)  # resident memory counts what is mapped
        return made

    def put(self, offset: int, data: memoryview) -> None:
        """Store bytes in the room; other threads run meanwhile."""
        import numpy as np

        def copy(part: memoryview) -> None:
            np.copyto(np.frombuffer(part, np.uint8), np.frombuffer(data, np.uint8))

        self.fill(offset, len(data), copy)

    def close(self) -> None:
        """Unmap it; what a caller that failed still holds is unmapped with that."""
        with suppress(BufferError):
            self._held.close()

    def _make_sure(self, first: int, size: int) -> None:
        """Have pages for part of the mapping, or raise OSError.

        A page that is mapped as it is made costs less than one made before, and pages of one file
        are made by several threads at a time, where `posix_fallocate` lets one in. It makes sure
        where the system has no such call, and says what is wrong where that failed.
        """
        if not self._advise(first, size, _POPULATE_WRITE):
            os.posix_fallocate(self._fd, self._first + first, size)

    def _advise(self, first: int, size: int, advice: int) -> bool:
        """Say something of part of the mapping; whether the system did as it was told."""
        import numpy as np

        call = _madvise()
        if call is None:
            return False
        start = np.frombuffer(self._held, np.uint8).ctypes.data
        return call(start + first, size, advice) == 0


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return madvise of the C library; `mmap.madvise` keeps the interpreter meanwhile."""
    import ctypes

    try:
        found = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
