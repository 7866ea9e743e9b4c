"""The base class of encodings whose rows begin with a header: most types of ik_llama.cpp.

    header | block | block ... | header | block ...

The header holds a scale of the whole row. Where the number of columns is not given (`of_rows`), it
follows from the bytes: what the blocks of all elements leave over are the headers.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar, Self

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs.base import CHUNK, F32, Array, BlockCodec, Blocks, Bytes, block_dtype, part_bytes
from aprfmt.errors import CodecError


class RowCodec(BlockCodec):
    """Encodings whose rows begin with a header that holds `d`, the scale of all its blocks."""

    head: ClassVar[np.dtype[Any]]
    columns = 0  # of a row, 0 where nobody told

    def __init_subclass__(cls) -> None:
        """Set the dtype of a row's header, `head`, from the encoding table."""
        super().__init_subclass__()
        if "name" in cls.__dict__:
            cls.head = block_dtype(ENCODINGS[cls.name].row_layout)

    def of_rows(self, columns: int) -> Self:
        """Return a copy of the codec for rows of `columns` elements."""
        found = copy(self)
        found.columns = columns
        return found

    def decode_scaled(self, d: F32, block: Blocks, out: F32) -> None:
        """Fill `out` [n, block_size] from `n` blocks; `d` [n, 1] are the scales of their rows.

        Subclasses implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    def row_steps(self, d: F32, block: Blocks) -> F32 | None:
        """Return each block's quantization step, float32 [n, 1]; None where it is not known.

        The step is the largest gap between two adjacent numbers that the block's codes can stand
        for. `d` [n, 1] are the scales of the blocks' rows. Codecs that know their steps override
        this method, which returns None.
        """
        return None

    def granule(self, raw: Mapping[str, Bytes], count: int) -> int:
        """Return the number of elements in a row: `cut` may start at each multiple of it.

        Raises CodecError where the bytes of `raw` do not fit `count` elements.
        """
        size = part_bytes(self.name, raw).size
        columns = self.columns or self._guess_columns(size, count)
        rows = -(-count // columns)
        expected = rows * self._row_bytes(columns)
        if size != expected:
            raise CodecError(
                f"{self.name}: found {size} bytes, expected {expected} for {count} elements "
                f"in rows of {columns}, each with {self.head.itemsize} bytes in front"
            )
        return columns

    def cut(self, raw: Mapping[str, Bytes], start: int, stop: int) -> Mapping[str, Bytes]:
        """Return {"": bytes} of the rows of elements [start, stop), headers included."""
        size, main = self._row_bytes(self.columns), part_bytes(self.name, raw)
        return {"": main[start // self.columns * size : -(-stop // self.columns) * size].data}

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill float32 `out` from whole rows; elements of the last row beyond `out` are dropped.

        Raises CodecError where the number of bytes does not fit.
        """
        main = self.main(raw, out)
        columns = self.granule(raw, out.size)
        rows = -(-out.size // columns)
        scales, blocks = self._split_rows(main, rows, columns)
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
        """Return float32 [count]: each block's step, repeated for its elements; None if unknown."""
        columns = self.granule(raw, count)
        rows = -(-count // columns)
        scales, blocks = self._split_rows(part_bytes(self.name, raw), rows, columns)
        d = np.repeat(scales, blocks.shape[1]).reshape(-1, 1)
        found = self.row_steps(d, blocks.reshape(-1))
        return None if found is None else np.abs(found).reshape(-1).repeat(self.block_size)[:count]

    def _split_rows(self, main: Array, rows: int, columns: int) -> tuple[F32, Array]:
        """Return (float32 scales [rows], blocks [rows, n]) of stored rows of `columns` elements."""
        stored = main.reshape(rows, self._row_bytes(columns))
        heads = np.ascontiguousarray(stored[:, : self.head.itemsize]).view(self.head)
        blocks = np.ascontiguousarray(stored[:, self.head.itemsize :]).view(self.layout)
        return heads["d"].reshape(-1).astype(np.float32), blocks

    def _row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of `columns` elements, its header included."""
        return self.head.itemsize + columns // self.block_size * self.type_size

    def _guess_columns(self, size: int, count: int) -> int:
        """Return the columns of a row, computed from `size` bytes for `count` elements.

        Every row has one header. If these give no whole number of rows, all elements are taken as
        one row.
        """
        padded = max(1, -(-count // self.block_size)) * self.block_size
        rows, left = divmod(size - padded // self.block_size * self.type_size, self.head.itemsize)
        whole = rows > 0 and not left and padded % (rows * self.block_size) == 0
        return padded // rows if whole else padded
