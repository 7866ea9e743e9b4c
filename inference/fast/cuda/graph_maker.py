"""Passes recorded by CuPy: a stream, its graph, and memory that is nobody else's."""

from collections.abc import Callable

import numpy as np

from aprfmt.inference.backends.base import Numbers
from aprfmt.inference.fast.cuda import memory
from aprfmt.inference.fast.cuda.loader import cupy

# cudaStreamCaptureMode: other threads may go on, and memory may grow meanwhile.
_RELAXED = 2


class CupyNumbers:
    """int64 numbers on the device and, pinned, on the host."""

    def __init__(self, count: int) -> None:
        self.device = memory.arrays().zeros(count, "int64")
        pinned = cupy().cuda.alloc_pinned_memory(8 * count)
        self.host: Numbers = np.frombuffer(pinned, np.int64, count)

    def bring(self) -> None:
        """Enqueue the copy to the device."""
        _copy(memory.pointer(self.device), self.host.ctypes.data, self.host.nbytes, "HostToDevice")

    def fetch(self, x: object) -> None:
        """Enqueue the copy of another array to the host."""
        _copy(self.host.ctypes.data, memory.pointer(x), self.host.nbytes, "DeviceToHost")


def _copy(to: int, source: int, size: int, way: str) -> None:
    runtime, stream = cupy().cuda.runtime, cupy().cuda.get_current_stream()
    runtime.memcpyAsync(to, source, size, getattr(runtime, f"memcpy{way}"), stream.ptr)


class CupyGraphMaker:
    """What records passes on the current device."""

    errors: tuple[type[Exception], ...] = (RuntimeError, MemoryError)

    def numbers(self, count: int) -> CupyNumbers:
        """Return so many numbers."""
        return CupyNumbers(count)

    def record(self, first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
        """Call both on a stream of their own, record the second; return what replays it.

        What both allocate is of a pool that lives as long as the graph.
        """
        module = cupy()
        pool, side = module.cuda.MemoryPool(), module.cuda.Stream(non_blocking=True)
        self.wait()
        with module.cuda.using_allocator(pool.malloc), side:
            first()
            side.synchronize()
            side.begin_capture(_RELAXED)
            try:
                then()
            finally:
                graph = side.end_capture()

        def replay() -> None:
            assert pool is not None  # held as long as this can be called
            graph.launch(module.cuda.get_current_stream())

        return replay

    def wait(self) -> None:
        """Wait for the device."""
        cupy().cuda.Device().synchronize()
