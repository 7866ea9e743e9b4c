"""The hypothesis that one step of a pass gave zeros: in all rows of a capture point, or in some."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from aprfmt.base.sequences import join_first
from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Mismatch, Patch
from aprfmt.causes.row import Cause
from aprfmt.inference.points import POINTS
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "zero_result", "forward", "bug",
        "What one step of a pass gives is zeros: its kernel wrote nothing, or a factor is zero.",
        "All values of a capture point are zero, or all of some rows, where the model gives others "
        "and the other rows agree.",
        "With zeros there the points after it are equal.",
    ),
)  # fmt: skip

SHOWN = 8  # rows that a sentence names


def find_zero_results(case: Mismatch) -> Iterator[Change]:
    """Yield the change that a point is zeros, in all rows or in the rows that the trace shows.

    Nothing where no row is zeros in the trace alone. The other rows have to agree as they are.
    """
    if POINTS[case.view.point].rows != "tokens" or case.view.axis != 0:
        return
    mine, theirs = (x.reshape(len(x), -1) for x in case.recorded_rows)
    rows = np.asarray(case.rows)[mine.any(axis=1) & ~theirs.any(axis=1)]
    if not rows.size:
        return
    point, whole = case.view.point, len(rows) == len(case.rows)
    places = f"row{'' if len(rows) == 1 else 's'} {join_first(rows.tolist(), SHOWN)}"
    says = "in every row" if whole else f"in {places}, and as the model has it in the others"
    yield Change(
        "zero_result",
        f"{point} is zeros {says}",
        (point,),
        _with_zeros(point, None if whole else rows),
        {"zeros": "all" if whole else [str(row) for row in rows]},
        of_values=True,
    )


def _with_zeros(point: str, rows: Array | None) -> Patch:
    """Return a patch: the named point is zeros in `rows`, numbers of tokens; None for all rows."""

    def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return the point's value `x` [tokens, ...] with zeros in the chosen rows."""
        made = np.array(patched.backend.to_numpy(x))
        made[slice(None) if rows is None else rows] = 0
        return patched.backend.array(made)

    return lambda patched, layers: patched.with_tap(point, tap, layers)


HYPOTHESES = (
    Hypothesis(
        "zero_result", find_zero_results, 5, "zeros are read off, before any number of them"
    ),
)
