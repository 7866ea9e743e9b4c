"""Evidence that a tensor is a different one, not a damaged copy of the right one.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

Replacing a tensor always removes the difference, so that this proves nothing. A tensor from another
checkpoint or from initialisation has values of the same size and spread as the right one, but no
relation to it: neither the values nor their magnitudes correlate, and it is not a rearrangement. A
damaged copy is related to the right one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.tensor.drawn_numbers import drawn_from
from aprfmt.measure.encoding_noise import pair_noise
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

LEAST = 1024  # values below which nothing can be said
MOST = 1 << 22  # values that are looked at
WINDOW = 1 << 20
SIZES = (0.5, 2.0)  # allowed ratio of the root mean squares, as in the screens of thresholds.py
SPREADS = (0.6, 1.7)  # ratio of quantiles of |x|/rms; normal to uniform: 0.86 to 1.49
QUANTILES = (0.5, 0.9, 0.99)
# Distance of the sorted values in units of the encodings' error: BF16 gives 0.44, blocks under 0.3.
SORTED = 0.5
RELATED = 0.1  # two trainings have a lower correlation of values, and of magnitudes


@dataclass(frozen=True, slots=True)
class ForeignVerdict:
    """Whether a tensor is a different one than the other side's, not a damaged copy; and why.

    `drawn` is the distribution of an initialisation that was never replaced, "" otherwise.
    """

    sure: bool
    says: str
    drawn: str = ""


def judge_foreign(first: RowReader, second: RowReader) -> ForeignVerdict:
    """Return whether the second tensor is unrelated to the first, or a damaged copy, and why.

    A tensor of one repeated value was never filled: it is unrelated to any other. Raises
    AprfmtError if one cannot be read.
    """
    if first.shape != second.shape or not first.size:
        return ForeignVerdict(False, "the shapes differ")
    # A constant tensor was never filled.
    for label, side, other in (("B", second, first), ("A", first, second)):
        value = constant_value(side, _row_windows(side))
        if value is not None and constant_value(other, _row_windows(other)) is None:
            return ForeignVerdict(
                True, f"{label} holds {value + 0.0:g} everywhere: it was never filled"
            )
    x, y = sample_values(first, MOST), sample_values(second, MOST)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return ForeignVerdict(False, "values are not finite: damage")
    if x.size < LEAST:
        return ForeignVerdict(
            False, f"{x.size} values are too few to tell another tensor from damage"
        )
    # Size and spread must be those of a weight, or of an initialisation.
    seen = drawn_from(y)
    drawn = seen.text() if seen else ""
    sizes = [float(np.sqrt(np.mean(values**2))) for values in (x, y)]
    ratio = sizes[1] / sizes[0] if sizes[0] else float("inf")
    if not SIZES[0] <= ratio <= SIZES[1] and not (drawn and ratio < 1):
        return ForeignVerdict(
            False, f"B's values are {ratio:.3g} times as large as A's: damage as well"
        )
    spreads = [np.quantile(np.abs(v), QUANTILES) / s for v, s in zip((x, y), sizes, strict=True)]
    apart = spreads[1] / np.maximum(spreads[0], 1e-30)
    if not drawn and not bool(((apart >= SPREADS[0]) & (apart <= SPREADS[1])).all()):
        return ForeignVerdict(False, "B's values are spread unlike A's: damage as well")
    # Values of another tensor do not correlate with the right ones.
    limit = RELATED + 4 / x.size**0.5
    values, magnitudes = correlation(x, y), correlation(*(_centred_magnitudes(v) for v in (x, y)))
    if abs(values) > limit or abs(magnitudes) > limit:
        return ForeignVerdict(
            False,
            f"B's values are related to A's (correlation {values:.2g}, of their sizes "
            f"{magnitudes:.2g}): an earlier state of it, or damage",
        )
    # Nor are they the right ones in another order.
    if same_values_reordered(first, second, x, y):
        if first.encoding == second.encoding:
            return ForeignVerdict(False, "B holds A's values in an order that has no name here")
        return ForeignVerdict(
            False,
            f"through {first.encoding} and {second.encoding}, B's values cannot be told from A's "
            "in another order: damage as well",
        )
    if drawn and ratio < SIZES[0]:
        return ForeignVerdict(
            True,
            f"B's values are {drawn}, {ratio:.3g} times the size of A's and not related to them "
            f"(correlation {values:.2g} over {x.size} values): an initialisation that was never "
            "replaced",
            drawn,
        )
    return ForeignVerdict(
        True,
        "B's values have the size and spread of A's, but no relation to them "
        f"(correlation {values:.2g} over {x.size} values, of their sizes {magnitudes:.2g}; no "
        "rearrangement): "
        "another tensor, not a damaged copy",
    )


def _row_windows(reader: RowReader, most: int | None = None, fewest: int = 1) -> "Iterator[Array]":
    """Yield arrays of row numbers, each of about WINDOW values.

    They cover all rows; with `most`, evenly spaced ones of about that many values in total, but at
    least `fewest` rows if there are so many.
    """
    rows = np.arange(reader.rows)
    if most is not None and reader.size > most:
        count = min(reader.rows, max(fewest, most // reader.columns))
        rows = np.linspace(0, reader.rows - 1, count).astype(np.int64)
    step = max(1, WINDOW // max(1, reader.columns))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def constant_value(reader: RowReader, windows: "Iterable[Array]") -> float | None:
    """Return the one finite value that a tensor has everywhere; None if it has others.

    `windows` are arrays of row numbers that cover all rows.
    """
    value: float | None = None
    for rows in windows:
        found = to_float64(reader.take(rows))
        value = float(found.flat[0]) if value is None else value
        if not bool((found == value).all()):
            return None
    return None if value is None or not np.isfinite(value) else value


def sample_values(reader: RowReader, most: int, fewest: int = 1) -> "Array":
    """Return the values of evenly spaced rows, float64 [rows, columns].

    About `most` values, but at least `fewest` rows; all values of a tensor that has no more.
    """
    windows = _row_windows(reader, most, fewest)
    return np.concatenate([to_float64(reader.take(rows)) for rows in windows])


def _centred_magnitudes(values: "Array") -> "Array":
    """Return magnitudes minus their row and column means, in which all checkpoints are alike.

    For a single row or column the magnitudes themselves.
    """
    found = np.abs(values)
    if min(found.shape) < 2:
        return found
    less: Array = found - found.mean(axis=1, keepdims=True) - found.mean(axis=0) + found.mean()
    return less


def correlation(x: "Array", y: "Array") -> float:
    """Return the correlation of two arrays; 0 if one is constant."""
    x, y = (v - v.mean() for v in (x, y))
    norm = float(norms.exact_norm(x) * norms.exact_norm(y))
    return norms.exact_dot(x, y) / norm if norm else 0.0


def same_values_reordered(a: RowReader, b: RowReader, x: "Array", y: "Array") -> bool:
    """Return whether both tensors have the same values in some order, within encoding errors.

    `x` and `y` are the tensors' sampled values, used if the encodings differ.
    """
    if a.encoding == b.encoding:
        return fingerprint(a) == fingerprint(b)
    x, y = np.sort(x, axis=None), np.sort(y, axis=None)
    limit = SORTED * pair_noise(a.encoding, b.encoding)
    return bool(norms.exact_norm(x - y) <= limit * norms.exact_norm(x))


def fingerprint(reader: RowReader) -> int:
    """Return a 64-bit hash of all values that does not depend on their order."""
    total = 0
    for rows in _row_windows(reader):
        bits = np.ascontiguousarray(reader.take(rows), np.float32).view(np.uint32)
        mixed = bits.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        total += int(mixed.sum(dtype=np.uint64))
    return total % (1 << 64)
