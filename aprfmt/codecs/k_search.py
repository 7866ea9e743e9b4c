"""The search that encodes K-quants: scales and mins of sub-blocks, their scales, then the codes.

A *sub-block* is 16 or 32 elements under one integer scale, a *superblock* the 256 elements whose
integer scales share a float scale `d`.

Source: quantize_row_q{2,4,5}_K_ref and _impl, quantize_row_q{3,6}_K_ref and _impl of ggml-quants.c.
The order of every operation decides bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aprfmt.codecs.arithmetic import F32, nearest_int, nearest_product, ordered_sum, sum_of_products
from aprfmt.codecs.base import Codes, scale_column
from aprfmt.codecs.importance_weights import (
    WEIGHTED_STEPS,
    block_first,
    element_first,
    element_weights,
    square_sum,
)
from aprfmt.codecs.scale_searches import ScaleSteps, positive_scale, scale_and_min


@dataclass(frozen=True)
class SearchPlan:
    """How one K-quant is encoded: sub-block size, largest code and scale, steps of the search.

    `size` counts elements. `largest_code` and `largest_scale` are the greatest integers that a code
    and a sub-block's scale can hold. `pack` and `unpack` convert the integer scales and mins of a
    superblock to its bytes and back.
    """

    size: int
    largest_code: int
    largest_scale: int
    steps: ScaleSteps
    mean_square: float  # of the superblock, by this factor, in the weights with importance
    pack: Callable[[Codes, Codes], Codes]  # scales and mins [n, sub-blocks] to bytes
    unpack: Callable[[Codes], tuple[Codes, Codes]]
    bound: int = 255  # for the scales that the search with importance finds


class BlockFields(NamedTuple):
    """d and dmin as float16 [n], packed scales and mins, codes [n, 256]."""

    d: npt.NDArray[np.float16]
    dmin: npt.NDArray[np.float16]
    scales: Codes
    codes: Codes


def magnitude_weights(x: F32, fused: bool) -> F32:
    """Return weights [size, n]: |x| plus the root mean square of the sub-block.

    `x` has the elements of a sub-block along its first axis, [size, n].
    """
    mean = sum_of_products(x, x, fused) / np.float32(len(x))
    weights: F32 = np.sqrt(mean) + np.abs(x)
    return weights


def importance_weights(x: F32, importance: F32, factor: float, fused: bool) -> F32:
    """Return weights of x's shape: importance * sqrt(sigma2 + x*x).

    sigma2 is `factor` times the mean square of the superblock.
    """
    sigma2 = np.float32(factor) * square_sum(x, fused) / np.float32(x.shape[1])
    return element_weights(x, importance, sigma2, fused)


def encode_scales_and_mins(
    x: F32, plan: SearchPlan, importance: F32 | None, fused: bool
) -> BlockFields:
    """Return the fields of superblocks x [n, 256] whose sub-blocks have a scale and a min.

    `plan` has the encoding's sizes and steps of the search. `importance` [n, 256] weighs the
    elements; without it they are weighed by magnitude. `fused`: products are added as by fused
    multiply-add.
    """
    n, subs = len(x), x.shape[1] // plan.size
    turned = element_first(x, plan.size)
    # Search scale and min of each sub-block, then encode these with 6 or 4 bits.
    if importance is None:
        weights = np.abs(turned) if plan.steps.absolute else magnitude_weights(turned, fused)
        scale, minimum, code = scale_and_min(turned, plan.largest_code, weights, plan.steps, fused)
        d, scales = _scale_by_largest(scale.reshape(n, subs), plan.largest_scale, fused)
        dmin, mins = _scale_by_largest(minimum.reshape(n, subs), plan.largest_scale, fused)
    else:
        each = importance_weights(x, importance, plan.mean_square, fused)
        weights = element_first(each, plan.size)
        scale, minimum, code = scale_and_min(
            turned, plan.largest_code, weights, WEIGHTED_STEPS, fused
        )
        total = element_first(ordered_sum(weights).reshape(n, subs), subs)
        d, scales = _scale_by_search(scale.reshape(n, subs), plan.largest_scale, total, fused)
        dmin, mins = _scale_by_search(minimum.reshape(n, subs), plan.largest_scale, total, fused)
        scales, mins = np.minimum(scales, plan.bound), np.minimum(mins, plan.bound)
    # The codes are chosen under the scales and mins as stored.
    packed = plan.pack(scales, mins)
    scales, mins = plan.unpack(packed)
    codes = encode_codes(
        x,
        block_first(code, x.shape[1]),
        scale_column(d) * scales,
        (0, plan.largest_code),
        offset=scale_column(dmin) * mins,
        plus=0,
    )
    return BlockFields(d, dmin, packed, codes)


def _scale_by_largest(values: F32, top: int, fused: bool) -> tuple[npt.NDArray[np.float16], Codes]:
    """Return (d [n], codes [n, k]): values [n, k] are about d * code, the largest code is `top`.

    d is rounded to float16 after the codes are chosen.
    """
    largest = np.fmax.reduce(values, axis=1, initial=np.float32(0)) + np.float32(0)  # never -0
    inverse = np.divide(np.float32(top), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = nearest_product(inverse[:, None], values, fused).astype(np.uint8)
    return (largest / np.float32(top)).astype(np.float16), np.minimum(codes, top).astype(np.uint8)


def _scale_by_search(
    values: F32, top: int, weights: F32, fused: bool
) -> tuple[npt.NDArray[np.float16], Codes]:
    """Return (d [n], codes [n, k]): values [n, k] are about d * code, as ggml's search finds them.

    The codes go from 0 to `top`. `weights` [k, n] weigh the values.
    """
    scale, code = positive_scale(element_first(values, values.shape[1]), top, weights, fused)
    return scale.astype(np.float16), block_first(code, values.shape[1])


def encode_codes(
    x: F32, codes: Codes, d: F32, bounds: tuple[int, int], *, offset: F32 | None = None, plus: int
) -> Codes:
    """Return the codes of x [n, 256] under the stored scales d [n, sub-blocks], uint8 [n, 256].

    `bounds` are the lowest and the highest code, `offset` [n, sub-blocks] is added before the
    division. Where a scale is 0 the codes in `codes` are returned unchanged. `plus` is added to
    signed codes to make them unsigned.
    """
    subs = x.reshape(*d.shape, -1)  # (block, sub-block, element)
    shifted = subs if offset is None else subs + offset[..., None]
    wanted = np.clip(nearest_int(shifted / d[..., None]), *bounds) + plus
    kept = codes.reshape(subs.shape)
    result: Codes = np.where((d != 0)[..., None], wanted, kept).astype(np.uint8).reshape(x.shape)
    return result
