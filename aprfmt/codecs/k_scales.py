"""Pack and unpack the 12 bytes of Q4_K and Q5_K that hold eight 6-bit scales and eight 6-bit mins.

bytes 0-3   low 6 bits: scales 0-3;  high 2 bits: bits 4-5 of scales 4-7
bytes 4-7   low 6 bits: mins 0-3;    high 2 bits: bits 4-5 of mins 4-7
bytes 8-11  low nibbles: bits 0-3 of scales 4-7;  high nibbles: bits 0-3 of mins 4-7
"""

import numpy as np

from aprfmt.codecs.base import Codes


def unpack_scales_and_mins(packed: Codes) -> tuple[Codes, Codes]:
    """Return (scales [n, 8], mins [n, 8]) of packed bytes [n, 12]."""
    first, second, third = np.split(packed, 3, axis=1)
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    mins = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales, mins


def pack_scales_and_mins(scales: Codes, mins: Codes) -> Codes:
    """Return the bytes [n, 12] of scales and mins [n, 8], each below 64."""
    low_scales, high_scales = np.split(scales, 2, axis=1)
    low_mins, high_mins = np.split(mins, 2, axis=1)
    return np.concatenate(
        [
            low_scales | high_scales >> 4 << 6,
            low_mins | high_mins >> 4 << 6,
            high_scales & 15 | (high_mins & 15) << 4,
        ],
        axis=1,
    )
