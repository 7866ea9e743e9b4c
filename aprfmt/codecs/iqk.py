"""IQ2_K to IQ6_K and Q6_0: ik_llama.cpp's blocks with scales of their own.

A superblock of 256 has 16 sub-blocks of 16 elements; value = d * scale * VALUES[q], where a bit of
`extra` a sub-block chooses between two tables, the second a little shifted.

IQ2_K  0 2 d, 2 2 extra, 4 8 scales (nibbles, less 8), 12 64 qs (2 bits)
IQ3_K  0 2 d, 2 2 extra, 4 2 scales_h (signs), 6 8 scales_l (nibbles s: 2s + 1), 14 64 qs,
       78 32 qh (the third bit)
IQ4_K  0 2 d, 2 2 extra, 4 4 scales_h, 8 8 scales_l (6 bits, less 32), 16 128 qs (nibbles)
IQ5_K  as IQ4_K, and 144 32 qh (the fifth bit)
IQ6_K  0 2 d, 2 2 extra, 4 16 scales (int8), 20 128 qs, 148 64 qh (two more bits)
Q6_0   0 2 d, 2 8 qh (two more bits), 10 16 qs: 32 elements, value = d * (q - 32)

Source: ik_llama.cpp's iqk_quantize.cpp (dequantize_row_*) and ggml-common.h (the tables). The
products of IQ6_K's cubic are rounded one by one, as its source has them; a build that contracts
them into multiply-adds differs in the last bit.
"""

import numpy as np

from aprfmt.codecs.base import F32, U8, BlockCodec, Blocks, Codes, largest_steps, scale_column
from aprfmt.codecs.bits import unpack_crumbs, unpack_halves, unpack_pairs
from aprfmt.codecs.iq4_nl import VALUES as _IQ4

IQ2: F32 = np.array((-31, -13, 1, 17, -26, -8, 6, 22), np.float32)
IQ3: F32 = np.array(
    (-63, -40, -23, -10, 1, 13, 28, 47, -59, -36, -19, -6, 5, 17, 32, 51), np.float32
)
IQ4: F32 = np.concatenate([_IQ4, _IQ4 + 4])
_IQ5 = (
    -126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
    -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121,
)  # fmt: skip
IQ5: F32 = np.array([*_IQ5, *(value + 2 for value in _IQ5)], np.float32)
WIDEST = {"IQ2": 18, "IQ3": 23, "IQ4": 24, "IQ5": 12, "IQ6": 7}  # the largest gap of a table


def look_up(table: F32, codes: Codes, second: Codes) -> F32:
    """Return the values of codes [n, k, m]: `table` holds two tables, one after the other.

    `second` [n, k] is 1 where a sub-block takes the second one.
    """
    size = table.size // 2
    found: F32 = table[codes.astype(np.intp) + second.astype(np.intp)[..., None] * size]
    return found


def unpack_flags(words: Codes, count: int) -> Codes:
    """Return the lowest `count` bits of each of `n` words as [n, count]."""
    return words[:, None] >> np.arange(count, dtype=words.dtype) & 1


def unpack_bit_pairs(qs: U8) -> Codes:
    """Return 2-bit codes of bytes [n, 64] as sub-blocks of 32, [n, 8, 32].

    32 bytes hold four sub-blocks, the first in the lowest bits.
    """
    return unpack_crumbs(qs.reshape(-1, 32)).reshape(-1, 8, 32)


def unpack_bit_planes(qh: U8) -> Codes:
    """Return the bits of bytes [n, 32] as [n, 8, 32], bit k of every byte at index k."""
    return unpack_fields(qh, 8, 1)


def unpack_fields(qh: U8, count: int, width: int) -> Codes:
    """Return `count` fields of `width` bits of [n, b] as [n, count, b], lowest first."""
    mask = (1 << width) - 1
    return np.stack([qh >> width * k & mask for k in range(count)], axis=1)


class SubBlocks(BlockCodec):
    """A codec of superblocks of k sub-blocks of m elements.

    Each sub-block has codes, a scale and a choice of two tables.
    """

    table: F32
    widest: int

    def codes(self, block: Blocks) -> Codes:
        """Return the integer codes [n, k, m] of n blocks.

        Subclasses implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    def scales(self, block: Blocks) -> Codes:
        """Return the integer scales [n, k] of n blocks with k sub-blocks each.

        Subclasses implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    def second(self, block: Blocks) -> Codes:
        """Return integers [n, k], 1 where a sub-block takes the second table and else 0.

        Subclasses implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    def fill(self, d: F32, block: Blocks, out: F32) -> None:
        """Fill `out` with the values of n blocks under float scales `d` [n, 1].

        d * scale is rounded first: bit equality needs that order.
        """
        dl = d * self.scales(block).astype(np.float32)
        values = look_up(self.table, self.codes(block), self.second(block))
        np.multiply(dl[..., None], values, out=out.reshape(values.shape))


class _HalfScaled(SubBlocks):
    """16 sub-blocks of 16 elements under a float16."""

    def second(self, block: Blocks) -> Codes:
        """Return [n, 16]: 1 where a sub-block takes the second table, from the bits of `extra`."""
        return unpack_flags(block["extra"], 16)

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] under each block's float16 scale d."""
        self.fill(scale_column(block["d"]), block, out)

    def block_steps(self, block: Blocks) -> F32:
        """Return float32 [n]: |d| times the largest scale times the largest gap of the table."""
        return largest_steps(block, self.scales(block)) * np.float32(self.widest)


