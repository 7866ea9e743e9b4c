"""IQ1_S: 256 elements; value = d * (2*scale + 1) * (grid + delta).

0   2  d   float16
2  32  qs  low 8 bits of the grid index, one for 8 elements
34 16  qh  8 words of 16 bits, one for 32 elements: bits 3k to 3k+2 are the high bits of index k,
           bits 12-14 the scale, bit 15 the sign of delta, which is 1/8
"""

import numpy as np

from aprfmt.codecs import iq_grids
from aprfmt.codecs.base import F32, BlockCodec, Blocks, scale_column

DELTA = np.float32(0.125)


class IQ1_S(BlockCodec):
    """One and a half bits: eight elements share one of 2048 ternary points."""

    name = "IQ1_S"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256]: add delta to the grid's values (exact), then scale."""
        qh = block["qh"]
        dl = scale_column(block["d"]) * (2 * (qh >> 12 & 7) + 1).astype(np.float32)
        delta = np.where(qh & 0x8000, -DELTA, DELTA)
        high = qh[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7  # (block, word, index)
        index = block["qs"].reshape(-1, 8, 4) | high << 8
        points = out.reshape(-1, 8, 4, 8)  # (block, word, index, element)
        np.add(iq_grids.IQ1[index], delta[..., None, None], out=points)
        points *= dl[..., None, None]


CODEC = IQ1_S()
