"""TQ1_0: 256 ternary elements, five to a byte; value = d * (digit - 1).

0   48  qs  5 base-3 digits a byte; the first 32 bytes hold elements 0-159, byte l digit k being
            element 32k + l; the next 16 bytes hold 160-239 likewise in runs of 16
48   4  qh  4 digits a byte: byte l digit k is element 240 + 4k + l
52   2  d   float16

A byte is ceil(256 * number / 243): digit k is found by multiplying with 3**k modulo 256 and
taking the integer part of 3/256 of the product.
"""

import numpy as np

from aprfmt.codecs.arithmetic import reciprocal, round_half_away, truncate_to_int
from aprfmt.codecs.base import F32, U8, BlockCodec, Blocks, scale_column

# bytes in a run, digits a byte, first element
RUNS = (("qs", slice(0, 32), 5), ("qs", slice(32, 48), 5), ("qh", slice(0, 4), 4))


class TQ1_0(BlockCodec):
    """Ternary weights at 1.69 bits."""

    name = "TQ1_0"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with d * (digit - 1)."""
        first = 0
        for field, at, digits in RUNS:
            packed: U8 = block[field][:, at]
            for k in range(digits):
                shifted = packed * np.uint8(3**k)  # modulo 256: drops the digits before k
                out[:, first : first + packed.shape[1]] = shifted.astype(np.uint16) * 3 >> 8
                first += packed.shape[1]
        out -= 1
        out *= scale_column(block["d"])

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 256]; `fused`, `weights` and `sigma2` are not used.

        The scale is the largest magnitude. Ties are rounded away from zero.
        """
        d = np.abs(x).max(axis=1, keepdims=True)
        digit = truncate_to_int(round_half_away(x * reciprocal(d))) + 1
        block["d"] = d[:, 0]
        first = 0
        for field, at, digits in RUNS:
            width = at.stop - at.start
            number = np.zeros((len(x), width), np.int32)
            for k in range(5):  # a run of four digits ends in a zero
                number *= 3
                if k < digits:
                    number += digit[:, first : first + width]
                    first += width
            block[field][:, at] = (number * 256 + 242) // 243


CODEC = TQ1_0()
