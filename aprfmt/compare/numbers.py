"""Comparing numbers: element-wise measures of two decoded tensors, in chunks of rows."""

import math
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.compare.diffs import ValueStats
from aprfmt.compare.nonfinite import Census

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

PIECE = 1 << 16  # elements measured at a time: their float64 arrays stay in the cache
CHUNK = 1 << 20  # elements compared at a time: a dozen float64 arrays of it are held


def wide(values: "Array") -> "Array":
    """Return values as float64; a signalling NaN becomes a quiet one without a warning."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


class PairSums:
    """Sums over chunks in float64, in order; chunk size matters by float64 rounding only."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.count = self.changed = self.ulp = 0
        self.max_abs = 0.0
        self.max_index: int | None = None
        self.dd = self.aa = self.bb = self.ab = 0.0
        self.nan_a = self.nan_b = self.inf_a = self.inf_b = 0
        self.odd = Census()

    def add(self, a: "Array", b: "Array") -> None:
        """Add one chunk, in pieces that stay in the cache; both arrays have the same shape."""
        x, y = a.reshape(-1), b.reshape(-1)
        for start in range(0, x.size, PIECE):
            self._add(x[start : start + PIECE], y[start : start + PIECE])

    def _add(self, x: "Array", y: "Array") -> None:
        base, self.count = self.count, self.count + x.size
        if x.dtype == y.dtype and np.array_equal(x, y) and np.isfinite(x).all():
            square = float(np.dot(x.astype(np.float64), x.astype(np.float64)))
            self.aa, self.bb, self.ab = self.aa + square, self.bb + square, self.ab + square
            self.odd.count += x.size
            return
        wide_x, wide_y = wide(x), wide(y)
        error = wide_x - wide_y
        if x.dtype == y.dtype and x.dtype.kind in "iu" and x.dtype.itemsize == 8:
            error = _exact(x, y)
        if np.isfinite(error).all():  # so are both: nothing has to be left out
            self._add_finite(x, y, wide_x, wide_y, error, base)
            return
        self.odd.add(wide_x, wide_y)
        nan_x, nan_y = np.isnan(wide_x), np.isnan(wide_y)
        inf_x, inf_y = np.isinf(wide_x), np.isinf(wide_y)
        self.nan_a += int(nan_x.sum())
        self.nan_b += int(nan_y.sum())
        self.inf_a += int(inf_x.sum())
        self.inf_b += int(inf_y.sum())
        differs = (wide_x != wide_y) & ~(nan_x & nan_y)
        self.changed += int(differs.sum())
        finite = ~(nan_x | nan_y | inf_x | inf_y)
        wide_x, wide_y = np.where(finite, wide_x, 0.0), np.where(finite, wide_y, 0.0)
        delta = np.abs(wide_x - wide_y)
        delta[differs & ~finite] = np.inf
        if delta.size and differs.any():
            self._largest(delta, base)
            self.ulp = max(self.ulp, _ulp(x[differs & finite], y[differs & finite]))
        self._sum(wide_x - wide_y, wide_x, wide_y)

    def _add_finite(
        self, x: "Array", y: "Array", wide_x: "Array", wide_y: "Array", error: "Array", base: int
    ) -> None:
        """Add a chunk without NaN and infinities: the same numbers, in a third of the time."""
        self.odd.count += x.size
        changed = int(np.count_nonzero(error))
        self.changed += changed
        if changed:
            self._largest(np.abs(error), base)
            self.ulp = max(self.ulp, _ulp(x, y))
        self._sum(error, wide_x, wide_y)

    def _largest(self, delta: "Array", base: int) -> None:
        """Keep the largest difference of a chunk that begins at `base`, if it is the largest."""
        index = int(delta.argmax())
        if delta[index] > self.max_abs or self.max_index is None:
            self.max_abs, self.max_index = float(delta[index]), base + index

    def _sum(self, error: "Array", x: "Array", y: "Array") -> None:
        """Add the squares of a chunk and of its difference, and the products of both sides."""
        self.dd += float(error.dot(error))
        self.aa += float(x.dot(x))
        self.bb += float(y.dot(y))
        self.ab += float(x.dot(y))

    def stats(self) -> ValueStats:
        """Return the measures of everything added."""
        if self.dd == 0:
            rel_l2 = 0.0
        elif math.isfinite(self.dd) and 0 < self.aa < math.inf:
            rel_l2 = math.sqrt(self.dd / self.aa)
        else:  # nothing to compare with, or squares beyond float64
            rel_l2 = math.inf
        norm = math.sqrt(self.aa) * math.sqrt(self.bb)
        cosine = self.ab / norm if norm else (1.0 if self.aa == self.bb else 0.0)
        at = None
        if self.max_index is not None:
            index = np.unravel_index(self.max_index, self.shape or (1,))
            at = tuple(int(i) for i in index)
        return ValueStats(
            self.count, self.changed, self.max_abs, at, rel_l2,
            min(1.0, cosine) if math.isfinite(cosine) else math.nan, self.ulp,
            self.nan_a, self.nan_b, self.inf_a, self.inf_b, math.sqrt(self.aa), math.sqrt(self.bb),
            self.odd.result(self.shape),
        )  # fmt: skip


def _exact(x: "Array", y: "Array") -> "Array":
    """Return x - y of 64-bit integers, of which float64 does not hold every one."""
    above, below = x.view(np.uint64), y.view(np.uint64)
    larger = x >= y
    size = np.where(larger, above - below, below - above).astype(np.float64)
    signed: Array = np.where(larger, size, -size)
    return signed


def _ulp(x: "Array", y: "Array") -> int:
    """Return the largest distance of two arrays in float32 representations."""
    if not x.size:
        return 0
    ordered = []
    for values in (x, y):
        with np.errstate(over="ignore"):
            bits = values.astype(np.float32).view(np.int32)
        # Of a negative number: minus its magnitude's bits.
        ordered.append(np.where(bits < 0, np.int32(-0x80000000) - bits, bits))
    apart = np.subtract(ordered[0], ordered[1], dtype=np.int64)
    return int(max(apart.max(), -apart.min()))
