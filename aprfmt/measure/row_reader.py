"""Reads rows of a tensor by number, decoded on demand."""

from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.codecs import decode
from aprfmt.errors import UnsupportedError
from aprfmt.tensors.runs import RunBytes
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

KEPT = 1 << 20  # elements up to which a tensor is decoded once and kept


class RowReader:
    """A tensor seen as [rows, columns]; a vector has one value per row."""

    def __init__(self, side: View) -> None:
        """Set rows and columns of a view; nothing is read."""
        self.side = side
        self.shape = side.shape
        self.encoding = side.encoding
        vector = len(self.shape) < 2
        self.columns = 1 if vector else self.shape[-1]
        self.rows = prod(self.shape) if vector else prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def name(self) -> str:
        """The first stored name of the tensor."""
        return self.side.names[0]

    @property
    def decodes_rows(self) -> bool:
        """Whether single rows, or values of a vector, can be decoded without all others."""
        return self.row_bytes is not None

    @cached_property
    def bytes(self) -> RunBytes:
        """The bytes of the logical tensor; empty if no file stores exactly these bytes."""
        return self.side.data or RunBytes([])

    @cached_property
    def whole(self) -> "Array":
        """All values [rows, columns] in a float type (or int64), decoded once."""
        return widen_values(self.side.numpy()).reshape(self.rows, self.columns)

    def take(self, index: "Array | list[int]") -> "Array":
        """Return the decoded rows of these numbers (in any order), [n, columns]."""
        if self.size <= KEPT or not self.decodes_rows:
            return self.whole[index]
        index = np.asarray(index, np.int64)
        return self.decode_rows(self.raw(index))

    @cached_property
    def row_bytes(self) -> int | None:
        """Bytes of a row of the logical tensor; None where rows are not separate stored bytes."""
        if not self.rows or not len(self.bytes) or self.side.restored:
            return None
        row = encoding_row(self.encoding)
        size = row.type_size if len(self.shape) < 2 else self.side.row_bytes
        return size if size is not None and size * self.rows == len(self.bytes) else None

    def raw(self, index: "Array") -> "Array":
        """Return the stored bytes of these rows (uint8 [n, row_bytes]).

        They have to be separate stored bytes: `row_bytes` is not None.
        """
        size = self.row_bytes
        assert size is not None
        index = np.asarray(index, np.int64)
        breaks = np.flatnonzero(np.diff(index) != 1) + 1
        pieces = [
            self.bytes.window(int(run[0]) * size, (int(run[-1]) + 1) * size)
            for run in np.split(index, breaks)
            if run.size
        ]
        joined = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return np.frombuffer(joined, np.uint8).reshape(index.size, size)

    def decode_rows(self, raw: "Array", encoding: str = "") -> "Array":
        """Return the values of the bytes of rows (uint8 [n, row_bytes]).

        `encoding` replaces the tensor's own, to read the bytes as another one.
        """
        parts = {"": np.ascontiguousarray(raw).tobytes()}
        return widen_values(decode(encoding or self.encoding, parts, (len(raw), self.columns)))

    def rows_as(self, encoding: str) -> "Callable[[Array], Array]":
        """Return a function from row numbers to these rows, their bytes decoded as `encoding`."""
        return lambda rows: self.decode_rows(self.raw(rows), encoding)

    def drop(self) -> None:
        """Release decoded values and mapped pages."""
        self.__dict__.pop("whole", None)
        self.side.drop()


class ComputedRows(RowReader):
    """Rows that are computed and not stored; a subclass implements `take`."""

    def take(self, index: "Array | list[int]") -> "Array":
        """Return the values of these row numbers (in any order), [n, columns].

        Subclasses implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    @cached_property
    def whole(self) -> "Array":
        """All values [rows, columns]."""
        return self.take(np.arange(self.rows))

    @cached_property
    def row_bytes(self) -> int | None:
        """None: the rows are not stored."""
        return None


class SelectedRows(RowReader):
    """Some rows of a tensor, as a tensor."""

    def __init__(self, reader: RowReader, index: "Array") -> None:
        """Select the rows of `reader` with these numbers, in their order."""
        super().__init__(reader.side)
        self.reader, self.index = reader, index
        self.rows = len(index)
        self.shape = (self.rows, self.columns)

    def take(self, index: "Array | list[int]") -> "Array":
        """Return the decoded rows of these numbers among the selected ones, [n, columns]."""
        if self.size <= KEPT:
            return self.whole[index]
        return self.reader.take(self.index[np.asarray(index, np.int64)])

    @cached_property
    def whole(self) -> "Array":
        """All values [rows, columns]."""
        return self.reader.take(self.index)

    @cached_property
    def row_bytes(self) -> int | None:
        """None: the rows are not consecutive bytes."""
        return None


def widen_values(values: "Array") -> "Array":
    """Return values in a type for arithmetic: int64, float64, or float32 for shorter floats.

    Raises UnsupportedError for complex numbers, which are compared but not explained.
    """
    if values.dtype.kind == "c":
        raise UnsupportedError("complex values are compared, but not explained")
    if values.dtype.kind in "biu":
        return values.astype(np.int64)
    return values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)
