"""Element-wise distances of two decoded tensors, summed over chunks of rows.

A *step* is the tolerance of an element: the distance of two neighbouring values of its encoding. A
*piece* is some of a chunk's elements. A and B are the two files that are compared; a *side* is one
of them, or its tensor.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.codecs import native_kernels
from aprfmt.measure.nonfinite import Census, equal_or_both_nan
from aprfmt.measure.records import ValueStats
from aprfmt.tensors.norms import exact_dot

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

    Step = Array | float  # of every element, or of all
    Steps = Callable[[slice], Step | None]  # of a part of a chunk; None: not known

PIECE = 1 << 15  # elements measured at a time: their float64 arrays stay in the cache
CHUNK = 1 << 20  # elements compared at a time: a dozen float64 arrays of it are held


def to_float64(values: "Array") -> "Array":
    """Return values as float64; a signalling NaN becomes a quiet one without a warning."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def difference(x: "Array", y: "Array") -> "Array":
    """Return x - y as float64, zero exactly where the values are equal.

    64-bit integers that float64 cannot tell apart keep their exact difference. Of complex values it
    is |x - y|.
    """
    if x.dtype.kind == "c" or y.dtype.kind == "c":
        apart: Array = np.abs(x - y).astype(np.float64)
        return apart
    found: Array = to_float64(x) - to_float64(y)
    if x.dtype == y.dtype and _is_64_bit_integer(x):
        lost = (x != y) & (found == 0)  # closer than float64 tells apart
        close = np.where(x > y, x - y, y - x).astype(np.float64)
        found = np.where(lost, np.where(x > y, close, -close), found)
    return found


def _is_64_bit_integer(values: "Array") -> bool:
    """Return whether values are of a 64-bit integer type, whose large numbers float64 rounds."""
    return values.dtype.kind in "iu" and values.dtype.itemsize == 8


def real_values(values: "Array") -> "Array":
    """Return the values unchanged; of complex ones the absolute value."""
    return np.abs(values) if values.dtype.kind == "c" else values