def _six_bit_scales(block: Blocks) -> Codes:
    """Return the scales [n, 16], -32 to 31: four low bits and two high bits each, less 32."""
    high = unpack_fields(block["scales_h"], 4, 2).transpose(0, 2, 1).reshape(-1, 16)
    return (unpack_pairs(block["scales_l"]) | high << 4).astype(np.int32) - 32


class Iq2K(_HalfScaled):
    """Two bits over two tables of four."""

    name = "IQ2_K"
    table, widest = IQ2, WIDEST["IQ2"]

    def codes(self, block: Blocks) -> Codes:
        """Return the 2-bit codes [n, 16, 16]: byte i of 32 has codes i, i + 32, i + 64, i + 96."""
        return unpack_bit_pairs(block["qs"]).reshape(-1, 16, 16)

    def scales(self, block: Blocks) -> Codes:
        """Return the scales [n, 16]: nibbles less 8."""
        return unpack_pairs(block["scales"]).astype(np.int32) - 8


class Iq3K(_HalfScaled):
    """Three bits; scales are odd numbers with a sign."""

    name = "IQ3_K"
    table, widest = IQ3, WIDEST["IQ3"]

    def codes(self, block: Blocks) -> Codes:
        """Return the 3-bit codes [n, 16, 16]: two bits in qs, the third in qh."""
        return (unpack_bit_pairs(block["qs"]) | unpack_bit_planes(block["qh"]) << 2).reshape(
            -1, 16, 16
        )

    def scales(self, block: Blocks) -> Codes:
        """Return the scales [n, 16]: 2s + 1, negative where `scales_h` has the bit."""
        sign = 1 - 2 * unpack_flags(block["scales_h"], 16).astype(np.int32)
        return (2 * unpack_pairs(block["scales_l"]).astype(np.int32) + 1) * sign


class Iq4K(_HalfScaled):
    """Four bits: IQ4_NL's table, and the same four higher."""

    name = "IQ4_K"
    table, widest = IQ4, WIDEST["IQ4"]

    def codes(self, block: Blocks) -> Codes:
        """Return the 4-bit codes [n, 16, 16].

        16 bytes hold a pair of sub-blocks: low nibbles, then high ones.
        """
        return unpack_halves(block["qs"].reshape(-1, 16)).reshape(-1, 16, 16)

    def scales(self, block: Blocks) -> Codes:
        """Return the scales [n, 16], -32 to 31."""
        return _six_bit_scales(block)


class Iq5K(_HalfScaled):
    """Five bits over two tables of 32."""

    name = "IQ5_K"
    table, widest = IQ5, WIDEST["IQ5"]

    def codes(self, block: Blocks) -> Codes:
        """Return the 5-bit codes [n, 16, 16].

        32 bytes of qs hold 64 elements: low nibbles, then high ones. Bit k of every byte of qh
        belongs to the k-th run of 32 elements.
        """
        low = unpack_halves(block["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
        return (low | unpack_bit_planes(block["qh"]) << 4).reshape(-1, 16, 16)

    def scales(self, block: Blocks) -> Codes:
        """Return the scales [n, 16], -32 to 31."""
        return _six_bit_scales(block)


class Iq6K(_HalfScaled):
    """Six bits over a cubic: -127 + q * (6.2568 + q * (-0.11218 + q * 0.0011972))."""

    name = "IQ6_K"
    widest = WIDEST["IQ6"]

    def codes(self, block: Blocks) -> Codes:
        """Return the 6-bit codes [n, 16, 16]: nibbles as IQ5_K has them, two more bits in qh."""
        low = unpack_halves(block["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
        return (low | unpack_bit_pairs(block["qh"]) << 4).reshape(-1, 16, 16)

    def scales(self, block: Blocks) -> Codes:
        """Return the scales [n, 16], int8."""
        scales: Codes = block["scales"]
        return scales

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 256] with the scaled cubic, plus one where `extra` has the bit."""
        dl = scale_column(block["d"]) * self.scales(block).astype(np.float32)
        q = self.codes(block).astype(np.float32)
        cubic = q * np.float32(0.0011972) + np.float32(-0.11218)
        cubic = np.float32(-127) + q * (np.float32(6.2568) + q * cubic)
        cubic += unpack_flags(block["extra"], 16).astype(np.float32)[..., None]
        np.multiply(dl[..., None], cubic, out=out.reshape(-1, 16, 16))


class Sixes(BlockCodec):
    """Q6_0: six bits under one float16, as Q4_0 and Q5_0."""

    name = "Q6_0"
    step = "d"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 32] with d * (q - 32).

        Element j of a half has bits 4 and 5 in byte j % 8 of qh, in higher bits for j from 8 on.
        """
        fields = unpack_fields(block["qh"], 4, 2)  # [n, field, 8]: low 0-7, high 0-7, low 8-15, ...
        high = fields.reshape(-1, 2, 2, 8).transpose(0, 2, 1, 3).reshape(-1, 2, 16)
        codes = (unpack_halves(block["qs"]) | high << 4).astype(np.float32) - 32
        np.multiply(codes.reshape(-1, 32), scale_column(block["d"]), out=out)


IQ2_K, IQ3_K, IQ4_K, IQ5_K, IQ6_K, Q6_0 = Iq2K(), Iq3K(), Iq4K(), Iq5K(), Iq6K(), Sixes()
