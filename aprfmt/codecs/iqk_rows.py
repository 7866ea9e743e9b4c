"""ik_llama.cpp's types with one scale a row: IQ2_KS to IQ5_KS, IQ4_KSS, IQ2_KL, IQ*_BN, Q8_KV.

A superblock of 256 has 8 sub-blocks of 32; value = d * scale * VALUES[q] with the row's d, over the
two tables of the types without S (`iqk`).

IQ2_KS   0 2 extra (bits 0-7 the table, 8-15 the fifth bit of a scale), 2 4 scales, 6 64 qs
IQ3_KS   0 2 extra (bits 0-7 the fifth bit, 8-15 the table), 2 4 scales (low nibbles 0-3, high
         ones 4-7), 6 64 qs, 70 32 qh
IQ4_KS   0 8 scales (the lowest bit is the table, the rest less 127 the scale), 8 128 qs
IQ5_KS   as IQ4_KS, and 136 32 qh
IQ4_KSS  0 128 qs: 8 words of 16 bits a sub-block; the lowest bits of these are its scale, the rest
         x of each word gives the nibbles x ^ x >> 1
IQ2_KL   0 2 scales_h, 2 4 scales_l (6 bits, less 32), 6 64 qs, 70 16 qh: five bits choose a pair
IQ1_BN   0 12 ql, 12 1 extra: 64 ternary digits, five a byte; value = d * (digit - 1)
IQ2_BN   0 16 qs: 64 codes of two bits, 16 a plane; value = d * (q - 1)
Q8_KV    32 int8; the header holds d and the sum of the row

Source: ik_llama.cpp's iqk_quantize.cpp. Its function that decodes a row of IQ1_BN or IQ2_BN leaves
the scale out; its products and its writer (`quantize_one_row_*`) have it.
"""

import numpy as np

from aprfmt.codecs.base import F32, Blocks, Codes
from aprfmt.codecs.bits import unpack_halves, unpack_pairs
from aprfmt.codecs.iqk import (
    IQ2,
    IQ3,
    IQ4,
    IQ5,
    WIDEST,
    SubBlocks,
    unpack_bit_planes,
    unpack_fields,
    unpack_flags,
)
from aprfmt.codecs.iqk import unpack_bit_pairs as _planes
from aprfmt.codecs.row_codec import RowCodec

# iq2kl_values: the low byte is the first number of a pair
_PAIRS = (
    0xE9C1, 0x0DC1, 0xC1D8, 0xF6D8, 0x0DD8, 0x2FD8, 0xD8E9, 0xE9E9, 0x01E9, 0x0DE9, 0x1CE9,
    0xC1F6, 0x01F6, 0x0DF6, 0x2FF6, 0xE901, 0xF601, 0x0101, 0x0D01, 0x1C01, 0xD80D, 0xE90D,
    0xF60D, 0x010D, 0x0D0D, 0xC11C, 0xE91C, 0x011C, 0x1C1C, 0x2F1C, 0xE92F, 0x0D2F,
)  # fmt: skip
KL: F32 = np.array(_PAIRS, "<u2").view(np.int8).reshape(32, 2).astype(np.float32)


class _RowScaled(SubBlocks, RowCodec):
    """A codec of superblocks of 8 sub-blocks of 32 under the scale of the row."""

    def decode_scaled(self, d: F32, block: Blocks, out: F32) -> None:
        """Fill `out` with the values of n blocks under the rows' scales `d` [n, 1]."""
        self.fill(d, block, out)

    def row_steps(self, d: F32, block: Blocks) -> F32 | None:
        """Return float32 [n, 1]: d times the largest scale times the largest gap of the table.

        It is the largest distance between neighbouring values of each block.
        """
        largest = np.abs(self.scales(block)).max(axis=1, keepdims=True).astype(np.float32)
        found: F32 = d * largest * np.float32(self.widest)
        return found


