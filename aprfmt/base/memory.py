"""Freed memory is kept for the next piece of work, where the C library can do that.

Otherwise it returns large pieces to the system, which clears every page of the next one: a third of
a repack's processor time, a fifth of the system's time in a download.
"""

from functools import cache

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h
LARGEST = 32 << 20  # pieces up to this size are kept: the most that glibc allows
KEPT = 128 << 20  # bytes at the end of a thread's memory that are not given back


@cache
def keep_freed() -> None:
    """Tell the C library to reuse freed memory, and not to return it; for the whole program."""
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, LARGEST)
    mallopt(_TRIM_THRESHOLD, KEPT)
