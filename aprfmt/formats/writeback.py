"""Has the system begin to write a file's bytes to the disk, without waiting for them.

A sync at the end then finds little to do. Linux has `sync_file_range(2)` for it, which Python does
not offer; elsewhere nothing happens. It makes nothing safe, and takes no error away from the fsync
that does: that alone says whether everything is on the disk.
"""

from collections.abc import Callable
from functools import cache

_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h


def begin_writing(fd: int) -> None:
    """Begin to write what the system still holds of an open file; errors are left to fsync."""
    call = _sync_file_range()
    if call is not None:
        call(fd, 0, 0, _WRITE)  # to the end of the file


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    import ctypes

    try:
        found = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError, TypeError):  # no such call in this C library
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found
