"""Q4_0: 32 elements, one scale; value = (q - 8) * d.

0   2  d   float16
2  16  qs  low nibbles are elements 0-15, high nibbles 16-31
"""

import numpy as np

from aprfmt.codecs.arithmetic import largest_magnitude, multiply_add, reciprocal, truncate_to_int
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column
from aprfmt.codecs.bits import pack_halves, unpack_halves
from aprfmt.codecs.importance_weights import weighted_signed_scale


class Q4_0(BlockCodec):
    """Four bits under one float16 scale, without a minimum."""

    name = "Q4_0"
    step = "d"
    weighs_rows = True

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 32] with (q - 8) * d."""
        out.reshape(-1, 2, 16)[:] = unpack_halves(block["qs"])
        out -= 8
        out *= scale_column(block["d"])

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 32]: the element of largest magnitude gets the code -8.

        With importance (`weights` and `sigma2`) ggml's search finds the scale.
        """
        if weights is not None and sigma2 is not None:
            d, q = weighted_signed_scale(x, 8, weights, sigma2, fused)
        else:
            d = largest_magnitude(x) / np.float32(-8)
            wanted = multiply_add(x, reciprocal(d)[:, None], np.float32(8.5), fused)
            q = np.minimum(truncate_to_int(wanted), 15).astype(np.uint8)
        block["d"] = d
        block["qs"] = pack_halves(q)


CODEC = Q4_0()
