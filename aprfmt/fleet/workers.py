"""Runs the tasks of a scan in processes that may hang, use too much memory or be killed.

A process is given one model at a time and the questions about it; where models are small, the next
one too, so that it never waits for us. One that takes longer for a question than it may, or dies
over it, is replaced: that question has an error, the others go on.
"""

import os
import pickle
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from aprfmt.base.child_process import start_module
from aprfmt.fleet.answer_lines import AnswerLine, encode_answer
from aprfmt.fleet.tasks import OPEN, Task, make_row
from aprfmt.fleet.worker_process import HEAD
from aprfmt.remote.paths import is_remote, parse_location

AT_ONCE = 1 << 20  # bytes read of a worker's answers at once
PAUSE = 0.005  # seconds in which answers gather: reading each by itself costs more than asking
SMALL = 16 << 20  # bytes of a model that may wait for a busy worker


@dataclass(frozen=True, slots=True)
class Limits:
    """What one question may take: `seconds` of wall time, `memory` in bytes.

    Mapped files do not count as memory.
    """

    seconds: float = 600.0
    memory: int = 4 << 30


def _worker_arguments() -> list[str]:
    """Return the command-line arguments of a worker: this process's --allow-http, or []."""
    guard = sys.modules.get("aprfmt.remote.address_policy")
    return ["--allow-http"] if guard is not None and guard.POLICY.plain_http else []


def _is_small(task: Task) -> bool:
    """Return whether a task's models are local and at most SMALL bytes together.

    A worker that is still busy may be given such a task.
    """
    sides = [task.subject] if task.base is None else [task.subject, task.base]
    return sum(side.bytes for side in sides) <= SMALL and not any(
        is_remote(parse_location(side.path)) for side in sides
    )


class _Worker:
    """One process, its tasks in order, and how many questions of the first task are answered.

    `heard` is the queue that its output goes to.
    """

    def __init__(self, limits: Limits, heard: "queue.Queue[tuple[_Worker, bytes]]") -> None:
        """Start the process, and a thread that puts its output on the queue `heard`."""
        self._limits = limits
        self._heard = heard
        self.process = start_module(
            "aprfmt.fleet.worker_process", str(limits.memory), *_worker_arguments()
        )
        self.tasks: deque[Task] = deque()
        self.done = 0
        self.until = 0.0
        self._begun = b""  # of a message that has not come whole
        threading.Thread(target=self._read_output, daemon=True).start()

    def _read_output(self) -> None:
        """Put what the process writes on the queue, and b"" at its end; runs in a thread."""
        assert self.process.stdout is not None
        with suppress(OSError, ValueError):
            while some := os.read(self.process.stdout.fileno(), AT_ONCE):
                self._heard.put((self, some))
                time.sleep(PAUSE)
        self._heard.put((self, b""))

    def give(self, task: Task) -> None:
        """Send a task to the process; one that has died is noticed by the end of its output."""
        assert self.process.stdin is not None
        self.tasks.append(task)
        if len(self.tasks) == 1:
            self._begin_task()
        with suppress(OSError):
            pickle.dump(task, self.process.stdin)
            self.process.stdin.flush()

    def takes(self, task: Task) -> bool:
        """Return whether a task may be sent: the worker has none, or one and both are small."""
        return not self.tasks or (
            len(self.tasks) == 1 and _is_small(task) and _is_small(self.tasks[0])
        )

    def messages(self, some: bytes) -> Iterator[AnswerLine | int]:
        """Yield the messages completed by the bytes `some`: an answer, or a task's request count.

        The count ends a task.
        """
        data, at = self._begun + some, 0
        while len(data) - at >= HEAD.size:
            end = at + HEAD.size + HEAD.unpack_from(data, at)[0]
            if end > len(data):
                break
            message: AnswerLine | int = pickle.loads(memoryview(data)[at + HEAD.size : end])
            self._count(message)
            yield message
            at = end
        self._begun = data[at:]

    def _count(self, message: AnswerLine | int) -> None:
        """Count an answer, or go to the next task if `message` is the request count that ends one.

        Each question has its own time limit, which begins with the answer before it.
        """
        if isinstance(message, int):
            self.tasks.popleft()
            self._begin_task()
        else:
            self.done += 1
            self.until = time.monotonic() + self._limits.seconds

    def _begin_task(self) -> None:
        """Set the number of answers to 0 and the time limit anew, for the next task."""
        self.done = 0
        self.until = time.monotonic() + self._limits.seconds

    def end(self) -> int:
        """Kill the process if it still runs, and return its exit code."""
        self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        return code


