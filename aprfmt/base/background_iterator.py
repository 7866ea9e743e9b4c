"""Run an iterator one item ahead on another thread, while the caller uses the item before."""

import os
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Threads that wait for work: a new one for each use would keep memory of its own each time, as
# what a thread frees stays with it.
_idle: list[ThreadPoolExecutor] = []


def iterate_ahead(pieces: Iterator[T]) -> Generator[T, None, None]:
    """Yield the items of an iterator in order; another thread makes them, one item ahead.

    What the iterator raises is raised here. Two items are in memory at a time.
    """
    done = object()
    worker = _idle.pop() if _idle else ThreadPoolExecutor(1, "aprfmt-ahead")
    coming = worker.submit(next, pieces, done)
    try:
        while (piece := coming.result()) is not done:
            coming = worker.submit(next, pieces, done)
            yield piece  # type: ignore[misc]
    finally:
        coming.exception()  # of a piece that nobody asked for
        _idle.append(worker)


if hasattr(os, "register_at_fork"):  # a process made by `fork` has none of them
    os.register_at_fork(after_in_child=_idle.clear)
