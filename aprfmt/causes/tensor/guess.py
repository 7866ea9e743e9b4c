"""The row type of hypotheses about a pair of tensors, and the guesses that they make."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprfmt.base.encodings import find_encoding
from aprfmt.causes.row import LAST
from aprfmt.measure.findings import Finding
from aprfmt.measure.verdicts import Certainty

if TYPE_CHECKING:
    from aprfmt.causes.tensor.context import PairContext
    from aprfmt.causes.tensor.differing_pair import DifferingPair
    from aprfmt.codecs.base import Array
    from aprfmt.measure.alignment import TensorPair
    from aprfmt.measure.records import TensorDiff

__all__ = ["Finding", "Group", "Guess", "JointHypothesis", "PairHypothesis", "Take"]

# Arrays made of arrays: values [n, columns] of row numbers, or other values of values.
Take = Callable[["Array"], "Array"]


@dataclass(frozen=True)
class Guess:
    """A hypothesis with its values filled in: `left` and `right` give both sides' rows, made equal.

    The defect is removed from one side, or applied to the other.
    """

    cause: str
    says: tuple[str, ...]
    left: Take
    right: Take
    where: tuple[str, ...] = ()
    rows: "Array | None" = None
    slack: float = 0.0
    constant: bool = False
    free: int = 0
    sampled: bool = False
    most: Certainty = "confirmed"


# Cheap facts about a pair that a row may ask for, so that its module is imported for no other.
FACTS: Mapping[str, Callable[["DifferingPair"], bool]] = {
    "two encodings": lambda case: case.a.encoding != case.b.encoding,
    "blocks": lambda case: any(
        find_encoding(side.encoding.split("+")[0]).block_size > 1 for side in (case.a, case.b)
    ),
    "companion tensors": lambda case: any(one.parts for one in case.b.side.stored),
}


@dataclass(frozen=True, slots=True)
class PairHypothesis:
    """One row of the table: the causes it can find, its function, and the pairs it applies to."""

    causes: tuple[str, ...]
    find: Callable[["DifferingPair"], "Iterator[Guess | Finding]"]
    rank: int = LAST
    because: str = "offered by another package"
    shapes: bool = False
    part: bool = False
    stored: bool = False
    roles: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    def is_for(self, case: "DifferingPair") -> bool:
        """Return whether a pair has the role and the properties that this row requires."""
        named = not self.roles or case.role.startswith(self.roles)
        return named and all(FACTS[name](case) for name in self.facts)


# Tensors to look at together, such as those of a layer: called, it gives what explains each by key.
Group = Callable[[], "Mapping[str, Finding]"]


@dataclass(frozen=True, slots=True)
class JointHypothesis:
    """One row about several tensors together: the causes it can find, and its function."""

    causes: tuple[str, ...]
    find: Callable[
        ["PairContext", "Mapping[str, TensorPair]", "Mapping[str, TensorDiff]"], "Iterator[Group]"
    ]
    rank: int = LAST
    because: str = "offered by another package"
    weak: tuple[str, ...] = ()
    shapes: bool = False
    engine: bool = False
    tables: bool = False
    one_sided: bool = False

    def is_for(self, context: "PairContext", rows: Iterable["TensorDiff"]) -> bool:
        """Return whether the hypothesis is worth trying, by the comparisons `rows` of all tensors.

        One about shapes needs two of different shape, one about an engine's ranks that B was
        saved by an engine, a one-sided one tensors that each side alone has, and any other a
        tensor that nothing explains yet; one for `tables` accepts a shape that differs, too.
        """
        if self.shapes:
            return any(row.verdict == "SHAPE_DIFFERS" for row in rows)
        if self.one_sided:
            rows = list(rows)
            return all(any(row.verdict == f"ONLY_IN_{one}" for row in rows) for one in "AB")
        if self.engine:
            return getattr(context.models["b"].source, "of_engine", False)
        rows = list(rows)
        if self.tables and any(row.verdict == "SHAPE_DIFFERS" for row in rows):
            return True
        return any(row.is_unexplained(self.weak) for row in rows)