class Workers:
    """A fixed number of processes that answer tasks; a context manager that ends them.

    With `ahead` a process is given its next small task while it still works on another one.
    """

    def __init__(self, count: int, limits: Limits, ahead: bool = True) -> None:
        """Set the number of processes and their limits; they start when there are tasks."""
        self._limits = limits
        self._ahead = ahead
        self._count = count
        self.requests = 0  # over the network, of the tasks that are done
        self._all: list[_Worker] = []
        self._heard: queue.Queue[tuple[_Worker, bytes]] = queue.Queue()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._all:
            worker.end()
        self._all = []

    def answers(self, tasks: Iterable[Task]) -> Iterator[AnswerLine]:
        """Yield the answers to all tasks as they come; tasks are taken as workers become free."""
        waiting = _Waiting(tasks)
        while True:
            self._assign_tasks(waiting)
            busy = [worker for worker in self._all if worker.tasks]
            if not busy:
                return
            first = min(worker.until for worker in busy)
            try:
                worker, some = self._heard.get(timeout=max(0.0, first - time.monotonic()))
            except queue.Empty:
                worker = next(worker for worker in busy if worker.until == first)
                why = f"took longer than {self._limits.seconds:g} s (--unit-time)"
                yield from self._replace_worker(worker, why, waiting)
                continue
            if worker not in self._all:
                continue  # output of a worker that was killed here
            if not some:
                code = worker.end()
                why = f"the process ended with {code}: killed, or out of memory"
                yield from self._replace_worker(worker, why, waiting)
            for message in worker.messages(some):
                if isinstance(message, int):
                    self.requests += message
                else:
                    yield message

    def _assign_tasks(self, waiting: "_Waiting") -> None:
        """Give tasks to the workers that have none, then to those that can take one more.

        A worker is started only for a task. `waiting` are the tasks that no worker has.
        """
        for worker in sorted(self._all, key=lambda each: len(each.tasks)):
            if worker.tasks and not self._ahead:
                continue
            while waiting.first is not None and worker.takes(waiting.first):
                worker.give(waiting.take())
                if not self._ahead:
                    break
        while len(self._all) < self._count and waiting.first is not None:
            self._all.append(_Worker(self._limits, self._heard))
            self._all[-1].give(waiting.take())

    def _replace_worker(
        self, worker: _Worker, why: str, waiting: "_Waiting"
    ) -> Iterator[AnswerLine]:
        """Remove a lost worker, and yield an ERROR for the question that it was answering, if any.

        Its other tasks go back to `waiting`, and so do the later questions of its task unless the
        model could not be opened. `why` says how it was lost.
        """
        self._all.remove(worker)
        worker.end()
        if not worker.tasks:
            return
        task, *others = worker.tasks
        waiting.again += others
        if worker.done >= len(task.names):
            return
        name = task.names[worker.done]
        left = task.names[worker.done + 1 :]
        if left and name != OPEN:  # of a model that cannot be opened nothing else is asked
            waiting.again.append(replace(task, names=left))
        yield encode_answer(make_row(task, name, None, why=why))


class _Waiting:
    """Tasks that no worker has; those of a lost worker come first."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        """Start with the tasks of an iterable, which is read only as tasks are given."""
        self._tasks = iter(tasks)
        self._next: Task | None = None
        self.again: list[Task] = []

    @property
    def first(self) -> Task | None:
        """The task to be given next, None where there is none."""
        if self.again:
            return self.again[-1]
        if self._next is None:
            self._next = next(self._tasks, None)
        return self._next

    def take(self) -> Task:
        """Return the task to be given next, and remove it."""
        task = self.first
        assert task is not None
        if self.again:
            self.again.pop()
        else:
            self._next = None
        return task
