"""Stored bytes without decoding: runs of them, windows over runs, and where two lists differ.

A *run* is consecutive bytes of a stored tensor. A *move* is consecutive elements that are copied
from a stored tensor.
"""

import hashlib
import math
from array import array
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.budget import end_where_time_is_over
from aprfmt.base.columns import FEW, Columns
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.protocols import ByteSource, LazyTensor
from aprfmt.formats.mapped_file import MappedFile, StoredTensor
from aprfmt.remote.paths import is_remote

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aprfmt.arch.spec import Move

WINDOW = 8 << 20
_SPLIT = 4  # rows that a run is taken for on average: neighbours that stay together make long runs


@dataclass(frozen=True, slots=True)
class ByteRun:
    """`nbytes` stored bytes of `tensor` from byte `start`."""

    tensor: LazyTensor
    start: int
    nbytes: int


class RunBytes:
    """The concatenated bytes of runs; reading a window costs only that window."""

    def __init__(self, runs: Sequence[ByteRun]) -> None:
        """Set the runs and the position where each ends.

        Reordered rows of one tensor are read by row.
        """
        self._rows = _ReorderedRows.from_runs(runs) if isinstance(runs, Columns) else None
        self._runs: Sequence[ByteRun] = runs
        if isinstance(runs, Columns):  # made of moves, of which none is empty
            sizes = runs.columns[2]
        else:
            self._runs = [run for run in runs if run.nbytes]
            sizes = array("q", (run.nbytes for run in self._runs))
        self._ends = array("q", accumulate(sizes))

    @classmethod
    def of_tensor(cls, tensor: LazyTensor) -> "RunBytes":
        """Return all bytes of a stored tensor."""
        return cls([ByteRun(tensor, 0, tensor.info.nbytes)])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def reordered(self) -> bool:
        """Whether these are rows of one tensor in another order than the tensor's."""
        return self._rows is not None

    def runs(self, start: int, stop: int) -> Iterator[ByteRun]:
        """Yield the runs that bytes [start, stop) are made of, cut at both ends to fit."""
        i = bisect_right(self._ends, start)
        while start < stop and i < len(self._runs):
            run, began = self._runs[i], self._ends[i] - self._runs[i].nbytes
            end = min(stop, self._ends[i])
            yield ByteRun(run.tensor, run.start + start - began, end - start)
            start, i = end, i + 1

    def window(self, start: int, stop: int) -> bytes | memoryview:
        """Return bytes [start, stop), without copying where one run holds them."""
        if self._rows is not None and stop > start:
            return self._rows.window(start, stop)
        pieces = [r.tensor.raw(r.start, r.start + r.nbytes) for r in self.runs(start, stop)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def locate(self, position: int) -> tuple[LazyTensor, int]:
        """Return (stored tensor, offset in it) of the byte at `position`."""
        run = next(self.runs(position, position + 1))
        return run.tensor, run.start

    def drop(self, start: int, stop: int) -> None:
        """Release the mapped pages of bytes [start, stop), or of whole tensors for several runs."""
        if self._rows is not None:
            self._rows.tensor.drop()
            return
        runs = list(self.runs(start, stop))
        if len(runs) == 1:
            runs[0].tensor.drop(runs[0].start, runs[0].start + runs[0].nbytes)
            return
        for tensor in dict.fromkeys(run.tensor for run in runs):
            tensor.drop()


_NEAR = 4  # rows made for one that is used, at most


@dataclass(frozen=True, slots=True)
class _ReorderedRows:
    """Rows of one tensor in another order: each of `width` bytes, at a multiple of it.

    `numbers` are the stored rows' numbers in order. The tensor is mapped, or makes its rows when
    they are read.
    """

    tensor: LazyTensor
    numbers: "NDArray[np.int64]"
    width: int

    @classmethod
    def from_runs(cls, runs: "Columns[ByteRun]") -> "_ReorderedRows | None":
        """Return the runs as equally long rows of one tensor, long runs as several rows.

        None where the runs are of several tensors, or reading by row is no gain.
        """
        import numpy as np

        which, starts, sizes = (np.frombuffer(column, np.int64) for column in runs.columns)
        tensor = runs[0].tensor.unwrapped
        width = int(np.gcd.reduce([np.gcd.reduce(starts), np.gcd.reduce(sizes)]))
        location = tensor.location() if type(tensor) is StoredTensor else None
        mapped = location is not None and isinstance(location[0], MappedFile)
        made = tensor.makes and width % (tensor.info.row_bytes or width + 1) == 0
        if not (mapped or made) or tensor.info.nbytes % width:
            return None
        counts = sizes // width
        if (which != which[0]).any() or counts.sum() > _SPLIT * len(counts):
            return None
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(tensor, np.repeat(starts // width, counts) + within, width)

    def window(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of the rows in their order, copied."""
        import numpy as np

        first, last = start // self.width, -(-stop // self.width)
        numbers = self.numbers[first:last]
        if not self.tensor.makes:
            rows = self._stored_rows(0, self.tensor.info.nbytes // self.width)
            held = rows.take(numbers, axis=0)
        elif np.ptp(numbers) < _NEAR * len(numbers):  # those of a few heads
            low = int(numbers.min())
            held = self._stored_rows(low, int(numbers.max()) + 1)[numbers - low]
        else:
            held = np.concatenate([self._stored_rows(int(row), int(row) + 1) for row in numbers])
        return held.reshape(-1).data[start - first * self.width : stop - first * self.width]

    def _stored_rows(self, first: int, stop: int) -> "NDArray[np.uint8]":
        """Return stored rows [first, stop), uint8 [rows, width]."""
        import numpy as np

        held = self.tensor.raw(first * self.width, stop * self.width)
        return np.frombuffer(held, np.uint8).reshape(-1, self.width)


def all_runs(tensor: LazyTensor) -> list[ByteRun]:
    """Return the runs of everything a stored tensor consists of, companions in suffix order."""
    parts = [tensor.parts[key] for key in sorted(tensor.parts)] or [tensor]
    return [ByteRun(part, 0, part.info.nbytes) for part in parts]


def expect_reads(runs: Sequence[ByteRun]) -> None:
    """Announce that the bytes of runs will be read in windows; only the first two runs count."""
    for run in runs[:2]:
        run.tensor.expect(run.start, run.start + run.nbytes)


def published_equal(a: Sequence[ByteRun], b: Sequence[ByteRun]) -> bool:
    """Return whether two lists of runs are the same ranges of files with one published SHA-256.

    Their bytes are equal then, and need not be fetched.
    """
    return bool(a) and len(a) == len(b) and all(map(_is_same_place, a, b))


def _is_same_place(a: ByteRun, b: ByteRun) -> bool:
    """Return whether two runs are the same bytes of files with one published SHA-256."""
    mine, theirs = a.tensor.location(a.start), b.tensor.location(b.start)
    if mine is None or theirs is None or a.nbytes != b.nbytes or mine[1] != theirs[1]:
        return False
    return type(a.tensor) is type(b.tensor) and same_published_file(mine[0], theirs[0])


_computed: set[Path] = set()  # files whose SHA-256 is not as published, but of bytes that were read


def same_published_file(a: ByteSource, b: ByteSource) -> bool:
    """Return whether two files have the same SHA-256, at least one of which is published.

    Where only one is, the other file is read, and its digest stored in `sha256`. If they are
    equal, a line for the user says that a remote file was not fetched whole: its site may send
    other bytes than it publishes the digest of.
    """
    if a.size != b.size or not (a.sha256 or b.sha256):
        return False
    for one in (a, b):
        if not one.sha256:
            total = hashlib.sha256()
            for window in one.windows(0, one.size):
                total.update(window)
            one.sha256 = total.hexdigest()
            _computed.add(one.path)
    if a.sha256 != b.sha256:
        return False
    for one in (a, b):
        if is_remote(one.path) and one.path not in _computed:
            from aprfmt.remote.traffic import TRAFFIC

            TRAFFIC.tell(
                f"{one.path}: equal by the SHA-256 that its site publishes; not all of it was "
                "fetched"
            )
    return True


def byte_windows(
    runs: Sequence[ByteRun], size: int = WINDOW
) -> Generator[bytes | memoryview, None, None]:
    """Yield the concatenated bytes of the runs in windows of `size`, the last one shorter.

    A window's pages are released when the next one is asked for, or the generator is closed.
    """
    data = RunBytes(runs)
    if len(data) > size:
        expect_reads(runs)
    for start in range(0, len(data), size):
        end_where_time_is_over()
        stop = min(start + size, len(data))
        try:
            yield data.window(start, stop)
        finally:
            data.drop(start, stop)


def first_difference(a: Sequence[ByteRun], b: Sequence[ByteRun], size: int = WINDOW) -> int | None:
    """Return the offset of the first byte in which two lists of runs differ; None if all are equal.

    If one is the beginning of the other, it is the length of the shorter. `size` is the number of
    bytes compared at a time; rows that have to be copied for it use a quarter.
    """
    if published_equal(a, b):
        return None
    at = 0
    expect_reads(a)
    expect_reads(b)
    if isinstance(a, Columns) or isinstance(b, Columns):
        size //= 4
    with closing(byte_windows(a, size)) as of_a, closing(byte_windows(b, size)) as of_b:
        for left, right in zip(of_a, of_b, strict=False):
            found = difference_offset(left, right)
            if found is not None:
                return at + found
            at += len(left)
    total_a, total_b = sum(run.nbytes for run in a), sum(run.nbytes for run in b)
    return None if total_a == total_b else min(total_a, total_b)


def hold_same_bytes(a: LazyTensor, b: LazyTensor) -> bool:
    """Return whether two stored tensors have the same encoding and bytes, in any shape.

    The bytes are read in windows, those of companions too.
    """
    if (a.info.encoding, a.info.nbytes) != (b.info.encoding, b.info.nbytes):
        return False
    return first_difference(all_runs(a), all_runs(b)) is None


def are_same_tensor(a: LazyTensor, b: LazyTensor) -> bool:
    """Return whether two stored tensors have the same shape, encoding and bytes."""
    return a.info.shape == b.info.shape and hold_same_bytes(a, b)


def difference_offset(a: bytes | memoryview, b: bytes | memoryview) -> int | None:
    """Return the offset of the first byte that differs, or at which one ends; None where equal."""
    import numpy as np

    from aprfmt.tensors.memory_compare import bytes_equal

    x, y = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    shorter = min(x.size, y.size)
    if not bytes_equal(x[:shorter], y[:shorter]):
        return int(np.argmax(x[:shorter] != y[:shorter]))
    return None if x.size == y.size else shorter


def element_runs(stored: Sequence[LazyTensor], moves: "Sequence[Move]") -> Sequence[ByteRun] | None:
    """Return the runs of bytes that hold runs of elements (`moves`); None if a block would be cut.

    Many runs, of rows in another order, are stored as columns of numbers only.
    """
    if len(moves) > FEW:
        return _many_runs(stored, moves)
    rows: list[tuple[int, int, int]] = []  # a stored tensor, its first byte, bytes
    units = [_movable_unit(tensor) for tensor in stored]
    for move in moves:
        info, fits = stored[move.source].info, units[move.source]
        if move.start == 0 and move.count == math.prod(info.shape):
            rows.append((move.source, 0, info.nbytes))
            continue
        if fits is None or move.start % fits[0] or move.count % fits[0]:
            return None
        unit, width = fits
        start, size = move.start // unit * width, move.count // unit * width
        if rows and rows[-1][0] == move.source and rows[-1][1] + rows[-1][2] == start:
            rows[-1] = move.source, rows[-1][1], rows[-1][2] + size
        else:
            rows.append((move.source, start, size))
    return [ByteRun(stored[i], start, nbytes) for i, start, nbytes in rows]


def _many_runs(stored: Sequence[LazyTensor], moves: "Sequence[Move]") -> Sequence[ByteRun] | None:
    """Return the runs of bytes that hold many runs of elements (`moves`), all computed at once.

    None where a move cuts through a block.
    """
    import numpy as np

    from aprfmt.arch.spec import Move

    if not isinstance(moves, Columns):
        moves = Columns.from_rows(Move, [(move.source, move.start, move.count) for move in moves])
    units = np.array([_movable_unit(tensor) or (0, 0) for tensor in stored], np.int64)
    whole = np.array([(math.prod(t.info.shape), t.info.nbytes) for t in stored], np.int64)
    source, start, count = (np.frombuffer(column, np.int64) for column in moves.columns)
    all_of = (start == 0) & (count == whole[source, 0])
    unit, width = np.maximum(units[source, 0], 1), units[source, 1]
    if not (all_of | (width > 0) & (start % unit == 0) & (count % unit == 0)).all():
        return None
    start, size = start // unit * width, np.where(all_of, whole[source, 1], count // unit * width)
    joined = (source[1:] == source[:-1]) & (start[:-1] + size[:-1] == start[1:])
    heads = np.flatnonzero(np.append(True, ~joined))
    rows = source[heads], start[heads], np.add.reduceat(size, heads)
    made = Columns(
        lambda i, start, nbytes: ByteRun(stored[i], start, nbytes),
        _shared_columns(*(row.tobytes() for row in rows)),
    )
    return list(made) if len(made) <= FEW else made


@lru_cache(8)
def _shared_columns(*columns: bytes) -> Sequence["array[int]"]:
    """Return columns of int64 as arrays; equal columns of a model's layers are the same objects."""
    return [array("q", column) for column in columns]


def _movable_unit(tensor: LazyTensor) -> tuple[int, int] | None:
    """Return (least number of elements that can be moved as bytes, their size in bytes).

    None where elements cannot be cut out of the stored bytes, or rows are padded.
    """
    info = tensor.info
    row = encoding_row(info.encoding)
    if not row.known or row.flat:
        return None
    unit, width = row.block_size, row.type_size
    if row.row_header:  # the scale of a row goes with it
        unit, width = info.shape[-1] if info.shape else 1, info.row_bytes or 0
    if info.nbytes * unit != math.prod(info.shape) * width:
        return None  # padded rows: elements and bytes do not run in step
    return unit, width