class PairSums:
    """Running sums of the differences of two tensors, which are added in chunks in order.

    The size of the chunks matters by float64 rounding only. `off` is the largest difference over
    its element's tolerance ("step"), `beyond` the number of elements with more than one; `known` is
    False once a step was asked for that is not known.
    """

    def __init__(self, shape: tuple[int, ...], ulp_type: str = "F32") -> None:
        """Start with no elements; `shape` is that of the whole tensors, for indices.

        `ulp_type` is the float type whose units in the last place are counted.
        """
        self.shape = shape
        self.ulp_type = ulp_type
        self.count = self.changed = self.ulp = self.beyond = 0
        self.max_abs = self.off = 0.0
        self.known = True
        self.max_index: int | None = None
        self.dd = self.aa = self.bb = self.ab = 0.0
        self.nan_a = self.nan_b = self.inf_a = self.inf_b = 0
        self.odd = Census()
        self._room: Array | None = None  # used again: fresh pages cost more than the arithmetic

    def add(self, a: "Array", b: "Array", steps: "Steps | None" = None) -> None:
        """Add one chunk of both tensors; both arrays have the same shape.

        `steps` maps a slice of the flat arrays to the tolerance of its elements, to one for all, or
        to None. It is called for slices that differ, and for those after them.
        """
        x, y = a.reshape(-1), b.reshape(-1)
        native = native_kernels()
        kernel = None if native is None else native.distances
        differs = False
        for start in range(0, x.size, PIECE):
            part = slice(start, min(start + PIECE, x.size))
            of_part = None if steps is None else partial(self._step_of_part, steps, part)
            if kernel is not None:
                found = self._add_by_kernel(kernel, x[part], y[part], of_part, differs)
                if found is not None:
                    differs = found
                    continue
            if self._room is None or self._room.shape[1] < min(x.size, PIECE):
                self._room = np.empty((4, min(x.size, PIECE)), np.float64)
            with np.errstate(invalid="ignore", divide="ignore"):
                if not self._add_equal(x[part], y[part]):
                    self._add_piece(x[part], y[part], None if of_part is None else of_part())

    def _step_of_part(self, steps: "Steps", part: slice) -> "Step | None":
        """Return the tolerances of a slice; None, and `known` becomes False, if unknown."""
        step = steps(part)
        self.known = self.known and step is not None
        return step if step is None or isinstance(step, np.ndarray) else float(step)

    def _add_by_kernel(
        self,
        kernel: "Callable[..., Any]",
        x: "Array",
        y: "Array",
        step: "Callable[[], Step | None] | None",
        differs: bool,
    ) -> bool | None:
        """Add a piece of finite float32 values by a compiled kernel; return whether the two differ.

        Of other values nothing is added, and None is returned. `step` computes the tolerances: at
        once if `differs` says that a difference is expected, else only for one. The sums round
        differently than those of `_add_piece`; all other numbers are the same.
        """
        if x.dtype != np.float32 or y.dtype != np.float32:
            return None
        x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
        furthest = -1.0 if self.max_index is None else self.max_abs
        found = kernel(x, y, step() if step is not None and differs else None, furthest)
        if found is None:
            return None
        if found[0] and step is not None and not differs:
            found = kernel(x, y, step(), furthest)
        changed, ulp, dd, aa, bb, ab, most, at, off, beyond = found
        base, self.count = self.count, self.count + x.size
        self.odd.count += x.size
        self.dd, self.aa, self.bb, self.ab = self.dd + dd, self.aa + aa, self.bb + bb, self.ab + ab
        if changed:
            self.changed, self.beyond = self.changed + changed, self.beyond + beyond
            self.ulp = max(
                self.ulp, _largest_float16_steps(x, y) if self.ulp_type == "F16" else ulp
            )
            self.off = max(self.off, off)
            if at >= 0:
                self.max_abs, self.max_index = most, base + at
        return bool(changed)

    def _add_equal(self, x: "Array", y: "Array") -> bool:
        """Add a piece of equal finite values; for any other return False and add nothing."""
        assert self._room is not None
        if x.dtype != y.dtype or not np.array_equal(x, y):
            return False
        wide_x = self._room[0, : x.size]
        np.copyto(wide_x, real_values(x), casting="unsafe")
        square = exact_dot(wide_x, wide_x)
        if not math.isfinite(square):  # where it is, every value is
            return False
        self.aa, self.bb, self.ab = self.aa + square, self.bb + square, self.ab + square
        self.count, self.odd.count = self.count + x.size, self.odd.count + x.size
        return True

    def _add_piece(self, x: "Array", y: "Array", step: "Step | None") -> None:
        """Add a piece of two tensors to the sums of their differences, for any types.

        `step` is the tolerance of each element, or None.
        """
        assert self._room is not None
        base, self.count = self.count, self.count + x.size
        wide_x, wide_y, error, delta = self._room[:, : x.size]
        same = int(np.count_nonzero(x == y))
        special = _is_64_bit_integer(x) or "c" in x.dtype.kind + y.dtype.kind
        exact = difference(x, y) if special else None
        x, y = real_values(x), real_values(y)
        np.copyto(wide_x, x, casting="unsafe")
        np.copyto(wide_y, y, casting="unsafe")
        if exact is None:
            np.subtract(wide_x, wide_y, out=error)
        else:
            error[:] = exact
        squares = exact_dot(error, error)
        if not math.isfinite(squares) and not np.isfinite(error).all():
            self._add_nonfinite(x, y, wide_x, wide_y, base)
            self._add_steps(steps_between(x, y, step) if step is not None else None)
            return
        # All are finite: nothing has to be left out.
        self.odd.count += x.size
        self._add_products(squares, wide_x, wide_y)
        if same == x.size:
            return
        self.changed += x.size - same
        np.abs(error, out=delta)
        self._update_largest(delta, base)
        steps = _largest_float16_steps if self.ulp_type == "F16" else _largest_float32_steps
        self.ulp = max(self.ulp, steps(x, y, wide_x, wide_y))
        if step is None:
            return
        np.copyto(wide_x, step)
        ratio = np.divide(delta, wide_x, out=error)
        if math.isnan(float(ratio.max())):  # of a step that is zero or NaN
            ratio = steps_between(x, y, step)
        self._add_steps(ratio)

    def _add_steps(self, ratio: "Array | None") -> None:
        """Count a piece's differences in units of their tolerance: the largest, and those above 1.

        They go into `off` and `beyond`. Nothing is added if `ratio` is None.
        """
        if ratio is None or not ratio.size:
            return
        most = float(ratio.max())
        self.off = max(self.off, most)
        if most > 1.0:
            self.beyond += int(np.count_nonzero(ratio > 1.0))

    def _add_nonfinite(
        self, x: "Array", y: "Array", wide_x: "Array", wide_y: "Array", base: int
    ) -> None:
        """Add a piece with NaN or infinities, or differences beyond float64.

        `base` is the flat index of its first element.
        """
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
            self._update_largest(delta, base)
            steps = _largest_float16_steps if self.ulp_type == "F16" else _largest_float32_steps
            self.ulp = max(self.ulp, steps(x[differs & finite], y[differs & finite]))
        error = wide_x - wide_y
        self._add_products(exact_dot(error, error), wide_x, wide_y)

    def _update_largest(self, delta: "Array", base: int) -> None:
        """Update the largest difference by those of a piece whose first flat index is `base`."""
        index = int(delta.argmax())
        if delta[index] > self.max_abs or self.max_index is None:
            self.max_abs, self.max_index = float(delta[index]), base + index

    def _add_products(self, squares: float, x: "Array", y: "Array") -> None:
        """Add the squares of a piece's difference, and the dot products of both sides."""
        self.dd += squares
        self.aa += exact_dot(x, x)
        self.bb += exact_dot(y, y)
        self.ab += exact_dot(x, y)

    def stats(self) -> ValueStats:
        """Return the ValueStats of everything added."""
        # Relative L2 and cosine, where the squares fit float64.
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
            self.count,
            self.changed,
            self.max_abs,
            at,
            rel_l2,
            min(1.0, cosine) if math.isfinite(cosine) else math.nan,
            self.ulp >> 16 if self.ulp_type == "BF16" else self.ulp,  # a BF16 step is 2**16 of F32
            self.nan_a,
            self.nan_b,
            self.inf_a,
            self.inf_b,
            math.sqrt(self.aa),
            math.sqrt(self.bb),
            self.odd.result(self.shape),
        )


