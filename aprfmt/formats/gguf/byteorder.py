"""Big-endian tensor data turned into little-endian, for every encoding ggml has.

A block's layout is a struct format: letters for multi-byte integers and floats, `s` for bytes.
Fields are what ggml's decoder reads as one integer (ggml-common.h for the members, ggml-quants.c
where it copies four bytes into a uint32_t): the high bits of Q5_0 and Q5_1, the sign words of
IQ2_XXS and IQ3_XXS. Upstream's own converter covers F32, F16, BF16, Q4_0, Q8_0, Q4_K, Q6_K, Q1_0,
TQ2_0, MXFP4 and NVFP4, and agrees on all of them.
"""

import re
import struct
from collections.abc import Callable, Mapping
from functools import cache

from aprfmt.base.encodings import encoding as encoding_row
from aprfmt.errors import UnsupportedError
from aprfmt.formats.mapped import StoredTensor

LAYOUTS: Mapping[str, str] = {
    "F32": "I",
    "F16": "H",
    "Q4_0": "H16s",
    "Q4_1": "2H16s",
    "Q5_0": "HI16s",
    "Q5_1": "2HI16s",
    "Q8_0": "H32s",
    "Q8_1": "2H32s",
    "Q2_K": "16s64s2H",
    "Q3_K": "32s64s12sH",
    "Q4_K": "2H12s128s",
    "Q5_K": "2H12s32s128s",
    "Q6_K": "128s64s16sH",
    "Q8_K": "I256s16H",
    "IQ2_XXS": "H" + "4sI" * 8,  # 4 grid indices, then signs and scale in one word
    "IQ2_XS": "H32H8s",
    "IQ3_XXS": "H64s8I",
    "IQ1_S": "H32s8H",
    "IQ4_NL": "H16s",
    "IQ3_S": "H64s8s32s4s",
    "IQ2_S": "H64s8s8s",
    "IQ4_XS": "2H4s128s",
    "I8": "s",
    "I16": "H",
    "I32": "I",
    "I64": "Q",
    "F64": "Q",
    "IQ1_M": "32s16s4H",
    "BF16": "H",
    "TQ1_0": "48s4sH",
    "TQ2_0": "64sH",
    "MXFP4": "s16s",
    "NVFP4": "4s32s",
    "Q1_0": "H16s",
    "Q2_0": "H16s",
}

_MEMBER = re.compile(r"(\d*)([a-zA-Z])")


def fields(layout: str) -> list[tuple[int, int]]:
    """Return (offset, width) of every field of a block that has a byte order."""
    found = []
    at = 0
    for repeat, letter in _MEMBER.findall(layout):
        times = int(repeat or 1)
        width = struct.calcsize(f"<{letter}")
        if width > 1:
            found += [(at + number * width, width) for number in range(times)]
        at += times * width
    return found


@cache
def swapper(encoding: str) -> Callable[[memoryview], bytes]:
    """Return the function that reverses the byte order of whole blocks of an encoding.

    It is its own inverse. Raises UnsupportedError for an encoding whose layout is not known.
    """
    if encoding not in LAYOUTS:
        raise UnsupportedError(
            f"{encoding}: its block layout is not known, so big-endian data of it cannot be "
            "read; convert the file where it was made"
        )
    swapped = fields(LAYOUTS[encoding])
    size = encoding_row(encoding).type_size

    def swap(blocks: memoryview) -> bytes:
        if not swapped:
            return bytes(blocks)
        given = bytes(blocks)
        result = bytearray(given)
        for at, width in swapped:
            for byte in range(width):
                result[at + byte :: size] = given[at + width - 1 - byte :: size]
        return bytes(result)

    return swap


class SwappedTensor(StoredTensor):
    """A tensor of a big-endian file; `raw` gives little-endian bytes, made for the range asked."""

    __slots__ = ()

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return stored bytes [start, stop) in little-endian order, as a copy.

        Raises UnsupportedError where the layout of the encoding is not known.
        """
        stop = self.info.nbytes if stop is None else stop
        swap = swapper(self.info.encoding)
        size = encoding_row(self.info.encoding).type_size
        super().raw(start, stop)  # judges the range
        first = start // size * size
        blocks = super().raw(first, -(-stop // size) * size)
        return memoryview(swap(blocks))[start - first : stop - first]
