"""IQ3_S: 256 elements; value = d * (2*scale + 1) * grid * sign.

0    2  d       float16
2   64  qs      low 8 bits of the grid index, one for 4 elements
66   8  qh      ninth bits of the grid indices, lowest first
74  32  signs   one byte for 8 elements
106  4  scales  8 nibbles, low first: one scale for 32 elements
"""

import numpy as np

from aprfmt.codecs import iq_grids, iq_signs
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column
from aprfmt.codecs.bits import unpack_bits, unpack_pairs


class IQ3_S(BlockCodec):
    """Three and a half bits: four elements share one of 512 lattice points."""

    name = "IQ3_S"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with scale times the grid's magnitudes, then apply the signs."""
        db = scale_column(block["d"]) * (1 + 2 * unpack_pairs(block["scales"])).astype(np.float32)
        index = block["qs"] | unpack_bits(block["qh"]).astype(np.uint16) << 8
        points = out.reshape(-1, 8, 32)  # (block, scale, element)
        np.multiply(db[..., None], iq_grids.IQ3_S[index].reshape(points.shape), out=points)
        points *= iq_signs.OF_BYTE[block["signs"]].reshape(points.shape)


CODEC = IQ3_S()
