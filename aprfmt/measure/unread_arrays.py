"""Dumped arrays of two runs that are no capture point: whether their values are equal."""

from dataclasses import replace

import numpy as np

from aprfmt.codecs.base import Array
from aprfmt.measure.distances import rel_l2, row_order
from aprfmt.measure.tolerances import BASE, run_tolerance
from aprfmt.measure.trace_view import TraceLike, shows_routing, unread_arrays
from aprfmt.model.ledger import NotCompared

ROOM = 10.0  # times a run's tolerance: how many operations made such an array is not known
MOST_ROWS = 4096  # of an array whose rows are looked for in another order


def compare_unread_arrays(a: TraceLike, b: TraceLike) -> tuple[NotCompared, ...]:
    """Return the dumped arrays of two runs that are no capture point, with their state.

    Numbers of one name on both sides are "unequal" beyond the rounding of a run. "equal" are equal
    bytes. Others are left as they are: integers are an engine's own numbers, such as addresses.
    """
    return tuple(_with_state(one, a, b) for one in unread_arrays(a, b))


def _with_state(one: NotCompared, a: TraceLike, b: TraceLike) -> NotCompared:
    """Return an array of two runs that was not read with the state that its values show."""
    if one.state != "unread":
        return one
    x, y = a.unread_values(one.name), b.unread_values(one.name)
    if x is None or y is None:
        return one
    if x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes():
        return replace(one, state="equal")
    if not all(np.issubdtype(side.dtype, np.floating) for side in (x, y)):
        return one
    if x.size != y.size:
        why = f"{one.why}; shape {list(x.shape)} against {list(y.shape)}"
        return replace(one, state="unequal", why=why)
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64).reshape(x.shape)
    bound, apart = _bound(a, b), rel_l2(y, x)
    if apart <= bound:
        return one
    why = f"{one.why}; {apart:.3g} apart"
    if _has_rows_in_another_order(x, y, bound):
        why += ": the same rows in another order"
    return replace(one, state="unequal", why=why)


def _bound(a: TraceLike, b: TraceLike) -> float:
    """Return the largest relative L2 distance that rounding in two runs' arithmetic makes."""
    dtypes = [next((row.dtype for row in each.records.values()), "float32") for each in (a, b)]
    known = [dtype if dtype in BASE else "float32" for dtype in dtypes]
    return ROOM * run_tolerance(*known, moe=shows_routing(a) or shows_routing(b)).rel_l2


def _has_rows_in_another_order(x: Array, y: Array, bound: float) -> bool:
    """Return whether the rows of `y` are those of `x` in another order, each once.

    Both have one shape, with rows along the first axis. `bound` is the largest relative L2.
    """
    rows = len(x) if x.ndim else 1
    if not 1 < rows <= MOST_ROWS or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return False
    return row_order(x, y, bound) is not None
