"""The common form of every packed weight: where its codes lie, and its scales.

A *tile* is the rows and columns that share one scale; where `group` names the scale of each column,
a *group* is the columns of one scale.

A *group* is the elements that share one scale.

    value = (number of the code - zero) * scale + offset        each step rounded to float32

A weight is [matrices, rows, columns]; zeros, scales and offsets stand for tiles of it, or for
columns of a group wherever they are. Rows are decoded when they are asked for: by numpy, which is
the reference, or by the kernels of native/packed.h, to the same bits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from aprfmt.codecs import native_kernels
from aprfmt.codecs.base import F32, U8, Array
from aprfmt.codecs.parallel import STORE_BY_SIZE, STORE_FRESH, run_tasks
from aprfmt.errors import CodecError

_CHUNK = 1 << 20  # elements decoded at a time, at least: their codes in order stay in the cache
_APART = 64  # bytes between streams: in steps of a power of two they would share lines of the cache
_EXAMINED = 1 << 18  # bytes compared at a time
_EIGHT = 8  # rows that share a word, at most: chunks begin at multiples of it
# by order and size of an item: the bits of codes that kernels decode where they lie
_ACROSS: Mapping[tuple[str, int], tuple[int, ...]] = {
    ("columns", 4): (2, 4, 8), ("columns", 1): (4, 8), ("awq", 4): (4,),
}  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble of a word, lowest first -> output
AWQ_BACK = tuple(sorted(range(8), key=AWQ_ORDER.__getitem__))  # output -> nibble


def _stream_of_rows(array: Array, start: int, stop: int) -> U8:
    """Return the code bytes of rows [start, stop), uint8 [rows, bytes], of codes stored by rows."""
    found: U8 = array[start:stop]
    return found


def _stream_of_columns(array: Array, start: int, stop: int) -> U8:
    """Return the code bytes of rows [start, stop), uint8 [rows, bytes], of codes stored by columns.

    `array` is [words of a row, rows]: a word packs codes of one row, and the words of a row are in
    one column.
    """
    return np.ascontiguousarray(array[:, start:stop].T).view(np.uint8)


def _stream_of_awq(array: Array, start: int, stop: int) -> U8:
    """Return the code bytes of rows [start, stop), uint8 [rows, bytes], of codes in AWQ's words.

    `array` [columns, rows / 8] packs a column of eight rows into a word, in the order `AWQ_ORDER`.
    """
    words = array[:, start // 8 : -(-stop // 8)]
    made = np.empty((words.shape[1], 8, -(-len(words) // 2)), np.uint8)
    for place, output in enumerate(AWQ_ORDER):
        codes = np.zeros((made.shape[2] * 2, len(made)), np.uint8)
        codes[: len(words)] = (words >> np.uint32(4 * place)).astype(np.uint8) & 15
        made[:, output] = (codes[0::2] | codes[1::2] << 4).T
    return made.reshape(-1, made.shape[2])[start % 8 :][: stop - start]


def _stream_of_pairs(array: Array, start: int, stop: int) -> U8:
    """Return the code bytes of rows [start, stop), uint8 [rows, bytes], of codes in row pairs.

    `array` [rows / 2, columns] has two rows in a byte, the first in the low 4 bits.
    """
    some = array[start // 2 : -(-stop // 2)]
    codes = np.zeros((len(some), 2, -(-some.shape[1] // 2) * 2), np.uint8)
    codes[:, 0, : some.shape[1]], codes[:, 1, : some.shape[1]] = some & 15, some >> 4
    made: U8 = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(2 * len(some), -1)
    return made[start % 2 :][: stop - start]


# how codes lie -> what gives the streams of rows [start, stop) of a matrix, in numpy
ORDERS: Mapping[str, Callable[[Array, int, int], U8]] = {
    "rows": _stream_of_rows,
    "columns": _stream_of_columns,
    "awq": _stream_of_awq,
    "pairs": _stream_of_pairs,
}


class PackedCodes(NamedTuple):
    """Codes of `bits` bits each, and their order in the array `array`.

    rows     uint8 [matrices, rows, bytes]: a row is a stream of codes, lowest bits first
    columns  uint8 or uint32 [matrices, units, rows]: the stream of a row goes down a column
    awq      uint32 [matrices, columns, rows / 8]: nibble k of a word is that of row AWQ_ORDER[k]
    pairs    uint8 [matrices, rows / 2, columns]: an even row in low nibbles, the next in high ones
    """

    bits: int
    order: str
    array: Array

    def streams(self, matrix: int, start: int, stop: int) -> U8:
        """Return the code bytes of rows [start, stop) of a matrix, uint8 [rows, bytes].

        A row is a stream of codes, lowest bits first, whatever the order they are stored in.
        """
        held, native = self.array[matrix], native_kernels()
        if self.order == "rows" or native is None:
            return ORDERS[self.order](held, start, stop)
        first = start // _EIGHT * _EIGHT
        units = held.shape[self.order == "pairs"]
        size = units * held.itemsize if self.order == "columns" else -(-units // 2)
        last = -(-stop // _EIGHT) * _EIGHT if self.order == "awq" else stop
        made = np.empty((last - first, size + _APART), np.uint8)[:, :size]
        native.turn(self.order, held, first, made)
        return made[start - first : stop - first]


def unpack_codes(streams: U8, bits: int, count: int) -> U8:
    """Return the first `count` codes of every row's stream, uint8 [rows, count]."""
    if bits == 8:
        return streams[:, :count]
    each = np.unpackbits(streams, axis=-1, count=count * bits, bitorder="little")
    return np.packbits(each.reshape(len(each), count, bits), axis=-1, bitorder="little")[..., 0]


