"""Passes recorded by torch as CUDA graphs, on a stream and in memory of the recording."""

from collections.abc import Callable
from contextlib import suppress

import torch

from aprfmt.inference.backends.base import Numbers


class TorchNumbers:
    """int64 numbers on a device and, pinned, on the host."""

    def __init__(self, count: int, device: torch.device) -> None:
        """Allocate `count` int64 zeros on the device and in pinned memory of the host."""
        self.device = torch.zeros(count, dtype=torch.int64, device=device)
        self._pinned = torch.zeros(count, dtype=torch.int64, pin_memory=True)
        self.host: Numbers = self._pinned.numpy()

    def copy_to_device(self) -> None:
        """Enqueue the copy of `host` to `device` on the current stream."""
        self.device.copy_(self._pinned, non_blocking=True)

    def copy_from_device(self, x: torch.Tensor) -> None:
        """Enqueue the copy of the device tensor `x` to `host` on the current stream."""
        self._pinned.copy_(x, non_blocking=True)


class TorchGraphMaker:
    """Records passes on one device; `prepare` loads every kernel that a pass may launch."""

    errors: tuple[type[Exception], ...] = (RuntimeError,)

    def __init__(self, device: torch.device, prepare: Callable[[], None]) -> None:
        """Take the device, and the function called before each recording."""
        self._device = device
        self._prepare = prepare

    def allocate_numbers(self, count: int) -> TorchNumbers:
        """Return `count` int64 numbers that a recorded pass reads on the device."""
        return TorchNumbers(count, self._device)

    def record(self, first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
        """Run `first`, record `then` as a CUDA graph, and return the function that replays it.

        Both run on a stream created here.
        """
        self._prepare()
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        self.wait()
        with torch.cuda.stream(side):
            first()
            self.wait()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                then()
            except BaseException:
                with suppress(RuntimeError):  # the first error says what it was
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def wait(self) -> None:
        """Wait until the device has done everything that is enqueued."""
        torch.cuda.synchronize(self._device)
