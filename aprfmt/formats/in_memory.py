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

_DONTNEED = 4  # MADV_DONTNEED of linux/mman.h

KINDS = frozenset(("tmpfs", "ramfs"))
_MOUNTS = Path("/proc/self/mountinfo")


def lies_in_memory(fd: int) -> bool:
    """Say whether an open file lies in memory and the system can reserve space for it."""
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


def make_pages(fd: int, nbytes: int) -> None:
    """Make the pages of the first bytes of an open file; what is there already stays.

    Call it before others fill them: the system makes one page of a file at a time, so that 16
    threads that touch new ones take three times as long as one that makes them and 16 that fill
    them (measured). Raises OSError where there is no room for them.
    """
    os.posix_fallocate(fd, 0, nbytes)


class MappedRoom:
    """Room for a tensor in an open file that lies in memory, mapped for who fills parts of it.

    Several threads may, each its own part. The file has its pages there (see `make_pages`). Who
    fills them first maps and zeroes them.
    """

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._skip = start - first
        self._held = mmap.mmap(fd, self._skip + nbytes, offset=first)

    def fill(self, offset: int, nbytes: int, make: Callable[[memoryview], T]) -> T:
        """Have `make` fill bytes [offset, offset + nbytes) of the room; return what it returns."""
        begin = self._skip + offset
        made = make(memoryview(self._held)[begin : begin + nbytes])
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._drop(first, begin + nbytes - first)
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

    def _drop(self, first: int, size: int) -> None:
        """Unmap pages, as resident memory counts them; they stay in the file."""
        import numpy as np

        call = _madvise()
        if call is not None:
            start = np.frombuffer(self._held, np.uint8).ctypes.data
            call(start + first, size, _DONTNEED)


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
