"""Q3_K: a superblock of 256 elements, 16 sub-blocks of 16; value = d*(scale - 32) * q, q in -4..3.

0   32  hmask   bit 4h + k of byte l: element 32k + l of half h is NOT lowered by 4
32  64  qs      each half of 128 elements has 32 bytes; bits 2k of byte l are its element 32k + l
96  12  scales  6 bits a sub-block: byte s (s < 8) holds bits 0-3 of scale s (low nibble) and of
                scale s + 8 (high nibble); byte 8 + j holds bits 4-5 of scales j, j+4, j+8, j+12
108  2  d       float16
"""

import numpy as np

from aprfmt.codecs.arithmetic import largest_magnitude, nearest_product, ordered_sum
from aprfmt.codecs.base import F32, BlockCodec, Blocks, Codes, largest_steps, scale_column
from aprfmt.codecs.bits import pack_crumbs, unpack_crumbs, unpack_halves
from aprfmt.codecs.importance_weights import block_first, element_first
from aprfmt.codecs.k_search import encode_codes, importance_weights
from aprfmt.codecs.scale_searches import refined_scale, signed_scale


def unpack_scales(packed: Codes) -> Codes:
    """Return the 6-bit scales [n, 16] of packed [n, 12]."""
    low = unpack_halves(packed[:, :8]).reshape(-1, 16)
    high = unpack_crumbs(packed[:, 8:]).reshape(-1, 16)
    return low | high << 4


def pack_scales(scales: Codes) -> Codes:
    """Return [n, 12] of scales [n, 16], each below 64."""
    low = scales[:, :8] & 15 | (scales[:, 8:] & 15) << 4
    high = (scales >> 4).reshape(-1, 4, 4)
    last = high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6
    return np.concatenate([low, last], axis=1)


class Q3_K(BlockCodec):
    """Three bits with a 6-bit signed scale every 16 elements."""

    name = "Q3_K"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with d*(scale - 32) * q.

        The product d*(scale - 32) is rounded first: bit equality needs that order.
        """
        scales = unpack_scales(block["scales"]).astype(np.float32) - 32
        packed, mask = block["qs"].reshape(-1, 2, 32), block["hmask"]
        q = out.reshape(-1, 2, 4, 32)  # (block, half, k, element)
        for half_index in range(2):
            for k in range(4):
                kept = mask >> 4 * half_index + k & 1
                q[:, half_index, k] = packed[:, half_index] >> 2 * k & 3 | kept << 2
        out -= 4
        out.reshape(-1, 16, 16)[:] *= (scale_column(block["d"]) * scales)[..., None]

    def block_steps(self, block: Blocks) -> F32:
        """Return float32 [n]: |d| times the largest magnitude of scale - 32 of the superblock."""
        return largest_steps(block, unpack_scales(block["scales"]).astype(np.int8) - 32)

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 256] by ggml's search; `sigma2` is not used.

        With `weights` (importance) ggml has another search, also for the scale of the scales.
        """
        turned = element_first(x, 16)
        if weights is None:
            scale, code = refined_scale(turned, 4, fused)
            values = scale.reshape(-1, 16)
            inverse = np.float32(-32) / largest_magnitude(values)
            wanted = nearest_product(inverse[:, None], values, fused).astype(np.int8)
            some = np.isfinite(inverse)
            scales = np.where(some[:, None], np.clip(wanted, -32, 31) + 32, 0).astype(np.uint8)
            d = np.where(some, np.float32(1) / inverse, 0)
        else:
            each = element_first(importance_weights(x, weights, 2, fused), 16)
            scale, code = signed_scale(turned, 4, each, fused)
            total = element_first(ordered_sum(each).reshape(-1, 16), 16)
            d, outer = signed_scale(element_first(scale.reshape(-1, 16), 16), 32, total, fused)
            scales = block_first(outer, 16)
        block["d"] = d
        block["scales"] = pack_scales(scales)
        rounded = scale_column(block["d"]) * (scales.astype(np.float32) - 32)
        codes = encode_codes(x, block_first(code, 256), rounded, (-4, 3), plus=4)
        block["hmask"] = np.packbits((codes >> 2).reshape(-1, 8, 32), axis=1, bitorder="little")[
            :, 0
        ]
        block["qs"] = pack_crumbs((codes & 3).reshape(-1, 4, 32)).reshape(-1, 64)


CODEC = Q3_K()
