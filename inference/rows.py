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
from aprfmt.codecs.bnb4 import Bnb4Codec, Coded

if TYPE_CHECKING:
    from aprfmt.tensors.view import View

Array = NDArray[Any]
PAGE = 4096
FREE = ("float32", "float64")  # dtypes that need no decoding


class RowSource(Protocol):
    """A source of a weight's numbers as [rows, last axis], read by whole rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, outermost first."""
        ...

    @property
    def encoding(self) -> str:
        """Encoding of the stored bytes."""
        ...

    def numpy(self) -> Array:
        """Return the whole tensor, decoded."""
        ...

    def decode_rows(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) of the tensor seen as [rows, last axis]."""
        ...

    @property
    def by_rows(self) -> bool:
        """False if `decode_rows` has to decode the whole tensor."""
        ...

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        ...

    def encoded(self, start: int, stop: int) -> bytes | memoryview | None:
        """Return the stored bytes of rows [start, stop) in order; None if there are no such bytes.

        A view if they are contiguous in the file, else a copy.
        """
        ...

    def coded(self) -> Coded | None:
        """Return the parts of a bitsandbytes 4-bit weight; None for any other weight."""
        ...

    def touch(self) -> None:
        """Make the system read the stored bytes into memory."""
        ...

    def drop(self) -> None:
        """Release mapped pages."""
        ...


class ArrayRows:
    """An array in memory; encoding F32 or F64."""

    by_rows = True

    def __init__(self, values: Array) -> None:
        self.values = values if values.dtype.kind == "f" else values.astype(np.float32)
        self.shape = tuple(self.values.shape)
        self.encoding = f"F{8 * self.values.dtype.itemsize}"
        self.nbytes = int(self.values.nbytes)

    def numpy(self) -> Array:
        """Return the array itself."""
        return self.values

    def decode_rows(self, start: int, stop: int) -> Array:
        """Return a view."""
        rows: Array = self.numpy().reshape(-1, self.shape[-1])[start:stop]
        return rows

    def encoded(self, start: int, stop: int) -> bytes | memoryview | None:
        """Return None: nothing is encoded."""
        return None

    def coded(self) -> Coded | None:
        """Return None: nothing is encoded."""
        return None

    def touch(self) -> None:
        """Do nothing: the array is in memory."""

    def drop(self) -> None:
        """Do nothing."""


class ChangedRows:
    """Another source whose numbers are changed, element by element, whenever they are decoded."""

    def __init__(self, rows: RowSource, change: Callable[[Array], Array]) -> None:
        self._rows = rows
        self._change = change
        self.shape = rows.shape
        self.encoding = "F32"
        self.nbytes = rows.nbytes
        self.by_rows = rows.by_rows

    def numpy(self) -> Array:
        """Return the whole tensor, changed."""
        return self._change(self._rows.numpy())

    def decode_rows(self, start: int, stop: int) -> Array:
        """Return some rows, changed."""
        return self._change(self._rows.decode_rows(start, stop))

    def encoded(self, start: int, stop: int) -> bytes | memoryview | None:
        """Return None: no stored bytes hold these numbers."""
        return None

    def coded(self) -> "Coded | None":
        """Return None: no stored parts hold these numbers."""
        return None

    def touch(self) -> None:
        """Have the source read."""
        self._rows.touch()

    def drop(self) -> None:
        """Release the source's pages."""
        self._rows.drop()


class StoredRows:
    """A tensor of an open model."""

    def __init__(self, tensor: "View") -> None:
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
        """Return the tensor decoded; plain little-endian floats as a view of the file."""
        whole = self._tensor.whole
        if whole is not None and not whole.parts:
            row = encoding_row(self.encoding)
            if row.numpy in FREE and whole.info.nbytes == row.nbytes(self.shape):
                dtype = np.dtype(row.numpy).newbyteorder("<")
                return np.frombuffer(whole.raw(), dtype).reshape(self.shape)
        # Row-major whatever the file's layout: a product's bits follow the strides.
        return np.ascontiguousarray(self._tensor.numpy())

    def decode_rows(self, start: int, stop: int) -> Array:
        """Decode only these rows, if that is possible."""
        return self._tensor.rows(start, stop)

    def encoded(self, start: int, stop: int) -> bytes | memoryview | None:
        """Return stored bytes if no layout step changes them; permuted rows are gathered."""
        data, size = self._tensor.data, self._tensor.row_bytes
        if data is None or size is None or len(data) != size * matrix_shape(self.shape)[0]:
            return None
        return data.window(start * size, stop * size)

    def coded(self) -> Coded | None:
        """Return the checked parts if the encoding is bitsandbytes' 4-bit one."""
        whole = self._tensor.whole
        if whole is None or not whole.parts:
            return None

        found = codec(self.encoding)
        if not isinstance(found, Bnb4Codec):
            return None
        return found.coded(raw_parts(whole), math.prod(self.shape))

    def touch(self) -> None:
        """Read one byte of every page, so that the system loads the tensor into memory."""
        for run in self._tensor.stored_runs():
            np.add.reduce(np.frombuffer(run.tensor.raw(), np.uint8)[::PAGE], dtype=np.int64)

    def drop(self) -> None:
        """Release the mapped pages."""
        self._tensor.drop()
