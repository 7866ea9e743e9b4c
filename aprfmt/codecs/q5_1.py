"""Q5_1: 32 elements, scale and minimum; value = q * d + m.

0   2  d   float16
2   2  m   float16, the smallest element
4   4  qh  bit i is the fifth bit of element i
8  16  qs  low nibbles are elements 0-15, high nibbles 16-31
"""

from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column
from aprfmt.codecs.bits import pack_bits, pack_halves, unpack_bits, unpack_halves
from aprfmt.codecs.importance_weights import plain_scale_and_min, weighted_scale_and_min


class Q5_1(BlockCodec):
    """Five bits under a float16 scale and a float16 minimum."""

    name = "Q5_1"
    step = "d"
    offset = "m"
    weighs_rows = True

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 32] with q * d + m, rounded twice as by ggml's decoder."""
        low = unpack_halves(block["qs"]).reshape(-1, 32)
        out[:] = low | unpack_bits(block["qh"]) << 4
        out *= scale_column(block["d"])
        out += scale_column(block["m"])

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 32]: 31 steps from the smallest to the largest element.

        With importance (`weights` and `sigma2`) ggml's search finds scale and minimum.
        """
        if weights is not None and sigma2 is not None:
            d, m, q = weighted_scale_and_min(x, 31, weights, sigma2, fused)
        else:
            d, m, q = plain_scale_and_min(x, 31, fused)
        block["d"], block["m"] = d, m
        block["qh"] = pack_bits(q >> 4 & 1)
        block["qs"] = pack_halves(q & 15)


CODEC = Q5_1()
