"""Histograms that pages show: of an array in memory, and of a stored tensor."""

from typing import NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.shapes import matrix_shape
from aprfmt.codecs.base import Array
from aprfmt.tensors.stats import Stats
from aprfmt.tensors.view import View

BINS = 48
CHUNK = 1 << 18  # values put into bins at a time
COUNTED = 1 << 22  # values of a stored tensor that are counted; of larger ones rows between
RUN = 1 << 15  # values of a run of such rows


class Histogram(TypedDict):
    """Counts of values in bins of equal width from low to high; `of` is how many were counted."""

    low: float
    high: float
    counts: list[int]
    of: NotRequired[int]


def histogram(values: Array) -> Histogram | None:
    """Return the histogram of an array's finite values, or None if it has none."""
    flat = np.asarray(values).reshape(-1)
    flat = flat[np.isfinite(flat)]
    if not flat.size:
        return None
    low, high = float(flat.min()), float(flat.max())
    if low == high:
        return {"low": low, "high": high, "counts": [int(flat.size)]}
    return {"low": low, "high": high, "counts": _count_bins(flat, low, high).tolist()}


def tensor_histogram(tensor: View, stats: Stats) -> Histogram | None:
    """Return the histogram of a stored tensor between the extremes of its statistics.

    `of` is how many values were counted: all, or about COUNTED in runs of rows evenly spaced. None
    where there is no finite value. Raises CodecError, UnsupportedError.
    """
    low, high = stats.min, stats.max
    if low is None or high is None:
        return None
    rows, columns = matrix_shape(tensor.shape)
    run = max(1, RUN // max(1, columns))
    runs = -(-rows // run)
    step = max(1, round(rows * columns / COUNTED))
    counts = np.zeros(BINS if low < high else 1, np.int64)
    counted = 0
    for index in range(0, runs, min(step, runs)):
        flat = np.asarray(tensor.rows(index * run, min(rows, (index + 1) * run))).reshape(-1)
        counted += flat.size
        flat = flat[np.isfinite(flat)]
        counts += _count_bins(flat, low, high) if low < high else flat.size
    tensor.drop()
    return {"low": low, "high": high, "counts": counts.tolist(), "of": counted}


def _count_bins(flat: Array, low: float, high: float) -> NDArray[np.int64]:
    """Return how many values are in each of BINS equal bins of [low, high], int64 [BINS].

    All values must be finite and inside; the last bin includes `high`.
    """
    counts = np.zeros(BINS, np.int64)
    for start in range(0, flat.size, CHUNK):
        share = (flat[start : start + CHUNK].astype(np.float64) - low) / (high - low)
        counts += np.bincount(np.minimum((share * BINS).astype(np.int64), BINS - 1), minlength=BINS)
    return counts
