"""The relative L2 distance by which two encodings of the same values may differ."""

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.measure.bounds import NMSE, NMSE_SLACK

# Half the distance of neighbouring numbers, relative to the number (2 ** -significand bits).
UNIT = {
    "F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8,
    "F8_E4M3": 2.0**-4, "F8_E5M2": 2.0**-3, "F8_E4M3FNUZ": 2.0**-4, "F8_E5M2FNUZ": 2.0**-3,
}  # fmt: skip


def noise_of(encoding: str) -> float:
    """Return the largest relative L2 error of storing values in an encoding.

    For quantized encodings it is the measured error of heavy-tailed weights, with slack; without a
    measurement, that of a uniform quantizer with as many bits.
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


def noise(a: str, b: str, *, moved: bool = True) -> float:
    """Return the distance up to which values of two encodings count as equal.

    `moved` values keep their bits, so values of the same encoding must be exactly equal; computed
    values are rounded once more.
    """
    if a == b and moved:
        return 0.0
    return float((noise_of(a) ** 2 + noise_of(b) ** 2) ** 0.5)
