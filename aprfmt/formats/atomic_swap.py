"""Swaps two file names in one step, where the system can.

Linux 3.15 has `renameat2(2)` with RENAME_EXCHANGE; glibc has called it since 2.28, Python does
not.
"""

import errno
import os
from pathlib import Path

_AT_FDCWD = -100  # fcntl.h: relative names count from the current folder
_RENAME_EXCHANGE = 2  # linux/fs.h

# Errors that mean: not possible on this system or file system (EINVAL; overlayfs: EXDEV), or for a
# mount point (EBUSY).
_UNABLE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV, errno.EBUSY}


def swap_names(a: Path, b: Path) -> bool:
    """Swap the names `a` and `b`; return False if the system cannot do it in one step.

    Raises OSError if the swap failed.
    """
    import ctypes

    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # no such call in this C library
        return False
    renameat2.argtypes = (
        ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint,
    )  # fmt: skip
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))
