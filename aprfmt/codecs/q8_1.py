"""Q8_1: 32 signed bytes under one scale, and their sum; value = q * d. 36 bytes, not 40.

0   2  d   float16
2   2  s   float16, d times the sum of qs (for dot products; decoding does not need it)
4  32  qs  int8

gguf-py's table says 40 bytes (two float32); ggml's struct has had two float16 since 2023.
"""

from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column


class Q8_1(BlockCodec):
    """ggml's format of activations, seldom in a file."""

    name = "Q8_1"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 32] with q * d."""
        out[:] = block["qs"]
        out *= scale_column(block["d"])


CODEC = Q8_1()
