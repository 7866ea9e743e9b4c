"""APR_Q4: 32 consecutive elements of the flattened tensor, one scale; value = (q - 8) * scale.

0   2  scale  float16
2  16  qs     low nibble is element 2i, high nibble 2i+1 (interleaved, unlike Q4_0)

Source: the APR v2 format. aprender's reader takes a scale that is NaN, infinite or below 6.1e-5
as 0, realizar's does not; this is the plain arithmetic.
"""

import numpy as np

from aprfmt.codecs.arithmetic import round_half_away
from aprfmt.codecs.base import F32, U8, BlockCodec, Blocks, scale_column
from aprfmt.codecs.bits import pack_pairs, unpack_pairs


class AprQ4(BlockCodec):
    """APR's own four bits."""

    name = "APR_Q4"
    step = "scale"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 32] with (q - 8) * scale: offset first, then scale."""
        out[:] = unpack_pairs(block["qs"])
        out -= 8
        out *= scale_column(block["scale"])

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 32]; `fused`, `weights` and `sigma2` are not used.

        Elements are divided by the scale before it is rounded to float16; ties are rounded away
        from zero and codes clamped to -8..7.
        """
        scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(7)
        scale[np.abs(x).max(axis=1) == 0] = 1
        ratio = np.divide(x, scale, out=np.zeros_like(x), where=x != 0)  # a scale can round to 0
        q: U8 = (np.clip(round_half_away(ratio), -8, 7) + 8).astype(np.uint8)
        block["scale"] = scale[:, 0]
        block["qs"] = pack_pairs(q)


CODEC = AprQ4()
