"""Runs the questions of a scan as Ray tasks, which Ray places, and retries on lost nodes.

A *unit* is one question about one model. It runs under the same limits as on one machine: each Ray
worker asks in a separate process, which is replaced when it takes too long, too much, or dies.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from typing import Any

from aprfmt.base.installation import install_command
from aprfmt.errors import BackendUnavailableError
from aprfmt.fleet.answer_lines import AnswerLine, encode_answer
from aprfmt.fleet.tasks import ERROR, OPEN, Task, make_row
from aprfmt.fleet.workers import Limits, Workers

AHEAD = 4  # units submitted for every CPU of the cluster, so that none is idle
ANSWERS = 10.0  # seconds a cluster's address may take to answer
RETRIES = 3  # of a unit whose worker or node was lost

_asking: dict[Limits, Workers] = {}  # the processes of this Ray worker, used for all its units


def _answer_unit(task: Task, limits: Limits) -> list[AnswerLine]:
    """Return the answers to one task, from a worker process that the Ray worker keeps."""
    if limits not in _asking:
        _asking[limits] = Workers(1, limits)
    return list(_asking[limits].answers([task]))


def ray_answers(tasks: Iterator[Task], address: str, limits: Limits) -> Iterator[AnswerLine]:
    """Yield the answers to all tasks, each asked by a Ray task that declares what it takes.

    `address` is that of a running cluster; "" joins one that runs here, or starts one. Models that
    cannot be opened are asked nothing else. `limits` are those of one question. Raises
    BackendUnavailableError where Ray is not there.
    """
    ray = _connect_ray(address)
    asked = ray.remote(num_cpus=1, memory=limits.memory, max_retries=RETRIES)(_answer_unit)
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting = _split_tasks(tasks)
    later: list[Task] = []
    running: dict[Any, tuple[Task, Task | None]] = {}
    while True:
        while len(running) < AHEAD * cpus:
            pair = (later.pop(), None) if later else next(waiting, None)
            if pair is None:
                break
            running[asked.remote(pair[0], limits)] = pair
        if not running:
            return
        done, _ = ray.wait(list(running), num_returns=1)
        for reference in done:
            task, rest = running.pop(reference)
            answers = _fetch_answers(ray, reference, task)
            yield from answers
            if rest is not None and answers[0].facts.outcome != ERROR:
                later += [replace(rest, names=(name,)) for name in rest.names]


def _split_tasks(tasks: Iterator[Task]) -> Iterator[tuple[Task, Task | None]]:
    """Yield (task of one question, task to ask after it or None).

    The question `open` comes first; the other questions of its task are the second item, and are
    asked only if the model could be opened.
    """
    for task in tasks:
        if task.names[0] == OPEN:
            rest = task.names[1:]
            yield replace(task, names=(OPEN,)), replace(task, names=rest) if rest else None
        else:
            yield from ((replace(task, names=(name,)), None) for name in task.names)


def _fetch_answers(ray: Any, reference: Any, task: Task) -> list[AnswerLine]:
    """Return the answers of a finished Ray task; an error row where Ray gave it up.

    `reference` is Ray's reference of the task's result.
    """
    try:
        answers: list[AnswerLine] = ray.get(reference)
        return answers
    except ray.exceptions.RayError as error:
        why = f"Ray gave it up after {RETRIES} more tries: {type(error).__name__}"
        return [encode_answer(make_row(task, task.names[0], None, why=why))]


def _connect_ray(address: str) -> Any:
    """Return the module ray, connected to a cluster; BackendUnavailableError without it."""
    try:
        import ray
    except ImportError:
        raise BackendUnavailableError(
            f"--ray needs ray, which is not installed; {install_command('fleet')}, or leave --ray "
            "out"
        ) from None
    if not ray.is_initialized():
        _check_reachable(address)
        with chdir(os.path.abspath(os.sep)):  # workers search for modules where this is called
            ray.init(address=address or None, log_to_driver=False, logging_level="ERROR")
    return ray


def _check_reachable(address: str) -> None:
    """Raise BackendUnavailableError if HOST:PORT does not answer, since Ray tries for minutes.

    An address without a port is not tried.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS).close()
    except (OSError, OverflowError) as error:
        raise BackendUnavailableError(f"{address}: no Ray cluster answers: {error}") from None
