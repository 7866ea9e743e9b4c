"""The sources of a weight's numbers, read by rows: an array, or a logical tensor of a model."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.protocols import raw_parts
from aprfmt.base.shapes import matrix_shape
from aprfmt.codecs import codec

if TYPE_CHECKING:
    from aprfmt.codecs.bnb4 import CodedParts
    from aprfmt.tensors.view import View

Array = NDArray[Any]
PAGE = 4096
FREE = ("float32", "float64")  # dtypes that need no decoding


class RowSource(Protocol):
    """A source of a weight's numbers as [rows, last axis], read by whole rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, outermost axis first."""
        ...

    @property
    def encoding(self) -> str:
        """Name of the encoding of the stored bytes."""
        ...

    def numpy(self) -> Array:
        """Return the whole tensor, decoded."""
        ...

    def decode_rows(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) of the tensor seen as [rows, last axis]."""
        ...

    @property
    def by_rows(self) -> bool:
        """Whether rows can be decoded alone; if not, `decode_rows` decodes the whole tensor."""
        ...

    @property
    def nbytes(self) -> int:
        """Number of stored bytes."""
        ...

    def encoded(self, start: int, stop: int) -> bytes | memoryview | None:
        """Return the stored bytes of rows [start, stop) in order; None if there are none.

        A view if they are contiguous in the file, else a copy.
        """
        ...

    def coded(self) -> "CodedParts | None":
        """Return the parts of a bitsandbytes 4-bit weight; None for any other weight."""
        ...

    def touch(self) -> None:
        """Make the system read the stored bytes into memory."""
        ...

    def drop(self) -> None:
        """Release the mapped pages of the stored bytes."""
        ...


def as_floats(values: Array) -> Array:
    """Return values unchanged if they are floats, integers as float32."""
    return values if values.dtype.kind == "f" else values.astype(np.float32)


class ArrayRows:
    """An array in memory; encoding F32 or F64."""

    by_rows = True

    def __init__(self, values: Array) -> None:
        """Take an array; integers are converted to float32."""
        self.values = as_floats(values)
        self.shape = tuple(self.values.shape)
        self.encoding = f"F{8 * self.values.dtype.itemsize}"
        self.nbytes = int(self.values.nbytes)

    def numpy(self) -> Array:
        """Return the array itself."""
        return self.values

    def decode_rows(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) as a view of the array."""
        rows: Array = self.numpy().reshape(-1, self.shape[-1])[start:stop]
        return rows

    def encoded(self, start: int, stop: int) -> bytes | memoryview | None:
        """Return None: nothing is encoded."""
        return None

    def coded(self) -> "CodedParts | None":
        """Return None: nothing is encoded."""
        return None

    def touch(self) -> None:
        """Do nothing: the array is in memory."""

    def drop(self) -> None:
        """Do nothing: the array is in memory."""


class ChangedRows:
    """Another source with a function applied to its numbers, whenever they are decoded."""

    def __init__(self, rows: RowSource, change: Callable[[Array], Array]) -> None:
        """Take a source, and an element-wise function of a decoded array."""
        self._rows = rows
        self._change = change
        self.shape = rows.shape
        self.encoding = "F32"
        self.nbytes = rows.nbytes
        self.by_rows = rows.by_rows

    def numpy(self) -> Array:
        """Return the whole tensor, decoded and changed."""
        return self._change(self._rows.numpy())

    def decode_rows(self, start: int, stop: int) -> Array:
        """Return rows [start, stop), decoded and changed."""
        return self._change(self._rows.decode_rows(start, stop))

    def encoded(self, start: int, stop: int) -> bytes | memoryview | None:
        """Return None: no stored bytes hold these numbers."""
        return None

    def coded(self) -> "CodedParts | None":
        """Return None: no stored codes and scales hold these numbers."""
        return None

    def touch(self) -> None:
        """Make the system read the source's stored bytes into memory."""
        self._rows.touch()

    def drop(self) -> None:
        """Release the mapped pages of the source's stored bytes."""
        self._rows.drop()


class StoredRows:
    """A logical tensor of an open model as a source of rows."""

    def __init__(self, tensor: "View") -> None:
        """Take a tensor; only its header is read."""
        self._tensor = tensor
        self.shape = tensor.shape
        self.encoding = tensor.encoding
        parts = [part for each in tensor.stored for part in (*each.parts.values(), each)]
        self.nbytes = sum(part.info.nbytes for part in parts)

    @property
    def by_rows(self) -> bool:
        """Whether rows can be decoded one by one."""
        return self._tensor.row_bytes is not None or self._tensor.by_rows is not None

    def numpy(self) -> Array:
        """Return the tensor decoded; plain little-endian floats are a view of the mapped file."""
        whole = self._tensor.whole
        if whole is not None and not whole.parts:
            row = encoding_row(self.encoding)
            if row.numpy in FREE and whole.info.nbytes == row.nbytes(self.shape):
                dtype = np.dtype(row.numpy).newbyteorder("<")
                return np.frombuffer(whole.raw(), dtype).reshape(self.shape)
        # Row-major whatever the file's layout: a product's bits follow the strides.
        return np.ascontiguousarray(self._tensor.numpy())

    def decode_rows(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) decoded; the whole tensor is decoded if it must be."""
        return self._tensor.rows(start, stop)

    def encoded(self, start: int, stop: int) -> bytes | memoryview | None:
        """Return the stored bytes of rows [start, stop); permuted rows are gathered.

        None if a layout step changes the bytes, or two rows share a byte.
        """
        data, size = self._tensor.data, self._tensor.row_bytes
        if data is None or size is None or len(data) != size * matrix_shape(self.shape)[0]:
            return None
        return data.window(start * size, stop * size)

    def coded(self) -> "CodedParts | None":
        """Return the checked parts of a bitsandbytes 4-bit weight; None for any other weight."""
        whole = self._tensor.whole
        if whole is None or not whole.parts:
            return None
        from aprfmt.codecs.bnb4 import Bnb4Codec

        found = codec(self.encoding)
        if not isinstance(found, Bnb4Codec):
            return None
        return found.coded(raw_parts(whole), math.prod(self.shape))

    def touch(self) -> None:
        """Read a byte of every page, so that the system loads the stored bytes into memory."""
        for run in self._tensor.stored_runs():
            np.add.reduce(np.frombuffer(run.tensor.raw(), np.uint8)[::PAGE], dtype=np.int64)

    def drop(self) -> None:
        """Release the mapped pages of the stored bytes."""
        self._tensor.drop()
