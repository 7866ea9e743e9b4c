"""MXFP4: 32 E2M1 elements under one power of two; value = 2**(e - 127) * E2M1[q].

0   1  e   E8M0: the exponent, biased by 127
1  16  qs  low nibbles are elements 0-15, high nibbles 16-31

As ggml does, the table below is doubled and the power halved, so that e = 0 and 1 give subnormal
powers; and e = 255, a NaN in the OCP specification, is the next power of two, as in ggml.
"""

import numpy as np

from aprfmt.codecs.base import F32, U8, BlockCodec, Blocks
from aprfmt.codecs.bits import pack_halves, unpack_halves

# Twice the values of E2M1; code 8 is a zero without sign.
VALUES: F32 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)

GAP = np.float32(4)  # between the two largest


def half_power(e: U8) -> F32:
    """Return 2**(e - 128) as float32; exact, subnormal for e = 0 and 1."""
    wide = e.astype(np.uint32)
    bits = np.where(wide < 2, np.uint32(0x00200000) << wide, wide - 1 << 23)
    powers: F32 = bits.astype(np.uint32).view(np.float32)
    return powers


def nearest_e2m1(x: F32, d: F32) -> U8:
    """Return the code of the VALUES * d nearest to x; a tie goes to the smaller magnitude.

    `x` is [n, size], `d` [n, 1]. Zero is code 0, never 8.
    """
    magnitude = np.abs(x)
    best = np.zeros(x.shape, np.uint8)
    least = magnitude.copy()
    for code in range(1, 8):
        error = np.abs(VALUES[code] * d - magnitude)
        better = error < least
        best[better] = code
        np.copyto(least, error, where=better)
    return best | np.where((x < 0) & (best > 0), np.uint8(8), np.uint8(0))


class MXFP4(BlockCodec):
    """The OCP microscaling format, four bits."""

    name = "MXFP4"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 32] with VALUES[q] times half the block's power of two."""
        np.take(VALUES, unpack_halves(block["qs"]), out=out.reshape(-1, 2, 16), mode="wrap")
        out *= half_power(block["e"])[:, None]

    def block_steps(self, block: Blocks) -> F32:
        """Return float32 [n]: half the power of two times the widest gap of the doubled table."""
        found: F32 = half_power(block["e"]).reshape(-1) * GAP
        return found

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 32]; `fused`, `weights` and `sigma2` are not used.

        The power of two is the one below a quarter of the largest magnitude. The exponent of a
        block below 2**-125 wraps, as ggml's conversion to a byte does; such a block becomes zeros.
        """
        largest = np.abs(x).max(axis=1)
        # float32(log2) reaches an integer from just below it, and ggml's log2f does, too.
        exponent = np.floor(np.log2(largest.astype(np.float64)).astype(np.float32)) - 2 + 127
        e = np.where(largest > 0, exponent, 0).astype(np.int32).astype(np.uint8)
        block["e"] = e
        block["qs"] = pack_halves(nearest_e2m1(x, half_power(e)[:, None]))


CODEC = MXFP4()
