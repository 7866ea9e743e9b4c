"""Runs one scan, from its roots to its summary.

An *item* is one thing that a model is made of: a file, a tensor, a key, a text.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aprfmt.base.data_frames import Row, Tabular
from aprfmt.errors import UsageError
from aprfmt.fleet.answer_lines import AnswerLine, encode_answer, summary_facts
from aprfmt.fleet.model_search import FleetModel, Unlisted, find_models
from aprfmt.fleet.questions import select_questions
from aprfmt.fleet.results import Results, check_results_path, read_rows
from aprfmt.fleet.summary import Summary
from aprfmt.fleet.tasks import DERIVES, ERROR, OPEN, Task, make_row
from aprfmt.fleet.workers import Limits, Workers
from aprfmt.model.ledger import NotCompared
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, pronounce
from aprfmt.remote.traffic import TRAFFIC

UnitProgress = Callable[[int, int], None]  # units done, units in all


@dataclass(frozen=True, slots=True)
class ScanBudget:
    """Limits of a whole scan: wall time in `seconds`, `bytes` of the models that are begun.

    `requests` are those over the network; once so many were made, no model is begun.
    """

    seconds: float | None = None
    bytes: int | None = None
    requests: int | None = None


@dataclass(frozen=True)
class ScanRequest:
    """What to scan: roots, questions, the file for the rows, and limits.

    `ray` is the address of a Ray cluster, "" for one on this machine, None for processes.
    """

    roots: Sequence[str]
    out: Path
    checks: Sequence[str] = ()
    jobs: int = 1
    limits: Limits = field(default_factory=Limits)
    budget: ScanBudget = field(default_factory=ScanBudget)
    ray: str | None = None
    families: bool = True
    accept: Sequence[str] = ()  # unread:PATTERN of models whose unread items the user accepts


@dataclass(frozen=True)
class ScanReport(Tabular):
    """What a scan did, and the summary of all rows.

    Numbers of questions: `asked` now, `kept` answered before, `left` not asked for the budget.
    """

    out: Path
    asked: int
    kept: int
    left: int
    seconds: float
    found: Mapping[str, Any]
    requests: int = 0
    accept: Sequence[str] = ()  # unread:PATTERN of models whose unread items the user accepts

    @property
    def exit_code(self) -> int:
        """0 nothing failed, 1 a check failed, 2 something was not asked or not answered."""
        return self.pronounced.exit

    @property
    def pronounced(self) -> Pronounced:
        """The verdict over all answers; what was not asked or not answered leaves it open.

        Models with items that no table lists are named in it; weights among them leave it open.
        """
        counts = self.found["counts"]
        lost = [NotCompared("question", f"without an answer: {counts[ERROR]}", "unreadable")]
        budget = [NotCompared("question", f"left by the budget: {self.left}", "unreadable")]
        left = (
            *(lost if counts[ERROR] else ()),
            *(budget if self.left else ()),
            *map(_unread_model, self.found.get("unread", ())),
        )
        scope = (
            f": {len(self.found['models'])} models: {counts['PASS']} answers passed, "
            f"{counts['FAIL']} failed, {counts['NOT_RUN']} not run, {counts[ERROR]} errors"
        )
        ran = {"answers": (counts["PASS"], counts["PASS"] + counts["FAIL"])}
        words = VerdictWords("PASS", "FAIL", "not decided" if counts["PASS"] else "NOT-RUN")
        return pronounce(words, Compared(bool(counts["FAIL"]), ran, left, scope=scope), self.accept)

    def table_rows(self) -> Sequence[Row]:
        """Return the rows of the results file: one for every question of every model."""
        return list(read_rows(self.out))

    def to_json(self) -> dict[str, Any]:
        """Return the report as the JSON object of `scan --json`."""
        return {
            "results": str(self.out),
            "asked": self.asked,
            "kept": self.kept,
            "left": self.left,
            "seconds": round(self.seconds, 3),
            "requests": self.requests,
            **self.found,
            **self.pronounced.to_json(),
        }


def _unread_model(row: Mapping[str, Any]) -> NotCompared:
    """Return the item of a model with items that no table lists; `row` is the summary's."""
    says = f"{row['items']} items of it"
    if row["weights"]:
        return NotCompared("model", row["model"], "unreadable", f"{says} are not read")
    return NotCompared("model", row["model"], "unread", says)


class _Meter:
    """Counts questions, bytes and requests of a scan, and compares them with its budget."""

    def __init__(self, budget: ScanBudget, total: int, progress: UnitProgress | None) -> None:
        """Start the clock; `total` is the number of questions to be asked."""
        self._budget, self._total, self._progress = budget, total, progress
        self._began = time.monotonic()
        self._bytes = 0
        self._begun: set[str] = set()
        self.asked = self.given = 0
        self.before = 0  # requests of workers that have ended
        self.workers: Workers | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the scan began."""
        return time.monotonic() - self._began

    @property
    def requests(self) -> int:
        """Requests over the network so far, by this process and the workers."""
        made = TRAFFIC.requests + self.before
        return made + (self.workers.requests if self.workers is not None else 0)

    def within(self, task: Task) -> bool:
        """Return whether the budget allows a task to begin, and count it if so."""
        limit = self._budget
        if limit.seconds is not None and self.seconds >= limit.seconds:
            return False
        if limit.requests is not None and self.requests >= limit.requests:
            return False
        new = 0 if task.subject.identity in self._begun else task.subject.bytes
        if limit.bytes is not None and self._bytes + new > limit.bytes:
            return False
        self._bytes += new
        self._begun.add(task.subject.identity)
        self.given += len(task.names)
        return True

    def count(self) -> None:
        """Count one answer, and report progress to the callback if there is one."""
        self.asked += 1
        if self._progress is not None:
            self._progress(self.asked, max(self._total, self.asked))

    def add(self, units: int) -> None:
        """Add `units` to the number of questions in all, which progress is measured against."""
        self._total += units


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The results file and the summary, which both get every answer."""

    results: Results
    summary: Summary

    def add(self, answer: AnswerLine) -> None:
        """Write an answer to the results file and add it to the summary."""
        self.results.add(answer)
        self.summary.add(answer.facts)


