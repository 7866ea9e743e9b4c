"""Round a weight to codes and scales of groups, as the libraries do without calibration data.

A *group* is the elements that share one scale.

All arithmetic is in float32. Where a scale is stored in another encoding it is rounded to that
first, so that codes are nearest under what is stored.
"""

import numpy as np

from aprfmt.codecs.base import F32, U8
from aprfmt.codecs.bits import pack_pairs
from aprfmt.codecs.grids import Groups

# Between neighbouring E2M1 magnitudes; a tie goes to the even code: up where `>=` stands.
_UP, _DOWN = (0.75, 1.75, 3.5), (0.25, 1.25, 2.5, 5.0)
E2M1_MAX, E4M3_MAX = np.float32(6), np.float32(448)


def group_values(values: F32, size: int) -> F32:
    """Return values [rows, inputs] as [rows, groups, size], a view."""
    return values.reshape(len(values), -1, size)


def largest_magnitudes(values: F32, size: int) -> F32:
    """Return the largest magnitude of each group, [rows, groups]."""
    groups = group_values(values, size)
    found: F32 = np.maximum(groups.max(axis=2), -groups.min(axis=2))
    return found + np.float32(0)  # no -0


def integer_codes(values: F32, groups: Groups) -> U8:
    """Return codes of 0 to 15 nearest to value / scale + zero point, uint8 [rows, inputs/2].

    The low nibble of a byte is the first code.
    """
    zeros = np.float32(8) if groups.zeros is None else groups.zeros[..., None].astype(np.float32)
    found = group_values(values, groups.size) / groups.scale[..., None]
    np.rint(found, out=found)
    found += zeros
    np.clip(found, 0, 15, out=found)
    made: U8 = pack_pairs(found.reshape(len(values), -1).astype(np.uint8)).astype(np.uint8)
    return made


def e2m1_codes(values: F32, groups: Groups) -> U8:
    """Return E2M1 codes nearest to value / scale, ties to even, uint8 [rows, inputs/2].

    The low nibble of a byte is the first code. A negative value that is rounded to zero keeps its
    sign.
    """
    found = group_values(values, groups.size) / groups.scales()[..., None]
    codes = (found < 0).astype(np.uint8) << 3
    np.abs(found, out=found)
    for bound in _UP:
        codes += found >= np.float32(bound)
    for bound in _DOWN:
        codes += found > np.float32(bound)
    made: U8 = pack_pairs(codes.reshape(len(values), -1)).astype(np.uint8)
    return made


def e4m3_bytes(values: F32) -> U8:
    """Return values as E4M3 bytes, rounded to nearest even and clamped to the largest value."""
    from ml_dtypes import float8_e4m3fn

    small_floats = np.clip(values, -E4M3_MAX, E4M3_MAX).astype(float8_e4m3fn)
    found: U8 = small_floats.view(np.uint8)
    return found
