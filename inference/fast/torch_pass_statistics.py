"""Statistics of a trace's points, kept on the device until the pass is over.

They are computed on a second stream, parallel to the pass. A point's tensor is kept until its
statistics are done; the pass waits if too many bytes would be kept.
"""

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from aprfmt.tensors.stats import Stats, compute_stats

_BLOCK = 256  # results per allocation
KEPT = 1 << 30  # largest sum of bytes of tensors with pending statistics


@cache
def _second_stream(device: torch.device) -> tuple[torch.cuda.Stream, torch.Tensor]:
    """Return (second stream of a device, zeroed workspace of its statistics kernels)."""
    from aprfmt.inference.fast import cuda

    workspace = torch.zeros(cuda.WORKSPACE, dtype=torch.float64, device=device)
    torch.cuda.synchronize(device)
    return torch.cuda.Stream(device), workspace  # type: ignore[no-untyped-call]


class TorchPending:
    """Computes each value's statistics with one kernel; `read` waits for all of them."""

    def __init__(self, device: torch.device) -> None:
        """Start with no values; statistics run on the device's second stream."""
        self._device = device
        self._stream, self._workspace = _second_stream(device)
        self._results: list[torch.Tensor] = []
        self._found: list[Stats | int] = []  # statistics, or the number of values of pending ones
        self._used = 0
        self._waiting: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._bytes = 0

    def add(self, x: Any) -> None:
        """Enqueue the statistics of a tensor; those of numpy arrays and integers are computed now.

        The pass waits if tensors of more than KEPT bytes have unfinished statistics.
        """
        if isinstance(x, np.ndarray) or not x.is_floating_point() or not x.numel():
            self._found.append(compute_stats(x if isinstance(x, np.ndarray) else x.cpu().numpy()))
            return
        from aprfmt.inference.fast import cuda

        x = x.contiguous()
        if self._used == len(self._results) * _BLOCK:
            block = torch.empty((_BLOCK, cuda.RESULT), dtype=torch.float64, device=self._device)
            self._results.append(block)
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        result = self._results[-1][self._used % _BLOCK]
        cuda.launch_stats(x, result, self._workspace, stream=int(self._stream.cuda_stream))
        self._waiting.append((x, self._stream.record_event()))
        self._bytes += x.numel() * x.element_size()
        while self._bytes > KEPT and len(self._waiting) > 1:
            done, event = self._waiting.popleft()
            main.wait_event(event)
            self._bytes -= done.numel() * done.element_size()
        self._found.append(int(x.numel()))
        self._used += 1

    def join(self) -> None:
        """Make later work on the current stream wait for the statistics enqueued so far."""
        if self._used:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._waiting.clear()
        self._bytes = 0

    def read(self) -> list[Stats]:
        """Return the statistics of every value added, in order."""
        from aprfmt.inference.fast.cuda.reduce import to_stats_of

        self.join()
        counts = [found for found in self._found if isinstance(found, int)]
        made: Iterator[Stats] = iter(())
        if counts:
            made = iter(to_stats_of(counts, torch.cat(self._results).cpu().numpy()))
        return [next(made) if isinstance(found, int) else found for found in self._found]
