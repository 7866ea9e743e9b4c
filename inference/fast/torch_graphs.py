"""Passes recorded by torch: its streams, its graphs, and memory of theirs."""

from collections.abc import Callable
from contextlib import suppress

import torch

from aprfmt.inference.backends.base import Numbers


class TorchNumbers:
    """int64 numbers on a device and, pinned, on the host."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.device = torch.zeros(count, dtype=torch.int64, device=device)
        self._pinned = torch.zeros(count, dtype=torch.int64, pin_memory=True)
        self.host: Numbers = self._pinned.numpy()

    def bring(self) -> None:
        """Enqueue the copy to the device."""
        self.device.copy_(self._pinned, non_blocking=True)

    def fetch(self, x: torch.Tensor) -> None:
        """Enqueue the copy of another tensor to the host."""
        self._pinned.copy_(x, non_blocking=True)


class TorchGraphMaker:
    """What records passes on one device; `prepare` loads every kernel that one may launch."""

    errors: tuple[type[Exception], ...] = (RuntimeError,)

    def __init__(self, device: torch.device, prepare: Callable[[], None]) -> None:
        self._device = device
        self._prepare = prepare

    def numbers(self, count: int) -> TorchNumbers:
        """Return so many numbers."""
        return TorchNumbers(count, self._device)

    def record(self, first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
        """Call both on a stream of their own, record the second; return what replays it."""
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
        """Wait for the device."""
        torch.cuda.synchronize(self._device)
