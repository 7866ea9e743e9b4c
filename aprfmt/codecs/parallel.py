"""Split work over a tensor between threads: a shared pool, equal ranges, and a native decode.

Kernels release the GIL, so plain threads do. They are started on first use and kept; a process made
by `fork` starts its own. A task that splits its work again does all of it on its own thread.
"""

import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from numpy.typing import NDArray

# Elements below which a part is not worth a separate thread: 50 us of decoding or multiplying,
# twice what handing over to a thread and back takes.
SMALLEST_PART = 1 << 19
# Parts begin at multiples of this many elements, so that they are aligned as the whole is.
_STEP = 1 << 10

_MOST_THREADS = 256

# The kernels' `stream`. Memory that was never stored to comes zeroed, a page at a time, into the
# cache: storing through it is then twice as fast as storing past it. In memory in use the large
# output goes past the cache, as a store through it would read first what it overwrites.
STORE_FRESH, STORE_BY_SIZE = 0, -1

_pool: "ThreadPoolExecutor | None" = None
_lock = threading.Lock()
_inside = threading.local()


def run_tasks(tasks: Sequence[Callable[[], None]], threads: int) -> None:
    """Run all tasks on at most `threads` threads, the caller's included, and wait for them.

    A call from within a task runs its tasks one after another. The first error is raised after all
    have ended.
    """
    if threads <= 1 or len(tasks) <= 1 or getattr(_inside, "busy", False):
        for task in tasks:
            task()
        return
    # Every thread takes the next task until none is left.
    todo = iter(tasks)
    turn = threading.Lock()

    def take_tasks() -> None:
        """Run tasks from the list that all threads share until it is empty."""
        _inside.busy = True
        try:
            while True:
                with turn:
                    task = next(todo, None)
                if task is None:
                    return
                task()
        finally:
            _inside.busy = False

    # The caller works too, then waits for the others.
    pool = _thread_pool()
    helpers = [pool.submit(take_tasks) for _ in range(min(threads, len(tasks)) - 1)]
    try:
        take_tasks()
    finally:
        errors = [helper.exception() for helper in helpers]
    for error in errors:
        if error is not None:
            raise error


def split_range(count: int, block_size: int, threads: int) -> list[tuple[int, int]]:
    """Return [(start, stop)] of equal ranges of `count` elements, at most `threads` of them.

    Starts are multiples of `block_size` and of _STEP. There is one range where the tensor is too
    small to be worth a thread.
    """
    parts = max(1, min(threads, count // SMALLEST_PART))
    step = math.lcm(block_size, _STEP)
    size = max(1, -(-count // (parts * step))) * step
    return [(start, min(start + size, count)) for start in range(0, count, size)] or [(0, 0)]


def parallel_decode(
    kernel: Callable[[Any, Any, int], None],
    raw: Any,
    out: "NDArray[Any]",
    block_size: int,
    type_size: int,
    threads: int,
    store: int = STORE_BY_SIZE,
) -> None:
    """Fill `out` from blocks `raw` with a kernel of `native.KERNELS`, on several threads.

    `store` says how the kernel writes (STORE_FRESH or STORE_BY_SIZE). Raises what the kernel raises
    where the lengths do not fit.
    """
    count = out.size
    view = memoryview(raw).cast("B")
    parts = split_range(count, block_size, threads)
    fits = len(view) == -(-count // block_size) * type_size
    if len(parts) == 1 or not fits:
        return kernel(view, out, store)

    def decode_part(start: int, stop: int) -> Callable[[], None]:
        """Return a function that decodes elements [start, stop) into `out`.

        A block begins at `start`.
        """
        first, last = start // block_size, -(-stop // block_size)
        piece = view[first * type_size : last * type_size]
        return lambda: kernel(piece, out[start:stop], store)

    run_tasks([decode_part(start, stop) for start, stop in parts], threads)


def _thread_pool() -> "ThreadPoolExecutor":
    """Return the process's thread pool, which is made on first use.

    None of its tasks may wait for another.
    """
    global _pool
    from concurrent.futures import ThreadPoolExecutor

    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_MOST_THREADS, "aprfmt")
        return _pool


def _after_fork() -> None:
    """Forget the parent's threads, which a child process lacks, and replace the lock."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()
    _inside.busy = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
