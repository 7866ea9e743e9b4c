"""IQ2_XS: 256 elements; value = d * (scale + 1/2) / 4 * grid * sign.

0   2  d       float16
2  64  qs      32 words of 16 bits, one for 8 elements: bits 0-8 grid index, bits 9-15 signs
66  8  scales  16 nibbles, low first: one scale for 16 elements
"""

import numpy as np

from aprfmt.codecs import iq_grids, iq_signs
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column
from aprfmt.codecs.bits import unpack_pairs


class IQ2_XS(BlockCodec):
    """Two bits: eight elements share one of 512 lattice points."""

    name = "IQ2_XS"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with scale times the grid's magnitudes, then apply the signs."""
        db = scale_column(block["d"]) * (
            np.float32(0.5) + unpack_pairs(block["scales"]).astype(np.float32)
        )
        db *= np.float32(0.25)
        qs = block["qs"].reshape(-1, 16, 2)
        points = out.reshape(-1, 16, 2, 8)  # (block, scale, index, element)
        np.multiply(db[..., None, None], iq_grids.IQ2_XS[qs & 511], out=points)
        points *= iq_signs.OF_SEVEN_BITS[qs >> 9]


CODEC = IQ2_XS()
