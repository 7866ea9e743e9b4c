"""The arithmetic of C: fused multiply-add against libm, sums in order, C's rounding."""

import ctypes
import ctypes.util

import numpy as np
import pytest

from aprfmt.codecs.arithmetic import (
    fma,
    largest_magnitude,
    nearest_int,
    ordered_sum,
    round_half_away,
    sum_of_products,
    truncate_to_int,
)
from tests.codecs.data import Array, assert_same_numbers

_MATH = ctypes.CDLL(ctypes.util.find_library("m"))
for _name, _count in (("fmaf", 3), ("roundf", 1)):
    getattr(_MATH, _name).restype = ctypes.c_float
    getattr(_MATH, _name).argtypes = [ctypes.c_float] * _count


def fmaf(a: Array, b: Array, c: Array) -> Array:
    made = [_MATH.fmaf(float(x), float(y), float(z)) for x, y, z in zip(a, b, c, strict=True)]
    return np.array(made, np.float32)


def any_floats(rng: np.random.Generator, count: int) -> Array:
    return rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)


def sums_near_ties(rng: np.random.Generator, count: int) -> tuple[Array, Array, Array]:
    """Return a, b, c where a*b + c lies beside the middle of two float32, by 2**-46.

    c is a multiple of 2, its last place, and a*b is 1 - 2**-46 or its negative: the sum in
    float64 is exactly the middle, and only what it lost says where to round.
    """
    c = (rng.integers(1 << 23, 1 << 24, count) * 2.0).astype(np.float32)
    sign = np.where(rng.random(count) < 0.5, np.float32(-1), np.float32(1))
    step = np.float32(2.0**-23)
    return sign * (1 + step), np.full(count, 1 - step, np.float32), c


@pytest.mark.parametrize("kind", ["any", "near", "cancelling", "subnormal"])
def test_fma_rounds_once(kind: str) -> None:
    rng = np.random.default_rng(0)
    n = 20000
    a, b, c = (any_floats(rng, n) for _ in range(3))
    if kind == "near":
        a, b, c = (rng.standard_normal(n).astype(np.float32) for _ in range(3))
        c *= np.exp2(rng.integers(-30, 30, n)).astype(np.float32)
    if kind == "cancelling":
        a, b = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
        c = -(a * b)
    if kind == "subnormal":
        a = (rng.standard_normal(n) * 1e-20).astype(np.float32)
        b = (rng.standard_normal(n) * 1e-20).astype(np.float32)
        c = (rng.standard_normal(n) * 1e-40).astype(np.float32)
    with np.errstate(all="ignore"):
        assert_same_numbers(fma(a, b, c), fmaf(a, b, c))


def test_fma_does_not_round_twice() -> None:
    """Rounding to float64 first gives the wrong neighbour on half of these."""
    a, b, c = sums_near_ties(np.random.default_rng(1), 4000)
    exact = fmaf(a, b, c)
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice != exact).sum() > 1000  # else this shows nothing
    assert_same_numbers(fma(a, b, c), exact)
    assert_same_numbers(fma(-a, b, -c), fmaf(-a, b, -c))
    # The same among subnormals, whose last place is 2**-149.
    low = np.float32(2.0**-75)
    c = (c / 2).astype(np.int64) % (1 << 19) * np.float32(2.0**-149)
    a, b, c = a * low, b * low, c.astype(np.float32)
    exact = fmaf(a, b, c)
    assert ((a.astype(np.float64) * b + c).astype(np.float32) != exact).sum() > 1000
    assert_same_numbers(fma(a, b, c), exact)


def test_fused_sum_is_a_loop_of_fmaf() -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((16, 500)).astype(np.float32) for _ in range(2))
    b[:, :250] = np.round(b[:, :250] * 4)  # short factors: exact products and many ties
    # Columns 0-99 meet sums beside a tie, which float64 alone gets wrong.
    near, factor, start = sums_near_ties(rng, 500)
    a[0, :100], b[0, :100] = near[:100], factor[:100]
    total = np.zeros(500, np.float32)
    total[:100] = start[:100]
    expected = total
    for row in range(16):
        expected = fmaf(a[row], b[row], expected)
    assert_same_numbers(sum_of_products(a, b, True, start=total), expected)


def test_strict_sum_rounds_products_and_sums() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((16, 100)).astype(np.float32) for _ in range(2))
    expected = np.zeros(100, np.float32)
    for row in range(16):
        expected = expected + a[row] * b[row]
    assert_same_numbers(sum_of_products(a, b, False), expected)
    assert_same_numbers(ordered_sum(a * b), expected)


def test_round_half_away_is_roundf() -> None:
    rng = np.random.default_rng(4)
    halves = np.arange(-1000, 1000, dtype=np.float32) / 2
    below = np.nextafter(halves, np.float32(0))
    x = np.concatenate([halves, below, any_floats(rng, 20000), [np.float32(0.49999997)]])
    x = x[np.isfinite(x)].astype(np.float32)
    expected = np.array([_MATH.roundf(float(value)) for value in x], np.float32)
    assert np.array_equal(round_half_away(x), expected)


def test_nearest_int_rounds_ties_to_even_and_wraps_beyond_22_bits() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 4194303.0, np.inf, np.nan, 1e30], np.float32)
    found = nearest_int(x).tolist()
    assert found[:6] == [0, 2, 2, 0, -2, 4194303]
    assert found[6:8] == [-4194304, 0]
    assert -4194304 <= found[8] < 4194304


def test_to_int_gives_zero_for_what_does_not_fit() -> None:
    x = np.array([2.9, -2.9, 3e9, np.inf, -np.inf, np.nan], np.float32)
    assert truncate_to_int(x).tolist() == [2, -2, 0, 0, 0, 0]


def test_largest_magnitude_takes_the_first_and_no_nan() -> None:
    rows = np.array([[1, -3, 3], [-0.0, 0.0, -0.0], [np.nan, -2, 1], [np.nan] * 3], np.float32)
    found = largest_magnitude(rows)
    assert found.tolist() == [-3, 0, -2, 0]
    assert not np.signbit(found[1])
