"""IQ2_XXS: 256 elements; value = d * (scale + 1/2) / 4 * grid * sign.

0   2  d      float16
2  64  group  8 groups of 32 elements: 4 one-byte grid indices, then a 32-bit word whose bits
              7k to 7k+6 are the signs of index k and bits 28-31 the scale
"""

import numpy as np

from aprfmt.codecs import iq_grids, iq_signs
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column


class IQ2_XXS(BlockCodec):
    """Two bits: eight elements share one of 256 lattice points."""

    name = "IQ2_XXS"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with scale times the grid's magnitudes, then apply the signs."""
        word = block["group"]["word"]  # (block, group)
        db = scale_column(block["d"]) * (np.float32(0.5) + (word >> 28).astype(np.float32))
        db *= np.float32(0.25)
        signs = word[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
        points = out.reshape(-1, 8, 4, 8)  # (block, group, index, element)
        np.multiply(db[..., None, None], iq_grids.IQ2_XXS[block["group"]["index"]], out=points)
        points *= iq_signs.OF_SEVEN_BITS[signs]


CODEC = IQ2_XXS()
