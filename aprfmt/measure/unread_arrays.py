"""Dumped arrays of two runs that are no capture point: whether their values are equal."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from aprfmt.codecs.base import Array
from aprfmt.measure.distances import rel_l2, row_order
from aprfmt.measure.tolerances import BASE, run_tolerance
from aprfmt.measure.trace_view import TraceLike, shows_routing, unread_arrays
from aprfmt.model.ledger import NotCompared

ROOM = 10.0  # times a run's tolerance: how many operations made such an array is not known
MOST_ROWS = 4096  # of an array whose rows are looked for in another order


@dataclass(frozen=True)
class UnequalArray:
    """Numbers of one name in two dumps that are further apart than rounding makes them.

    `mine` and `theirs` are A's and B's values, float64, each in its own shape. `apart` is their
    relative L2 distance, None where they are not as many. `bound` is the largest that rounding in
    two runs makes.
    """

    name: str
    mine: Array
    theirs: Array
    apart: float | None
    bound: float

    @cached_property
    def order(self) -> Array | None:
        """The number of the row of B that each row of A is, int64 [rows]; None if not so.

        Both sides have the same rows, each once, in another order.
        """
        rows = len(self.mine) if self.mine.ndim else 1
        if self.apart is None or not 1 < rows <= MOST_ROWS:
            return None
        if not (np.isfinite(self.mine).all() and np.isfinite(self.theirs).all()):
            return None
        return row_order(self.mine, self.theirs, self.bound)

    @property
    def says(self) -> str:
        """The clause on how far they are apart."""
        if self.apart is None:
            return f"shape {list(self.mine.shape)} against {list(self.theirs.shape)}"
        moved = "" if self.order is None else ": the same rows in another order"
        return f"{self.apart:.3g} apart{moved}"


def compare_unread_arrays(a: TraceLike, b: TraceLike) -> tuple[NotCompared, ...]:
    """Return the dumped arrays of two runs that are no capture point, with their state.

    Numbers of one name on both sides are "unequal" beyond the rounding of a run. "equal" are equal
    bytes. Others are left as they are: integers are an engine's own numbers, such as addresses.
    """
    return tuple(_with_state(one, a, b) for one in unread_arrays(a, b))


def unequal_arrays(a: TraceLike, b: TraceLike) -> tuple[UnequalArray, ...]:
    """Return the dumped numbers of two runs that are no capture point and differ beyond rounding.

    Left out are arrays of one side and those of which no values were kept.
    """
    names = (one.name for one in unread_arrays(a, b) if one.state == "unread")
    found = (_unequal_array(name, a, b) for name in names)
    return tuple(one for one in found if one is not None)


def _with_state(one: NotCompared, a: TraceLike, b: TraceLike) -> NotCompared:
    """Return an array of two runs that was not read with the state that its values show."""
    if one.state != "unread":
        return one
    x, y = a.unread_values(one.name), b.unread_values(one.name)
    if x is None or y is None:
        return one
    if x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes():
        return replace(one, state="equal")
    unequal = _unequal_array(one.name, a, b)
    if unequal is None:
        return one
    return replace(one, state="unequal", why=f"{one.why}; {unequal.says}")


def _unequal_array(name: str, a: TraceLike, b: TraceLike) -> UnequalArray | None:
    """Return an array of two runs whose values differ beyond rounding; None for any other."""
    x, y = a.unread_values(name), b.unread_values(name)
    if x is None or y is None:
        return None
    if not all(np.issubdtype(side.dtype, np.floating) for side in (x, y)):
        return None
    bound = _rounding_bound(a, b)
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.size != y.size:
        return UnequalArray(name, x, y, None, bound)
    apart = rel_l2(y.reshape(x.shape), x)
    return None if apart <= bound else UnequalArray(name, x, y.reshape(x.shape), apart, bound)


def _rounding_bound(a: TraceLike, b: TraceLike) -> float:
    """Return the largest relative L2 distance that rounding in two runs' arithmetic makes."""
    dtypes = [next((row.dtype for row in each.records.values()), "float32") for each in (a, b)]
    known = [dtype if dtype in BASE else "float32" for dtype in dtypes]
    return ROOM * run_tolerance(*known, moe=shows_routing(a) or shows_routing(b)).rel_l2
