"""Memory that is freed is kept for the next piece of work, where the C library can.

It returns large pieces to the system otherwise, which clears every page of them anew: of a repack
that is a third of its processor time, of fetching a fifth of the system's.
"""

from functools import cache

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h
LARGEST = 32 << 20  # pieces up to this size are kept: the most that glibc allows
KEPT = 128 << 20  # bytes at the end of a thread's memory that are not given back


@cache
def keep_freed() -> None:
    """Have the memory of pieces that are freed used for the next ones; once for the program."""
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, LARGEST)
    mallopt(_TRIM_THRESHOLD, KEPT)
