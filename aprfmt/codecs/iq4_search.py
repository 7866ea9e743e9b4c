"""The search for the scales of IQ4_NL and IQ4_XS: those under which the uneven table fits best.

A *group* is the elements that share one scale.

Source: quantize_row_iq4_nl_impl of ggml-quants.c, with its 7 tries to either side.
"""

import numpy as np

from aprfmt.codecs.arithmetic import F32, I32, largest_magnitude, sum_of_products
from aprfmt.codecs.importance_weights import element_first, element_weights, square_sum
from aprfmt.codecs.scale_searches import SMALLEST

_TRIES = 7


def nearest_index(values: F32, x: F32) -> I32:
    """Return int32 of x's shape: the index of the nearest of 16 ascending `values`.

    A tie goes to the higher one.
    """
    above = np.clip(np.searchsorted(values, x, side="right"), 1, 15)
    lower, upper = values[above - 1], values[above]
    index: I32 = (above - (x - lower < upper - x)).astype(np.int32)
    return index


def search_scales(x: F32, size: int, values: F32, importance: F32 | None, fused: bool) -> F32:
    """Return the scales [n, columns/size] of x [n, columns]; 0 for a group of zeros.

    `size` is the number of elements under a scale, `values` the 16 ascending values of the table,
    `importance` [n, columns] weighs the elements, `fused` is the arithmetic (see `arithmetic`).
    """
    # Weigh elements, then try the obvious scale and seven to either side of it.
    if importance is None:
        each = x * x
    else:
        sigma2 = square_sum(x, fused) * (np.float32(2) / np.float32(x.shape[1]))
        each = element_weights(x, importance, sigma2, fused)
    turned, w = element_first(x, size), element_first(each, size)
    largest = largest_magnitude(turned.T)

    def fit_sums(inverse: F32) -> tuple[F32, F32]:
        """Return (sum of w*q*x, sum of w*q*q) of each group under the inverse scales `inverse`.

        q are the table's values nearest to x times `inverse`, w weights; the sums' quotient is
        the best scale for these q.
        """
        q = values[nearest_index(values, inverse * turned)]
        wq = w * q
        return sum_of_products(wq, turned, fused), sum_of_products(wq, q, fused)

    sum_qx, sum_q2 = fit_sums(np.float32(1) / (-largest / values[0]))
    scale = np.divide(sum_qx, sum_q2, out=np.zeros_like(sum_qx), where=sum_q2 > 0)
    best = scale * sum_qx
    for step in range(-_TRIES, _TRIES + 1):
        sum_qx, sum_q2 = fit_sums((np.float32(step) + values[0]) / largest)
        better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
        np.copyto(scale, sum_qx / sum_q2, where=better)
        np.copyto(best, scale * sum_qx, where=better)
    scale[np.abs(largest) < SMALLEST] = 0
    result: F32 = scale.reshape(len(x), -1)
    return result
