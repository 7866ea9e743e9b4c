"""IQ4_XS: 256 elements, 8 sub-blocks of 32; value = d * (scale - 32) * VALUES[q].

0   2  d         float16
2   2  scales_h  16 bits: bits 2s and 2s+1 are the high bits of scale s
4   4  scales_l  8 nibbles, low first: the low bits of the scales
8 128  qs        16 bytes a sub-block: low nibbles are elements 0-15 of it, high nibbles 16-31
"""

import numpy as np

from aprfmt.codecs.arithmetic import largest_magnitude, nearest_product, reciprocal
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column
from aprfmt.codecs.bits import pack_halves, pack_pairs, unpack_pairs
from aprfmt.codecs.iq4_nl import GAP, VALUES
from aprfmt.codecs.iq4_search import nearest_index, search_scales


def _unpack_scales(block: Blocks) -> F32:
    """Return float32 [n, 8]: the scales of each superblock's sub-blocks, -32 to 31."""
    high = block["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    found: F32 = (unpack_pairs(block["scales_l"]) | high << 4).astype(np.float32) - 32
    return found


class IQ4_XS(BlockCodec):
    """IQ4_NL's table with 6-bit scales under one float16."""

    name = "IQ4_XS"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with d * (scale - 32) * VALUES[q].

        The product d * (scale - 32) is rounded first: bit equality needs that order.
        """
        scales = _unpack_scales(block)
        runs = block["qs"].reshape(-1, 8, 16)
        elements = out.reshape(-1, 8, 2, 16)  # (block, sub-block, low or high, element)
        elements[:, :, 0] = VALUES[runs & 15]
        elements[:, :, 1] = VALUES[runs >> 4]
        elements *= (scale_column(block["d"]) * scales)[..., None, None]

    def block_steps(self, block: Blocks) -> F32:
        """Return float32 [n]: |d| times the largest scale times the widest gap of the table."""
        largest = np.abs(_unpack_scales(block)).max(axis=1)
        found: F32 = np.abs(scale_column(block["d"])).reshape(-1) * largest * GAP
        return found

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 256] by ggml's search for the scales.

        The codes use d before it is rounded to float16. `weights` are the importance of each
        element; `sigma2` is not used.
        """
        found = search_scales(x, 32, VALUES, weights, fused)
        d = -largest_magnitude(found)[:, None] / np.float32(32)
        scales = np.clip(nearest_product(reciprocal(d), found, fused), -32, 31)
        inverse = reciprocal(d * scales.astype(np.float32))
        codes = nearest_index(VALUES, inverse[..., None] * x.reshape(-1, 8, 32))
        unsigned = (scales + 32).astype(np.uint16)
        block["d"] = d[:, 0]
        shifts = np.arange(0, 16, 2, dtype=np.uint16)
        block["scales_h"] = np.bitwise_or.reduce(unsigned >> 4 << shifts, axis=1)
        block["scales_l"] = pack_pairs((unsigned & 15).astype(np.uint8))
        block["qs"] = pack_halves(codes.astype(np.uint8).reshape(-1, 32)).reshape(-1, 128)


CODEC = IQ4_XS()
