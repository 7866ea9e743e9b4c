"""Codes that are cut after scales were chosen which held all values, and clipping on purpose."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aprfmt.codecs.lattice import Lattice
from aprfmt.measure.bounds import Fit, fit_errors
from tests.causes.packed_source import copied, judged, plain, source, values
from tests.codecs.data import Array

__all__ = ["source", "values"]

ROWS, COLUMNS, SIZE = 32, 256, 64
TOP, HALF = 15, 8  # the highest of 16 codes, and the middle one


def drawn(kind: str) -> Array:
    """Return values [rows, groups, size], with or without an offset of each group."""
    rng = np.random.default_rng(3)
    shape = ROWS, COLUMNS // SIZE, SIZE
    heavy = kind == "heavy tails"
    x = 0.05 * (rng.standard_t(5, shape) if heavy else rng.standard_normal(shape))
    return x + 0.04 * rng.standard_normal(shape[:2])[..., None] * (kind == "offset")


def with_offset(x: Array, by: float = 1.0) -> tuple[Array, Array, Array]:
    """Return (steps, codes, zero points) of a range, as AWQ stores them."""
    low, high = (by * np.minimum(x.min(-1), 0), by * np.maximum(x.max(-1), 0))
    step = ((high - low) / TOP).astype(np.float16).astype(float)[..., None]
    zero = np.round(-low[..., None] / step)
    return step, np.clip(np.round(x / step) + zero, 0, TOP), zero


def signed(x: Array, by: float = 1.0) -> tuple[Array, Array, Array]:
    """Return (steps, codes, zero points) of signed codes, the zero point in the middle."""
    step = (by * np.abs(x).max(-1) / (HALF - 1)).astype(np.float16).astype(float)[..., None]
    return step, np.clip(np.round(x / step), -HALF, HALF - 1) + HALF, np.array(HALF)


def searched(x: Array, quantize: Callable[..., tuple[Array, ...]], weights: Array) -> Array:
    """Return the values with the least weighted error of AWQ's search for a range."""
    best: Array = np.zeros_like(x)
    least = np.full(x.shape[:2], np.inf)
    for at in range(10):
        step, codes, zero = quantize(x, 1 - at / 20)
        made: Array = (codes - zero) * step
        error = (weights * (made - x) ** 2).sum(-1)
        best = np.where((error < least)[..., None], made, best)
        least = np.minimum(error, least)
    return best


def cut_after(x: Array, low: int, high: int) -> Array:
    """Return values whose codes, less their zero points, were cut."""
    step, codes, zero = with_offset(x)
    made: Array = np.clip(codes - zero, low, high) * step
    return made


def on_purpose(quantize: Callable[..., tuple[Array, ...]]) -> Callable[[Array], Array]:
    """Return a quantizer that clips where activations of unlike sizes have it."""
    sizes = np.exp(1.2 * np.random.default_rng(5).standard_normal((1, COLUMNS // SIZE, SIZE)))
    return lambda x: searched(x, quantize, sizes**2)


def of_signed(by: float) -> Callable[[Array], Array]:
    """Return a quantizer to signed codes whose scales are `by` times those of the largest value."""

    def made(x: Array) -> Array:
        step, codes, zero = signed(x, by)
        return (codes - zero) * step

    return made


def by_squares(x: Array) -> Array:
    """Return signed codes' values, of the range with the least squares."""
    return searched(x, signed, np.ones(1))


def of_range(x: Array) -> Array:
    """Return values rounded to the nearest, nothing cut."""
    return cut_after(x, -TOP, TOP)


CUT: dict[str, Callable[[Array], Array]] = {
    "folded into signed codes": lambda x: cut_after(x, -HALF, HALF - 1),
    "cut at one end": lambda x: cut_after(x, -TOP, HALF - 3),
    "scales of half the size": of_signed(0.5),
}
SOUND: dict[str, Callable[[Array], Array]] = {
    "the whole range": of_range,
    "signed": of_signed(1.0),
    "signed, clipped a little": of_signed(0.9),
    "weighed by activations": on_purpose(with_offset),
    "signed, weighed by activations": on_purpose(signed),
    "least squares": by_squares,
}


def fitted(x: Array, y: Array) -> Fit:
    """Return the errors of values, each group with the ends that its own values have."""
    low, high = (np.broadcast_to(end(-1, keepdims=True), y.shape) for end in (y.min, y.max))
    gaps = np.diff(np.sort(y, axis=-1), axis=-1)
    step = np.where(gaps > 1e-9, gaps, np.inf).min(-1, keepdims=True)
    step = np.broadcast_to(step, y.shape)
    flat = (part.reshape(ROWS, COLUMNS) for part in (step, low, high))
    return fit_errors(x.reshape(ROWS, COLUMNS), y.reshape(ROWS, COLUMNS), Lattice(*flat))


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "offset"])
@pytest.mark.parametrize("name", [*CUT, *SOUND])
def test_who_clips_on_purpose_has_smaller_steps_for_it(name: str, kind: str) -> None:
    x = drawn(kind)
    found = fitted(x, {**CUT, **SOUND}[name](x))
    if name in SOUND:
        assert found.needless == 0 and found.how == "rounded to the nearest"
        return
    assert found.needless > 0 and not found.how


@pytest.mark.parametrize("name", ["folded into signed codes", "cut at one end", "signed"])
def test_codes_that_were_cut_are_no_rounding(
    name: str, values: Array, source: Path, tmp_path: Path
) -> None:
    """Seen red: 3 % of the values up to 6 steps off were the same computation, rounded."""
    moved = values + np.float32(0.01)
    y = {**CUT, **SOUND}[name](moved.reshape(len(values), -1, 32)).reshape(values.shape)
    a = copied(source, tmp_path / "a", plain(moved), None)
    row = judged(a, copied(source, tmp_path / "b", plain(np.asarray(y, np.float32)), None))
    assert row.explanation is not None and row.explanation.confirmed
    if name in SOUND:
        assert row.explanation.cause == "quantisation"
        return
    assert row.explanation.cause == "clipped_codes"
    low, high = (int(n) for n in ((-HALF, HALF - 1) if "folded" in name else (-TOP, HALF - 3)))
    assert f"cut at {low} and {high} steps" in str(row.explanation.evidence) or low == -TOP
