"""float32 arithmetic the way C encoders do it: fused multiply-adds, C's rounding, sums in order.

Two arithmetics exist in the wild, and quantized bytes depend on which one made them:

strict  every product and every sum is rounded. All x86-64 binaries of ggml and libgguf do this.
fused   a product that only additions consume is not rounded before it is added. That is what GCC
        makes of ggml-quants.c where the processor has the instruction (aarch64, -mfma); in
        `nearest_int(a * b)` the addition of the magic number counts, and in `w*l` that is both
        added and multiplied on, nothing is fused. Sums stay in order: no vectorized reductions.

numpy has no fmaf. The product of two float32 is exact in float64, but the sum then rounds twice
(to 53 bits, to 24), and the two differ from one rounding exactly where the first lands on a tie
of the second. Only those few sums are computed again, to odd (Boldo and Melquiond, 2008).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]

_LOW_BITS = np.uint64((1 << 29) - 1)  # what float64 has beyond float32's fraction
_TIE = np.uint64(1 << 28)
_SMALLEST_NORMAL = 2.0**-126
MAGIC = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves the integer in the low bits


def fma(a: Any, b: Any, c: Any) -> F32:
    """Return a*b + c of float32 arrays (broadcasting), rounded once, as C's fmaf does."""
    product = np.multiply(a, b, dtype=np.float64)
    total = np.asarray(product + c)
    result: F32 = np.asarray(total.astype(np.float32))
    doubtful = _are_ties(total)
    if doubtful.any():
        addend = np.broadcast_to(np.asarray(c, np.float64), total.shape)[doubtful]
        result[doubtful] = _round_to_odd(np.broadcast_to(product, total.shape)[doubtful], addend)
    return result


def _are_ties(total: F64) -> npt.NDArray[np.bool_]:
    """Return a mask of the float64 sums that lie halfway between two float32 numbers.

    Below the smallest normal float32 every sum other than 0 is marked: there the halfway point is
    at another bit.
    """
    doubtful = (total.view(np.uint64) & _LOW_BITS) == _TIE
    small = np.abs(total) < _SMALLEST_NORMAL
    if small.any():
        doubtful |= small & (total != 0)
    result: npt.NDArray[np.bool_] = doubtful
    return result


def _rounding_error(a: Any, b: Any) -> F64:
    """Return the rounding error of a + b in float64: a + b == (a + b rounded) + error, exactly.

    The method is Knuth's.
    """
    total = a + b
    virtual = total - a
    error: F64 = (a - (total - virtual)) + (b - virtual)
    return error


def _round_to_odd(a: F64, b: F64) -> F32:
    """Return a + b as float32, rounded once.

    The sum is rounded to float64 towards the odd neighbour first. Rounding that to float32 then
    gives what one rounding of the exact sum gives.
    """
    total, error = a + b, _rounding_error(a, b)
    bits = total.view(np.int64)
    inexact = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    # The even neighbour was chosen: step towards the true value, to the odd one.
    outward = (error > 0) == (total > 0)
    bits = bits + np.where(inexact, np.where(outward, 1, -1), 0)
    odd: F32 = bits.view(np.float64).astype(np.float32)
    return odd


def multiply_add(a: Any, b: Any, c: Any, fused: bool) -> F32:
    """Return a*b + c as float32, rounded once if `fused`, else after each operation."""
    if fused:
        return fma(a, b, c)
    result: F32 = np.multiply(a, b, dtype=np.float32) + c
    return result


def sum_of_products(a: F32, b: F32, fused: bool, start: F32 | None = None) -> F32:
    """Return [n] float32: `start` (or zero) plus the sum of a*b over the first axis of [size, n].

    Terms are added in order of index; `fused` rounds each product and sum once, as C's fmaf. Sums
    are formed in float64 first, and added again exactly where one is a tie of two float32 numbers.
    """
    initial = np.zeros(a.shape[1], np.float32) if start is None else start
    if not fused:
        return ordered_sum(a * b, initial)
    product = np.multiply(a, b, dtype=np.float64)
    totals = np.empty_like(product)
    total = initial
    for index in range(len(product)):
        np.add(product[index], total, out=totals[index])
        total = totals[index].astype(np.float32)
    at, column = np.nonzero(_are_ties(totals))
    if at.size:
        before = np.where(at > 0, totals[at - 1, column].astype(np.float32), initial[column])
        again = np.unique(column[_rounding_error(product[at, column], before) != 0])
        if again.size:
            total[again] = initial[again]
            for index in range(len(product)):
                total[again] = fma(a[index, again], b[index, again], total[again])
    return total


def ordered_sum(terms: F32, start: F32 | None = None) -> F32:
    """Return `start` (or zero) plus the sum over the first axis, added in order of index."""
    total = np.zeros(terms.shape[1:], np.float32) if start is None else start.copy()
    for term in terms:
        total += term
    return total


def row_mean_square(rows: F32, fused: bool) -> F32:
    """Return float32 [rows]: sum(x*x) / columns of each row, summed in order of index."""
    turned = np.ascontiguousarray(rows.T)
    result: F32 = sum_of_products(turned, turned, fused) / np.float32(rows.shape[1])
    return result


def nearest_int(x: F32) -> I32:
    """Return `x` rounded to int32 as ggml's nearest_int rounds: ties to even within +-2**22.

    Beyond that range the result has the bits that ggml's trick with the magic number gives.
    """
    return _from_magic_number(x + MAGIC)


def nearest_product(a: Any, b: Any, fused: bool) -> I32:
    """Return nearest_int(a * b) as int32; with `fused` the product is not rounded first."""
    return _from_magic_number(multiply_add(a, b, MAGIC, fused))


def _from_magic_number(x: F32) -> I32:
    """Return int32: the integer in the low bits of `x`, which is a number plus 1.5 * 2**23."""
    result: I32 = x.view(np.int32) & 0x007FFFFF
    result -= 0x00400000
    return result


def round_half_away(x: F32) -> F32:
    """Return the nearest integers, ties away from zero (C's roundf), rounding once."""
    whole: F32 = np.trunc(x)
    whole += np.where(np.abs(x - whole) >= 0.5, np.copysign(np.float32(1), x), np.float32(0))
    return whole


def truncate_to_int(x: F32) -> I32:
    """Return x truncated to int32, and 0 where it does not fit.

    That is the byte that x86's conversion gives. The C source leaves the case undefined; it occurs
    where a scale is so small that its reciprocal overflows.
    """
    fits = np.abs(x) < 2.0**31
    result: I32 = np.where(fits, x, 0).astype(np.int32)
    return result


def reciprocal(d: F32) -> F32:
    """Return 1/d as float32, and 0 where d is 0."""
    result: F32 = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    return result


def element_of_largest_key(x: F32, key: F32) -> F32:
    """Return [n]: the element of each row of x [n, size] where `key` [n, size] is largest.

    Among equal keys the first counts: it decides the sign of a scale, and of a zero.
    """
    index = np.argmax(key, axis=1)
    result: F32 = np.take_along_axis(x, index[:, None], axis=1)[:, 0]
    return result


def largest_magnitude(x: F32) -> F32:
    """Return [n]: the signed element of largest magnitude of each row of x [n, size].

    Among equal magnitudes the first counts. The result is +0 for a row of nothing but zeros (of
    either sign) and NaN, because ggml's search in C starts from +0.
    """
    key = np.fmax(np.abs(x), np.float32(0))
    result: F32 = np.where(key.any(axis=1), element_of_largest_key(x, key), np.float32(0))
    return result
