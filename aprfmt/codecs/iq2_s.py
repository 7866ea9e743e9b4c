"""IQ2_S: 256 elements; value = d * (scale + 1/2) / 4 * grid * sign.

0   2  d       float16
2  32  qs      low 8 bits of the grid index, one for 8 elements
34 32  signs   one byte for 8 elements
66  8  qh      high 2 bits of the grid index, four to a byte, lowest first
74  8  scales  16 nibbles, low first: one scale for 16 elements
"""

import numpy as np

from aprfmt.codecs import iq_grids, iq_signs
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column
from aprfmt.codecs.bits import unpack_pairs


class IQ2_S(BlockCodec):
    """Two and a half bits: eight elements share one of 1024 lattice points."""

    name = "IQ2_S"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with scale times the grid's magnitudes, then apply the signs."""
        db = scale_column(block["d"]) * (
            np.float32(0.5) + unpack_pairs(block["scales"]).astype(np.float32)
        )
        db *= np.float32(0.25)
        high = block["qh"][..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
        index = block["qs"] | high.reshape(-1, 32).astype(np.uint16) << 8
        points = out.reshape(-1, 16, 2, 8)  # (block, scale, index, element)
        np.multiply(db[..., None, None], iq_grids.IQ2_S[index].reshape(points.shape), out=points)
        points *= iq_signs.OF_BYTE[block["signs"]].reshape(points.shape)


CODEC = IQ2_S()
