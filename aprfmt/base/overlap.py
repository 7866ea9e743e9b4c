"""Two things at a time: one thread makes the next piece while the caller uses the last."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def overlapped(pieces: Iterator[T]) -> Generator[T, None, None]:
    """Yield what an iterator gives, in order; it runs on another thread, one piece ahead.

    What it raises is raised here. Two pieces are in memory at a time.
    """
    done = object()
    with ThreadPoolExecutor(1, "aprfmt-ahead") as pool:
        coming = pool.submit(next, pieces, done)
        while (piece := coming.result()) is not done:
            coming = pool.submit(next, pieces, done)
            yield piece  # type: ignore[misc]
