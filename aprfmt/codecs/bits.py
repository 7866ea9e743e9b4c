"""Unpack bytes into small integers and pack them again, for codecs with the same bit layout.

Everything works on integers, in files uint8, [n, bytes] and keeps n; `n` is the number of blocks.
"""

import numpy as np

from aprfmt.codecs.base import U8, Codes


def unpack_halves(qs: Codes) -> Codes:
    """Return nibbles of [n, b] as [n, 2, b]: all low nibbles, then all high ones (GGML's order)."""
    return np.stack([qs & 15, qs >> 4], axis=1)


def pack_halves(q: Codes) -> Codes:
    """Return nibbles [n, 2*b] packed into [n, b]: the first half low, the second half high."""
    first, second = np.split(q, 2, axis=1)
    return first | second << 4


def unpack_pairs(qs: Codes) -> Codes:
    """Return nibbles of [n, b] as [n, 2*b], the low nibble of each byte first."""
    return np.stack([qs & 15, qs >> 4], axis=-1).reshape(len(qs), -1)


def pack_pairs(q: Codes) -> Codes:
    """Return nibbles [n, 2*b] packed into [n, b], even elements in the low nibbles."""
    return q[:, 0::2] | q[:, 1::2] << 4


def unpack_crumbs(qs: Codes) -> Codes:
    """Return the four 2-bit fields of [n, b] as [n, 4, b], lowest bits first."""
    return np.stack([qs >> 2 * k & 3 for k in range(4)], axis=1)


def pack_crumbs(q: Codes) -> Codes:
    """Return 2-bit values [n, 4, b] packed into [n, b], index 0 in the lowest bits."""
    return q[:, 0] | q[:, 1] << 2 | q[:, 2] << 4 | q[:, 3] << 6


def unpack_bits(qs: U8) -> U8:
    """Return the bits of [n, b] as [n, 8*b], lowest first."""
    return np.unpackbits(qs, axis=-1, bitorder="little")


def pack_bits(q: Codes) -> Codes:
    """Return zeros and ones [n, 8*b] packed into [n, b], lowest first."""
    return np.packbits(q, axis=-1, bitorder="little")


def pairs_to_halves(qs: U8) -> U8:
    """Return bytes [n, b] with their nibbles reordered: adjacent elements to GGML's halves.

    Before, a byte has elements 2i (low) and 2i + 1 (high). After, all low nibbles are the first
    half of the elements. `b` is a multiple of 8.
    """
    words = np.ascontiguousarray(qs).view("<u4").reshape(len(qs), 2, -1)
    spread = words[:, 0].astype("<u8")
    _spread_nibbles(spread)
    second = words[:, 1].astype("<u8")
    _spread_nibbles(second)
    second <<= np.uint64(4)
    spread |= second
    return spread.view(np.uint8)


def _spread_nibbles(words: Codes) -> None:
    """Spread the eight nibbles in the low half of every 64-bit word over its bytes, in place."""
    moved = np.empty_like(words)
    for shift, mask in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F)):
        np.left_shift(words, np.uint64(shift), out=moved)
        words |= moved
        words &= np.uint64(mask)


def halves_to_pairs(qs: U8) -> U8:
    """Return bytes [n, b] with the same nibbles, reordered from GGML's halves to adjacent elements.

    It undoes `pairs_to_halves`; `b` is a multiple of 8.
    """
    words = np.ascontiguousarray(qs).view("<u8")
    made = np.empty((len(qs), 2, words.shape[1]), "<u4")
    for half, shift in enumerate((0, 4)):
        nibbles = words >> np.uint64(shift)
        nibbles &= np.uint64(0x0F0F0F0F0F0F0F0F)
        _gather_nibbles(nibbles)
        made[:, half] = nibbles
    return made.view(np.uint8).reshape(len(qs), -1)


def _gather_nibbles(words: Codes) -> None:
    """Gather the low nibbles of the eight bytes of every 64-bit word in its low half, in place."""
    moved = np.empty_like(words)
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)):
        np.right_shift(words, np.uint64(shift), out=moved)
        words |= moved
        words &= np.uint64(mask)
