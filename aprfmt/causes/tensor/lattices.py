"""The packing scheme of decoded values: few levels in each group, as scale times a code.

A *cell*, or group, is the elements that share a scale. A packed weight decoded to floats keeps its
lattice: in every group of neighbours all values are one number times an entry of the scheme's code.
Each code of CODES is tried with each grouping: the group's largest value is held to be one entry
after the other, and all others must then be entries, within the rounding of the type they are
stored in. A value tests this the better the coarser the entries lie around it; `Found.bits` is how
improbable all of it is by chance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.codecs import f4, fp4, fp8, iq4_nl, nf4
from aprfmt.codecs.lattice import Lattice
from aprfmt.measure.coarse_steps import split_blocks
from aprfmt.measure.encoding_noise import UNIT

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

ROUNDINGS = 1.2  # of value and scale: units that a value may be off its entry
TELLING = 0.2  # share of the distance between entries: a value that is less sure tells nothing
ALL = 0.97  # share of the groups that must fit; the rest may hold a fault
ENOUGH = 40.0  # bits of improbability beyond that of the choices made
TOLD = 4.0  # such bits of a usual cell: many cells that each fit by accident prove nothing
CELLS, OF_CELL = 2, 64  # cells, and values of each, that a scheme is looked for in
FEW = 8  # rows that are then fitted first
FIRST_CELLS = 16  # cells that are fitted first; of each later part, as many as before it
SOURCE_CELLS = 24  # cells of the source, which must not fit the same scheme
SMALL, SMALLEST = 4, 16  # bits of a code, and entries that a cell's smallest value is held to be
FIRST = 12  # values of a cell that are tried first
MOST = 0.98  # share of values at one code from which on a lattice says nothing about them
NARROWEST = 16  # values that a group has at least
ROUNDED = 2.0**-7  # of a code, where scale and value are of 16 bits


class CodeBook(NamedTuple):
    """The levels (`entries`, ascending) that a code can stand for, before the scale.

    `offset` says that a group's smallest value is the entry 0; `full` that groups usually hold the
    largest entry, which is then tried first, and else last: multiples of a scheme fit it too.
    """

    name: str
    entries: "Array"
    offset: bool = False
    full: bool = False

    @property
    def bits(self) -> int:
        """Number of bits of integer codes; 0 for codes of a table or a float type."""
        words = self.name.split()
        return int(words[2]) if words[1] == "of" else 0


class StorageUnit(NamedTuple):
    """The rounding of stored values: `relative` to the value, and `least`, an absolute minimum."""

    relative: float
    least: float

    @classmethod
    def of_encoding(cls, encoding: str) -> "StorageUnit":
        """Return how a plain float type rounds values; as float32 for any other encoding."""
        unit = max(UNIT.get(encoding, 0.0), UNIT["F32"])
        return cls(ROUNDINGS * unit, 2.0**-24 if encoding == "F16" else 0.0)


class Grouping(NamedTuple):
    """A group of `rows` by `columns` elements with one scale, called a cell; 0 is all of them."""

    rows: int
    columns: int

    def __str__(self) -> str:
        """Return in words which elements share a scale."""
        if not self.rows and not self.columns:
            return "the whole tensor"
        if not self.columns:
            return "every row"
        return (
            f"every {self.columns}" if self.rows == 1 else f"tiles of {self.rows} by {self.columns}"
        )


@dataclass(frozen=True)
class FoundScheme:
    """The packing scheme of a decoded tensor: its code, its grouping, and the scales found.

    `scales` is [groups of rows, groups of columns]. `width` is how many bits the integer codes of a
    group need: a book of symmetric codes has room for those of any zero point. It is 0 for others.
    """

    code: CodeBook
    grouping: Grouping
    lattice: Lattice
    scales: "Array"
    share: float
    bits: float
    width: int

    @property
    def name(self) -> str:
        """Name of the scheme: its code, and which elements share a scale."""
        code = self.code.name
        if self.width and not self.code.offset:
            code = f"codes of {self.width} bits"
        return f"{code}, one scale for {self.grouping}"


@cache
def code_books() -> tuple[CodeBook, ...]:
    """Return every code that is searched for, the smallest first.

    8-bit floats are tried before 6-bit integers, since values of 6-bit integers seldom fit 8-bit
    floats by chance, while the reverse happens.
    """

    def symmetric_codes(bits: int) -> "Array":
        """Return the integers from -(2**bits) + 1 to 2**bits - 1: a code's values, float64."""
        return np.arange(-(2**bits) + 1, 2**bits, dtype=np.float64)

    def finite_entries(values: "Array") -> "Array":
        """Return a code's finite values, each once, ascending, float64."""
        values = np.asarray(values, np.float64)
        return np.unique(values[np.isfinite(values)])

    return (
        *(CodeBook(f"codes of {bits} bits", symmetric_codes(bits)) for bits in (2, 3)),
        CodeBook("E2M1 codes", finite_entries(f4.CODEC.values)),
        CodeBook("codes of 4 bits", symmetric_codes(4)),
        *(
            CodeBook(f"codes of {bits} bits above a minimum", np.arange(2.0**bits), True)
            for bits in (2, 4)
        ),
        CodeBook("NF4 codes", finite_entries(nf4.CODEC.code), full=True),
        CodeBook("FP4 codes", finite_entries(fp4.CODEC.code), full=True),
        CodeBook("IQ4_NL codes", finite_entries(iq4_nl.VALUES), full=True),
        CodeBook("E5M2 codes", finite_entries(fp8.E5M2.values), full=True),
        CodeBook("E4M3 codes", finite_entries(fp8.E4M3.values), full=True),
        CodeBook("codes of 6 bits", symmetric_codes(6)),
        CodeBook("codes of 5 bits above a minimum", np.arange(32.0), True),
        CodeBook("codes of 8 bits", symmetric_codes(8)),
    )


