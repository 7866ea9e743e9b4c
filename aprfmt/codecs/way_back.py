"""Whether the codes of an FP8 weight come back from decoded values that were rounded again.

A decoded value is code * scale; stored as BF16 it is rounded. Divided by the same scale, it lies
nearest to the same code again, unless the product left the range of the narrower type.
"""

import numpy as np

from aprfmt.codecs import decode, encode
from aprfmt.codecs.base import Array
from aprfmt.codecs.dialects import decode_weight
from aprfmt.codecs.fp8 import OF_TWO_SIGNS
from aprfmt.codecs.lattice import PackedWeight, filled

_KINDS = {kind.name: kind for kind in OF_TWO_SIGNS}


def lost_codes(packed: PackedWeight, stored: str) -> int | None:
    """Count the codes that do not come back from values stored as the plain float `stored`.

    A NaN counts as one code, zeros of both signs as one, too. None where the codes are no FP8.
    """
    dialect, parts, config = packed
    kind = _KINDS.get(parts[dialect.main].encoding)
    if kind is None:
        return None
    one = int(np.flatnonzero(kind.values == 1)[0])
    with np.errstate(all="ignore"):
        values = packed.decode()
        scale = decode_weight(dialect, filled(dialect, parts, one, 8), config)
        kept = decode(stored, encode(stored, values)[""], values.shape)
        again = (kept.astype(np.float64) / scale).astype(np.float32)
    codes = np.frombuffer(parts[dialect.main].raw, np.uint8)
    found = kind.values[codes]
    back = _nearest(again.reshape(-1), kind.values)
    return int((~((found == back) | (np.isnan(found) & np.isnan(back)))).sum())


def _nearest(x: Array, table: Array) -> Array:
    """Return the number of a table nearest to each of x; NaN stays NaN."""
    levels = np.unique(table[np.isfinite(table)]).astype(np.float64)
    at = np.searchsorted((levels[:-1] + levels[1:]) / 2, np.nan_to_num(x))
    return np.where(np.isnan(x), np.nan, levels[at]).astype(np.float32)
