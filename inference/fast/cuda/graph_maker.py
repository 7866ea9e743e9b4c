"""Passes recorded by CuPy: a stream, its graph, and memory that is nobody else's."""

from collections.abc import Callable

import numpy as np

from aprfmt.inference.backends.base import Numbers
from aprfmt.inference.fast.cuda import memory
from aprfmt.inference.fast.cuda.loader import load_cupy

# cudaStreamCaptureMode: other threads may use CUDA and allocate memory meanwhile.
_RELAXED = 2


class CupyNumbers:
    """int64 numbers on the device and, pinned, on the host."""

    def __init__(self, count: int) -> None:
        """Allocate `count` int64 numbers: zeros on the device, pinned memory on the host."""
        self.device = memory.array_module().zeros(count, "int64")
        pinned = load_cupy().cuda.alloc_pinned_memory(8 * count)
        self.host: Numbers = np.frombuffer(pinned, np.int64, count)

    def copy_to_device(self) -> None:
        """Enqueue the copy of `host` to `device` on the current stream."""
        _copy_async(
            memory.pointer(self.device), self.host.ctypes.data, self.host.nbytes, "HostToDevice"
        )

    def copy_from_device(self, x: object) -> None:
        """Enqueue the copy of the device array `x` to `host` on the current stream."""
        _copy_async(self.host.ctypes.data, memory.pointer(x), self.host.nbytes, "DeviceToHost")


def _copy_async(to: int, source: int, size: int, direction: str) -> None:
    """Enqueue a copy of `size` bytes between two addresses on the current stream.

    `direction` is HostToDevice or DeviceToHost, as in cudaMemcpyKind.
    """
    runtime, stream = load_cupy().cuda.runtime, load_cupy().cuda.get_current_stream()
    runtime.memcpyAsync(to, source, size, getattr(runtime, f"memcpy{direction}"), stream.ptr)


class CupyGraphMaker:
    """Records passes as CUDA graphs on the current device, by CuPy."""

    errors: tuple[type[Exception], ...] = (RuntimeError, MemoryError)

    def allocate_numbers(self, count: int) -> CupyNumbers:
        """Return `count` int64 numbers that a recorded pass reads on the device."""
        return CupyNumbers(count)

    def record(self, first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
        """Run `first`, record `then` as a CUDA graph, and return the function that replays it.

        Both run on a stream created here. What they allocate is of a memory pool that lives as long
        as the graph.
        """
        module = load_cupy()
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
            """Launch the recorded CUDA graph on the current stream."""
            assert pool is not None  # held as long as this can be called
            graph.launch(module.cuda.get_current_stream())

        return replay

    def wait(self) -> None:
        """Wait until the current device has done everything that is enqueued."""
        load_cupy().cuda.Device().synchronize()
