"""What the values of one point in two traces look like, where no model is there to compute with.

A *signature* is a relation that a cause leaves between the values of a point in trace A and in
trace B. It makes the cause likely and proves nothing. It stands in the file of its cause.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes import hypotheses_of
from aprfmt.measure.distances import rel_l2

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aprfmt.measure.trace_view import TraceLike

ALIKE = 1e-4  # relative L2 up to which values follow from a relation


@dataclass(frozen=True)
class PointPair:
    """The finite values of one point in traces A and B, [tokens, ...], both of A's shape."""

    point: str
    a: "NDArray[np.float64]"
    b: "NDArray[np.float64]"

    @cached_property
    def rows(self) -> "NDArray[np.float64]":
        """A's values as [tokens, width]."""
        return self.a.reshape(len(self.a), -1)

    @cached_property
    def away(self) -> "NDArray[np.float64]":
        """B's values less A's, [tokens, width]."""
        return self.b.reshape(self.rows.shape) - self.rows

    @cached_property
    def factor(self) -> float | None:
        """The one factor of A's values that gives B's; None if none does."""
        found = float(np.sum(self.a * self.b) / max(float(np.sum(self.a * self.a)), 1e-300))
        return found if rel_l2(self.a * found, self.b) < ALIKE else None

    @property
    def factor_text(self) -> str:
        """The sentence that all values differ by one factor; "" if they do not."""
        return "" if self.factor is None else f"all values differ by the factor {self.factor:.6g}"


@dataclass(frozen=True, slots=True)
class PointSignature:
    """A row of the table of signatures: a cause, and the function that recognises it.

    `find(pair)` returns the sentence of what is seen, "" if it is not. Rows are tried by `rank`,
    the lowest first; `because` is the reason for it.
    """

    cause: str
    find: Callable[[PointPair], str]
    rank: int
    because: str


@cache
def point_signatures() -> tuple[PointSignature, ...]:
    """Return the rows of all files of causes, in the order in which they are tried."""
    return hypotheses_of("forward", PointSignature)


def likely_cause(key: str, a: "TraceLike", b: "TraceLike") -> tuple[str, str]:
    """Return (cause, what is seen) of the difference at a point of two traces; ("", "") if none.

    Only for finite values of equal number. The cause is likely, never proven.
    """
    x, y = a.recorded_values(key), b.recorded_values(key)
    if x is None or y is None or np.asarray(x).size != np.asarray(y).size:
        return "", ""
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return "", ""
    mine = np.asarray(x, np.float64)
    theirs = np.asarray(y, np.float64).reshape(mine.shape)
    pair = PointPair(key.rpartition(".")[2], mine, theirs)
    for row in point_signatures():
        seen = row.find(pair)
        if seen:
            return row.cause, seen
    return "", ""
