"""Statistics of a whole pass: enqueued one by one, read in one transfer."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from aprfmt.inference.backends.cuda import memory
from aprfmt.inference.backends.cuda.arrays import Flat
from aprfmt.inference.backends.cuda.reduce import (
    SLOT,
    THREADS,
    WORKSPACE,
    kernel,
    split,
    to_stats_of,
)
from aprfmt.stats import Stats, compute

_ROWS = 512  # slots allocated at a time


class Workspace:
    """What reductions share; one per backend, since one stream's launches use it."""

    def __init__(self) -> None:
        self._room = memory.arrays().zeros(WORKSPACE, "float64")
        self._place = memory.pointer(self._room)
        self._kernels: dict[str, Any] = {}

    def stats(self, x: Flat, slot: int) -> None:
        """Put the statistics of x at the address of a slot."""
        dtype = x.dtype
        if dtype not in self._kernels:
            self._kernels[dtype] = kernel("stats", dtype)
        pieces, size = split(x.count)
        self._kernels[dtype]((pieces,), (THREADS,), (x.ptr, x.count, size, self._place, slot))


class Pending:
    """The statistics of one trace's values, in the order they were added.

    `flat` returns an array, copied where it is not contiguous, and its memory.
    """

    def __init__(self, workspace: Workspace, flat: Callable[[Any], tuple[Any, Flat]]) -> None:
        self._workspace = workspace
        self._flat = flat
        self._found: list[int | Stats] = []  # elements of a waiting one, or what is known already
        self._chunks: list[Any] = []
        self._rows = self._next = 0

    def add(self, x: Any) -> None:
        """Enqueue the statistics of the next value; a numpy array's are computed now."""
        if not memory.is_device(x):
            self._found.append(compute(x))
            return
        if self._rows == _ROWS * len(self._chunks):
            self._chunks.append(memory.arrays().empty((_ROWS, SLOT), "float64"))
            self._next = memory.pointer(self._chunks[-1])
        whole, data = self._flat(x)  # a copy may go once the launch is enqueued: one stream
        self._workspace.stats(data, self._next)
        self._next += 8 * SLOT
        del whole
        self._found.append(data.count)
        self._rows += 1

    def join(self) -> None:
        """Do nothing: all of it is enqueued on one stream."""

    def read(self) -> list[Stats]:
        """Return the statistics of every value added, in order; waits for the device."""
        counts = [found for found in self._found if isinstance(found, int)]
        made: Iterator[Stats] = iter(())
        if counts:
            rows = np.concatenate([memory.get(chunk) for chunk in self._chunks])
            made = iter(to_stats_of(counts, rows))
        return [next(made) if isinstance(found, int) else found for found in self._found]