def transpose_numbers(numbers: F32) -> F32:
    """Return contiguous float32 numbers [a, b] as [b, a]."""
    found: F32 = np.ascontiguousarray(_rows_together(numbers.T, 0, numbers.shape[1]))
    return found


def _rows_together(numbers: Array | None, start: int, stop: int) -> Array | None:
    """Return the numbers of rows [start, stop) of [rows, groups], each row contiguous in memory.

    Numbers that are stored column by column are copied. None is returned as None.
    """
    if numbers is None:
        return None
    if numbers.strides[1] == numbers.itemsize or numbers.strides[0] != numbers.itemsize:
        return numbers[start:stop]
    units = numbers.T if numbers.itemsize == 1 else numbers.T.view(np.uint32)
    return PackedCodes(8, "columns", units[None]).streams(0, start, stop).view(numbers.dtype)


class GroupNumbers(NamedTuple):
    """Numbers [matrices, down, across]: float32, or bytes with a table of their values.

    `table` is float32 [1, 256], or [matrices, 256] where the matrices differ.
    """

    array: Array
    table: F32 | None = None

    def of(self, matrix: int) -> F32:
        """Return the scales (or zero points, or offsets) of one matrix, float32 [down, across]."""
        table = self.table_of(matrix)
        held: F32 = self.array[matrix] if table is None else table[self.array[matrix]]
        return held

    def table_of(self, matrix: int) -> F32 | None:
        """Return float32 [256], the value of each byte in a matrix; None for float numbers."""
        return None if self.table is None else self.table[matrix % len(self.table)]


Tile = tuple[int, int]


