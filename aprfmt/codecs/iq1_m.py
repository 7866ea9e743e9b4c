"""IQ1_M: 256 elements; value = d * (2*scale + 1) * (grid + delta).

0  32  qs      low 8 bits of the grid index, one for 8 elements
32 16  qh      32 nibbles, low first, one for 8 elements: bits 0-2 are the high bits of the index,
               bit 3 the sign of delta, which is 1/8
48  8  scales  4 words of 16 bits: bits 3k to 3k+2 are the scale of 16 elements; the four top
               nibbles together, first word lowest, are d as float16
"""

import numpy as np

from aprfmt.codecs import iq_grids
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column
from aprfmt.codecs.bits import unpack_pairs
from aprfmt.codecs.iq1_s import DELTA


class IQ1_M(BlockCodec):
    """One and three quarter bits, the scale scattered over the block."""

    name = "IQ1_M"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256]: add delta to the grid's values (exact), then scale."""
        words = np.ascontiguousarray(block["scales"], np.uint16)
        top = words >> 12
        d = (top[:, 0] | top[:, 1] << 4 | top[:, 2] << 8 | top[:, 3] << 12).view(np.float16)
        scales = words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
        dl = scale_column(d) * (2 * scales.reshape(-1, 16) + 1).astype(np.float32)
        nibbles = unpack_pairs(block["qh"])  # (block, index)
        delta = np.where(nibbles & 8, -DELTA, DELTA)
        index = block["qs"] | (nibbles & 7).astype(np.uint16) << 8
        np.add(iq_grids.IQ1[index], delta[..., None], out=out.reshape(-1, 32, 8))
        out.reshape(-1, 16, 16)[:] *= dl[..., None]


CODEC = IQ1_M()