def possible_groupings(rows: int, columns: int) -> Iterator[Grouping]:
    """Yield the groupings that a matrix of this size may have, the largest first."""
    yield Grouping(0, 0)
    yield Grouping(1, 0)
    for size in (128, 64, 32):
        if columns > size or rows > size:
            yield Grouping(size, size)
    for size in (256, 128, 64, 32, 16):
        if columns % size == 0 and columns > size:
            yield Grouping(1, size)


def find_scheme(
    values: "Array",
    encoding: str,
    known: Sequence[tuple[CodeBook, Grouping]] = (),
    search: bool = True,
) -> FoundScheme | None:
    """Return the scheme that values [rows, columns] were packed in; None if there is none.

    `encoding` is the plain type they are stored in; "F32" for decoded blocks. `known` schemes are
    tried first, all others only with `search`. None too for narrow matrices, zeros, and values
    that are not finite.
    """
    values = np.asarray(values, np.float64)
    if values.shape[1] < NARROWEST or not np.isfinite(values).all() or not values.any():
        return None
    unit = StorageUnit.of_encoding(encoding)
    every = (
        (code, grouping) for code in code_books() for grouping in possible_groupings(*values.shape)
    )
    samples: dict[Grouping, Array] = {}
    # Known schemes first, then every code with every grouping.
    for tried in (known, every if search else ()):
        for code, grouping in tried:
            if grouping not in samples:
                samples[grouping] = _sample_cells(split_cells(values, grouping))
            if any(_cell_may_fit(cell, code, unit) for cell in samples[grouping]):
                few = min(len(values), max(grouping.rows, FEW))
                if few < len(values) and fit_scheme(values[:few], code, grouping, unit) is None:
                    continue
                made = fit_scheme(values, code, grouping, unit)
                if made is not None:
                    return made
    return None


