"""Weights and array layouts that the encoders of Q4_0 to Q5_1 and of the K-quants share.

With an importance matrix an element weighs importance * sqrt(mean square + x*x), the mean square
taken over the row (Q4_0 to Q5_1) or the superblock (K-quants).
"""

import numpy as np

from aprfmt.codecs.arithmetic import (
    F32,
    element_of_largest_key,
    multiply_add,
    reciprocal,
    sum_of_products,
    truncate_to_int,
)
from aprfmt.codecs.base import U8
from aprfmt.codecs.scale_searches import ScaleSteps, scale_and_min, signed_scale

WEIGHTED_STEPS = ScaleSteps(-0.9, 0.05, 36)


def element_first(x: F32, size: int) -> F32:
    """Return x [blocks, k*size] as contiguous [size, blocks*k], one group of `size` in each column.

    The searches for scales work on this layout.
    """
    return np.ascontiguousarray(x.reshape(-1, size).T)


def block_first(code: np.ndarray[tuple[int, ...], np.dtype[np.int32]], columns: int) -> U8:
    """Return codes [size, n] as uint8 [blocks, columns]; it undoes `element_first`."""
    return code.T.astype(np.uint8).reshape(-1, columns)


def square_sum(x: F32, fused: bool) -> F32:
    """Return the sum of squares [n] of x [n, size], added in order of index."""
    turned = np.ascontiguousarray(x.T)
    return sum_of_products(turned, turned, fused)


def element_weights(x: F32, importance: F32, sigma2: F32, fused: bool) -> F32:
    """Return weights [n, size]: importance * sqrt(sigma2 + x*x), sigma2 being [n]."""
    weights: F32 = importance * np.sqrt(multiply_add(x, x, sigma2[:, None], fused))
    return weights


def weighted_signed_scale(
    x: F32, nmax: int, importance: F32, sigma2: F32, fused: bool
) -> tuple[F32, U8]:
    """Return (scale [n], codes [n, size] in 0..2*nmax-1) so that x is about scale * (code - nmax).

    Elements weigh by `importance` [n, size] and the mean square of the row, `sigma2` [n].
    """
    weights = element_weights(x, importance, sigma2, fused)
    size = x.shape[1]
    scale, code = signed_scale(element_first(x, size), nmax, element_first(weights, size), fused)
    return scale, block_first(code, size)


def weighted_scale_and_min(
    x: F32, nmax: int, importance: F32, sigma2: F32, fused: bool
) -> tuple[F32, F32, U8]:
    """Return (scale [n], value of code 0 [n], codes [n, size] in 0..nmax) of x [n, size].

    Elements weigh by `importance` [n, size] and the mean square of the row, `sigma2` [n].
    """
    weights = element_weights(x, importance, sigma2, fused)
    size = x.shape[1]
    scale, minimum, code = scale_and_min(
        element_first(x, size), nmax, element_first(weights, size), WEIGHTED_STEPS, fused
    )
    return scale, -minimum, block_first(code, size)


def plain_scale_and_min(x: F32, nmax: int, fused: bool) -> tuple[F32, F32, U8]:
    """Return (scale [n], smallest element [n], codes [n, size] in 0..nmax) of x [n, size].

    The codes are equal steps from the smallest to the largest element.
    """
    low = element_of_largest_key(x, -x)
    d: F32 = (x.max(axis=1) - low + np.float32(0)) / np.float32(nmax)  # never -0
    wanted = multiply_add(x - low[:, None], reciprocal(d)[:, None], np.float32(0.5), fused)
    return d, low, truncate_to_int(wanted).astype(np.uint8)
