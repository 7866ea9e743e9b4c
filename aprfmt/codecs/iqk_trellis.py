"""ik_llama.cpp's trellis types, IQ1_KT to IQ4_KT: a code is the seed of several values.

From `x = code + 4096` every value takes `x = x * 0xCBAC1FED` (32 bits); it is the sum of the four
bytes of `x & 0x3F3F3F3F`, less 126. value = d * scale * that, with the row's d; a group of 8
elements (IQ4_KT: 4) has one code, a sub-block of 32 one scale.

IQ1_KT  0 8 sh (bits 0-3 the scale, 4-7 the 13th bits of four codes), 8 32 ql, 40 16 qh
IQ2_KT  0 4 scales (low nibbles 0-3, high ones 4-7), 4 64 ql (16 bits a code)
IQ3_KT  as IQ2_KT, of magnitudes, and 68 32 qh: a bit a sub-block, the signs of its 32 elements;
        scales are 0 to 15
IQ4_KT  0 32 scales: 8 words of 32 bits (bit 0 adds 32768 to the codes, 1-7 less 64 the scale,
        8-31 bits 12-14 of eight codes), 32 64 ql, 96 32 qh

Scales of IQ1_KT and IQ2_KT are the values of IQ4_NL. Source: ik_llama.cpp's iqk_quantize.cpp
(QuantizerIQKT, dequantize_row_*).
"""

import numpy as np

from aprfmt.codecs.base import F32, Blocks, Codes
from aprfmt.codecs.bits import unpack_halves
from aprfmt.codecs.iq4_nl import VALUES
from aprfmt.codecs.iqk import unpack_bit_planes
from aprfmt.codecs.row_codec import RowCodec

_FACTOR, _MASK = np.uint32(0xCBAC1FED), np.uint32(0x3F3F3F3F)
_OFFSET, _FURTHER = np.uint32(4096), np.uint32(32768)


def expand_seeds(seeds: Codes, count: int) -> F32:
    """Return float32 [..., count]: the `count` values that follow from each seed.

    `seeds` are codes to which the offset 4096 was added.
    """
    x = seeds.astype(np.uint32)
    found = np.empty((*x.shape, count), np.float32)
    for k in range(count):
        x = x * _FACTOR
        small = np.ascontiguousarray(x & _MASK)[..., None].view(np.uint8)
        found[..., k] = small.sum(axis=-1, dtype=np.int32) - np.float32(126)
    return found


class _Trellis(RowCodec):
    """A codec of superblocks of 8 sub-blocks of 32 elements, with seeds and scales."""

    group = 8

    def seeds(self, block: Blocks) -> Codes:
        """Return the seeds [n, 8, 32 / group] of n blocks, with the offset added.

        Subclasses implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    def scales(self, block: Blocks) -> F32:
        """Return the scales float32 [n, 8] of n blocks.

        Subclasses implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    def points(self, block: Blocks) -> F32:
        """Return the values before they are scaled, [n, 8, 32]."""
        return expand_seeds(self.seeds(block), self.group).reshape(-1, 8, 32)

    def decode_scaled(self, d: F32, block: Blocks, out: F32) -> None:
        """Fill `out` with the values of n blocks under the rows' scales `d` [n, 1].

        d * scale is rounded first: bit equality needs that order.
        """
        dl = d * self.scales(block)
        np.multiply(dl[..., None], self.points(block), out=out.reshape(-1, 8, 32))


class Iq1Kt(_Trellis):
    """13 bits for eight elements."""

    name = "IQ1_KT"

    def seeds(self, block: Blocks) -> Codes:
        """Return the seeds [n, 8, 4]: eight bits in ql, four in qh, the thirteenth in sh."""
        low = block["ql"].reshape(-1, 8, 4).astype(np.uint32)
        middle = unpack_halves(block["qh"]).reshape(-1, 8, 4).astype(np.uint32)
        top = block["sh"][..., None] >> np.arange(4, 8, dtype=np.uint8) & 1
        return (low | middle << 8 | top.astype(np.uint32) << 12) + _OFFSET

    def scales(self, block: Blocks) -> F32:
        """Return float32 [n, 8]: IQ4_NL's value for the low nibble of each byte of sh."""
        found: F32 = VALUES[block["sh"] & 15]
        return found


class Iq2Kt(_Trellis):
    """16 bits for eight elements."""

    name = "IQ2_KT"

    def seeds(self, block: Blocks) -> Codes:
        """Return the seeds [n, 8, 4]: 16 bits each, in order."""
        return block["ql"].reshape(-1, 8, 4).astype(np.uint32) + _OFFSET

    def scales(self, block: Blocks) -> F32:
        """Return float32 [n, 8]: IQ4_NL's value for each nibble."""
        return VALUES[unpack_halves(block["scales"]).reshape(-1, 8)]


class Iq3Kt(Iq2Kt):
    """16 bits for eight magnitudes, and their signs."""

    name = "IQ3_KT"

    def scales(self, block: Blocks) -> F32:
        """Return float32 [n, 8]: the nibbles, 0 to 15."""
        return unpack_halves(block["scales"]).reshape(-1, 8).astype(np.float32)

    def points(self, block: Blocks) -> F32:
        """Return the magnitudes [n, 8, 32]; `decode_scaled` applies the signs."""
        return np.abs(super().points(block))

    def decode_scaled(self, d: F32, block: Blocks, out: F32) -> None:
        """Fill `out` with scaled magnitudes, then apply the signs of qh.

        The signs come last: they also make zeros negative.
        """
        super().decode_scaled(d, block, out)
        signs = 1 - 2 * unpack_bit_planes(block["qh"]).astype(np.float32)
        out *= signs.reshape(out.shape)


class Iq4Kt(_Trellis):
    """15 bits for four elements, and one for eight such codes."""

    name = "IQ4_KT"
    group = 4

    def seeds(self, block: Blocks) -> Codes:
        """Return the seeds [n, 8, 8]: eight bits in ql, four in qh, three in the scale's word.

        Bit 0 of the scale's word adds 32768 to its eight seeds.
        """
        low = block["ql"].reshape(-1, 8, 8).astype(np.uint32)
        middle = unpack_halves(block["qh"]).reshape(-1, 8, 8).astype(np.uint32)
        top = block["scales"][..., None] >> np.arange(8, 32, 3, dtype=np.uint32) & 7
        further = (block["scales"] & 1)[..., None] * _FURTHER
        return (low | middle << 8 | top << 12) + further + _OFFSET

    def scales(self, block: Blocks) -> F32:
        """Return float32 [n, 8]: seven bits less 64."""
        found: F32 = (block["scales"] >> 1 & 127).astype(np.float32) - 64
        return found


IQ1_KT, IQ2_KT, IQ3_KT, IQ4_KT = Iq1Kt(), Iq2Kt(), Iq3Kt(), Iq4Kt()
