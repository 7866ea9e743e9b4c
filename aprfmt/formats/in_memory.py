"""Files of a file system that keeps them in memory, written through a mapping.

Such a system lets one `write` at a time into a file, and copies at the rate of one core; stores
into mapped pages have no such limit. The pages must be there before: a store for which there is no
room would end the program, where `posix_fallocate` says so.
"""

import mmap
import os
from pathlib import Path

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


def store(fd: int, data: memoryview, offset: int) -> None:
    """Store bytes where room was made sure of; other threads run meanwhile. Raises OSError."""
    import numpy as np

    first = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(fd, offset + len(data) - first, offset=first) as held:
        pages = np.frombuffer(held, np.uint8)
        np.copyto(pages[offset - first :], np.frombuffer(data, np.uint8))
        del pages