class Iq2Ks(_RowScaled):
    """IQ2_K with scales of 5 bits and no float16 of its own."""

    name = "IQ2_KS"
    table, widest = IQ2, WIDEST["IQ2"]

    def codes(self, block: Blocks) -> Codes:
        """Return the 2-bit codes [n, 8, 32]: 32 bytes hold four sub-blocks."""
        return _planes(block["qs"])

    def scales(self, block: Blocks) -> Codes:
        """Return the scales [n, 8]: nibbles and a fifth bit, less 16."""
        high = unpack_flags(block["extra"] >> 8, 8).astype(np.int32) << 4
        return (unpack_pairs(block["scales"]) | high) - 16

    def second(self, block: Blocks) -> Codes:
        """Return [n, 8]: 1 where a sub-block takes the second table (low byte of `extra`)."""
        return unpack_flags(block["extra"], 8)


class Iq3Ks(_RowScaled):
    """IQ3_K with scales of 5 bits."""

    name = "IQ3_KS"
    table, widest = IQ3, WIDEST["IQ3"]

    def codes(self, block: Blocks) -> Codes:
        """Return the 3-bit codes [n, 8, 32]: two bits in qs, the third in qh."""
        return _planes(block["qs"]) | unpack_bit_planes(block["qh"]) << 2

    def scales(self, block: Blocks) -> Codes:
        """Return the scales [n, 8]: nibbles, the low ones first, and a fifth bit, less 16."""
        high = unpack_flags(block["extra"], 8).astype(np.int32) << 4
        return (unpack_halves(block["scales"]).reshape(-1, 8) | high) - 16

    def second(self, block: Blocks) -> Codes:
        """Return [n, 8]: 1 where a sub-block takes the second table (high byte of `extra`)."""
        return unpack_flags(block["extra"] >> 8, 8)


class Iq4Ks(_RowScaled):
    """IQ4_K with scales of 7 bits."""

    name = "IQ4_KS"
    table, widest = IQ4, WIDEST["IQ4"]

    def codes(self, block: Blocks) -> Codes:
        """Return the 4-bit codes [n, 8, 32]: 16 bytes a sub-block, low nibbles, then high ones."""
        return unpack_halves(block["qs"].reshape(-1, 16)).reshape(-1, 8, 32)

    def scales(self, block: Blocks) -> Codes:
        """Return the scales [n, 8]: all bits of the byte but the lowest, less 127."""
        return (block["scales"] & 254).astype(np.int32) - 127

    def second(self, block: Blocks) -> Codes:
        """Return [n, 8]: 1 where a sub-block takes the second table (lowest bit of the scale)."""
        return block["scales"] & 1


