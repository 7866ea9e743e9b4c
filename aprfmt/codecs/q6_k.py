"""Q6_K: a superblock of 256 elements, 16 sub-blocks of 16; value = (d*scale) * (q - 32).

0   128  ql      low 4 bits
128  64  qh      high 2 bits
192  16  scales  int8
208   2  d       float16 (last, unlike the other K-quants)

Each half h of 128 elements has 64 bytes of ql and 32 of qh. Element 32k + l of a half takes byte
32*(k mod 2) + l of ql, its low nibble for k < 2 and its high one after, and bits 2k of qh byte l.
"""

import numpy as np

from aprfmt.codecs.arithmetic import largest_magnitude, nearest_product
from aprfmt.codecs.base import F32, BlockCodec, Blocks, largest_steps, scale_column
from aprfmt.codecs.bits import pack_crumbs, pack_halves
from aprfmt.codecs.importance_weights import block_first, element_first
from aprfmt.codecs.k_search import encode_codes
from aprfmt.codecs.scale_searches import SMALLEST, signed_scale


class Q6_K(BlockCodec):
    """Six bits with an 8-bit signed scale every 16 elements."""

    name = "Q6_K"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with (d*scale) * (q - 32).

        The product d*scale is rounded first: bit equality needs that order.
        """
        low = block["ql"].reshape(-1, 2, 2, 32)  # (block, half, k mod 2, byte)
        high = block["qh"].reshape(-1, 2, 32)
        q = out.reshape(-1, 2, 4, 32)  # (block, half, k, element)
        for k in range(4):
            nibble = low[:, :, k % 2] >> 4 if k >= 2 else low[:, :, k % 2] & 15
            q[:, :, k] = nibble | (high >> 2 * k & 3) << 4
        out -= 32
        out.reshape(-1, 16, 16)[:] *= (scale_column(block["d"]) * block["scales"])[..., None]

    def block_steps(self, block: Blocks) -> F32:
        """Return float32 [n]: |d| times the largest magnitude of the superblock's scales."""
        return largest_steps(block, block["scales"])

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 256] by ggml's search; `sigma2` is not used.

        `weights` is the importance of each element, not multiplied by its magnitude as elsewhere.
        """
        each = None if weights is None else element_first(weights, 16)
        scale, code = signed_scale(element_first(x, 16), 32, each, fused)
        values = scale.reshape(-1, 16)
        largest = largest_magnitude(values)
        inverse = np.float32(-128) / largest
        block["d"] = np.float32(1) / inverse
        block["scales"] = np.minimum(nearest_product(inverse[:, None], values, fused), 127)
        rounded = scale_column(block["d"]) * block["scales"]
        codes = encode_codes(x, block_first(code, 256), rounded, (-32, 31), plus=32)
        block["ql"] = pack_halves((codes & 15).reshape(-1, 128)).reshape(-1, 128)
        block["qh"] = pack_crumbs((codes >> 4).reshape(-1, 4, 32)).reshape(-1, 64)
        block[np.abs(largest) < SMALLEST] = np.zeros((), self.layout)


CODEC = Q6_K()
