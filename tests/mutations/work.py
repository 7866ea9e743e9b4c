"""Several runs side by side, all of which end when this process is told to."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Generator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

_children: set["subprocess.Popen[bytes]"] = set()
_told_to_stop = threading.Event()


class Interrupted(Exception):
    """A child was ended because all of them were: what it did says nothing."""


def in_parallel(jobs: int, do: Callable[[A], B], items: Collection[A]) -> Generator[B, None, None]:
    """Give what `do` returns for each item, in the order in which they are done."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for done in as_completed([pool.submit(do, item) for item in items]):
                yield done.result()
        except BaseException:
            _told_to_stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for child in list(_children):
                end(child)
            pool.shutdown()
            raise
        finally:
            _told_to_stop.clear()


def wait(child: "subprocess.Popen[bytes]", limit: float) -> int | None:
    """Return a child's exit code, None where it was ended for its time.

    Nothing that it started in its session is left. Raises Interrupted where all children end.
    """
    _children.add(child)
    try:
        code: int | None = child.wait(0 if _told_to_stop.is_set() else limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end(child)
        _children.discard(child)
    if _told_to_stop.is_set():
        raise Interrupted
    return code


def end(child: "subprocess.Popen[bytes]") -> None:
    """End a child, which leads a session, and what it started there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
