"""IQ4_NL: 32 elements over a table of 16 uneven steps; value = d * VALUES[q].

0   2  d   float16
2  16  qs  low nibbles are elements 0-15, high nibbles 16-31
"""

import numpy as np

from aprfmt.codecs.arithmetic import reciprocal
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column
from aprfmt.codecs.bits import pack_halves, unpack_halves
from aprfmt.codecs.iq4_search import nearest_index, search_scales

# ggml-common.h, kvalues_iq4nl
VALUES: F32 = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)

GAP = np.float32(np.diff(VALUES).max())  # between the last two


class IQ4_NL(BlockCodec):
    """Four bits, denser near zero."""

    name = "IQ4_NL"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 32] with d * VALUES[q]."""
        np.take(VALUES, unpack_halves(block["qs"]), out=out.reshape(-1, 2, 16), mode="wrap")
        out *= scale_column(block["d"])

    def block_steps(self, block: Blocks) -> F32:
        """Return each block's step, float32 [n]: the largest distance of neighbouring values.

        That is |d| times the widest gap of the table. Rounding to this encoding moves no value by
        more than half of it.
        """
        found: F32 = np.abs(scale_column(block["d"])).reshape(-1) * GAP
        return found

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 32]: ggml's search for the scale, then the nearest value.

        `weights` are the importance of each element; `sigma2` is not used.
        """
        d = search_scales(x, 32, VALUES, weights, fused)
        block["d"] = d[:, 0]
        block["qs"] = pack_halves(nearest_index(VALUES, reciprocal(d) * x).astype(np.uint8))


CODEC = IQ4_NL()