class Iq5Ks(Iq4Ks):
    """IQ5_K with scales of 7 bits."""

    name = "IQ5_KS"
    table, widest = IQ5, WIDEST["IQ5"]

    def codes(self, block: Blocks) -> Codes:
        """Return the 5-bit codes [n, 8, 32].

        32 bytes of qs hold two sub-blocks: low nibbles, then high ones. Bit k of every byte of qh
        belongs to sub-block k.
        """
        low = unpack_halves(block["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
        return low | unpack_bit_planes(block["qh"]) << 4


class Iq4Kss(_RowScaled):
    """IQ4_KS in exactly four bits: a scale is made of its codes' lowest bits."""

    name = "IQ4_KSS"
    table, widest = IQ4, WIDEST["IQ4"]

    def codes(self, block: Blocks) -> Codes:
        """Return the 4-bit codes [n, 8, 32].

        A word with its lowest bit cleared, x, gives the nibbles x ^ x >> 1, in the order of IQ4_KS.
        """
        words = block["qs"] & 0xFFFE
        plain = np.ascontiguousarray(words ^ words >> 1).astype("<u2").view(np.uint8)
        return unpack_halves(plain.reshape(-1, 16)).reshape(-1, 8, 32)

    def _scale_bytes(self, block: Blocks) -> Codes:
        """Return [n, 8]: the byte made of the lowest bits of each sub-block's eight words."""
        lowest = (block["qs"].reshape(-1, 8) & 1).astype(np.int32)
        found: Codes = (lowest << np.arange(8)).sum(axis=1).reshape(-1, 8)
        return found

    def scales(self, block: Blocks) -> Codes:
        """Return the scales [n, 8]: all bits of the byte but the lowest, less 127."""
        return (self._scale_bytes(block) & 254) - 127

    def second(self, block: Blocks) -> Codes:
        """Return [n, 8]: 1 where a sub-block takes the second table (lowest bit of the scale)."""
        return self._scale_bytes(block) & 1


class Iq2Kl(_RowScaled):
    """Five bits choose one of 32 pairs."""

    name = "IQ2_KL"

    def scales(self, block: Blocks) -> Codes:
        """Return the scales [n, 8]: four and two bits less 32.

        Low nibbles are 0-3, high ones 4-7.
        """
        high = block["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
        low = unpack_halves(block["scales_l"]).reshape(-1, 8)
        return (low | high << 4).astype(np.int32) - 32

    def decode_scaled(self, d: F32, block: Blocks, out: F32) -> None:
        """Fill `out` with the pairs of n blocks under the rows' scales `d` [n, 1].

        16 bytes hold two sub-blocks of 16 codes of pairs: low nibbles, then high ones.
        """
        low = unpack_halves(block["qs"].reshape(-1, 16)).reshape(-1, 8, 16)
        points = KL[low | unpack_fields(block["qh"], 8, 1) << 4]
        dl = d * self.scales(block).astype(np.float32)
        np.multiply(dl[..., None, None], points, out=out.reshape(-1, 8, 16, 2))

    def row_steps(self, d: F32, block: Blocks) -> None:
        """Return None: pairs have no order, so no value has a neighbour."""


class _Ternary(RowCodec):
    """A codec of the values -1, 0 and 1 under the scale of the row."""

    def digits(self, block: Blocks) -> Codes:
        """Return the codes [n, 64] of n blocks, each 0, 1 or 2.

        Subclasses implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    def decode_scaled(self, d: F32, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 64] with d * (digit - 1)."""
        np.multiply(self.digits(block).astype(np.float32) - 1, d, out=out)

    def row_steps(self, d: F32, block: Blocks) -> F32:
        """Return float32 [n, 1]: the row's scale, the distance between neighbouring values."""
        return d


class Iq1Bn(_Ternary):
    """Five ternary digits a byte; the 16th of each 16 is in `extra`."""

    name = "IQ1_BN"

    def digits(self, block: Blocks) -> Codes:
        """Return the ternary digits [n, 64].

        A byte times 81, 27, 9, 3 or 1, modulo 256, has one digit in front: the whole part of 3 *
        byte / 256.
        """
        powers = np.array((81, 27, 9, 3, 1), np.uint8)
        first = block["ql"].reshape(-1, 4, 3, 1) * powers  # wraps: bytes
        last = (block["extra"][:, None] * powers[:4]).reshape(-1, 4, 1)
        shifted = np.concatenate([first.reshape(-1, 4, 15), last], axis=2).astype(np.int32)
        return (shifted + (shifted >> 1) >> 7).reshape(-1, 64)


class Iq2Bn(_Ternary):
    """Two bits a digit."""

    name = "IQ2_BN"

    def digits(self, block: Blocks) -> Codes:
        """Return the 2-bit codes [n, 64]: byte i of 16 has codes i, i + 16, i + 32, i + 48."""
        return unpack_fields(block["qs"], 4, 2).reshape(-1, 64)


class Q8Kv(RowCodec):
    """Eight bits an element; one float32 scale for each row."""

    name = "Q8_KV"

    def decode_scaled(self, d: F32, block: Blocks, out: F32) -> None:
        """Fill `out` with each code times its row's scale."""
        np.multiply(d, block["qs"].astype(np.float32), out=out)

    def row_steps(self, d: F32, block: Blocks) -> F32:
        """Return float32 [n, 1]: the row's scale, the distance between neighbouring values."""
        return d


IQ2_KS, IQ3_KS, IQ4_KS, IQ5_KS, IQ4_KSS = Iq2Ks(), Iq3Ks(), Iq4Ks(), Iq5Ks(), Iq4Kss()
IQ2_KL, IQ1_BN, IQ2_BN, Q8_KV = Iq2Kl(), Iq1Bn(), Iq2Bn(), Q8Kv()