def steps_between(x: "Array", y: "Array", step: "Step") -> "Array":
    """Return |x - y| / step, flat; infinite where the step is zero, or only one side is finite.

    Where the sides are equal, or both NaN, it is 0.
    """
    x, y = x.reshape(-1), y.reshape(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        delta = np.abs(difference(x, y))
        ratio: Array = delta / step
    ratio[np.isnan(ratio) | ~np.isfinite(delta)] = np.inf
    ratio[equal_or_both_nan(x, y)] = 0.0
    return ratio


def _largest_float32_steps(x: "Array", y: "Array", *room: "Array") -> int:
    """Return the largest distance of two arrays, counted in float32 representations.

    `room` is two float64 arrays of the same size, which are overwritten.
    """
    if not x.size:
        return 0
    first, second = room or (np.empty(x.size), np.empty(x.size))
    one, other = _float32_ranks(x, first), _float32_ranks(y, second)
    # Up to 2**32 - 1 apart: the difference of signed numbers is right when read as unsigned.
    more = np.maximum(one, other, out=first.view(np.int32)[x.size :])
    apart = np.subtract(more, np.minimum(one, other, out=one), out=more)
    return int(apart.view(np.uint32).max())


def _largest_float16_steps(x: "Array", y: "Array", *room: "Array") -> int:
    """Return the largest distance of two arrays of F16 values, counted in float16 representations.

    `room` is not used; it makes the signature that of `_largest_float32_steps`.
    """
    if not x.size:
        return 0
    bits = [np.asarray(side, np.float16).view(np.int16).astype(np.int32) for side in (x, y)]
    one, other = (np.where(side < 0, -(side & 0x7FFF), side) for side in bits)
    return int(np.abs(one - other).max())


def _float32_ranks(values: "Array", room: "Array") -> "Array":
    """Return the rank of every value among all float32 numbers (int32); both zeros have rank 0.

    `room` is a float64 array of the same size, which is overwritten and holds the result.
    """
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, np.float32).view(np.int32)
    places, sign = room.view(np.int32)[: bits.size], room.view(np.int32)[bits.size :]
    np.right_shift(bits, 31, out=sign)  # -1 of a negative number: it becomes minus its magnitude
    np.bitwise_and(sign, np.int32(0x7FFFFFFF), out=places)
    np.bitwise_xor(bits, places, out=places)
    return np.subtract(places, sign, out=places)
