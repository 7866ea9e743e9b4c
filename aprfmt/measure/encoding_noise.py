"""How much error storing values in an encoding may make."""

import math
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.measure.bounds import NMSE, NMSE_SLACK

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Half the distance of neighbouring numbers, relative to the number (2 ** -significand bits).
UNIT = {
    "F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8,
    "F8_E4M3": 2.0**-4, "F8_E5M2": 2.0**-3, "F8_E4M3FNUZ": 2.0**-4, "F8_E5M2FNUZ": 2.0**-3,
}  # fmt: skip


def storage_noise(encoding: str) -> float:
    """Return the largest usual relative L2 error of storing values in an encoding (or "A+B").

    For quantized encodings it is the error measured on heavy-tailed weights, with a margin; without
    a measurement, that of a uniform quantizer with as many bits.
    """
    worst = 0.0
    for name in encoding.split("+"):
        row = encoding_row(name)
        if name in UNIT:
            found = UNIT[name]
        elif row.numpy:
            found = 0.0  # integers are exact
        else:
            usual = NMSE.get(name, 4.0 ** (1.0 - (row.bits_per_weight or 4.0)))
            found = float((usual * NMSE_SLACK) ** 0.5)
        worst = max(worst, found)
    return worst


def pair_noise(a: str, b: str, *, moved: bool = True) -> float:
    """Return the relative L2 up to which values in two encodings count as equal.

    Values that were only copied (`moved`) have to be exactly equal in the same encoding (0.0).
    Computed values are rounded once more.
    """
    if a == b and moved:
        return 0.0
    return float((storage_noise(a) ** 2 + storage_noise(b) ** 2) ** 0.5)


# Exponent of the smallest step of a float type: below its normal numbers steps stay this wide.
SMALLEST = {
    "F64": -1074, "F32": -149, "F16": -24, "BF16": -133, "F8_E4M3": -9, "F8_E5M2": -16,
    "F8_E4M3FNUZ": -10, "F8_E5M2FNUZ": -17,
}  # fmt: skip


def float_spacing(values: "NDArray[np.float64]", encoding: str) -> "NDArray[np.float64]":
    """Return one unit in the last place of a float type at each value; `encoding` is in UNIT."""
    exponent = np.frexp(values)[1] + round(math.log2(UNIT[encoding]))
    found: NDArray[np.float64] = np.ldexp(1.0, np.maximum(exponent, SMALLEST[encoding]))
    return found
