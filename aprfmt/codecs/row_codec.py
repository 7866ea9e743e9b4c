"""Blocks behind a header that stands once in front of every row: most types of ik_llama.cpp.

    header | block | block ... | header | block ...

The header holds a scale of the whole row. Where the columns are not told (`of_rows`), they follow
from the bytes: what the blocks of all elements leave over are the headers.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar, Self

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs.base import CHUNK, F32, Array, BlockCodec, Blocks, Bytes, part, record
from aprfmt.errors import CodecError


class RowCodec(BlockCodec):
    """Encodings whose rows begin with a header that holds `d`, the scale of all its blocks."""

    head: ClassVar[np.dtype[Any]]
    columns = 0  # of a row, 0 where nobody told

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            cls.head = record(ENCODINGS[cls.name].row_layout)

    def of_rows(self, columns: int) -> Self:
        """Return the codec of rows of so many elements."""
        found = copy(self)
        found.columns = columns
        return found

    def decode_scaled(self, d: F32, block: Blocks, out: F32) -> None:
        """Fill `out` [n, block_size] from `n` records; `d` [n, 1] are the scales of their rows."""
        raise NotImplementedError

    def row_steps(self, d: F32, block: Blocks) -> F32 | None:
        """Return the largest distance of neighbouring values in each of `n` records, if known."""
        return None

    def granule(self, raw: Mapping[str, Bytes], count: int) -> int:
        """Return the elements of a row; CodecError where `raw` does not fit `count`."""
        size = part(self.name, raw).size
        columns = self.columns or self._columns(size, count)
        rows = -(-count // columns)
        expected = rows * self._row(columns)
        if size != expected:
            raise CodecError(
                f"{self.name}: found {size} bytes, expected {expected} for {count} elements "
                f"in rows of {columns}, each with {self.head.itemsize} bytes in front"
            )
        return columns

    def cut(self, raw: Mapping[str, Bytes], start: int, stop: int) -> Mapping[str, Bytes]:
        """Return the rows of elements [start, stop)."""
        size, main = self._row(self.columns), part(self.name, raw)
        return {"": main[start // self.columns * size : -(-stop // self.columns) * size].data}

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill float32 `out` with whole rows; what it leaves of the last one is dropped.

        Raises CodecError where bytes do not fit it.
        """
        main = self.main(raw, out)
        columns = self.granule(raw, out.size)
        rows = -(-out.size // columns)
        scales, blocks = self._apart(main, rows, columns)
        step = max(1, CHUNK // columns)
        with np.errstate(all="ignore"):
            for start in range(0, rows, step):
                some = blocks[start : start + step]
                d = np.repeat(scales[start : start + step], blocks.shape[1]).reshape(-1, 1)
                filled = np.empty((some.size, self.block_size), np.float32)
                self.decode_scaled(d, some.reshape(-1), filled)
                at = slice(start * columns, min((start + step) * columns, out.size))
                out[at] = filled.reshape(-1)[: at.stop - at.start]

    def steps(self, raw: Mapping[str, Bytes], count: int) -> F32 | None:
        """Repeat each block's step for its elements."""
        columns = self.granule(raw, count)
        rows = -(-count // columns)
        scales, blocks = self._apart(part(self.name, raw), rows, columns)
        d = np.repeat(scales, blocks.shape[1]).reshape(-1, 1)
        found = self.row_steps(d, blocks.reshape(-1))
        return None if found is None else np.abs(found).reshape(-1).repeat(self.block_size)[:count]

    def _apart(self, main: Array, rows: int, columns: int) -> tuple[F32, Array]:
        """Return the scales [rows] and the blocks [rows, n] of stored rows."""
        stored = main.reshape(rows, self._row(columns))
        heads = np.ascontiguousarray(stored[:, : self.head.itemsize]).view(self.head)
        blocks = np.ascontiguousarray(stored[:, self.head.itemsize :]).view(self.layout)
        return heads["d"].reshape(-1).astype(np.float32), blocks

    def _row(self, columns: int) -> int:
        return self.head.itemsize + columns // self.block_size * self.type_size

    def _columns(self, size: int, count: int) -> int:
        """Return the columns that `size` bytes of `count` elements speak of; else one row's."""
        padded = max(1, -(-count // self.block_size)) * self.block_size
        rows, left = divmod(size - padded // self.block_size * self.type_size, self.head.itemsize)
        whole = rows > 0 and not left and padded % (rows * self.block_size) == 0
        return padded // rows if whole else padded
