"""IQ3_XXS: 256 elements; value = d * (scale + 1/2) / 2 * grid * sign.

0   2  d     float16
2  64  qs    grid indices, one for 4 elements
66 32  word  8 words, one for 32 elements: bits 7k to 7k+6 are the signs of eight elements,
             bits 28-31 the scale
"""

import numpy as np

from aprfmt.codecs import iq_grids, iq_signs
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column


class IQ3_XXS(BlockCodec):
    """Three bits: four elements share one of 256 lattice points."""

    name = "IQ3_XXS"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with scale times the grid's magnitudes, then apply the signs."""
        word = block["word"]
        db = scale_column(block["d"]) * (np.float32(0.5) + (word >> 28).astype(np.float32))
        db *= np.float32(0.5)
        signs = word[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
        points = out.reshape(-1, 8, 4, 8)  # (block, word, sign byte, element)
        grid = iq_grids.IQ3_XXS[block["qs"]].reshape(points.shape)
        np.multiply(db[..., None, None], grid, out=points)
        points *= iq_signs.OF_SEVEN_BITS[signs]


CODEC = IQ3_XXS()
