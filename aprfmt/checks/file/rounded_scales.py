"""Scales of packed weights that were rounded once the codes were made, seen from the file alone.

A *group* is the elements that share one scale.

A quantizer that divides by the exact scale gives the largest value of every group the largest code.
One that divides by a scale of few values (powers of two, E5M2) does so in some groups: by up to
half of the codes the largest value falls short of the end. Scales of few values over codes that
reach the end in every group cannot be the scales that the codes were made with.
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.codecs import fp8

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.codecs.weight_layout import WeightLayout

# Kind of scales, least bits of a code, and at most how probable it is that the largest value of a
# group has the largest code though the scale it was divided by is of that kind: a power of two
# rounded up 0.05 (8 bits) to 0.25 (4 bits); rounded down with what lies beyond clipped, as OCP's
# MX specification allows, 0.25 and 0.68; E5M2 to the nearest 0.68.
POWERS, E5M2 = "powers of two", "F8_E5M2"
_CHANCE = ((POWERS, 8, 0.3), (POWERS, 4, 0.7), (E5M2, 8, 0.7))
SURE = 1e-9  # chance of all groups together
MOST_TOPS = 2.5  # codes at the end in a group, in the mean: more were clipped
MOST = 1 << 22  # values looked at


def rounded_scales_text(laid: "WeightLayout") -> str:
    """Return a clause on scales of a packed weight that were rounded after its codes; "" if none.

    They are seen by their few possible values (powers of two, float8 E5M2) together with codes that
    such scales would not have given. `laid` is the weight's layout of codes and scales.
    """
    if laid.scale is None or laid.offset is not None or not laid.rows:
        return ""
    scales = laid.scale.of(0)
    kind = _kind_of(scales)
    bits = laid.codes.bits
    chance = next((p for name, least, p in _CHANCE if name == kind and bits >= least), None)
    if chance is None or (laid.zero is not None and np.ptp(laid.zero.of(0)) > 0):
        return ""
    tall = laid.tile[0] or laid.shape[-2]
    rows = min(laid.shape[-2], max(tall, MOST // laid.shape[-1] // tall * tall))
    counts = _tops_of_groups(laid, rows)
    if len(counts) < math.log(SURE) / math.log(chance) or not counts.all():
        return ""
    if counts.mean() > MOST_TOPS:
        return ""
    return (
        f"scales are {kind} alone, and in each of {len(counts)} groups looked at the largest value "
        "has the largest code: codes made with such scales fall short of it in some. The scales "
        "were rounded after the codes were made"
    )


def _kind_of(scales: "Array") -> str:
    """Return the name of the small set of numbers to which all scales belong, "" for none.

    It is powers of two, or the values of float8 E5M2.
    """
    held = np.asarray(scales, np.float64).ravel()
    held = held[held != 0]
    if not held.size or not (np.isfinite(held).all() and (held > 0).all()):
        return ""
    if (np.frexp(held)[0] == 0.5).all():
        return POWERS if np.unique(held).size > 1 else ""
    return E5M2 if np.isin(held, fp8.E5M2.values.astype(np.float64)).all() else ""


def _tops_of_groups(laid: "WeightLayout", rows: int) -> "Array":
    """Return the number of codes with the largest magnitude in each group of a weight (int64).

    Groups of the first `rows` rows are counted; those of zeros are left out.
    """
    values = laid.values.astype(np.float64)
    if laid.zero is not None:
        values = values - float(laid.zero.of(0).flat[0])
    finite = values[np.isfinite(values)]
    end = min(abs(finite.min()), abs(finite.max()))
    sizes = np.abs(np.nan_to_num(values))[laid.unpack_rows(0, rows)]
    columns = sizes.shape[1]
    across = np.arange(columns) // (laid.tile[1] or columns) if laid.group is None else laid.group
    down = np.arange(rows) // (laid.tile[0] or rows)
    groups = (down[:, None] * (int(across.max()) + 1) + across).ravel()
    tops, filled = (np.bincount(groups, held.ravel()) for held in (sizes >= end, sizes > 0))
    return tops[filled > 0].astype(np.int64)
