"""Q4_K: a superblock of 256 elements, 8 sub-blocks of 32; value = (d*scale) * q - (dmin*min).

0    2  d       float16
2    2  dmin    float16
4   12  scales  eight 6-bit scales and eight 6-bit mins (k_scales.py)
16 128  qs      4 runs of 32 bytes: low nibbles are sub-block 2i, high nibbles sub-block 2i+1
"""

from aprfmt.codecs import k_scales
from aprfmt.codecs.base import F32, BlockCodec, Blocks, largest_steps, scale_column
from aprfmt.codecs.bits import pack_halves
from aprfmt.codecs.k_search import SearchPlan, encode_scales_and_mins
from aprfmt.codecs.scale_searches import ScaleSteps

_PLAN = SearchPlan(
    32,
    15,
    63,
    ScaleSteps(-1.0, 0.1, 20),
    2,
    k_scales.pack_scales_and_mins,
    k_scales.unpack_scales_and_mins,
)


class Q4_K(BlockCodec):
    """Four bits with a 6-bit scale and a 6-bit min every 32 elements."""

    name = "Q4_K"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with (d*scale) * q - (dmin*min).

        The products d*scale and dmin*min are rounded first: bit equality needs that order.
        """
        scales, mins = k_scales.unpack_scales_and_mins(block["scales"])
        runs = block["qs"].reshape(-1, 4, 32)
        q = out.reshape(-1, 4, 2, 32)  # (block, run, low or high, element)
        q[:, :, 0] = runs & 15
        q[:, :, 1] = runs >> 4
        elements = out.reshape(-1, 8, 32)
        elements *= (scale_column(block["d"]) * scales)[..., None]
        elements -= (scale_column(block["dmin"]) * mins)[..., None]

    def block_steps(self, block: Blocks) -> F32:
        """Return float32 [n]: |d| times the largest scale of the superblock."""
        return largest_steps(block, k_scales.unpack_scales_and_mins(block["scales"])[0])

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 256] by ggml's search for scales and mins.

        `weights` is the importance of each element; `sigma2` is not used.
        """
        found = encode_scales_and_mins(x, _PLAN, weights, fused)
        block["d"], block["dmin"] = found.d, found.dmin
        block["scales"] = found.scales
        block["qs"] = pack_halves(found.codes.reshape(-1, 64)).reshape(-1, 128)


CODEC = Q4_K()
