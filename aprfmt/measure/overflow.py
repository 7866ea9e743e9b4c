"""Names values that a run's float type cannot hold: infinities where the reference is beyond it."""

from typing import TYPE_CHECKING

import numpy as np

from aprfmt.measure.trace_view import TraceLike

if TYPE_CHECKING:
    from aprfmt.measure.traces import PointDiff

LARGEST = {"float16": 65504.0}  # the largest finite number of a type that activations exceed


def overflow_text(point: "PointDiff | None", run: TraceLike, reference: TraceLike) -> str:
    """Return that a point overflows the type of `run`, with place and largest value; "" if not.

    Wherever the run is not finite it has to be infinite with the sign of the reference's value,
    and that value has to be beyond the largest of the type, up to the point's tolerance. Nothing
    is said of points of which only statistics were recorded.
    """
    record = None if point is None else run.find_record(point.key)
    largest = LARGEST.get(record.dtype) if record is not None else None
    if point is None or record is None or largest is None:
        return ""
    mine, theirs = run.recorded_values(point.key), reference.recorded_values(point.key)
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return ""
    lost = ~np.isfinite(mine)
    values = theirs[lost].astype(np.float64)
    if not values.size or not np.isfinite(values).all():
        return ""
    infinite = mine[lost] == np.copysign(np.inf, values)
    beyond = np.abs(values) > largest * (1 - point.tolerance)
    most = float(np.abs(values).max())
    if not (infinite & beyond).all() or most <= largest:
        return ""
    first = np.argwhere(lost)[0].tolist()
    return (
        f"{point.key} overflows {record.dtype}: the reference has values up to {most:g} there, and "
        f"the largest number of the type is {largest:g}; {int(lost.sum())} of {mine.size} values, "
        f"the first at {first}"
    )
