"""Memory in huge pages, for weights that are read many times.

A decoding step reads every weight once. In a mapped file every 4 KiB need an address translation,
which takes a quarter to a third of the reading time; for anonymous memory the system uses pages of
2 MiB if asked to.
"""

import mmap

SEGMENT = 64 << 20  # bytes per allocation; unused pages take no memory
# Shared memory, the default, would have small pages.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
LINE = 64  # data begins on a cache line


class Pages:
    """Allocates memory from large segments of huge pages.

    A segment is freed with the last view into it.
    """

    def __init__(self) -> None:
        """Start without a segment."""
        self._open: memoryview | None = None
        self._used = 0

    def allocate(self, size: int) -> memoryview:
        """Return `size` zeroed bytes; MemoryError if the system has no memory left."""
        start = -(-self._used // LINE) * LINE
        if self._open is None or start + size > len(self._open):
            self._open, start = self._map_segment(max(size, SEGMENT)), 0
        self._used = start + size
        return self._open[start : self._used]

    def copy_bytes(self, raw: bytes | memoryview) -> memoryview:
        """Return a copy of contiguous bytes in huge pages; MemoryError if there is no memory."""
        source = memoryview(raw).cast("B")
        room = self.allocate(len(source))
        room[:] = source
        return room

    def _map_segment(self, size: int) -> memoryview:
        """Return `size` bytes of new anonymous memory, in huge pages if the system has them.

        Raises MemoryError if there is no memory.
        """
        try:
            memory = mmap.mmap(-1, size, **_PRIVATE)
        except OSError as error:
            raise MemoryError(f"no room for {size} bytes") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # no huge pages on this system
                pass
        return memoryview(memory)
