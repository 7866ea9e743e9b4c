"""Reads and writes at an offset of an open file, also on systems without pread and pwrite.

Windows has neither. There the file position is moved and put back, which is not safe for two
threads on one descriptor: threads that share one take turns (`output_file.OutputFile`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Flags of os.open for the bytes of a file itself: no link, closed in children, no translation.
PLAIN_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def read_at(fd: int, size: int, offset: int) -> bytes:
    """Return up to `size` bytes from byte `offset`; the file position does not change.

    Fewer bytes are returned only where the file ends. Raises OSError.
    """
    pieces = []
    while size > 0:
        piece = _pread(fd, size, offset)
        if not piece:
            break
        pieces.append(piece)
        size, offset = size - len(piece), offset + len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` (a view of bytes) at byte `offset`; the file position does not change.

    Raises OSError.
    """
    while data:
        count = _pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _pread(fd: int, size: int, offset: int) -> bytes:
    """Return up to `size` bytes from byte `offset`, with one read."""
    if hasattr(os, "pread"):
        return os.pread(fd, size, offset)
    with _at_position(fd, offset):
        return os.read(fd, size)


def _pwrite(fd: int, data: memoryview, offset: int) -> int:
    """Write at byte `offset` with one call; return how many bytes were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _at_position(fd, offset):
        return os.write(fd, data)


@contextmanager
def _at_position(fd: int, offset: int) -> Iterator[None]:
    """Set the file position to `offset` in the block, and restore it afterwards."""
    before = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        os.lseek(fd, offset, os.SEEK_SET)
        yield
    finally:
        os.lseek(fd, before, os.SEEK_SET)