def _sample_cells(cells: "Array", count: int = CELLS) -> "Array":
    """Return some values of `count` cells, with each cell's largest and smallest among them.

    `cells` is [cells, elements], one cell for each scale, NaN for elements that are missing.
    """
    if len(cells) > count:
        cells = cells[np.unique(np.linspace(0, len(cells) - 1, count).astype(np.int64))]
    if cells.shape[1] <= OF_CELL:
        return cells
    return np.concatenate([_cell_ends(cells), cells[:, :: cells.shape[1] // OF_CELL]], axis=1)


def _cell_ends(cells: "Array") -> "Array":
    """Return the value of largest magnitude, the smallest and the largest of each cell, [cells, 3].

    `cells` is [cells, elements], NaN for elements that are missing. Of two values of largest
    magnitude the first counts. No copy of the cells is made: one may be a whole matrix.
    """
    low, high = np.fmin.reduce(cells, axis=1), np.fmax.reduce(cells, axis=1)
    places = [(cells == end[:, None]).argmax(axis=1) for end in (low, high)]
    negative = (-low > high) | ((-low == high) & (places[0] < places[1]))
    return np.stack([np.where(negative, low, high), low, high], axis=1)


def _cell_may_fit(cell: "Array", code: CodeBook, unit: StorageUnit) -> bool:
    """Return whether the values of one cell, which share a scale, fit the code with some scale."""
    moved = cell - (np.nanmin(cell) if code.offset else 0.0)
    size = np.nan_to_num(np.abs(moved))
    most = moved[int(size.argmax())]
    if not most:
        return False
    # Let the largest value be each entry in turn.
    tops, turned = _top_entries(code)
    scale = np.abs(most / tops) if turned else most / tops
    loose = np.full(len(tops), unit.relative * np.nan_to_num(np.abs(cell)).max() * code.offset)
    cells = np.broadcast_to(moved, (len(tops), moved.size))
    return bool(np.isfinite(_measure_improbability(cells, scale, code, unit, loose)).any())


def share_of_fitting_cells(
    values: "Array", code: CodeBook, grouping: Grouping, unit: StorageUnit
) -> float:
    """Return the fraction, 0 to 1, of some cells that fit a scheme better than chance allows.

    A cell is the elements that share a scale.
    """
    chosen = _sample_cells(split_cells(values, grouping), SOURCE_CELLS)
    return float((_fit_cell_scales(chosen, code, unit)[1] >= TOLD).mean())


def fit_scheme(
    values: "Array", code: CodeBook, grouping: Grouping, unit: StorageUnit
) -> FoundScheme | None:
    """Return the scheme with its scales, or None unless nearly all groups of the values fit it.

    None too if they fit no better than chance, or only because nearly all codes are zero.
    """
    cells = split_cells(values, grouping)
    # Nearly all cells must fit, too well for chance.
    fitted = _fit_nearly_all(cells, code, unit)
    if fitted is None:
        return None
    scales, bits = fitted
    fits = np.isfinite(bits)
    told = fits & (scales != 0)
    sure = float(bits[told].sum())
    if not told.any() or np.median(bits[told]) < TOLD or sure < ENOUGH:
        return None
    if _share_at_rest(cells, scales, code) > MOST:
        return None
    width = _bits_of_codes(cells[told] / np.abs(scales[told])[:, None]) if code.bits else 0
    usual = float(np.median(np.abs(scales[told])))
    scales = np.where(fits & (scales != 0), scales, usual)
    lattice = _fit_lattice(values, cells, scales, code, grouping)
    grid = _cell_grid(scales, values.shape, grouping)
    return FoundScheme(code, grouping, lattice, grid, float(fits.mean()), sure, width)


def _bits_of_codes(codes: "Array") -> int:
    """Return how many bits the widest of groups of integer codes, [groups, elements], needs.

    Codes are numbers as far as the rounding of their scale and values allows (ROUNDED).
    """
    span = float((np.nanmax(codes, axis=1) - np.nanmin(codes, axis=1)).max())
    return max(1, round(span * (1 - ROUNDED)).bit_length())


def _share_at_rest(cells: "Array", scales: "Array", code: CodeBook) -> float:
    """Return the fraction of values nearest to code 0, or to the minimum of their group.

    It is near 1 where one huge value sets the scale of its group. `cells` is [groups, elements].
    """
    moved = cells - (np.nanmin(cells, axis=1, keepdims=True) if code.offset else 0.0)
    first = np.abs(code.entries[code.entries != 0]).min()
    near = np.abs(moved) < first / 2 * np.abs(scales)[:, None]
    return float(near.sum() / max(1, (~np.isnan(cells)).sum()))


def _fit_nearly_all(
    cells: "Array", code: CodeBook, unit: StorageUnit
) -> tuple["Array", "Array"] | None:
    """Return (scales, bits by which the fits beat chance) of all groups; None if too few fit.

    Both are [groups], `cells` is [groups, elements]. The fraction ALL of the groups must fit. More
    and more of them are fitted, until too many do not fit.
    """
    parts = []
    start = failed = 0
    while start < len(cells):
        stop = max(FIRST_CELLS, 2 * start)
        parts.append(_fit_cell_scales(cells[start:stop], code, unit))
        failed += int((~np.isfinite(parts[-1][1])).sum())
        if (len(cells) - failed) / len(cells) < ALL:
            return None
        start = stop
    scales, bits = (np.concatenate(one) for one in zip(*parts, strict=True))
    return scales, bits


def _fit_cell_scales(cells: "Array", code: CodeBook, unit: StorageUnit) -> tuple["Array", "Array"]:
    """Return (scale, bits by which the fit beats chance) of every group, both [groups].

    `cells` is [groups, elements]. The bits are -inf for a group that does not fit. A group's
    largest value is tried as each entry of the code; the first with which all others fit counts.
    """
    moved = cells - (np.nanmin(cells, axis=1, keepdims=True) if code.offset else 0.0)
    size = np.nan_to_num(np.abs(moved))
    most = np.take_along_axis(moved, size.argmax(1)[:, None], 1)[:, 0]
    loose = (
        unit.relative * np.nan_to_num(np.abs(cells)).max(1) if code.offset else np.zeros(len(cells))
    )
    scales, told = np.zeros(len(cells)), np.where(most == 0, 0.0, -np.inf)
    tops, turned = _top_entries(code)
    if code.bits > SMALL and not code.offset:
        # Of many codes a small one is met in nearly every cell: fewer tries than for the largest.
        least = np.where(size > 0, size, np.inf).min(axis=1)
        for entry in range(1, SMALLEST):
            todo = np.flatnonzero(np.isneginf(told))
            if not todo.size:
                break
            bits = _measure_improbability(moved[todo], least[todo] / entry, code, unit, loose[todo])
            good = np.isfinite(bits)
            scales[todo[good]] = least[todo[good]] / entry
            told[todo[good]] = bits[good] - np.log2(SMALLEST)
    few = moved[:, :: max(1, moved.shape[1] // FIRST)]
    for entry in tops:
        todo = np.flatnonzero(np.isneginf(told))
        if not todo.size:
            break
        scale = np.abs(most[todo] / entry) if turned else most[todo] / entry
        first = np.isfinite(_measure_improbability(few[todo], scale, code, unit, loose[todo]))
        todo, scale = todo[first], scale[first]
        if not todo.size:
            continue
        bits = _measure_improbability(moved[todo], scale, code, unit, loose[todo]) - np.log2(
            len(tops)
        )
        good = np.isfinite(bits)
        scales[todo[good]], told[todo[good]] = scale[good], bits[good]
    todo = np.flatnonzero(np.isfinite(told) & (scales != 0) & code.full)
    while todo.size:  # codes that are floats fit a scale of half as well: the largest counts
        bits = _measure_improbability(moved[todo], 2 * scales[todo], code, unit, loose[todo])
        todo = todo[np.isfinite(bits)]
        scales[todo] *= 2
    return scales, told


def _top_entries(code: CodeBook) -> tuple["Array", bool]:
    """Return (entries that a group's largest value may be, whether all occur with both signs).

    The likeliest entry is first. Of a code with both signs only the positive entries are
    returned.
    """
    turned = np.array_equal(code.entries, -code.entries[::-1])
    entries = code.entries[(code.entries > 0) | (not turned)]
    entries = entries[entries != 0]
    order = np.argsort(np.abs(entries), kind="stable")
    return entries[order[::-1] if code.full else order], turned


def _measure_improbability(
    cells: "Array", scale: "Array", code: CodeBook, unit: StorageUnit, loose: "Array"
) -> "Array":
    """Return, for each group, how improbable its fit is by chance, in bits; -inf for no fit.

    `cells` is [groups, elements], `scale` and `loose` (how far a minimum may be off) are
    [groups].
    """
    entries = code.entries
    at = cells / scale[:, None]
    near = np.clip(np.searchsorted((entries[:-1] + entries[1:]) / 2, at), 0, len(entries) - 1)
    gap = _larger_gaps(entries)[near]
    off = np.abs(at - entries[near])
    # Zero is stored as it is: what is only small next to the scale is not zero.
    may = (2 * unit.relative * np.abs(entries[near]) + 1e-9) * (entries[near] != 0) + 1e-30
    may = may + ((2 * loose + unit.least) / np.abs(scale))[:, None]
    # Zero is an entry of every code: what was pruned or clipped to it fits any scheme.
    telling = ~np.isnan(cells) & (cells != 0) & (may < TELLING * gap)
    bits = np.where(telling, np.log2(gap / (2 * may)), 0.0)
    found: Array = np.where((telling & (off > may)).any(1), -np.inf, np.minimum(bits, 8).sum(1))
    return found


def _larger_gaps(entries: "Array") -> "Array":
    """Return, for every entry of a code, its larger distance to a neighbour, [entries]."""
    gaps = np.concatenate(([0.0], np.diff(entries), [0.0]))
    found: Array = np.maximum(gaps[:-1], gaps[1:])
    return found


def are_powers_of_two(scales: "Array") -> bool:
    """Return whether the magnitudes of all nonzero numbers are powers of two; False for none."""
    exponents = np.log2(np.abs(scales[scales != 0]))
    return exponents.size > 0 and bool((exponents == np.rint(exponents)).all())


# --- cells ----------------------------------------------------------------------------------------


def split_cells(values: "Array", grouping: Grouping) -> "Array":
    """Return values [rows, columns] as [groups, elements], one row for each scale.

    NaN fills groups that extend beyond the matrix.
    """
    rows, columns = values.shape
    tall, wide = grouping.rows or rows, grouping.columns or columns
    down, across = -(-rows // tall), -(-columns // wide)
    padded = values
    if (down * tall, across * wide) != values.shape:
        padded = np.full((down * tall, across * wide), np.nan)
        padded[:rows, :columns] = values
    return split_blocks(padded, tall, wide)


def spread_over_cells(cells: "Array", shape: tuple[int, ...], grouping: Grouping) -> "Array":
    """Return an array of the matrix's shape that repeats each group's number, from [groups]."""
    rows, columns = shape
    tall, wide = grouping.rows or rows, grouping.columns or columns
    grid = _cell_grid(cells, shape, grouping)
    found: Array = grid.repeat(tall, 0)[:rows].repeat(wide, 1)[:, :columns]
    return found


def _cell_grid(cells: "Array", shape: tuple[int, ...], grouping: Grouping) -> "Array":
    """Return one number for each group, [groups], arranged as [groups down, groups across].

    `shape` is the matrix's.
    """
    rows = -(-shape[0] // (grouping.rows or shape[0]))
    found: Array = cells.reshape(rows, -1)
    return found


def _fit_lattice(
    values: "Array", cells: "Array", scales: "Array", code: CodeBook, grouping: Grouping
) -> Lattice:
    """Return the lattice of a fit: each value's step, and its group's lowest and highest value.

    `cells` are the values by group, `scales` each group's scale.
    """
    entries = code.entries
    low = np.nanmin(cells, axis=1, keepdims=True) if code.offset else 0.0
    with np.errstate(all="ignore"):
        at = np.where(scales[:, None] != 0, (cells - low) / scales[:, None], 0.0)
    near = np.clip(
        np.searchsorted((entries[:-1] + entries[1:]) / 2, np.nan_to_num(at)), 0, len(entries) - 1
    )
    step = np.abs(scales)[:, None] * _larger_gaps(entries)[near]
    tall, wide = grouping.rows or values.shape[0], grouping.columns or values.shape[1]
    down = -(-values.shape[0] // tall)
    back = step.reshape(down, -1, tall, wide).swapaxes(1, 2)
    steps = back.reshape(down * tall, -1)[: values.shape[0], : values.shape[1]]
    # The lowest and the highest value of each cell.
    ends = [
        spread_over_cells(end(cells, axis=1), values.shape, grouping)
        for end in (np.nanmin, np.nanmax)
    ]
    return Lattice(steps, *ends)
