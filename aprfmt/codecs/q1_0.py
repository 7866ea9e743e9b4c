"""Q1_0: 128 elements, one bit each under one scale; value = d if the bit is set, else -d.

0   2  d   float16
2  16  qs  bit i % 8 of byte i // 8 is element i
"""

import numpy as np

from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column
from aprfmt.codecs.bits import unpack_bits


class Q1_0(BlockCodec):
    """One bit: the sign."""

    name = "Q1_0"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 128] with d where the element's bit is set, else -d."""
        d = scale_column(block["d"])
        out[:] = np.where(unpack_bits(block["qs"]), d, -d)


CODEC = Q1_0()
