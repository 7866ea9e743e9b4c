"""Keep freed memory for the next work, and release pages of mapped files.

Otherwise the C library returns large blocks of memory to the system, which clears every page of the
next block: a third of a repack's processor time, a fifth of the system's time in a download.
"""

import mmap
from functools import cache

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h
LARGEST = 32 << 20  # pieces up to this size are kept: the most that glibc allows
_PAGE = mmap.PAGESIZE
_AROUND = 2 << 20  # what Linux maps with a page that is touched, at most: one folio of its cache
_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)
KEPT = 128 << 20  # bytes at the end of a thread's memory that are not given back


@cache
def keep_freed() -> None:
    """Make the C library of this process reuse freed memory rather than return it to the system.

    It does nothing where the library has no `mallopt`.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, LARGEST)
    mallopt(_TRIM_THRESHOLD, KEPT)


def release_pages(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Release the mapped pages of bytes [start, stop), and the pages around them.

    The system maps neighbouring pages together; without releasing these, one would stay in memory
    at the edge of every window of a file. They are read again if needed.
    """
    first = start // _AROUND * _AROUND
    last = min(-(-stop // _AROUND) * _AROUND, -(-len(mapped) // _PAGE) * _PAGE)
    if last > first and _DONTNEED is not None:
        mapped.madvise(_DONTNEED, first, last - first)
