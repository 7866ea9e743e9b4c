"""Q8_K: 256 signed bytes under one float32 scale, and their sums; value = q * d.

0     4  d      float32
4   256  qs     int8
260  32  bsums  16 int16: sums of 16 elements each (for dot products; decoding does not need them)
"""

import numpy as np

from aprfmt.codecs.base import F32, BlockCodec, Blocks


class Q8_K(BlockCodec):
    """ggml's format of activations in products with K-quants, seldom in a file."""

    name = "Q8_K"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with q * d."""
        out[:] = block["qs"]
        out *= block["d"].astype(np.float32)[:, None]


CODEC = Q8_K()
