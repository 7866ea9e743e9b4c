"""What is said of a training step: one list of tensors, the causes, and the verdict.

An *item* is a stored array that was not compared.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from aprfmt.measure.named_causes import NamedCause
from aprfmt.model.ledger import NotCompared
from aprfmt.model.patterns import spelling_predicate
from aprfmt.model.verdict import (
    UNREAD,
    Compared,
    Pronounced,
    VerdictWords,
    acceptance_predicate,
    pronounce,
)

WORDS = VerdictWords("agrees", "differs")
Judged = Literal["agrees", "differs", "not compared"]


@dataclass(frozen=True)
class ArrayFacts:
    """The size of an array and of its numbers; the norm is of the finite ones.

    `zeros` and `nonfinite` are counts of elements.
    """

    norm: float
    largest: float
    zeros: int
    nonfinite: int


@dataclass(frozen=True)
class UpdateFacts:
    """What a step did to one tensor: W after it, less W before it.

    `moved` elements differ as stored, `one_step` of them by one step of the stored type (its
    smallest change). `step` is the size of the step in the usual element, `decay` the share of the
    weight that the step took away, each None where the elements do not say it. `arrived` is the
    share of the expected update that is in the weight, None where none was expected. `norm` is the
    L2 norm of the change, `largest` its largest absolute value. `nonfinite` elements are NaN or
    infinite before the step or after it, and are left out of these.
    """

    elements: int
    moved: int
    one_step: int
    norm: float
    largest: float
    nonfinite: int = 0
    step: float | None = None
    decay: float | None = None
    arrived: float | None = None


@dataclass(frozen=True)
class TensorStep:
    """One parameter: its gradient as given and as computed, its update, and the verdict.

    `norm` is that of the weight before the step, None where it did not move and none was asked for.
    `distance` is the relative L2 of the given gradient from the computed one. `verdict` is about
    all that was compared. `why` says what differs, or why nothing was compared.
    """

    key: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    encoding: str
    norm: float | None
    gradient: ArrayFacts | None = None
    computed: ArrayFacts | None = None
    distance: float | None = None
    update: UpdateFacts | None = None
    verdict: Judged = "not compared"
    why: str = ""


@dataclass(frozen=True)
class PointStep:
    """The gradient of one capture point, dL/d(point), against the one computed of the batch.

    `name` is the array from which it was read, `norm` that of the computed gradient, `distance` the
    relative L2 of the given one from it; None where that is zero or not finite. `why` says what
    differs, or why it was not compared.
    """

    key: str
    name: str
    norm: float
    distance: float | None
    verdict: Judged
    why: str = ""


@dataclass(frozen=True)
class Norms:
    """The norm over all gradients: those that were given, and those computed here."""

    gradient: float | None = None
    computed: float | None = None


@dataclass(frozen=True)
class StepReport:
    """A training step, compared with what its optimizer and its batch make of it.

    `optimizer` is the recipe that the step was compared with, None without one. `notes` are
    sentences about what was found and is no fault. `loss` is that of the batch in nats, None
    without one. `points` are gradients of capture points, backward from the loss.
    """

    model: str
    after: str | None
    adapter: str | None
    optimizer: str | None
    tensors: tuple[TensorStep, ...]
    causes: tuple[NamedCause, ...] = ()
    left: tuple[NotCompared, ...] = ()
    norms: Norms = Norms()
    loss: float | None = None
    computed_on: str | None = None
    notes: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    points: tuple[PointStep, ...] = ()

    @property
    def counts(self) -> Mapping[str, int]:
        """{verdict: number of tensors} for `agrees`, `differs` and `not compared`."""
        return {
            word: sum(row.verdict == word for row in self.tensors)
            for word in ("agrees", "differs", "not compared")
        }

    @property
    def pronounced(self) -> Pronounced:
        """The verdict over all tensors, with the report's own `accept` patterns."""
        return self.verdict(self.accept)

    def verdict(self, accept: Collection[str]) -> Pronounced:
        """Return the verdict over all tensors; what was not compared may leave it open.

        `accept` are patterns (`unread:PATTERN`) of what may stay uncompared. A parameter is matched
        by its role and by its names in the file.
        """
        counts = self.counts
        compared = counts["agrees"] + counts["differs"]
        left = (*self.left, *self._not_compared())
        detail = f"{counts['differs']} differ" if counts["differs"] else ""
        held = {"tensors": (compared, len(self.tensors))}
        wrong = sum(row.verdict == "differs" for row in self.points)
        if self.points:
            known = sum(row.verdict != "not compared" for row in self.points)
            held["gradients of points"] = (known, len(self.points))
        if wrong:
            detail = ", ".join(filter(None, (detail, f"{wrong} of points differ")))
        return pronounce(
            WORDS,
            Compared(
                bool(counts["differs"]) or bool(self.causes) or bool(wrong), held, left, detail
            ),
            self._by_key(accept, left),
        )

    def _by_key(self, accept: Collection[str], left: Collection[NotCompared]) -> list[str]:
        """Return the patterns of `accept`, with a parameter's name in the file replaced by its key.

        `left` are the items that the patterns may match.
        """
        stored = {row.key: row.names for row in self.tensors}
        names = {row.name: stored.get(row.name, ()) for row in left}
        found: list[str] = []
        for each in accept:
            wanted = each.removeprefix(UNREAD)
            keys = [
                f"{UNREAD}{key}"
                for key, held in names.items()
                if any(map(spelling_predicate(wanted, held), held))
            ]
            itself = not keys or any(map(acceptance_predicate([each]), left))
            found += [*keys, *([each] if itself else [])]
        return found

    def _not_compared(self) -> Collection[NotCompared]:
        """Return an entry for each parameter that was not compared, with the reason."""
        return [
            NotCompared("parameter", row.key, "unreadable", row.why)
            for row in self.tensors
            if row.verdict == "not compared"
        ]

    @property
    def exit_code(self) -> Literal[0, 1, 2]:
        """0: every parameter agrees; 1: one differs, or a cause is found; 2: it stays open."""
        return self.pronounced.exit

    def to_json(self) -> dict[str, Any]:
        """Return the report with its verdict and counts as the object that `--json` prints."""
        found = self.pronounced
        return {
            "model": self.model,
            "after": self.after,
            "adapter": self.adapter,
            "optimizer": self.optimizer,
            "verdict": found.word,
            "says": found.says,
            "counts": dict(self.counts),
            "loss": self.loss,
            "computed_on": self.computed_on,
            "norms": asdict(self.norms),
            "causes": [row.to_json() for row in self.causes],
            "tensors": [asdict(row) for row in self.tensors],
            "points": [asdict(row) for row in self.points],
            "not_compared": [asdict(row) for row in found.not_compared],
            "notes": list(self.notes),
            **found.to_json(),
        }
