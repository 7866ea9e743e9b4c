"""The row type of hypotheses about a pair of tensors, and the guesses that they make.

A *row* of the table is one hypothesis. A *side* is the tensor of file A or of file B.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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

__all__ = [
    "Finding",
    "Group",
    "Guess",
    "JointHypothesis",
    "PairHypothesis",
    "Take",
    "groups_by_side",
]

# Arrays made of arrays: values [n, columns] of row numbers, or other values of values.
Take = Callable[["Array"], "Array"]


@dataclass(frozen=True)
class Guess:
    """A hypothesis with its values filled in: both sides with the defect removed or applied.

    `left` and `right` take row numbers (int array) of the tensor seen as [rows, last axis] and
    return values [n, columns]; they are equal if the guess is right. `rows` are the rows the guess
    concerns, None for all: of other rows that differ nothing is explained, unless those were
    `sampled` and stand for all. `slack` is the relative L2 distance that counts as equal.
    `constant` says that the statement itself is that one value stands everywhere: any other guess
    that gives a single value explains nothing. `free` counts the numbers that were read from the
    values: as many differing ones again have to judge them (`measure/proofs.py`). `most` is how
    sure the cause can be: less where its name says more than was found. `within` is how many of
    their roundings the values of two plain floats may be apart, each for itself; 0 where they are
    judged by `slack` alone. `either`: either side may be the wrong one, and the files do not say
    which.
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
    within: float = 0.0
    either: bool = False
    beyond: "Callable[[], Finding | None] | None" = None


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
    """A row of the table: the causes it can find, its function, and the pairs of tensors it is for.

    Rows are tried by `rank`, the lowest first; `because` is the reason for it. Rows of other
    packages come after ours. `shapes` rows are for tensors of different shapes. `part` rows are
    also tried on only the rows of a matrix that differ. `stored` rows compare bytes in pieces, and
    are all that is tried on a vector of gigabytes. Only pairs are tried whose role begins with one
    of `roles` (none: any) and that have all `facts` of FACTS.
    """

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
        """Return whether a differing tensor has the role and properties that this row requires."""
        named = not self.roles or case.role.startswith(self.roles)
        return named and all(FACTS[name](case) for name in self.facts)


# Tensors to look at together, such as those of a layer: called, it gives what explains each by key.
Group = Callable[[], "Mapping[str, Finding]"]
# What looks for causes in tensors together: it takes the context, the pairs and the records by key.
FindGroups = Callable[
    ["PairContext", "Mapping[str, TensorPair]", "Mapping[str, TensorDiff]"], "Iterator[Group]"
]
# What explains the tensors of one side, "A" or "B": it returns {tensor key: finding}.
ExplainSide = Callable[
    ["PairContext", "Mapping[str, TensorPair]", "Mapping[str, TensorDiff]", str],
    "Mapping[str, Finding]",
]


def groups_by_side(explain: ExplainSide) -> FindGroups:
    """Return a function that yields a group for side B, then one for side A.

    `explain` is called with the side's letter when the group is.
    """

    def groups(
        context: "PairContext", pairs: "Mapping[str, TensorPair]", rows: "Mapping[str, TensorDiff]"
    ) -> Iterator[Group]:
        """Yield functions that return {tensor key: finding} of one side each."""
        for side in ("B", "A"):
            yield partial(explain, context, pairs, rows, side)

    return groups


@dataclass(frozen=True, slots=True)
class JointHypothesis:
    """One row about several tensors together: the causes it can find, and its function.

    The function takes the context, the pairs and the records by key, and yields groups. Records
    change as groups are explained. Rows are tried by `rank` after those of single pairs, and only
    where a tensor differs that has no confirmed explanation, or one by a cause of `weak`; a
    hypothesis for `shapes` where two have different shapes, one for `tables` there as well, one for
    an `engine` where B is what an engine saved, whatever explains a tensor, and a `one_sided` one
    where A has tensors that B lacks, and the reverse.
    """

    causes: tuple[str, ...]
    find: FindGroups
    rank: int = LAST
    because: str = "offered by another package"
    weak: tuple[str, ...] = ()
    shapes: bool = False
    engine: bool = False
    tables: bool = False
    one_sided: bool = False

    def is_for(self, context: "PairContext", rows: Iterable["TensorDiff"]) -> bool:
        """Return whether the hypothesis is worth trying, by the comparisons of all tensors.

        `rows` are the comparisons. A hypothesis about shapes needs two of different shape. One
        about an engine's ranks needs a B that an engine saved. A one-sided one needs tensors that
        only A has and tensors that only B has. Any other needs a tensor that nothing explains
        yet, or with `tables` a shape that differs.
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
