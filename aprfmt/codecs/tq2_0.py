"""TQ2_0: 256 ternary elements, two bits each; value = d * (q - 1).

0   64  qs  each half of 128 elements has 32 bytes; bits 2k of byte l are its element 32k + l
64   2  d   float16
"""

import numpy as np

from aprfmt.codecs.arithmetic import reciprocal, round_half_away, truncate_to_int
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column
from aprfmt.codecs.bits import pack_crumbs


class TQ2_0(BlockCodec):
    """Ternary weights at 2.06 bits."""

    name = "TQ2_0"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with d * (q - 1)."""
        packed = block["qs"].reshape(-1, 2, 32)
        q = out.reshape(-1, 2, 4, 32)  # (block, half, k, element)
        for k in range(4):
            q[:, :, k] = packed >> 2 * k & 3
        out -= 1
        out *= scale_column(block["d"])

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 256]; `fused`, `weights` and `sigma2` are not used.

        The scale is the largest magnitude. Ties are rounded away from zero.
        """
        d = np.abs(x).max(axis=1, keepdims=True)
        q = (truncate_to_int(round_half_away(x * reciprocal(d))) + 1).astype(np.uint8)
        block["d"] = d[:, 0]
        block["qs"] = pack_crumbs(q.reshape(-1, 4, 32)).reshape(-1, 64)


CODEC = TQ2_0()
