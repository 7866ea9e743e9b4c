"""Compares logits with log-probabilities, which are logits less one number per row.

A server returns `log_softmax(logits)`. What it subtracted is not known, so such rows are compared
with logits up to a constant for each row. Distances are relative to the log-probabilities, by whose
size they were rounded. Taking the log-softmax of the logits too would not do: its sum moves with
the rounding of the largest logit, and all of the row with it.
"""

import numpy as np
from numpy.typing import NDArray

from aprfmt.measure.softmax import log_sum_exp

POINT = "logits"
# What logsumexp of a row is off zero by at most: bfloat16 rounds a logarithm near -1 by 2^-9.
_OFF = 0.02
NOTE = "log-probabilities: compared up to a constant for each row"


def is_log_softmax(values: NDArray[np.generic]) -> bool:
    """Return whether values [..., vocabulary] are log-probabilities.

    They are if the exponentials of every row add up to 1.
    """
    rows = np.asarray(values)
    if rows.ndim < 2 or rows.shape[-1] < 2 or not rows.size or rows.dtype.kind != "f":
        return False
    rows = rows.reshape(-1, rows.shape[-1])
    if rows[0].max() > _OFF:  # raw logits: most are decided by the first row
        return False
    for row in rows:
        wide = row.astype(np.float64)
        top = float(wide.max())
        if not np.isfinite(top) or top > _OFF:
            return False
        if abs(log_sum_exp(wide)) > _OFF:
            return False
    return True


def shift_logits_onto(
    logits: NDArray[np.generic], log_probabilities: NDArray[np.generic]
) -> NDArray[np.float64]:
    """Return logits shifted, row by row, to the mean of the given log-probabilities.

    Both are [..., vocabulary] of one shape; the means are over elements that are finite in both.
    The constant of the softmax is then no difference any more.
    """
    x, y = np.asarray(logits, np.float64), np.asarray(log_probabilities, np.float64)
    both = np.isfinite(x) & np.isfinite(y)
    count = np.maximum(both.sum(axis=-1, keepdims=True), 1)
    with np.errstate(invalid="ignore"):
        apart = np.where(both, y - x, 0.0).sum(axis=-1, keepdims=True) / count
    found: NDArray[np.float64] = x + apart
    return found
