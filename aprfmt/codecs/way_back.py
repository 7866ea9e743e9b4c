"""Whether the codes of an FP8 weight come back from decoded values that were rounded again.

A decoded value is code * scale; stored as BF16 it is rounded. Divided by the same scale, it lies
nearest to the same code again, unless the product left the range of the narrower type.
"""

from dataclasses import replace

import numpy as np

from aprfmt.codecs import decode, encode
from aprfmt.codecs.base import Array
from aprfmt.codecs.fp8 import OF_TWO_SIGNS
from aprfmt.codecs.lattice import PackedWeight

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
    with np.errstate(all="ignore"):
        values = laid.decode(start, stop)
        scale = replace(laid, values=np.ones_like(laid.values)).decode(start, stop)
        kept = decode(stored, encode(stored, values)[""], values.shape)
        again = (kept.astype(np.float64) / scale).astype(np.float32).reshape(-1)
    codes = laid.codes_in(start, stop).reshape(-1)
    low, high = _reach(kind.values)
    x = np.maximum(again, np.finfo(np.float32).min)
    back = (x > low[codes]) & (x <= high[codes])
    return int((~(back | (np.isnan(kind.values)[codes] & np.isnan(x)))).sum())


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
