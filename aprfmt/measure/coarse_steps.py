"""Blocks of a quantized copy whose steps are far too wide for the values that they hold.

A *block* is the elements that share a scale. A *copy* is the quantized tensor, its *source* the
tensor of the other file. A and B are the two files that are compared; a *side* is one of them, or
its tensor.

Errors within a copy's own steps prove nothing where the steps are wrong themselves: a block whose
scale is 8 times too large is rounded to the nearest, too. How wide a step may be follows from the
other side: its values span about as many steps in every block of a tensor, and the encoder gives
them a step of their own. Measured on eight kinds of weights in the 16 types with encoder and step:
no block of an honest copy spans less than 0.42 of the usual number of steps, but those of Q2_K and
Q4_K around a constant (0.17), which have the encoder's own step.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.base.encodings import find_encoding
from aprfmt.codecs import CODECS, encode
from aprfmt.measure.numbers import to_float64

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.codecs.lattice import Lattice

FAR = 4.0  # times too wide; scales that are powers of two make 2 of it
SMALL = 16.0  # blocks so much smaller than usual are left out: their scales are rounded, too
LEAST = 16  # elements of a block that say how wide it is
USUAL = 0.75  # quantile of the blocks that is usual: a quarter of sound ones is enough
LISTED = 64  # blocks whose places are kept


class BlockSpans(NamedTuple):
    """The largest absolute value and the range of each block of a source, and a copy's step.

    Each is an array [blocks].
    """

    largest: "Array"
    span: "Array"
    step: "Array"


def block_spans(values: "Array", steps: "Array") -> BlockSpans:
    """Return the largest value and range of each block of a source, with the copy's step of it.

    `values` [blocks, elements] are the source's, NaN for elements to leave out. `steps` [blocks]
    are the copy's.
    """
    low, high = (to_float64(end) for end in _block_ends(values))
    return BlockSpans(np.maximum(np.abs(low), np.abs(high)), high - low, to_float64(steps))


def _block_ends(values: "Array") -> "tuple[Array, Array]":
    """Return (smallest, largest) value of each block [blocks] of `values` [blocks, elements].

    NaN is left out; a block of nothing else has NaN for both.
    """
    starts = np.arange(0, values.size, values.shape[1])
    flat = np.ascontiguousarray(values).reshape(-1)
    with np.errstate(invalid="ignore"):
        low, high = np.minimum.reduceat(flat, starts), np.maximum.reduceat(flat, starts)
        odd = np.flatnonzero(np.isnan(low))
        if odd.size:  # leaving NaN out takes twice as long
            low[odd], high[odd] = (op.reduce(values[odd], axis=1) for op in (np.fmin, np.fmax))
    return low, high


def too_wide(blocks: BlockSpans) -> "Array":
    """Return a bool array [blocks]: True where a step is over FAR times as wide as usual ones.

    A block's largest value and its range both have to be too few steps. The step of symmetric codes
    depends on the largest value, that of codes above a minimum on the range.
    """
    known = np.isfinite(blocks.largest) & np.isfinite(blocks.step)
    known &= (blocks.largest > 0) & (blocks.step > 0)
    if not known.any():
        return known
    share = np.zeros(known.shape)
    for size in (blocks.largest, blocks.span):
        counted = np.divide(size, blocks.step, out=np.zeros(known.shape), where=known)
        among = counted[known]
        if among.min() * FAR >= among.max() > 0:  # no block is far from any other, nor from usual
            return np.zeros(known.shape, bool)
        usual = float(np.quantile(among, USUAL))
        share = np.maximum(share, counted / usual if usual > 0 else 0.0)
    least = float(np.median(blocks.largest[known])) / SMALL
    return np.asarray(known & (share < 1 / FAR) & (blocks.largest >= least))


@dataclass(frozen=True, slots=True)
class WideSteps:
    """Which blocks have steps too wide: `count` of `total`, by how much, and where they are.

    `places` are (row, first column) of at most LISTED of them, `columns` is a block's width.
    `times` is the median of how many times too wide they are.
    """

    count: int
    total: int
    times: float
    places: tuple[tuple[int, int], ...]
    columns: int

    def text(self, rows: "Array | None" = None) -> str:
        """Return how many blocks they are, where the first is, and how much too wide, as text.

        `rows` maps rows to their numbers in the tensor, None where all rows were looked at.
        """
        row, column = self.places[0]
        row = row if rows is None else int(rows[row])
        of = f"{self.count} of {self.total} blocks of {self.columns}"
        more = "" if self.count == 1 else "the first "
        return f"in {of}, {more}at [{row}, {column}], about {self.times:.2g} times too large"


class WideStepsOfBlocks:
    """Finds the blocks of a copy in a block encoding that have steps too wide, chunk by chunk."""

    def __init__(self, encoding: str, columns: int) -> None:
        """Start without rows; `encoding` is the copy's, `columns` the length of its rows."""
        self.size = find_encoding(encoding).block_size
        self.encoding, self.columns = encoding, columns
        self.count = self.total = 0
        self._places: list[tuple[int, int]] = []
        self._times: list[float] = []

    @staticmethod
    def is_for(encoding: str, columns: int) -> bool:
        """Return whether an encoding has blocks of one known step that divide rows of `columns`."""
        size = find_encoding(encoding).block_size if encoding in CODECS else 0
        return size >= LEAST and columns % size == 0 and CODECS[encoding].parts == ("",)

    def add(
        self,
        source: "Array",
        wide: "Array | None",
        copied: "Array | None" = None,
        steps: "Array | float" = 0.0,
    ) -> None:
        """Add the next rows: the source's values, and the largest step of each block of the copy.

        `wide` [blocks] are these steps; nothing is added where it is None, as steps are unknown.
        With `copied`, the copy's values, and `steps`, the step of each value, blocks with an error
        above a step are left out: they are no rounding of the source.
        """
        if wide is None:
            return
        values = source.reshape(-1, self.size)
        spans = block_spans(values, wide)
        found = np.flatnonzero(too_wide(spans))
        if copied is not None and found.size:
            with np.errstate(all="ignore"):
                copy = copied.reshape(values.shape)[found]
                error = np.abs(to_float64(values[found]) - to_float64(copy))
                each = np.broadcast_to(steps, source.size).reshape(values.shape)[found]
                found = found[(error <= each).all(axis=1)]
        times = np.full(found.shape, np.nan)
        if found.size and CODECS[self.encoding].has_encoder:
            own = self._encoder_steps(values[found])
            known = (own > 0) & (wide[found] > FAR * own)
            found, times = found[known], wide[found][known] / own[known]
        elif found.size:
            times = _times_too_wide(spans, found)
        for block, by in zip(found.tolist()[: LISTED - len(self._places)], times, strict=False):
            at = (self.total + block) * self.size
            self._places.append((at // self.columns, at % self.columns))
            self._times.append(float(by))
        self.count += len(found)
        self.total += len(wide)

    def skip(self, count: int) -> None:
        """Count the blocks of the next `count` elements, which are equal on both sides, as good."""
        self.total += count // self.size

    def _encoder_steps(self, values: "Array") -> "Array":
        """Return the largest step [blocks] that encoding gives blocks of values; 0 if unknown."""
        values = np.ascontiguousarray(np.where(np.isfinite(values), values, 0), np.float32)
        codec = CODECS[self.encoding]
        own = codec.largest_steps(encode(self.encoding, values), values.size)
        return np.zeros(len(values)) if own is None else own

    def found(self) -> WideSteps | None:
        """Return the blocks with steps too wide; None if there are none."""
        if not self.count:
            return None
        times = float(np.median(self._times))
        return WideSteps(self.count, self.total, times, tuple(self._places), self.size)


def _times_too_wide(blocks: BlockSpans, found: "Array") -> "Array":
    """Return how many times wider than usual the steps of the blocks with indices `found` are."""
    with np.errstate(all="ignore"):
        counted = blocks.largest / blocks.step
    counted = np.where(np.isfinite(counted), counted, 0.0)
    return np.asarray(np.quantile(counted[counted > 0], USUAL) / counted[found])


def wide_steps_of_lattice(source: "Array", lattice: "Lattice") -> WideSteps | None:
    """Return the groups of a packed weight that have steps too wide; None without any.

    `source` [..., columns] are the values that the weight is a copy of. None too for groups of
    fewer than LEAST elements, such as those of columns in another order.
    """
    columns = source.shape[-1]
    rows = source.size // max(1, columns)
    tall, wide = cell_size(lattice)
    return wide_steps_of_cells(
        source.reshape(rows, columns), lattice.step, tall or rows, wide or columns
    )


def wide_steps_of_cells(source: "Array", steps: "Array", tall: int, wide: int) -> WideSteps | None:
    """Return the blocks of `tall` rows by `wide` columns with steps too wide; None without any.

    `source` [rows, columns] are the values of which the steps are a copy's, `steps` the step of
    each. None too where such blocks do not divide the matrix.
    """
    rows, columns = source.shape
    if tall * wide < LEAST or rows % tall or columns % wide:
        return None

    each = split_blocks(np.asarray(steps).reshape(rows, columns), tall, wide).max(axis=1)
    blocks = block_spans(split_blocks(source, tall, wide), each)
    found = np.flatnonzero(too_wide(blocks))
    if not found.size:
        return None
    across = columns // wide
    return WideSteps(
        len(found),
        len(blocks.step),
        float(np.median(_times_too_wide(blocks, found))),
        tuple((at // across * tall, at % across * wide) for at in found[:LISTED].tolist()),
        wide,
    )


def split_blocks(values: "Array", tall: int, wide: int) -> "Array":
    """Return values [rows, columns] as [blocks, elements]: blocks of `tall` rows by `wide` columns.

    Such blocks must divide the matrix.
    """
    rows, columns = values.shape
    grid = values.reshape(rows // tall, tall, columns // wide, wide)
    return grid.swapaxes(1, 2).reshape(-1, tall * wide)


def cell_size(lattice: "Lattice") -> tuple[int, int]:
    """Return (rows, columns) of the blocks in which a lattice has one lowest and highest value.

    A size is 0 where these never change along that axis.
    """
    low, high = (
        np.asarray(part).reshape(-1, part.shape[-1]) for part in (lattice.low, lattice.high)
    )
    found = []
    for axis in (0, 1):
        changes = ((np.diff(low, axis=axis) != 0) | (np.diff(high, axis=axis) != 0)).any(1 - axis)
        at = np.flatnonzero(changes)
        found.append(int(np.gcd.reduce(at + 1)) if at.size else 0)
    return found[0], found[1]
