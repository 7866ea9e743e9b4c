"""Q2_0: 64 elements, two bits each under one scale; value = (q - 1) * d.

0   2  d   float16
2  16  qs  bits 2*(i % 4) of byte i // 4 are element i
"""

import numpy as np

from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column


class Q2_0(BlockCodec):
    """Two bits: -1, 0, 1, 2 under one float16 scale."""

    name = "Q2_0"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 64] with (q - 1) * d."""
        fields = block["qs"][..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
        out[:] = fields.reshape(-1, 64)
        out -= 1
        out *= scale_column(block["d"])


CODEC = Q2_0()
