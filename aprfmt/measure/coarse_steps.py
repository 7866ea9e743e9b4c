"""Blocks of a quantized copy whose steps are far too wide for the values that they hold.

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
    """Of each block [blocks]: the source's largest size and its range, and the copy's step."""

    largest: "Array"
    span: "Array"
    step: "Array"


def block_spans(values: "Array", steps: "Array") -> BlockSpans:
    """Return the spans of blocks; `values` [blocks, elements] are the source's, NaN for none.

    `steps` [blocks] are the copy's.
    """
    low, high = (to_float64(end) for end in _block_ends(values))
    return BlockSpans(np.maximum(np.abs(low), np.abs(high)), high - low, to_float64(steps))


def _block_ends(values: "Array") -> "tuple[Array, Array]":
    """Return the least and the largest value of each block [blocks] of `values`, NaN left out.

    A block of NaN alone has the end NaN. `values` are [blocks, elements].
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
    """Return which blocks [blocks] (bool) have a step over FAR times as wide as usual ones.

    Both the largest value and the range have to span too few steps: symmetric codes have steps by
    the first, codes above a minimum by the second.
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

    `places` are (row, first column) of at most LISTED of them, `columns` a block's width. `times`
    is the median of how many times too wide they are.
    """

    count: int
    total: int
    times: float
    places: tuple[tuple[int, int], ...]
    columns: int

    def text(self, rows: "Array | None" = None) -> str:
        """Return which blocks they are, in words.

        `rows` are the numbers of the rows that were looked at, None for all.
        """
        row, column = self.places[0]
        row = row if rows is None else int(rows[row])
        of = f"{self.count} of {self.total} blocks of {self.columns}"
        more = "" if self.count == 1 else "the first "
        return f"in {of}, {more}at [{row}, {column}], about {self.times:.2g} times too large"


class WideStepsOfBlocks:
    """Finds the blocks with steps too wide of a copy in a block encoding, chunk by chunk."""

    def __init__(self, encoding: str, columns: int) -> None:
        """Take the copy's encoding and the number of columns of its rows."""
        self.size = find_encoding(encoding).block_size
        self.encoding, self.columns = encoding, columns
        self.count = self.total = 0
        self._places: list[tuple[int, int]] = []
        self._times: list[float] = []

    @staticmethod
    def is_for(encoding: str, columns: int) -> bool:
        """Return whether blocks of this encoding fill rows and have one known step each."""
        size = find_encoding(encoding).block_size if encoding in CODECS else 0
        return size >= LEAST and columns % size == 0 and CODECS[encoding].parts == ("",)

    def add(
        self,
        source: "Array",
        wide: "Array | None",
        copied: "Array | None" = None,
        steps: "Array | float" = 0.0,
    ) -> None:
        """Add the next rows: the source's values and the copy's largest step of each block.

        With `copied`, the copy's values, and `steps`, the step of each, blocks that are no rounding
        of the source are left out: an error in them is more than a step. They are not needed where
        all errors are known to be within one. `wide` is [blocks]; nothing is added where it is
        None: steps are not known.
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
        """Leave out the next `count` elements, which are the same in the source and the copy."""
        self.total += count // self.size

    def _encoder_steps(self, values: "Array") -> "Array":
        """Return the step [blocks] that the encoder gives each block of values; 0 if unknown."""
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
    """Return by how many times each of the blocks with indices `found` has too wide a step."""
    with np.errstate(all="ignore"):
        counted = blocks.largest / blocks.step
    counted = np.where(np.isfinite(counted), counted, 0.0)
    return np.asarray(np.quantile(counted[counted > 0], USUAL) / counted[found])


def wide_steps_of_lattice(source: "Array", lattice: "Lattice") -> WideSteps | None:
    """Return the groups of a packed weight with steps too wide; None without any.

    `source` are the values [..., columns] that it is a copy of. None too for groups of fewer than
    LEAST elements, such as those of columns in another order.
    """
    columns = source.shape[-1]
    rows = source.size // max(1, columns)
    tall, wide = cell_size(lattice)
    return wide_steps_of_cells(
        source.reshape(rows, columns), lattice.step, tall or rows, wide or columns
    )


def wide_steps_of_cells(source: "Array", steps: "Array", tall: int, wide: int) -> WideSteps | None:
    """Return the cells of `tall` rows by `wide` columns with steps too wide; None without any.

    `source` are the values [rows, columns], `steps` the copy's step of each.
    """
    rows, columns = source.shape
    if tall * wide < LEAST or rows % tall or columns % wide:
        return None

    def cells(values: "Array") -> "Array":
        """Return values [rows, columns] as [cells, elements]."""
        grid = values.reshape(rows // tall, tall, columns // wide, wide)
        return grid.swapaxes(1, 2).reshape(-1, tall * wide)

    blocks = block_spans(cells(source), cells(np.asarray(steps).reshape(rows, columns)).max(axis=1))
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


def cell_size(lattice: "Lattice") -> tuple[int, int]:
    """Return (rows, columns) of the cells in which the ends of a lattice stay the same.

    0 stands for all of them.
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
