"""Q8_0: 32 signed bytes under one scale; value = q * d.

0   2  d   float16
2  32  qs  int8
"""

import numpy as np

from aprfmt.codecs.arithmetic import reciprocal, round_half_away
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column


class Q8_0(BlockCodec):
    """Eight bits under one float16 scale."""

    name = "Q8_0"
    step = "d"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 32] with q * d."""
        out[:] = block["qs"]
        out *= scale_column(block["d"])

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 32]; `fused`, `weights` and `sigma2` are not used.

        The scale is the largest magnitude / 127. Ties are rounded away from zero.
        """
        d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
        block["d"] = d[:, 0]
        block["qs"] = round_half_away(x * reciprocal(d)).astype(np.int8)


CODEC = Q8_0()
