"""Memory in huge pages, for what is read again and again.

A step of decoding reads every weight once. From a mapped file that is one translation of an address
for every 4 KiB, which costs a quarter to a third of the reading; the system maps anonymous memory
in pages of 2 MiB where it is asked to.
"""

import mmap

SEGMENT = 64 << 20  # bytes asked for at a time; untouched ones take no memory
# Shared memory, the default, comes in small pages.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
LINE = 64  # what is put down begins on a cache line


class Pages:
    """Memory handed out piece by piece; a segment is freed with the last view into it."""

    def __init__(self) -> None:
        self._open: memoryview | None = None
        self._used = 0

    def room(self, size: int) -> memoryview:
        """Return that many zeroed bytes; MemoryError where the system has none."""
        start = -(-self._used // LINE) * LINE
        if self._open is None or start + size > len(self._open):
            self._open, start = self._segment(max(size, SEGMENT)), 0
        self._used = start + size
        return self._open[start : self._used]

    def put(self, raw: bytes | memoryview) -> memoryview:
        """Return a copy of contiguous bytes; MemoryError where there is no room for it."""
        source = memoryview(raw).cast("B")
        room = self.room(len(source))
        room[:] = source
        return room

    def _segment(self, size: int) -> memoryview:
        try:
            memory = mmap.mmap(-1, size, **_PRIVATE)
        except OSError as error:
            raise MemoryError(f"no room for {size} bytes") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a system that has none reads as before
                pass
        return memoryview(memory)
