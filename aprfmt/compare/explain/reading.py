"""Rows of a tensor by number, decoded on demand: what every hypothesis reads through."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from aprfmt.base.encodings import encoding as encoding_row
from aprfmt.base.protocols import LazyTensor
from aprfmt.compare.align import Side, stored_names
from aprfmt.compare.raw import byte_runs
from aprfmt.tensors.logical import LogicalTensor, Run

KEPT = 1 << 20  # elements up to which a tensor is decoded once and kept


class Bytes:
    """The concatenated bytes of runs, any window of them at the cost of that window."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = [run for run in runs if run.nbytes]
        self._ends = list(accumulate(run.nbytes for run in self._runs))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def window(self, start: int, stop: int) -> bytes | memoryview:
        """Return bytes [start, stop)."""
        pieces = []
        i = bisect_right(self._ends, start)
        while start < stop and i < len(self._runs):
            run, began = self._runs[i], self._ends[i] - self._runs[i].nbytes
            end = min(stop, self._ends[i])
            pieces.append(run.tensor.raw(run.start + start - began, run.start + end - began))
            start, i = end, i + 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def locate(self, at: int) -> tuple[LazyTensor, int]:
        """Return the stored tensor a byte belongs to, and its offset there."""
        i = bisect_right(self._ends, at)
        run = self._runs[i]
        return run.tensor, run.start + at - (self._ends[i] - run.nbytes)

    @classmethod
    def of(cls, tensor: LazyTensor) -> "Bytes":
        """Return all bytes of a stored tensor."""
        return cls([Run(tensor, 0, tensor.info.nbytes)])


class Reader:
    """A tensor as [rows, columns]; a vector has one value a row."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.shape = tuple(side.shape)
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
        """The first stored name."""
        return next(iter(stored_names(self.side)), "")

    @property
    def by_row(self) -> bool:
        """Say whether single rows can be decoded; else the whole tensor is."""
        return self.columns > 1 and self.row_bytes is not None

    @cached_property
    def bytes(self) -> Bytes:
        """The bytes of the logical tensor; empty where it has none of its own."""
        return Bytes(byte_runs(self.side) or [])

    @cached_property
    def whole(self) -> Any:
        """Return all values [rows, columns] in a float type (or int64)."""
        return widened(self.side.numpy()).reshape(self.rows, self.columns)

    def take(self, index: Any) -> Any:
        """Return the rows of these numbers (int array, any order), decoded."""
        import numpy as np

        if self.size <= KEPT or not self.by_row:
            return self.whole[index]
        index = np.asarray(index, np.int64)
        return self.decoded(self.raw(index))

    @cached_property
    def row_bytes(self) -> int | None:
        """Bytes of a row of the logical tensor, None where its rows have none of their own."""
        if "+" in self.encoding or not self.rows or not len(self.bytes):
            return None
        row = encoding_row(self.encoding)
        if isinstance(self.side, LogicalTensor) and self.side.restored:
            return None
        size = row.type_size if len(self.shape) < 2 else row.row_bytes(self.shape)
        return size if size is not None and size * self.rows == len(self.bytes) else None

    def raw(self, index: Any) -> Any:
        """Return the stored bytes of these rows (uint8 [n, row_bytes]); needs `row_bytes`."""
        import numpy as np

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

    def decoded(self, raw: Any, encoding: str = "") -> Any:
        """Decode the bytes of rows (uint8 [n, row_bytes]), as this encoding or as another."""
        import numpy as np

        from aprfmt.codecs import decode

        parts = {"": np.ascontiguousarray(raw).tobytes()}
        return widened(decode(encoding or self.encoding, parts, (len(raw), self.columns)))

    def drop(self) -> None:
        """Release what is kept, and the mapped pages."""
        self.__dict__.pop("whole", None)
        if isinstance(self.side, LogicalTensor):
            self.side.drop()
        else:
            self.side.lazy.drop()


class Part(Reader):
    """Some rows of a tensor, as a tensor of their own."""

    def __init__(self, reader: Reader, index: Any) -> None:
        super().__init__(reader.side)
        self.reader, self.index = reader, index
        self.rows = len(index)
        self.shape = (self.rows, self.columns)

    @cached_property
    def whole(self) -> Any:
        """All values [rows, columns]."""
        return self.reader.take(self.index)

    @cached_property
    def row_bytes(self) -> int | None:
        """None: the rows have no bytes that follow each other."""
        return None


def widened(values: Any) -> Any:
    """Return values in float32, float64 or int64: what arithmetic can be done in."""
    import numpy as np

    if values.dtype.kind in "biu":
        return values.astype(np.int64)
    return values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)
