"""Tasks on this machine: processes that may be slow, greedy or killed, one row for each question.

A process is given one model at a time and the questions about it. One that takes longer for a
question than it may, or dies over it, is replaced: that question has an error, the others go on.
"""

import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from aprfmt.fleet.units import OPEN, Row, Task, row_of


@dataclass(frozen=True, slots=True)
class Limits:
    """What one unit may take: `seconds` of wall time, `memory` in bytes beside mapped files."""

    seconds: float = 600.0
    memory: int = 4 << 30


def _allowed() -> list[str]:
    """Return what a worker has to be told that this process was told."""
    guard = sys.modules.get("aprfmt.remote.guard")
    return ["--allow-http"] if guard is not None and guard.POLICY.plain_http else []


class _Ended:
    """What a worker's pipe says at its end."""


Heard = Row | int | _Ended  # an answer, the requests a task made at its end, the process's end


class _Worker:
    """One process, the task it is at, and how many questions of it are answered."""

    def __init__(self, limits: Limits, heard: "queue.Queue[tuple[_Worker, Heard]]") -> None:
        self._limits = limits
        self._heard = heard
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aprfmt.fleet.serve", str(limits.memory), *_allowed()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.task: Task | None = None
        self.done = 0
        self.until = 0.0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
            while True:
                self._heard.put((self, pickle.load(self.process.stdout)))
        self._heard.put((self, _Ended()))

    def give(self, task: Task) -> None:
        """Send a task; a process that has died is heard of as one that ended."""
        assert self.process.stdin is not None
        self.task, self.done = task, 0
        self.until = time.monotonic() + self._limits.seconds
        with suppress(OSError):
            pickle.dump(task, self.process.stdin)
            self.process.stdin.flush()

    def answered(self) -> None:
        """Count an answer; the next question has its own time."""
        self.done += 1
        self.until = time.monotonic() + self._limits.seconds

    def end(self) -> int:
        """End the process, if it has not ended; return its exit code."""
        self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        return code


class Workers:
    """A fixed number of processes; a context manager that ends them."""

    def __init__(self, count: int, limits: Limits) -> None:
        self._limits = limits
        self._count = count
        self.requests = 0  # over the network, of the tasks that are done
        self._all: list[_Worker] = []
        self._heard: queue.Queue[tuple[_Worker, Heard]] = queue.Queue()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._all:
            worker.end()
        self._all = []

    def rows(self, tasks: Iterable[Task]) -> Iterator[Row]:
        """Yield the rows of all tasks as they come; tasks are taken as workers become free."""
        waiting = iter(tasks)
        again: list[Task] = []
        while True:
            self._fill(waiting, again)
            busy = [worker for worker in self._all if worker.task is not None]
            if not busy:
                return
            first = min(worker.until for worker in busy)
            try:
                worker, heard = self._heard.get(timeout=max(0.0, first - time.monotonic()))
            except queue.Empty:
                worker = next(worker for worker in busy if worker.until == first)
                why = f"took longer than {self._limits.seconds:g} s (--unit-time)"
                yield from self._lost(worker, why, again)
                continue
            if isinstance(heard, _Ended):
                if worker in self._all:  # one that was ended here is heard of, too
                    code = worker.end()
                    why = f"the process ended with {code}: killed, or out of memory"
                    yield from self._lost(worker, why, again)
            elif isinstance(heard, int):
                self.requests += heard
                worker.task = None
            elif worker in self._all:
                worker.answered()
                yield heard

    def _fill(self, waiting: Iterator[Task], again: list[Task]) -> None:
        """Give a task to every worker that has none; start a worker only for a task."""
        idle = [worker for worker in self._all if worker.task is None]
        while idle or len(self._all) < self._count:
            task = again.pop() if again else next(waiting, None)
            if task is None:
                return
            if not idle:
                self._all.append(_Worker(self._limits, self._heard))
                idle.append(self._all[-1])
            idle.pop().give(task)

    def _lost(self, worker: _Worker, why: str, again: list[Task]) -> Iterator[Row]:
        """Yield the error of the question a worker was at, and keep those it had yet to answer."""
        self._all.remove(worker)
        worker.end()
        task = worker.task
        if task is None or worker.done >= len(task.names):
            return
        name = task.names[worker.done]
        yield row_of(task, name, None, why=why)
        left = task.names[worker.done + 1 :]
        if left and name != OPEN:  # of a model that cannot be opened nothing else is asked
            again.append(replace(task, names=left))