def scan(request: ScanRequest, progress: UnitProgress | None = None) -> ScanReport:
    """Ask every question that has no answer yet, and return a report of all answers.

    Raises UsageError for a root or a check that does not exist, and for a results file of another
    extension. Raises FormatError for one that holds something else, OutputError where it cannot be
    written.
    """
    if request.ray is not None and request.budget.requests is not None:
        raise UsageError("--max-requests counts this machine's requests; leave it out with --ray")
    names = (OPEN, *select_questions(request.checks))
    check_results_path(request.out)
    met = list(find_models(request.roots))
    subjects = [each for each in met if isinstance(each, FleetModel)]
    subjects += [_placeholder_model(each) for each in met if isinstance(each, Unlisted)]
    with (
        Summary(subjects) as summary,
        Results(request.out, lambda row: summary.add(summary_facts(row))) as results,
    ):
        # Places that could not be read are rows at once; all models are asked what is new.
        gathered = _Gathered(results, summary)
        for subject in subjects:
            if not subject.path:
                row = make_row(
                    Task(subject, (OPEN,)), OPEN, None, why=_unlisted_reason(subject, met)
                )
                gathered.add(encode_answer(row))
        tasks = list(_pending_tasks((each for each in subjects if each.path), names, results))
        units = sum(len(task.names) for task in tasks)
        every = len(names) * sum(bool(each.path) for each in subjects)
        meter = _Meter(request.budget, units, progress)
        _run_tasks(request, _within_budget(tasks, meter), gathered, meter)
        left = units - meter.given
        # Pairs are known only when the digests of all models are.
        if request.families:
            pairs = list(_pair_tasks(subjects, gathered))
            meter.add(len(pairs))
            before = meter.given
            _run_tasks(request, _within_budget(pairs, meter), gathered, meter)
            left += len(pairs) - (meter.given - before)
        results.finish()
        found = summary.to_json()
    return ScanReport(
        request.out,
        meter.asked,
        every - units,
        left,
        meter.seconds,
        found,
        meter.requests,
        request.accept,
    )


def _placeholder_model(unlisted: Unlisted) -> FleetModel:
    """Return a FleetModel with an empty path, for a path or address where nothing could be read."""
    identity = hashlib.sha256(f"unlisted {unlisted.place}".encode(errors="replace")).hexdigest()
    return FleetModel("", identity, 0, (unlisted.place,))


def _unlisted_reason(subject: FleetModel, met: Iterable[FleetModel | Unlisted]) -> str:
    """Return why nothing could be read at the path or address that a placeholder stands for.

    `met` is what the search found.
    """
    return next(
        each.why for each in met if isinstance(each, Unlisted) and each.place == subject.places[0]
    )


def _pending_tasks(
    subjects: Iterable[FleetModel], names: Sequence[str], results: Results
) -> Iterator[Task]:
    """Yield a task for each model with its questions that have no answer yet."""
    for subject in subjects:
        wanted = results.wanted(subject, names)
        if wanted:
            yield Task(subject, tuple(wanted))


def _within_budget(tasks: Iterable[Task], meter: _Meter) -> Iterator[Task]:
    """Yield tasks until the budget is used up; the remaining tasks are dropped."""
    for task in tasks:
        if not meter.within(task):
            return
        yield task


def _pair_tasks(subjects: Sequence[FleetModel], gathered: _Gathered) -> Iterator[Task]:
    """Yield a task for each pair of models to ask whether the first derives from the second.

    Pairs that already have an answer are left out. `gathered` has the summary that knows the pairs,
    and the answers that exist.
    """
    by_identity = {each.identity: each for each in subjects}
    for pair in gathered.summary.pairs():
        subject, base = by_identity[pair.subject], by_identity[pair.base]
        if gathered.results.wanted(subject, (DERIVES,), base):
            yield Task(subject, (DERIVES,), base)


def _run_tasks(
    request: ScanRequest, tasks: Iterator[Task], gathered: _Gathered, meter: _Meter
) -> None:
    """Run tasks, and record each answer in `gathered` and `meter`."""
    for answer in _answer_tasks(request, tasks, meter):
        gathered.add(answer)
        meter.count()


def _answer_tasks(
    request: ScanRequest, tasks: Iterator[Task], meter: _Meter
) -> Iterator[AnswerLine]:
    """Yield the answers to tasks, from Ray or from processes of this machine."""
    if request.ray is not None:
        from aprfmt.fleet.ray_tasks import ray_answers

        yield from ray_answers(tasks, request.ray, request.limits)
        return
    # With a limit of requests nothing is begun before it is known what the one before it made.
    with Workers(request.jobs, request.limits, request.budget.requests is None) as workers:
        meter.workers = workers
        yield from workers.answers(tasks)
        meter.before, meter.workers = meter.before + workers.requests, None
