"""Blocks of rows and columns of an array that a file, or many ranks' files, hold in parts.

A *tile* is a rectangle of an array: some rows, of each some columns. A *piece* is consecutive
elements in the order of the array, whatever its rows. PART is how many elements the moments of the
statistics are summed over at a time, always from the first element on, so that equal arrays give
equal bits.

A block is decoded from the files into the place where it is wanted: neither the array as a whole
nor one rank's part of the array is in memory before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import native_kernels
from aprfmt.errors import CodecError, FormatError, UsageError
from aprfmt.tensors.stats import PART, Stats, compute_stats_of_parts, stats_of_moments

if TYPE_CHECKING:
    from aprfmt.codecs.native import NumberedPieces
    from aprfmt.codecs.native.moments import Moments

Numbers = NDArray[Any]
_TOGETHER = 1 << 21  # elements that are read together for a whole array
_COUNTED = 1 << 20  # and for its statistics: they stay in the last-level cache
_AHEAD = 1 << 19  # and for pieces of them
_HELD_PARTS = 256  # parts whose stored rows are held at a time: each may be a separate file
_STORED = 8 * PART  # elements of which statistics are taken where they are stored, at a time


class StoredRows(NamedTuple):
    """Rows as a file stores them, of which the columns `first` to `first + wide` are wanted.

    `raw` has whole rows of `columns` elements in `encoding`; `drop` releases its pages, `place` is
    for messages.
    """

    encoding: str
    raw: memoryview
    columns: int
    first: int
    wide: int
    drop: Callable[[], None]
    place: str


@dataclass(frozen=True)
class StoredRange:
    """Elements of an array as files store them, for native kernels that read rows.

    `pieces` are the files' bytes of whole rows of `width` elements; the first element is number
    `start` of the array. `drop` releases their mapped pages. `parts` sums up statistics of the
    elements, None: no statistics are wanted.
    """

    pieces: "NumberedPieces"
    width: int
    start: int
    drop: Callable[[], None]
    parts: "PartStats | None" = None

    def rows_from(self, first: int) -> "tuple[NumberedPieces, int, int]":
        """Return what a native kernel reads from element `first` of the array on.

        That is (stored rows, their width, number of elements in them before `first`).
        """
        return self.pieces, self.width, first - self.start

    def count_until(self, last: int) -> None:
        """Add the elements before element `last` to the statistics, if these are wanted."""
        if self.parts is not None:
            self.parts.add_stored(self, last)


@dataclass(frozen=True)
class StoredReader:
    """Reads an array's elements in their order as files store them.

    `parts` sums up their statistics, None: no statistics are wanted.
    """

    tiles: "Tiles"
    parts: "PartStats | None" = None

    def read_range(self, first: int, last: int) -> StoredRange:
        """Return elements [first, last) of the array; ranges must be read in order.

        Raises FormatError where a file holds other sizes.
        """
        # A part of the statistics that began in the range before is read from its begin on.
        begin = first if self.parts is None else self.parts.count
        width = self.tiles.width
        row = begin // width
        found = self.tiles.stored_range(row, -(-last // width) - row)
        assert found is not None
        return replace(found, parts=self.parts)


@dataclass(frozen=True)
class Tiles:
    """An array [rows, width] of float32 of which any block can be read.

    `fill(row, column, out)` fills float32 `out` [n, m] with n rows from `row` on, of each the m
    elements from `column` on. It raises FormatError where the file is damaged. `stored(row, n)`
    returns the files' bytes of n rows from `row` on, an entry for each file that has some of their
    columns; None: the files do not store rows.
    """

    rows: int
    width: int
    fill: Callable[[int, int, Numbers], None]
    stored: Callable[[int, int], list[StoredRows]] | None = None

    @property
    def size(self) -> int:
        """The number of the array's elements."""
        return self.rows * self.width

    def pieces(self, counts: Sequence[int], parts: "PartStats | None" = None) -> Iterator[Numbers]:
        """Yield the array's elements in order as flat arrays: for each of `counts`, that many.

        An array that was yielded is valid until the next one. `parts`, if given, sums up statistics
        of every element.
        """
        width = max(self.width, 1)
        ahead = max(_AHEAD // width, 1)  # rows that are read together, at least
        size = max(counts, default=0) + (ahead + 1) * width + (PART if parts else 0)
        buffer = np.empty(size, np.float32)
        row, first, held = 0, 0, 0
        counted = 0  # where elements begin that `parts` has not taken
        for count in counts:
            if held - first < count:
                gone = min(first, counted) if parts else first
                first, counted, held = first - gone, counted - gone, held - gone
                buffer[:held] = buffer[gone : gone + held]
                rows = min(max(-(-(first + count - held) // width), ahead), self.rows - row)
                stop = held + rows * width
                self.fill(row, 0, buffer[held:stop].reshape(rows, width))
                row, held = row + rows, stop
                if parts:
                    counted += parts.add(buffer[counted:held])
            yield buffer[first : first + count]
            first += count

    def read(self, parts: "PartStats | None" = None) -> Numbers:
        """Return the whole array [rows, width]; `parts` accumulates its statistics."""
        made, counted = np.empty((self.rows, self.width), np.float32), 0
        flat = made.reshape(-1)
        for first, last in self._row_ranges(_TOGETHER):
            self.fill(first, 0, made[first:last])
            if parts:
                counted += parts.add(flat[counted : last * self.width])
        return made

    def reader(self, shape: Sequence[int]) -> Callable[[], Numbers]:
        """Return a function that reads the whole array, reshaped to `shape`."""
        return lambda: self.read().reshape(shape)

    def some_rows(self, step: int) -> Numbers:
        """Return every `step`-th row of the array, from the first on."""
        wanted = range(0, self.rows, step)
        made = np.empty((len(wanted), self.width), np.float32)
        for place, row in enumerate(wanted):
            self.fill(row, 0, made[place : place + 1])
        return made

    def columns(self, first: int, width: int) -> "Tiles":
        """Return `width` columns of the array from column `first` on, as another array."""
        stored = self.stored
        return Tiles(
            self.rows,
            width,
            lambda row, column, out: self.fill(row, first + column, out),
            None
            if stored is None
            else lambda row, rows: _cut_columns(stored(row, rows), first, width),
        )

    def row_range(self, first: int, rows: int) -> "Tiles":
        """Return `rows` rows of the array from row `first` on, as another array."""
        stored = self.stored
        return Tiles(
            rows,
            self.width,
            lambda row, column, out: self.fill(first + row, column, out),
            None if stored is None else lambda row, count: stored(first + row, count),
        )

    def stats(self) -> Stats:
        """Return the statistics of all values, equal to those of the array read as a whole."""
        found = self._stats_where_stored()
        return compute_stats_of_parts(self._parts()) if found is None else found

    def _stats_where_stored(self) -> Stats | None:
        """Return the statistics, computed from the stored bytes; None where no kernel reads them.

        They are summed in the runs of PART elements that `_parts` yields, so that both give the
        same bits.
        """
        native = native_kernels()
        if native is None or self.stored is None or not self.size:
            return None
        total: Moments | None = None
        for first in range(0, self.size, _STORED):
            last = min(first + _STORED, self.size)
            row, skip = divmod(first, self.width)
            pieces = self.stored(row, -(-last // self.width) - row)
            try:
                found = native.stats_of_rows(
                    [piece[:5] for piece in pieces], self.width, skip, last - first
                )
            except CodecError as error:
                raise FormatError(f"{pieces[0].place}: {error}") from error
            finally:
                for piece in pieces:
                    piece.drop()
            if found is None:
                return None
            for part in found:
                total = part if total is None else total.joined(part)
        return None if total is None else stats_of_moments(self.size, total)

    def stored_range(self, row: int, rows: int) -> StoredRange | None:
        """Return `rows` rows from `row` on as files store them; None where no kernel reads them.

        Raises FormatError where a file holds other sizes.
        """
        native = native_kernels()
        if native is None or self.stored is None or not self.size:
            return None
        pieces = self.stored(row, rows)

        def drop() -> None:
            """Release the mapped pages of all files' bytes in the range."""
            for piece in pieces:
                piece.drop()

        numbered = native.number_pieces([piece[:5] for piece in pieces])
        if numbered is None:
            drop()
            return None
        _check_sizes(pieces, rows)
        return StoredRange(numbered, self.width, row * self.width, drop)

    def stored_reader(self) -> StoredReader | None:
        """Return a reader of the stored elements; None where no native kernel reads them."""
        first = self.stored_range(0, 1)
        if first is None:
            return None
        first.drop()
        return StoredReader(self)

    def _parts(self) -> Iterator[Numbers]:
        """Yield the array's elements in order, PART at a time, each valid until the next."""
        ahead = max(1, min(_COUNTED // max(self.width, 1), self.rows))
        buffer = np.empty(PART + ahead * self.width, np.float32)
        held = 0
        for first, last in self._row_ranges(_COUNTED):
            stop = held + (last - first) * self.width
            self.fill(first, 0, buffer[held:stop].reshape(last - first, self.width))
            held, used = stop, 0
            while held - used >= PART:
                yield buffer[used : used + PART]
                used += PART
            buffer[: held - used] = buffer[used:held].copy()
            held -= used
        if held:
            yield buffer[:held]

    def _row_ranges(self, elements: int) -> Iterator[tuple[int, int]]:
        """Yield (first, last) of consecutive ranges of rows with about `elements` elements each."""
        step = max(1, elements // max(self.width, 1))
        for first in range(0, self.rows, step):
            yield first, min(first + step, self.rows)


class PartStats:
    """Accumulates statistics of `size` float32 elements, given in order, by native kernels."""

    def __init__(self, size: int) -> None:
        """Start without elements."""
        self._size, self._count = size, 0
        self._total: Moments | None = None

    def add(self, flat: Numbers) -> int:
        """Add the next elements to the statistics, and return how many were added.

        Whole runs of PART elements are added, or all elements if these are the last. The caller
        passes the elements that were not added again, with more elements after them.
        """
        native = native_kernels()
        assert native is not None
        last = self._count + flat.size == self._size
        count = flat.size if last else flat.size // PART * PART
        if count:
            for part in native.stats_of_parts("F32", flat[:count].view(np.uint8), count):
                self._total = part if self._total is None else self._total.joined(part)
            self._count += count
        return count

    def add_stored(self, values: StoredRange, last: int) -> None:
        """Add the elements before element `last` that were not added yet, read from `values`.

        Only whole runs of PART elements are added, or all that are left.
        """
        stop = last if last == self._size else last // PART * PART
        if stop <= self._count:
            return
        native = native_kernels()
        assert native is not None
        for part in native.moments_of_rows(values.rows_from(self._count), stop - self._count):
            self._total = part if self._total is None else self._total.joined(part)
        self._count = stop

    @property
    def count(self) -> int:
        """The number of elements that were added to the statistics."""
        return self._count

    def result(self) -> Stats | None:
        """Return the statistics, equal to those of `Tiles.stats`; None until all were added."""
        if self._total is None or self._count < self._size:
            return None
        return stats_of_moments(self._size, self._total)


class MeasuredTiles:
    """An array that is read from Tiles, and its statistics, which are computed only once.

    A caller who reads all values computes them at the same time, so that files are not read again
    for them. After `close`, reading raises UsageError.
    """

    def __init__(self, tiles: Tiles) -> None:
        """Hold the array; nothing is read."""
        self._tiles = tiles
        self._stats: Stats | None = None
        self._reading: PartStats | None = None  # of who reads all values as they are stored
        self._closed = False
        self.rows, self.width, self.size = tiles.rows, tiles.width, tiles.size

    def stats(self) -> Stats:
        """Return the statistics of all values; FormatError where the file is damaged."""
        if self._stats is None and self._reading is not None:
            self._stats = self._reading.result()
        if self._stats is None:
            self._refuse_closed()
            self._stats = self._tiles.stats()
        return self._stats

    def close(self) -> None:
        """Note that the files are closed, so that later reads are refused."""
        self._closed = True

    def _refuse_closed(self) -> None:
        """Raise UsageError if the files from which the array is read are closed."""
        if self._closed:
            raise UsageError(
                "the dump is closed: read values and statistics inside of the `with` that opens it"
            )

    def read(self, shape: Sequence[int]) -> Numbers:
        """Return the whole array, reshaped to `shape`."""
        self._refuse_closed()
        parts = self._new_stats()
        values = self._tiles.read(parts)
        self._store_stats(parts)
        return values.reshape(shape)

    def pieces(self, counts: Sequence[int]) -> Iterator[Numbers]:
        """Yield the elements in order: for each of `counts`, that many, as a flat array.

        An array that was yielded is valid until the next one.
        """
        self._refuse_closed()
        parts = self._new_stats()
        yield from self._tiles.pieces(counts, parts)
        self._store_stats(parts)

    def stored_reader(self) -> StoredReader | None:
        """Return a reader of the stored elements; None where no native kernel reads them.

        After it has read and counted all of them, their statistics are known.
        """
        self._refuse_closed()
        reader = self._tiles.stored_reader()
        if reader is None:
            return None
        self._reading = self._new_stats()
        return replace(reader, parts=self._reading)

    def _new_stats(self) -> PartStats | None:
        """Return new statistics to add elements to while they are read.

        None where the statistics are known already or no native kernel computes them.
        """
        wanted = self._stats is None and self.size and native_kernels() is not None
        return PartStats(self.size) if wanted else None

    def _store_stats(self, parts: PartStats | None) -> None:
        """Store the array's statistics that `parts` accumulated over all values."""
        if parts is not None:
            self._stats = parts.result()


def _check_sizes(pieces: Sequence[StoredRows], rows: int) -> None:
    """Raise FormatError where a file's bytes are not as many as `rows` rows take."""
    for piece in pieces:
        size = rows * piece.columns * ENCODINGS[piece.encoding].type_size
        if len(piece.raw) != size:
            raise FormatError(
                f"{piece.place}: {piece.encoding}: found {len(piece.raw)} bytes for {rows} rows of "
                f"{piece.columns} elements; expected {size}"
            )


def _cut_columns(pieces: Sequence[StoredRows], first: int, width: int) -> list[StoredRows]:
    """Return the `width` columns from `first` on of rows whose columns several files hold."""
    found, start = [], 0
    for piece in pieces:
        begin, end = max(first, start), min(first + width, start + piece.wide)
        if begin < end:
            found.append(piece._replace(first=piece.first + begin - start, wide=end - begin))
        start += piece.wide
    return found


def join_columns(parts: Sequence[Tiles]) -> Tiles:
    """Return arrays with equally many rows as one array, joined along the columns."""
    starts = list(accumulate((part.width for part in parts), initial=0))

    def fill(row: int, column: int, out: Numbers) -> None:
        """Fill `out` with the joined array's values from `row` and `column` on, array by array."""
        for part, start in zip(parts, starts, strict=False):
            first, last = max(column, start), min(column + out.shape[1], start + part.width)
            if first < last:
                part.fill(row, first - start, out[:, first - column : last - column])

    held = [part.stored for part in parts if part.stored is not None]

    def stored(row: int, rows: int) -> list[StoredRows]:
        """Return the stored bytes of rows [row, row + rows), an entry for each joined array."""
        return [piece for one in held for piece in one(row, rows)]

    there = len(held) == len(parts) <= _HELD_PARTS
    return Tiles(parts[0].rows, starts[-1], fill, stored if there else None)


def join_rows(parts: Sequence[Tiles]) -> Tiles:
    """Return arrays of the same width joined: the rows of the first, then those of the next."""
    starts = list(accumulate((part.rows for part in parts), initial=0))

    def fill(row: int, column: int, out: Numbers) -> None:
        """Fill `out` with the joined array's values from `row` and `column` on, array by array."""
        for part, start in zip(parts, starts, strict=False):
            first, last = max(row, start), min(row + len(out), start + part.rows)
            if first < last:
                part.fill(first - start, column, out[first - row : last - row])

    return Tiles(starts[-1], parts[0].width, fill)


def add_up(parts: Sequence[Tiles]) -> Tiles:
    """Return the sum of arrays of one size, added in their order in float32."""

    def fill(row: int, column: int, out: Numbers) -> None:
        """Fill `out` with the sum of the arrays' float32 values from `row` and `column` on."""
        parts[0].fill(row, column, out)
        more = np.empty(out.shape, np.float32)
        for part in parts[1:]:
            part.fill(row, column, more)
            out += more

    return Tiles(parts[0].rows, parts[0].width, fill)
