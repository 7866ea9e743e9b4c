"""Q2_K: a superblock of 256 elements, 16 sub-blocks of 16; value = (d*scale) * q - (dmin*min).

0   16  scales  low nibble the scale, high nibble the min of a sub-block
16  64  qs      each half of 128 elements has 32 bytes; bits 2k of byte l are its element 32k + l
80   2  d       float16
82   2  dmin    float16
"""

from aprfmt.codecs.base import F32, BlockCodec, Blocks, Codes, largest_steps, scale_column
from aprfmt.codecs.bits import pack_crumbs
from aprfmt.codecs.k_search import SearchPlan, encode_scales_and_mins
from aprfmt.codecs.scale_searches import ScaleSteps


def pack_scales_and_mins(scales: Codes, mins: Codes) -> Codes:
    """Return one byte for each sub-block: the scale in the low nibble, the min in the high one."""
    return scales | mins << 4


def unpack_scales_and_mins(packed: Codes) -> tuple[Codes, Codes]:
    """Return (scales, mins), each below 16, of packed bytes of the same shape."""
    return packed & 15, packed >> 4


_PLAN = SearchPlan(
    16,
    3,
    15,
    ScaleSteps(-0.5, 0.1, 15, absolute=True),
    1,
    pack_scales_and_mins,
    unpack_scales_and_mins,
)


class Q2_K(BlockCodec):
    """Two bits with a 4-bit scale and a 4-bit min every 16 elements."""

    name = "Q2_K"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with (d*scale) * q - (dmin*min).

        The products d*scale and dmin*min are rounded first: bit equality needs that order.
        """
        scales, mins = unpack_scales_and_mins(block["scales"])
        packed = block["qs"].reshape(-1, 2, 32)
        q = out.reshape(-1, 2, 4, 32)  # (block, half, k, element)
        for k in range(4):
            q[:, :, k] = packed >> 2 * k & 3
        elements = out.reshape(-1, 16, 16)
        elements *= (scale_column(block["d"]) * scales)[..., None]
        elements -= (scale_column(block["dmin"]) * mins)[..., None]

    def block_steps(self, block: Blocks) -> F32:
        """Return float32 [n]: |d| times the largest scale of the superblock."""
        return largest_steps(block, unpack_scales_and_mins(block["scales"])[0])

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 256] by ggml's search; `sigma2` is not used.

        Without `weights` (importance) the search weighs by magnitude and compares absolute errors.
        """
        found = encode_scales_and_mins(x, _PLAN, weights, fused)
        block["d"], block["dmin"] = found.d, found.dmin
        block["scales"] = found.scales
        block["qs"] = pack_crumbs(found.codes.reshape(-1, 4, 32)).reshape(-1, 64)


CODEC = Q2_K()
