"""Converts big-endian tensor data to little-endian, for every encoding ggml has.

What has a byte order is what ggml's decoder reads as one number (ggml-common.h for the members,
ggml-quants.c where it copies four bytes into a uint32_t): the layouts of the encoding table say
so, for the high bits of Q5_0 and Q5_1 and the sign words of IQ2_XXS and IQ3_XXS too. Upstream's
own converter covers F32, F16, BF16, Q4_0, Q8_0, Q4_K, Q6_K, Q1_0, TQ2_0, MXFP4 and NVFP4, and
agrees on all of them.
"""

from collections.abc import Callable
from functools import cache

from aprfmt.base.encodings import block_numbers
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.errors import UnsupportedError
from aprfmt.formats.mapped_file import StoredTensor


@cache
def byte_swapper(encoding: str) -> Callable[[memoryview], bytes]:
    """Return the function that reverses the byte order of whole blocks of an encoding.

    It is its own inverse. Raises UnsupportedError for an encoding whose layout is not known.
    """
    row = encoding_row(encoding)
    size = row.type_size
    if not (row.layout or row.numpy) or row.row_layout:
        raise UnsupportedError(
            f"{encoding}: its block layout is not known, so big-endian data of it cannot be "
            "read; convert the file where it was made"
        )
    widths = [width for _, width in block_numbers(row.layout)] or [size]
    order: list[int] = []  # where each byte of a block comes from
    for width in widths:
        order += reversed(range(len(order), len(order) + width))
    moved = [(at, source) for at, source in enumerate(order) if at != source]

    def swap(blocks: memoryview) -> bytes:
        """Return a copy of an encoding's blocks with the bytes of every number reversed."""
        given = bytes(blocks)
        result = bytearray(given)
        for at, source in moved:
            result[at::size] = given[source::size]
        return bytes(result)

    return swap


class SwappedTensor(StoredTensor):
    """A tensor of a big-endian file; `raw` returns little-endian bytes, made for each range."""

    __slots__ = ()

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return stored bytes [start, stop) in little-endian order, as a copy.

        Raises UnsupportedError where the layout of the encoding is not known.
        """
        stop = self.info.nbytes if stop is None else stop
        swap = byte_swapper(self.info.encoding)
        size = encoding_row(self.info.encoding).type_size
        super().raw(start, stop)  # judges the range
        first = start // size * size
        blocks = super().raw(first, -(-stop // size) * size)
        return memoryview(swap(blocks))[start - first : stop - first]
