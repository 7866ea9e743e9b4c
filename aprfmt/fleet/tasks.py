"""The unit of work of a scan: one question about one model, answered by one row.

The process that asks leaves the model open for the next question about it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aprfmt.base.version import __version__
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import NotRun
from aprfmt.compare import diff
from aprfmt.errors import AprfmtError
from aprfmt.fleet.model_search import FleetModel
from aprfmt.fleet.questions import Question, QuestionAnswer, select_questions
from aprfmt.model import open_model

SCHEMA = "aprfmt.scan-row/1"
OPEN = "open"  # what is asked first: can it be opened at all
DERIVES = "derives"  # asked of two models: are the tensors of one those of the other, encoded again
ERROR = "ERROR"  # besides PASS, FAIL and NOT_RUN: the question could not be answered

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """Questions about one model, in order; with `base`, the question DERIVES about two."""

    subject: FleetModel
    names: tuple[str, ...]
    base: FleetModel | None = None


def make_row(
    task: Task, name: str, answer: QuestionAnswer | None, seconds: float = 0.0, why: str = ""
) -> Row:
    """Return the row of the answer `answer` to question `name`, or an ERROR row where it is None.

    `why` is the reason of the ERROR. `seconds` is the time that the question took.
    """
    subject = task.subject
    row: Row = {
        "schema": SCHEMA,
        "identity": subject.identity,
        "model": subject.places[0],
        "bytes": subject.bytes,
        "check": name,
        "outcome": ERROR if answer is None else answer.outcome,
        "found": why if answer is None else answer.found,
        "findings": [] if answer is None else list(answer.findings),
        "details": {} if answer is None or answer.details is None else dict(answer.details),
        "seconds": round(seconds, 3),
        "version": __version__,
    }
    if task.base is not None:
        row |= {"base": task.base.places[0], "base_identity": task.base.identity}
    if name == OPEN:
        row["places"] = list(subject.places)
    return row


class Asker:
    """Answers tasks one after another, with one model open at a time."""

    def __init__(self) -> None:
        """Start without an open model."""
        self._table: Mapping[str, Question] = select_questions()
        self._at: FleetModel | None = None
        self._context: CheckContext | None = None

    def answers(self, task: Task) -> Iterator[Row]:
        """Yield a row for every question of a task; only one if the model cannot be opened."""
        for name in task.names:
            began = time.perf_counter()
            said: QuestionAnswer | None
            try:
                said, why = self._answer_question(task, name), ""
            except NotRun as reason:
                said, why = QuestionAnswer("NOT_RUN", str(reason)), ""
            except MemoryError:
                said, why = None, "more memory was needed than a unit may take (--unit-memory)"
            except (AprfmtError, OSError) as error:
                said, why = None, str(error)
            except Exception as error:  # a file that breaks a check may not stop the scan
                said, why = None, f"{type(error).__name__}: {error}"
            yield make_row(task, name, said, time.perf_counter() - began, why)
            if said is None and name == OPEN:
                return

    def _answer_question(self, task: Task, name: str) -> QuestionAnswer:
        """Return the answer to the question `name` of a task, opening its model if necessary."""
        if task.base is not None:
            return check_derives(task.subject, task.base)
        context = self._open_context(task.subject)
        if name == OPEN:
            return check_opens(context)
        return self._table[name].ask(context)

    def _open_context(self, subject: FleetModel) -> CheckContext:
        """Return the context of a model, which is opened unless it is open already."""
        if self._context is None or self._at != subject:
            self.close()
            model = open_model(subject.path, partial=True, damaged=True)
            self._at, self._context = subject, CheckContext(model)
        return self._context

    def close(self) -> None:
        """Close the model that is open."""
        if self._context is not None:
            self._context.model.close()
        self._at = self._context = None


def check_opens(context: CheckContext) -> QuestionAnswer:
    """Return PASS with the format and number of tensors of an open model.

    What is wrong with the file is for the check `layout` to say.
    """
    model = context.model
    return QuestionAnswer(
        "PASS",
        f"{model.format}, {len(model)} tensors",
        details={"format": model.format, "tensors": len(model), "damage": len(model.damage)},
    )


def check_derives(subject: FleetModel, base: FleetModel) -> QuestionAnswer:
    """Return PASS if each tensor of `subject` equals the base's, or is the base's encoded again.

    FAIL if one does not, or if that cannot be decided. The details have the counts, and the modes
    of encoding that gave the tensors.
    """
    report = diff(subject.path, base.path, only=("tensors",), base=base.path, explain=False)
    sides = [one for tensor in report.tensors for one in tensor.derivations if one.side == "a"]
    yes = sum(one.derives is True for one in sides)
    no = sum(one.derives is False for one in sides)
    same = sum(tensor.verdict in ("SAME_BYTES", "SAME_VALUES") for tensor in report.tensors)
    modes: Sequence[str] = sorted({one.mode for one in sides if one.derives})
    of = len(report.tensors)
    others = of - same - len(sides)
    proven = bool(yes + same) and not no and len(sides) == yes and not others
    said = f"{yes} of {len(sides)} quantized tensors are base's encoded again, {same} of {of} equal"
    return QuestionAnswer(
        "PASS" if proven else "FAIL",
        said,
        details={
            "derives": yes,
            "does_not": no,
            "open": len(sides) - yes - no,
            "equal": same,
            "tensors": of,
            "modes": list(modes),
        },
    )
