"""Checks for all-zero traces and models, and sentences on what rounding hides.

A and B are the two models, runs or traces that are compared; a *side* is one of them.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.budget import Budget
from aprfmt.errors import AprfmtError
from aprfmt.measure.row_reader import RowReader
from aprfmt.model import Model

if TYPE_CHECKING:
    from aprfmt.measure.trace_view import TraceLike

WINDOW = 1 << 20  # elements read at a time


def zero_points_of_trace(trace: "TraceLike") -> int:
    """Return how many points of a trace hold computed numbers, if all these are zero; else 0.

    Points of whole numbers, such as the chosen experts, and points without values do not count.
    """
    from aprfmt.diagnosis.trace_pair import NO_POINT, execution_order
    from aprfmt.measure.tolerances import DISCRETE

    count = 0
    for key, record in trace.records.items():
        if record.point in DISCRETE or execution_order(key) == NO_POINT:
            continue
        values = trace.recorded_values(key)
        if values is None or not values.size:
            continue
        if values.any():
            return 0
        count += 1
    return count


def zero_tensors_of_model(model: Model, budget: Budget | None = None) -> int:
    """Return the number of a model's tensors if every value in the model is zero, else 0.

    0 too if a tensor cannot be read, or `budget` ends before the last; none of it is used up.
    """
    budget = budget or Budget()
    size = 0
    for tensor in model.values():
        size += tensor.nbytes
        if not budget.has_time() or (budget.nbytes is not None and size > budget.nbytes):
            return 0
        try:
            if _has_nonzero(RowReader(tensor)):
                return 0
        except AprfmtError:
            return 0  # comparing reports tensors that cannot be read
    return len(model)


def _has_nonzero(reader: RowReader) -> bool:
    """Return whether a tensor has a value other than zero."""
    step = max(1, WINDOW // max(1, reader.columns))
    try:
        return any(
            bool(reader.take(np.arange(start, min(reader.rows, start + step))).any())
            for start in range(0, reader.rows, step)
        )
    finally:
        reader.drop()


def hidden_by_rounding(label: str, bounds: Iterable[tuple[float, str]]) -> Iterator[str]:
    """Yield a sentence per dtype whose tolerance is too large to show the smallest known bugs.

    `bounds` are (tolerance, dtype) of the points, `label` is the side.
    """
    from aprfmt.measure.tolerances import SMALLEST_BUG

    found: dict[str, list[float]] = {}
    for bound, dtype in bounds:
        if bound > SMALLEST_BUG:
            found.setdefault(dtype, []).append(bound)
    for dtype, sizes in sorted(found.items()):
        low, high = (f"{size:.3g}" for size in (min(sizes), max(sizes)))
        size = low if low == high else f"{low} to {high}"
        yield (
            f"{label}: differences below relL2 {size} at {len(sizes)} points: in {dtype} they "
            f"cannot be told from rounding, and real bugs go down to {SMALLEST_BUG:g}; run float32"
        )
