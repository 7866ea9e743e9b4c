"""Check whether the codes of an FP8 weight can be recovered from its values stored as BF16 or F16.

A decoded value is code * scale; stored as BF16 it is rounded. Divided by the same scale, it lies
nearest to the same code again, unless the product left the range of the narrower type. Of scales
that keep all products well inside that range nothing has to be tried: three roundings move a value
by less than 2**-7 of it, and no code of three fraction bits or fewer lies nearer than 2**-5.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from aprfmt.codecs import decode, encode
from aprfmt.codecs.base import F32, U8, Array
from aprfmt.codecs.fp8 import OF_TWO_SIGNS
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.codecs.weight_layout import WeightLayout

_STEP = 1 << 18  # values looked at in one step
_KINDS = {kind.name: kind for kind in OF_TWO_SIGNS}
_NORMAL = {"BF16": (2.0**-126, 2.0**127), "F16": (2.0**-14, 2.0**15)}  # the ends of normal numbers
_MOVED = 2.0**-7  # of a value, more than the three roundings


def count_lost_codes(packed: PackedWeight, stored: str) -> int | None:
    """Return how many FP8 codes cannot be recovered from values stored as the plain float `stored`.

    All NaNs count as one code, and so do zeros of both signs. None where the codes are not FP8.
    """
    kind, laid = _KINDS.get(packed.parts[packed.dialect.main].encoding), packed.laid_out()
    if kind is None:
        return None
    if laid is None:
        return 0
    start, stop = packed.rows or (0, laid.rows)
    if all_codes_recoverable(laid, start, stop, stored, kind.values):
        return 0
    with np.errstate(all="ignore"):
        values = laid.decode(start, stop)
        scale = replace(laid, values=np.ones_like(laid.values)).decode(start, stop)
        recovered = _recovered_mask(
            values, scale, laid.unpack_rows(start, stop), stored, kind.values
        )
    return int((~recovered).sum())


def all_codes_recoverable(
    laid: WeightLayout, start: int, stop: int, stored: str, table: Array
) -> bool:
    """Return whether each of the 256 codes is recovered under every scale of rows [start, stop).

    `stored` is the float type of the decoded values, `table` the number of every code. The weight's
    codes are not read. False where zero points, offsets or factors join the scales.
    """
    scales = _doubtful_scales(laid, start, stop, stored, table)
    if scales is None:
        return False
    codes = np.arange(256, dtype=np.uint8)
    step = max(1, _STEP // len(codes))
    with np.errstate(all="ignore"):
        for at in range(0, len(scales), step):
            some = scales[at : at + step, None]
            values = laid.values * some
            every = np.broadcast_to(codes, values.shape)
            if not _recovered_mask(values, some, every, stored, table).all():
                return False
    return True


def _doubtful_scales(
    laid: WeightLayout, start: int, stop: int, stored: str, table: Array
) -> F32 | None:
    """Return the distinct scales, float32 [n], under which some code may not be recovered.

    They are those of rows [start, stop). A matrix adds all of its scales, or none if all are in the
    range in which every code is recovered. None for codes that are not bytes, and where zero
    points, offsets or factors join the scales.
    """
    others = (laid.zero, laid.offset, laid.group, laid.factor)
    if laid.scale is None or laid.codes.bits != 8 or any(one is not None for one in others):
        return None
    tall = laid.shape[-2]
    low, high = _safe_scale_range(table.astype(np.float32).tobytes(), stored)
    numbers = []
    for matrix in range(start // tall, -(-stop // tall)):
        first, last = max(start - matrix * tall, 0), min(stop - matrix * tall, tall)
        rows = slice(first // laid.tile[0], (last - 1) // laid.tile[0] + 1)
        some = laid.scale.of(matrix)[rows]
        if some.size and not (low <= some.min() and some.max() <= high):  # a NaN is neither
            numbers.append(np.unique(some))
    return np.unique(np.concatenate(numbers)) if numbers else np.empty(0, np.float32)


def has_only_safe_scales(packed: PackedWeight, stored: str) -> bool:
    """Return whether a weight's scales alone prove that every code can be recovered.

    Codes are recovered from values rounded to the float type `stored`. The codes themselves are not
    read. False also where `packed` is a band of a weight.
    """
    kind, laid = _KINDS.get(packed.parts[packed.dialect.main].encoding), packed.laid_out()
    if kind is None or laid is None or packed.rows is not None:
        return False
    scales = _doubtful_scales(laid, 0, laid.rows, stored, kind.values)
    return scales is not None and not scales.size


@lru_cache(16)
def _safe_scale_range(values: bytes, stored: str) -> tuple[float, float]:
    """Return (lowest, highest) scale between which every code of a table is recovered.

    `values` are the table's float32 bytes. The products with every code lie a factor of two inside
    the normal numbers of `stored`. The result is (inf, -inf) where there is no such range.
    """
    table = np.frombuffer(values, np.float32).astype(np.float64)
    low, high = _code_intervals(table)
    codes = np.isfinite(table) & (table != 0)
    sizes = np.abs(table[codes])
    near = np.minimum(table[codes] - low[codes], high[codes] - table[codes]) / sizes
    if stored not in _NORMAL or np.isinf(table).any() or not (near > _MOVED).all():
        return np.inf, -np.inf
    smallest, largest = _NORMAL[stored]
    return 2 * smallest / sizes.min(), largest / 2 / sizes.max()


def _recovered_mask(values: F32, scale: F32, codes: U8, stored: str, table: Array) -> Array:
    """Return a mask [rows, columns]: True where a value, rounded to `stored`, gives its code again.

    `scale` divides the rounded value. `codes` are the values' own codes, `table` the number of
    every code.
    """
    kept = decode(stored, encode(stored, values)[""], values.shape)
    again = (kept.astype(np.float64) / scale).astype(np.float32)
    low, high = _code_intervals(table)
    x = np.maximum(again, np.finfo(np.float32).min)
    back: Array = (x > low[codes]) & (x <= high[codes])
    back |= np.isnan(table)[codes] & np.isnan(x)
    return back


def _code_intervals(table: Array) -> tuple[Array, Array]:
    """Return (low, high), float32 for each code: values in (low, high] are nearest to that code.

    Codes that are not finite get an empty interval. The bounds are exact: they need one bit more
    than the codes' values.
    """
    finite = np.isfinite(table)
    levels = np.unique(table[finite]).astype(np.float64)
    between = (levels[:-1] + levels[1:]) / 2
    at = np.searchsorted(levels, np.where(finite, table, 0))
    low, high = np.append(-np.inf, between)[at], np.append(between, np.inf)[at]
    low, high = np.where(finite, low, np.inf), np.where(finite, high, -np.inf)
    return low.astype(np.float32), high.astype(np.float32)
