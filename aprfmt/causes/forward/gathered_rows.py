"""The hypothesis that some rows of a capture point are the rows of other tokens."""

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
        "gathered_rows", "forward", "bug",
        "Rows of what one step of a pass gives are those of other tokens: an index is wrong where "
        "rows are gathered or scattered.",
        "Rows of a capture point are bit for bit other rows of it, and the rest agree.",
        "With these rows there the points after it are equal.",
    ),
)  # fmt: skip

FEWEST = 8  # values of a row that two tokens do not share by chance
MOST_WRONG = 0.25  # share of the rows; more of them in another order are no slip of an index
SHOWN = 4  # rows that a sentence names


def find_gathered_rows(case: Mismatch) -> Iterator[Change]:
    """Yield the change that the rows that differ are the rows of other tokens.

    Nothing where one of them is no other row of the trace, bit for bit. Rows of the embedding are
    rows of its table: another one is another token.
    """
    if POINTS[case.view.point].rows != "tokens" or case.view.axis != 0 or case.call("embed"):
        return
    theirs = case.recorded_rows[1]
    theirs = theirs.reshape(len(theirs), -1)
    away = case.distances_by_row(case.view)[case.rows]
    late = np.flatnonzero(away > 2 * case.view.tolerance)
    if not 0 < len(late) <= MOST_WRONG * len(theirs) or theirs.shape[1] < FEWEST:
        return
    right = np.setdiff1d(np.arange(len(theirs)), late)
    read: dict[int, int] = {}
    for row in late.tolist():
        same = right[(theirs[right] == theirs[row]).all(axis=1)]
        if not len(same) or not theirs[row].any():
            return
        read[int(case.rows[row])] = int(case.rows[same[np.abs(same - row).argmin()]])
    point = case.view.point
    shown = join_first([f"row {row} is row {other}" for row, other in read.items()], SHOWN)
    yield Change(
        "gathered_rows",
        f"in {point} {shown}: rows of other tokens, as by a wrong index",
        (point,),
        _with_rows(point, read),
        {"rows": {str(row): str(other) for row, other in read.items()}},
        of_values=True,
    )


def _with_rows(point: str, read: Mapping[int, int]) -> Patch:
    """Return a patch: rows of the named point are others of it, {token: token that is read}."""

    def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return the point's value `x` [tokens, ...] with some rows read of other tokens."""
        made: Array = np.array(patched.backend.to_numpy(x))
        made[list(read)] = made[list(read.values())]
        return patched.backend.array(made)

    return lambda patched, layers: patched.with_tap(point, tap, layers)


HYPOTHESES = (
    Hypothesis(
        "gathered_rows", find_gathered_rows, 6, "equal rows are read off, after those of zeros"
    ),
)
