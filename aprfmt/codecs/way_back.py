"""Whether the codes of an FP8 weight come back from decoded values that were rounded again.

A decoded value is code * scale; stored as BF16 it is rounded. Divided by the same scale, it lies
nearest to the same code again, unless the product left the range of the narrower type.
"""

from dataclasses import replace

import numpy as np

from aprfmt.codecs import decode, encode
from aprfmt.codecs.base import F32, U8, Array
from aprfmt.codecs.fp8 import OF_TWO_SIGNS
from aprfmt.codecs.laid_out import LaidOut
from aprfmt.codecs.lattice import PackedWeight

_STEP = 1 << 18  # values looked at in one step
_KINDS = {kind.name: kind for kind in OF_TWO_SIGNS}


def lost_codes(packed: PackedWeight, stored: str) -> int | None:
    """Count the codes that do not come back from values stored as the plain float `stored`.

    A NaN counts as one code, zeros of both signs as one, too. None where the codes are no FP8.
    """
    kind, laid = _KINDS.get(packed.parts[packed.dialect.main].encoding), packed.laid_out()
    if kind is None:
        return None
    if laid is None:
        return 0
    start, stop = packed.rows or (0, laid.rows)
    if all_come_back(laid, start, stop, stored, kind.values):
        return 0
    with np.errstate(all="ignore"):
        values = laid.decode(start, stop)
        scale = replace(laid, values=np.ones_like(laid.values)).decode(start, stop)
        back = _come_back(values, scale, laid.codes_in(start, stop), stored, kind.values)
    return int((~back).sum())


def all_come_back(laid: LaidOut, start: int, stop: int, stored: str, table: Array) -> bool:
    """Say whether every code there is comes back under every scale of rows [start, stop).

    That needs no look at the codes that a weight has; False where it has more than scales.
    """
    beside = (laid.zero, laid.offset, laid.group, laid.factor)
    if laid.scale is None or laid.codes.bits != 8 or any(one is not None for one in beside):
        return False
    tall = laid.shape[-2]
    numbers = []
    for matrix in range(start // tall, -(-stop // tall)):
        first, last = max(start - matrix * tall, 0), min(stop - matrix * tall, tall)
        rows = slice(first // laid.tile[0], (last - 1) // laid.tile[0] + 1)
        numbers.append(np.unique(laid.scale.of(matrix)[rows]))
    scales = np.unique(np.concatenate(numbers) if numbers else np.empty(0, np.float32))
    codes = np.arange(256, dtype=np.uint8)
    step = max(1, _STEP // len(codes))
    with np.errstate(all="ignore"):
        for at in range(0, len(scales), step):
            some = scales[at : at + step, None]
            values = laid.values * some
            every = np.broadcast_to(codes, values.shape)
            if not _come_back(values, some, every, stored, table).all():
                return False
    return True


def _come_back(values: F32, scale: F32, codes: U8, stored: str, table: Array) -> Array:
    """Say of decoded values [rows, columns] which have their own codes once they are `stored`."""
    kept = decode(stored, encode(stored, values)[""], values.shape)
    again = (kept.astype(np.float64) / scale).astype(np.float32)
    low, high = _reach(table)
    x = np.maximum(again, np.finfo(np.float32).min)
    back: Array = (x > low[codes]) & (x <= high[codes])
    back |= np.isnan(table)[codes] & np.isnan(x)
    return back


def _reach(table: Array) -> tuple[Array, Array]:
    """Return for each code of a table the numbers between which its own is the nearest.

    Codes that are not finite have none. The numbers are exact: one bit more than the codes'.
    """
    finite = np.isfinite(table)
    levels = np.unique(table[finite]).astype(np.float64)
    between = (levels[:-1] + levels[1:]) / 2
    at = np.searchsorted(levels, np.where(finite, table, 0))
    low, high = np.append(-np.inf, between)[at], np.append(between, np.inf)[at]
    low, high = np.where(finite, low, np.inf), np.where(finite, high, -np.inf)
    return low.astype(np.float32), high.astype(np.float32)