@dataclass(frozen=True)
class WeightLayout:
    """A packed weight of `shape`: its codes, and the numbers that turn them into values.

    `values` float32 [2**bits] is the number of every code. `zero`, `scale` and `offset` are those
    of tiles of `tile` rows and columns, of which the last may be short; where there is a `group`,
    int32 [columns], column c has those of group[c] instead. `factor` float32 [columns] multiplies
    the decoded values.
    """

    shape: tuple[int, ...]
    codes: PackedCodes
    values: F32
    tile: Tile
    scale: GroupNumbers | None = None
    zero: GroupNumbers | None = None
    offset: GroupNumbers | None = None
    group: Array | None = None
    factor: F32 | None = None

    @property
    def rows(self) -> int:
        """Number of rows of all matrices."""
        return math.prod(self.shape[:-1])

    def decode(self, start: int = 0, stop: int | None = None, *, threads: int = 1) -> F32:
        """Return rows [start, stop) of all matrices, new float32 [rows, columns]."""
        stop = self.rows if stop is None else stop
        out: F32 = np.empty((stop - start, self.shape[-1]), np.float32)
        self.decode_into(out, start, threads=threads, fresh=True)
        return out

    def decode_into(
        self, out: F32, start: int = 0, *, threads: int = 1, fresh: bool = False
    ) -> None:
        """Fill contiguous float32 `out` [rows, columns] with rows from `start` on.

        `fresh` says that nothing was stored in `out` yet (see `parallel.STORE_FRESH`).
        """
        tasks = [
            partial(self._fill, matrix, first, out[at : at + last - first], fresh)
            for matrix, first, last, at in self._chunks(start, start + len(out))
        ]
        with np.errstate(all="ignore"):
            run_tasks(tasks, threads)

    def unpack_rows(self, start: int, stop: int) -> U8:
        """Return the codes of rows [start, stop) of all matrices, new uint8 [rows, columns]."""
        made = np.empty((stop - start, self.shape[-1]), np.uint8)
        for matrix, first, last, at in self._chunks(start, stop):
            streams = self.codes.streams(matrix, first, last)
            made[at : at + last - first] = unpack_codes(streams, self.codes.bits, made.shape[1])
        return made

    def _chunks(
        self, start: int, stop: int, elements: int = _CHUNK
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield (matrix, first, last, position) of ranges of rows [start, stop) of all matrices.

        A range is rows [first, last) of the matrix, of about `elements` elements; `position` is
        that of its first row within [start, stop).
        """
        tall, at = self.shape[-2], start
        step = -(-elements // max(self.shape[-1], 1) // _EIGHT) * _EIGHT
        while at < stop:
            matrix, first = divmod(at, tall)
            last = min((first // step + 1) * step, tall, first + stop - at)
            yield matrix, first, last, at - start
            at += last - first

    def recodes(self, encoding: str) -> bool:
        """Return whether `recode_into` can make this encoding.

        That needs native kernels and codes stored by rows.
        """
        native = native_kernels()
        plain = self.codes.order == "rows" and self.factor is None
        return native is not None and plain and bool(native.recodes(encoding))

    def recode_into(
        self, encoding: str, out: memoryview, start: int, stop: int, *, threads: int = 1
    ) -> list[tuple[int, int, int]]:
        """Fill `out` (bytes) with rows [start, stop) in an encoding for which `recodes` is True.

        The decoded values are not kept. Returns for each range of rows that was decoded at once a
        tuple: how many values the encoding changed, how many finite ones it could not hold, how
        many others became zero.
        """
        native = native_kernels()
        assert native is not None
        # Each piece of rows fills its own part of `out`.
        width = len(out) // max(stop - start, 1)
        found: list[tuple[int, int, int]] = []

        def recode_piece(matrix: int, first: int, last: int, out_row: int) -> None:
            """Encode rows [first, last) of a matrix into `out`, from its row `out_row` on.

            Appends to `found` how many values the encoding changed, could not hold, and made
            zero.
            """
            streams = self.codes.streams(matrix, first, last)
            row, numbers, tables = self._numbers(matrix, first, last)
            target = out[out_row * width : (out_row + last - first) * width]
            found.append(
                native.recode_packed(
                    encoding,
                    target,
                    streams,
                    self.codes.bits,
                    self.values,
                    (row, *self.tile),
                    numbers,
                    tables,
                    self.group,
                )
            )

        # Codes that lie in rows are read where they are: one thread takes all in one call.
        each = _CHUNK if threads > 1 else max(self.rows * self.shape[-1], 1)
        run_tasks(
            [partial(recode_piece, *chunk) for chunk in self._chunks(start, stop, each)], threads
        )
        return found

    def _numbers(
        self, matrix: int, first: int, last: int
    ) -> tuple[int, tuple[Array | None, ...], tuple[F32 | None, ...]]:
        """Return (row, (scales, zeros, offsets), tables of their bytes) for rows [first, last).

        `row` is the position of row `first` in these numbers. A number or a table that does not
        exist is None.
        """
        held, tables = self._scales_and_tables(matrix)
        if self.tile[0] == 1:  # numbers of these rows alone, each row's together
            return 0, tuple(_rows_together(one, first, last) for one in held), tables
        return first, held, tables

    def _scales_and_tables(
        self, matrix: int
    ) -> tuple[tuple[Array | None, ...], tuple[F32 | None, ...]]:
        """Return (scales, zeros and offsets of a matrix as stored, a table for each of the three).

        A table is float32 [256]: the value of each byte, where the numbers are stored as bytes.
        None stands for numbers that do not exist, and for the table of numbers that are floats.
        """
        every = (self.scale, self.zero, self.offset)
        held = tuple(None if one is None else one.array[matrix] for one in every)
        return held, tuple(None if one is None else one.table_of(matrix) for one in every)

    def _fill(self, matrix: int, first: int, out: F32, fresh: bool) -> None:
        """Fill `out` with the decoded rows of a matrix from row `first` on.

        Native kernels decode them where there are any. `fresh` says that nothing was stored in
        `out` yet, which chooses how a kernel stores.
        """
        native = native_kernels()
        # The numpy reference, else a kernel: across rows, or row by row from their streams.
        if native is None:
            streams = self.codes.streams(matrix, first, first + len(out))
            self._decode_rows_by_numpy(matrix, first, streams, out)
        else:
            store = STORE_FRESH if fresh else STORE_BY_SIZE
            codes = self.codes
            if self._decodes_across(first, len(out)):
                native.decode_across(
                    codes.order,
                    codes.array[matrix],
                    codes.bits,
                    self.values,
                    (first, len(out), self.tile[1]),
                    *self._scales_and_tables(matrix),
                    self.group,
                    out,
                    store,
                )
            else:
                streams = codes.streams(matrix, first, first + len(out))
                row, numbers, tables = self._numbers(matrix, first, first + len(out))
                native.decode_packed(
                    streams,
                    codes.bits,
                    self.values,
                    (row, *self.tile),
                    numbers,
                    tables,
                    self.group,
                    out,
                    store,
                )
        if self.factor is not None:
            out *= self.factor

    def _decodes_across(self, first: int, rows: int) -> bool:
        """Return whether to use the kernel that decodes eight rows at a time without transposing.

        It is the faster one only where columns choose their own group: one look-up of the group is
        then enough for eight rows. `first`, `rows` and the columns must be multiples of eight, and
        a row's codes fill whole 32-bit words.
        """
        bits, columns = self.codes.bits, self.shape[-1]
        widths = _ACROSS.get((self.codes.order, self.codes.array.itemsize), ())
        whole = not (first % _EIGHT or rows % _EIGHT or columns % _EIGHT or columns * bits % 32)
        return whole and bits in widths and self.group is not None and self.tile[0] == 1

    def _decode_rows_by_numpy(self, matrix: int, first: int, streams: U8, out: F32) -> None:
        """Fill `out` with the values of rows by numpy: the reference that kernels must equal.

        `streams` are the rows' code bytes, and `first` is the number of the first row in its
        matrix.
        """
        rows, columns = out.shape
        down = np.arange(first, first + rows) // self.tile[0]
        across = np.arange(columns) // self.tile[1] if self.group is None else self.group

        def spread(numbers: GroupNumbers) -> F32:
            """Return one number per group, repeated for every element of the group.

            The numbers are scales or zero points; the result is float32 [rows, columns].
            """
            found: F32 = numbers.of(matrix)[down][:, across]
            return found

        np.take(self.values, unpack_codes(streams, self.codes.bits, columns), out=out, mode="clip")
        if self.zero is not None:
            out -= spread(self.zero)
        if self.scale is not None:
            out *= spread(self.scale)
        if self.offset is not None:
            out += spread(self.offset)


def wrap_codes(raw: U8, bits: int, shape: Sequence[int], values: Array) -> tuple[PackedCodes, F32]:
    """Return (codes, float32 number of each code) of a weight whose bytes are one stream of codes.

    `raw` is the stream of codes of `bits` bits, `values` the number of each code, `shape` [...,
    rows, columns]. Where rows would end within a byte, every code gets a byte.
    """
    rows, columns = math.prod(shape[:-1]), shape[-1]
    held, table = raw, values.astype(np.float32)
    if columns * bits % 8:
        held = unpack_codes(held[None], bits, rows * columns)
        wide = np.full(256, np.nan, np.float32)
        wide[: len(table)] = table
        bits, table = 8, wide
    return PackedCodes(bits, "rows", held.reshape(-1, shape[-2], columns * bits // 8)), table


def broadcast_to_matrices(values: Array, shape: Sequence[int], grid: Sequence[int]) -> Array:
    """Return scales or zero points as [matrices, down, across], repeated where several share one.

    `values` broadcast over [..., down, across], `shape` is the weight's, `grid` is (down, across).
    """
    every = np.broadcast_to(values, (*shape[:-2], *grid))
    return every.reshape(-1, *grid)


def tile_grid(shape: Sequence[int], tile: Tile) -> tuple[int, int]:
    """Return (tiles down, tiles across) of a matrix of `shape`."""
    return -(-shape[-2] // tile[0]), -(-shape[-1] // tile[1])


def spread_on_tiles(numbers: Array, tile: Tile, finer: Tile, shape: Sequence[int]) -> Array:
    """Return the numbers of tiles [..., down, across] repeated for the finer tiles within each.

    `tile` and `finer` are (rows, columns); the sizes of `finer` divide those of `tile`.
    """
    if tile == finer:
        return numbers
    down, across = tile_grid(shape, finer)
    found: Array = numbers[..., np.arange(down) * finer[0] // tile[0], :][
        ..., np.arange(across) * finer[1] // tile[1]
    ]
    return found


def as_group_numbers(raw: Array, table: Array | None, name: str) -> GroupNumbers:
    """Return scales of any shape as `GroupNumbers`; CodecError for a NaN, infinite or negative one.

    `raw` holds floats, or bytes to be looked up in `table`. `name` begins the error's text.
    """
    if table is None:
        fine = not raw.size or (raw.min() >= 0 and raw.max() < np.inf)  # both NaN where one is
        bad = np.empty(0, bool) if fine else ~np.isfinite(raw) | (raw < 0)
    else:
        wrong = ~np.isfinite(table) | (table < 0)
        bad = wrong[raw] if _has_any(raw.reshape(-1), wrong) else np.empty(0, bool)
    if bad.any():
        at = [int(index) for index in np.argwhere(bad)[0]]
        number = raw[tuple(at)] if table is None else table[raw[tuple(at)]]
        raise CodecError(
            f"{name} holds {number} at {at}, expected scales that are finite and not negative"
        )
    return GroupNumbers(raw, None if table is None else table.astype(np.float32)[None])


def _has_any(codes: U8, wrong: Array) -> bool:
    """Return whether any byte of `codes` has a value that is marked in the mask `wrong` [256].

    Comparing with the marked ranges is faster than looking up every byte.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], wrong.astype(np.int8), [0]])))
    for start in range(0, codes.size, _EXAMINED):
        chunk = codes[start : start + _EXAMINED]
        if not edges.size or chunk.max() < edges[0]:  # all below the first of them
            continue
        for first, end in edges.reshape(-1, 2):
            if (chunk - np.uint8(first) <= np.uint8(end - first - 1)).any():
                return True
    return False
