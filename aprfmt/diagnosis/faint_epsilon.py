"""Finds another epsilon of norms that moves a float32 run by less than its tolerance.

The tolerance of one operation in float32 is many times what rounding makes of it. An epsilon of
1e-5 in place of 1e-6 is lost in it wherever the norms' inputs are larger than 1 or so. But it has a
shape that rounding has not: each row is off by its own factor, the smaller its mean square the
more, and one number gives all of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.forward.norm_changes import NORMS
from aprfmt.diagnosis.accumulated_rounding import needs_measured_rounding
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import ShadowPass, ShadowPoint, run_shadow_pass
from aprfmt.measure.distances import exact_16_bit_type
from aprfmt.measure.tolerances import ROUNDOFF
from aprfmt.tensors.norms import exact_norm

Array = NDArray[Any]
FINE = ("float32", "float64")  # arithmetics that show it
# Sums and roots of sound float32 engines are off by 1 to 5 roundoffs in these operations.
LEAST = 16 * ROUNDOFF["float32"]
MANY = 4  # times that after many operations
RIGHT = 8 * ROUNDOFF["float32"]  # what a norm with the right epsilon is off by, at most
LEFT = 0.3  # share of the difference that one epsilon leaves, on rows it was not found on
PLAINER = 0.5  # and share of what one factor of all rows leaves: a root that is a little off
FEW_ROWS = 4  # below so many rows it is not judged
NUDGE = 1e-2  # far beyond the rounding of the pass, and still linear
# Differences of a point over its size, by row: the run's, one epsilon's, one factor's.
Moves = tuple[Array, Array, Array]


def with_narrow_norms(
    patched: PatchedModel, recorded: RecordedTrace, found: ShadowPass
) -> RecordedTrace:
    """Return the trace with narrower tolerances at the points that another epsilon moves.

    They are points within their tolerance whose difference one epsilon gives, found on the even
    rows and judged on the odd ones. The trace is returned unchanged where there are none: then
    nothing is beyond rounding. Without a norm's point that is further off than rounding no pass is
    run.
    """
    views = [view for view in found.views.values() if _may_show(view)]
    if not views:
        return recorded
    moves = _moves(patched, recorded, views)
    shown = [key for key, move in moves.items() if _is_epsilon([move])]
    if _is_epsilon(list(moves.values())):
        shown = list(moves)
    if not shown:
        return recorded
    narrow = {key: max(RIGHT, LEFT * float(found.views[key].residual or 0.0)) for key in shown}
    return recorded.with_bounds({**recorded.bounds, **narrow})


def _may_show(view: ShadowPoint) -> bool:
    """Return whether a point after norms is off by more than rounding, within its tolerance.

    Only points of float32 and float64 runs with some rows are asked, and none whose values a 16-bit
    type holds.
    """
    if view.recorded is None or view.residual is None or view.flagged:
        return False
    if view.residual <= LEAST * (MANY if needs_measured_rounding(view) else 1):
        return False
    if view.recorded.dtype not in FINE or not any(call.op in NORMS for call in view.calls):
        return False
    mine, theirs = view.recorded.comparable_values(view.mine, view.axis)
    return mine.shape[view.axis] >= FEW_ROWS and not exact_16_bit_type(np.asarray(theirs))


def _moves(
    patched: PatchedModel, recorded: RecordedTrace, views: list[ShadowPoint]
) -> Mapping[str, Moves]:
    """Return by point's key how far its rows are off, and what an epsilon and a factor move.

    All three are divided by the point's size. Points that an epsilon does not move are left out.
    """
    small = min(
        float(np.median(np.mean(np.square(patched.backend.to_numpy(call.args[0])), -1)))
        for view in views
        for call in view.calls
        if call.op in NORMS
    )

    def more(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a norm's result with an epsilon that is larger by NUDGE of the least square."""
        return op(*args, **kwargs | {"eps": kwargs["eps"] + NUDGE * small})

    def larger(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a norm's result times 1 + NUDGE."""
        y = op(*args, **kwargs)
        return (y * (1 + NUDGE)).astype(y.dtype)

    made = [
        run_shadow_pass(patched.with_ops(NORMS, override, None), recorded).views
        for override in (more, larger)
    ]
    out: dict[str, Moves] = {}
    for view in views:
        assert view.recorded is not None
        mine, theirs = (
            np.asarray(x, np.float64) for x in view.recorded.comparable_values(view.mine, view.axis)
        )
        others = [pass_[view.key].mine for pass_ in made if view.key in pass_]
        moved = [
            np.asarray(view.recorded.comparable_values(x, view.axis)[0], np.float64) for x in others
        ]
        size = exact_norm(mine)
        rows = [
            np.moveaxis((x - mine) / size, view.axis, 0).reshape(mine.shape[view.axis], -1)
            for x in (theirs, *moved)
        ]
        if len(rows) == 3 and rows[1].any() and all(np.isfinite(x).all() for x in rows):
            out[view.key] = rows[0], rows[1], rows[2]
    return out


def _is_epsilon(moves: list[Moves]) -> bool:
    """Return whether one epsilon of all these points gives their differences.

    It is found on the even rows and judged on the odd ones. One factor of all rows must leave more:
    a root that is a little off has it too.
    """
    if not moves:
        return False
    off, epsilon, factor = (np.concatenate(list(_halves(moves, at, 1))) for at in range(3))
    left = [
        exact_norm(off - _scale(moves, at) * column) for at, column in ((1, epsilon), (2, factor))
    ]
    return left[0] <= LEFT * exact_norm(off) and left[0] <= PLAINER * left[1]


def _scale(moves: list[Moves], at: int) -> float:
    """Return the number times column `at` that is nearest to the differences of the even rows."""
    off, column = (np.concatenate(list(_halves(moves, which, 0))) for which in (0, at))
    return float(off @ column / max(float(column @ column), 1e-300))


def _halves(moves: list[Moves], at: int, first: int) -> Iterator[Array]:
    """Yield every second row of column `at` of each point, from row `first` on, flat."""
    for move in moves:
        yield move[at][first::2].reshape(-1)
