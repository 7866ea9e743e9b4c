"""Copies in a packed encoding: whether they are right, and the finding if they are not.

A *copy* is the quantized tensor of file A or B, its *source* the other file's tensor. A *cell*, or
group, is the elements that share one scale. A and B are the two files that are compared; a *side*
is one of them, or its tensor.

A side is a copy of the other if its values lie on a lattice: its dialect says which
(`codecs.lattice`), or the values show it (`lattices`), be they of a GGUF block or decoded again.
Errors are then judged in the copy's own steps (`measure.bounds`). For a wrong copy every fault is
made good in turn; the one after which the errors are usual is the cause.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.causes.tensor import lattices
from aprfmt.causes.tensor.differing_pair import DifferingPair, count_stray_rows
from aprfmt.causes.tensor.lattices import Grouping
from aprfmt.causes.tensor.proof import either_side_text, make_finding
from aprfmt.codecs import decode
from aprfmt.codecs.dialect import CodeTable
from aprfmt.codecs.lattice import Lattice
from aprfmt.measure.bounds import ON_STEPS, Fit, fit_errors
from aprfmt.measure.coarse_steps import cell_size
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import Proof, cap_proof
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

MOST = 1 << 21  # elements looked at; of larger tensors, that many in runs of TILE rows
TILE = 128
FLAT = 64  # elements of a block of bitsandbytes, which rows do not end
FAILED = 4  # searches for a scheme without result, after which no more are made
CODES_OF_BYTE = 8  # most values that a byte of codes has
BYTE_UNIT = 2.0**-4  # relative rounding of the finest 8-bit float
DECODED = 2.0**-6  # relative L2 within which values are decoded codes, both rounded to 16 bits
GONE = 0.8  # of the distance at most is left when the cause is put right
SAME_SCHEME = 0.9  # the source must not fit the copy's scheme in more of its groups


@dataclass(frozen=True)
class PackedCopy:
    """A source `x` and its copy `y` (float64 [rows, columns]), the copy's lattice and cells.

    `scheme` says in words what it is, `whose` the side; `again` that it was decoded again. `rows`
    are the numbers of those looked at, None for all. `bits` are those of its codes, 0 for codes
    that are no integers, `scales` one number a cell. A copy that is not `finite` has no lattice
    that means anything: only its stored tensors may be read in another way.
    """

    case: DifferingPair
    source: RowReader
    reader: RowReader
    x: "Array"
    y: "Array"
    lattice: Lattice
    grouping: Grouping
    scheme: str
    whose: str
    again: bool
    bits: int
    rows: "Array | None"
    scales: "Array"
    finite: bool

    @property
    def other(self) -> str:
        """The source side's name in the genitive, "A's" or "B's", for evidence on the copy."""
        return "A's" if self.whose == "B's" else "B's"

    @property
    def tall(self) -> int:
        """Number of rows of one matrix of a stack; of all rows where only some are looked at."""
        shape = self.reader.side.shape
        stacked = len(shape) > 2 and self.y.shape == (self.reader.rows, self.reader.columns)
        return int(shape[-2]) if stacked else self.y.shape[0]

    def fit(self) -> Fit:
        """Return the errors of the copy's values as they are, with one scale for each matrix.

        They are measured once, however many causes ask for them.
        """
        return self._errors

    @cached_property
    def _errors(self) -> Fit:
        """The errors of the copy's values against its source; `fit` returns them."""

        def split(part: "Array") -> "Array":
            """Return rows [rows, columns] as a stack [matrices, rows, columns]."""
            return part.reshape(-1, self.tall, part.shape[-1])

        return fit_errors(split(self.x), split(self.y), self.lattice.map_parts(split))

    def explain_repaired(
        self, cause: str, says: tuple[str, ...], y: "Array", lattice: Lattice, free: int = 0
    ) -> Finding | None:
        """Return the finding of `cause` if the repaired values are a right copy's, else None.

        `says` is the evidence, `y` and `lattice` are the repaired values and their lattice;
        `free` is how many numbers were fitted to the values.
        """
        after = fit_errors(self.x, y, lattice)
        if not self.is_repaired(after):
            return None
        return explain_copy(self, cause, says, after, free)

    def is_repaired(self, after: Fit) -> bool:
        """Return whether a repair makes this a right copy; `after` are the errors that it leaves.

        They must be those of a scheme's rounding (`after.how`), and at most GONE of the errors
        before; the errors before do not count for a copy with values that are not finite.
        """
        gone = after.relative <= GONE * fit_errors(self.x, self.y, self.lattice).relative
        return bool(after.how) and (gone or not self.finite)


def explain_copy(
    copy: PackedCopy,
    cause: str,
    says: tuple[str, ...],
    after: Fit,
    free: int = 0,
    moved: float = math.inf,
    either: bool = False,
) -> Finding:
    """Return the finding of a cause without which only a right copy's errors remain.

    Its distance after is 0; the measured one, `after`, is in the evidence. `free` is how many
    numbers were fitted to the values, `moved` how many values the repair changes. A value within
    its step gives about as much evidence as its code has bits. Where the source is the same codes
    decoded, or has scales itself, fitted numbers do not say which side is wrong: the finding
    names both. `either`: `says` names both already.
    """
    before = copy.case.before.relative
    two = cause == "quant_scale" and copy.source.side.lattice is not None
    fitted = free > 0 and (two or is_own_decoding(copy, after))
    if fitted:
        says = (says[0] + either_side_text(copy.whose, "numbers are"), *says[1:])
    said = (
        *says,
        f"relative distance {before:.3g} as stored, {after.relative:.3g} with it put right: "
        f"{after.how}",
        after.text(),
    )
    if copy.rows is not None:
        said = (*said, f"{len(copy.rows)} of {copy.reader.rows} rows looked at")
    stray = count_stray_rows(copy.case, copy.rows)
    if stray:
        said = (*said, f"{stray} other rows are further apart than any of these")
    share = 1.0 if copy.rows is None or not stray else len(copy.rows) / copy.reader.rows
    bits = float(max(1, copy.bits - 1))
    found = Proof(copy.x.size, share, free, bits, accused=fitted, moved=moved)
    # A sample stands for the other rows where these are no further apart, but proves no more.
    proof = found if copy.rows is None else cap_proof(found, "explained")
    made = make_finding(cause, (copy.case.key,), said, before, 0.0, proof)
    either |= fitted
    side = copy.whose[0] if made.verdict == "bug" and not either else ""
    return replace(made, side=side, leaves_side_open=either)


def is_own_decoding(copy: PackedCopy, after: Fit) -> bool:
    """Return whether the source is the copy's own codes, decoded to floats with other numbers.

    An original is rounded once, by up to half a step; decoded values are exactly on the steps.
    """
    return is_plain_float(copy.source) and after.rms <= ON_STEPS and after.relative <= DECODED


def packed_copies(case: DifferingPair) -> Iterator[PackedCopy]:
    """Yield each side that is a quantized copy of the other, B first, as a PackedCopy.

    The packing scheme of a tensor is searched once, and only when it is asked for.
    """
    for side in (0, 1):
        if len(case.copies) == side:
            case.copies.append(_find_copy(case, swapped=side == 1))
        copy = case.copies[side]
        if copy is not None:
            yield copy


def _find_copy(case: DifferingPair, *, swapped: bool) -> PackedCopy | None:
    """Return B as a quantized copy of A, or with `swapped` A of B; None if it is no such copy.

    The values may be packed, or decoded to floats.
    """
    if case.a.columns < lattices.NARROWEST or case.numbers is not None:
        return None
    source, reader, whose = (case.b, case.a, "A's") if swapped else (case.a, case.b, "B's")
    # Of large tensors only some rows are read.
    rows = _sampled_rows(case.a)
    index = np.arange(reader.rows) if rows is None else rows
    y = np.asarray(reader.take(index), np.float64)
    x = np.asarray(source.take(index), np.float64)
    known, finite = reader.side.lattice, bool(np.isfinite(y).all())
    if not (np.isfinite(x).all() and x.any() and y.any()):
        return None
    # The encoding itself gives the lattice.
    if known is not None:
        lattice = known.map_parts(
            lambda part: np.asarray(part, np.float64).reshape(-1, reader.columns)[index]
        )
        grouping, codes = grouping_of(lattice), _code_table(reader)
        return PackedCopy(
            case,
            source,
            reader,
            x,
            y,
            lattice,
            grouping,
            reader.encoding,
            whose,
            False,
            _code_bits(codes),
            rows,
            _cell_scales(lattice, grouping, codes),
            finite,
        )
    # Otherwise search for a scheme in the values.
    made = _scheme_of_one_side(case, x, y, source, reader) if finite else None
    if made is None and finite and reader.columns % FLAT and not x.size % FLAT:
        x, y = x.reshape(-1, FLAT), y.reshape(-1, FLAT)  # blocks that run over row ends
        made = _scheme_of_one_side(case, x, y, source, reader)
    if made is None:
        return None
    if is_plain_float(reader):
        case.context.schemes.decoded.add(case.key)
    name = made.name if is_plain_float(reader) else f"{reader.encoding}: {made.name}"
    return PackedCopy(
        case,
        source,
        reader,
        x,
        y,
        made.lattice,
        made.grouping,
        name,
        whose,
        is_plain_float(reader),
        made.code.bits,
        rows,
        made.scales.reshape(-1),
        True,
    )


def holds_scale(reader: RowReader, columns: int) -> bool:
    """Return whether `columns` consecutive values are at least as many as share one stored scale.

    True for other than block types: other packed weights and plain floats do not show it.
    """
    row = encoding_row(reader.encoding.split("+")[0])
    blocks = row.block_size > 1 and row.layout and not row.row_header
    return not blocks or columns >= _block_values_of_scale(row.name)


@cache
def _block_values_of_scale(encoding: str) -> int:
    """Return how many values of a block share one scale, at least, rounded up to a power of 2.

    1 where no byte looks like a scale's: a byte of a random block that changes more than
    CODES_OF_BYTE values.
    """
    row = encoding_row(encoding)
    raw = np.random.default_rng(0).integers(0, 256, row.type_size, np.uint8)
    # One bit of every byte is turned, of each half: a half may be a separate scale.
    edits = np.concatenate([np.eye(row.type_size, dtype=np.uint8) << bit for bit in (0, 4)])
    blocks = np.concatenate([raw[None], raw ^ edits])
    with np.errstate(all="ignore"):
        values = decode(encoding, blocks.tobytes(), (len(blocks), row.block_size))
        changed = (values[1:] != values[0]).sum(axis=1)
    wide = changed[changed > CODES_OF_BYTE]
    return int(1 << math.ceil(math.log2(wide.min()))) if wide.size else 1


def is_plain_float(reader: RowReader) -> bool:
    """Return whether a tensor is stored as plain floats."""
    return reader.encoding in UNIT


def _sampled_rows(reader: RowReader) -> "Array | None":
    """Return the row numbers of a sample of a large tensor, in runs of TILE; None for all rows."""
    if reader.size <= MOST or reader.rows <= TILE:
        return None
    runs = max(1, MOST // reader.columns // TILE)
    starts = np.unique(np.linspace(0, reader.rows // TILE - 1, runs).astype(np.int64)) * TILE
    found: Array = (starts[:, None] + np.arange(TILE)).reshape(-1)
    return found


def _scheme_of_one_side(
    case: DifferingPair, x: "Array", y: "Array", source: RowReader, reader: RowReader
) -> lattices.FoundScheme | None:
    """Return the packing scheme that the values `y` show and `x` do not; None if there is none.

    `x` are the source's values, `y` those of the side that may be packed.
    """
    seen = case.context.schemes
    known = tuple(seen.found)
    row = encoding_row(reader.encoding.split("+")[0])
    # What bitsandbytes decodes was rounded to its quant state's dtype: to BF16 at worst.
    stored = reader.encoding if is_plain_float(reader) else "BF16" if row.claim else "F32"
    if UNIT.get(stored, 0.0) >= BYTE_UNIT:
        stored = "F32"  # the values are codes themselves: nothing was rounded after a scale
    search = bool(known) or seen.failed_searches < FAILED or row.block_size > 1
    made = lattices.find_scheme(y, stored, known, search)
    if made is None:
        seen.failed_searches += 1
        return None
    unit = lattices.StorageUnit.of_encoding(source.encoding if is_plain_float(source) else "F32")
    if lattices.share_of_fitting_cells(x, made.code, made.grouping, unit) > SAME_SCHEME:
        return None
    made = _own_grouping(x, y, made, lattices.StorageUnit.of_encoding(stored))
    if (made.code, made.grouping) not in known:
        seen.found.append((made.code, made.grouping))
    return made


def _own_grouping(
    x: "Array", y: "Array", made: lattices.FoundScheme, unit: lattices.StorageUnit
) -> lattices.FoundScheme:
    """Return the scheme with the grouping whose errors against the source are those of rounding.

    Small floats times a power of two are small floats again: where scales are such powers, larger
    groups fit as well, but what was clipped in its own group is inside the range of these.
    """
    if not made.code.full or not lattices.are_powers_of_two(made.scales):
        return made
    if fit_errors(x, y, made.lattice).how:
        return made
    every = list(lattices.possible_groupings(*y.shape))
    for grouping in every[every.index(made.grouping) + 1 :] if made.grouping in every else ():
        finer = lattices.fit_scheme(y, made.code, grouping, unit)
        if finer is not None and fit_errors(x, y, finer.lattice).how:
            return finer
    return made


def _code_table(reader: RowReader) -> CodeTable:
    """Return the table of a packed weight: the value that each code stands for."""
    packed = reader.side.stored[0].packed
    codes: CodeTable | None = None if packed is None else packed().codes()
    assert codes is not None, "a lattice without codes"
    return codes


def _code_bits(codes: CodeTable) -> int:
    """Return the number of bits of integer codes, else 0."""
    return codes.bits if np.isin(np.diff(np.sort(codes.values)), 1.0).all() else 0


def _cell_scales(lattice: Lattice, grouping: Grouping, codes: CodeTable) -> "Array":
    """Return the scale of every group, [groups]: its range of values over that of its codes."""
    wide = lattices.split_cells(np.abs(lattice.high - lattice.low), grouping)
    with np.errstate(all="ignore"):
        found: Array = np.nan_to_num(np.nanmedian(wide, axis=1)) / np.ptp(
            codes.values[np.isfinite(codes.values)]
        )
    return found


def grouping_of(lattice: Lattice) -> Grouping:
    """Return the size of the groups in which a lattice's lowest and highest value are constant."""
    return Grouping(*cell_size(lattice))


def copy_cells(copy: PackedCopy, values: "Array") -> "Array":
    """Return values of the copy's shape as [groups, elements], one row per scale, NaN outside."""
    return lattices.split_cells(values, copy.grouping)


def spread_over_copy(copy: PackedCopy, numbers: "Array") -> "Array":
    """Return an array of the copy's shape in which every element has its group's number.

    `numbers` is [groups]; a group's elements share one scale.
    """
    return lattices.spread_over_cells(numbers, copy.y.shape, copy.grouping)


def scale_lattice(
    lattice: Lattice, factor: "Array | float", offset: "Array | float" = 0.0
) -> Lattice:
    """Return the lattice of values times `factor` plus `offset`."""
    return Lattice(
        lattice.step * np.abs(factor),
        lattice.low * factor + offset,
        lattice.high * factor + offset,
        None if lattice.room is None else lattice.room * np.abs(factor),
    )


def reorder_lattice(lattice: Lattice, rows: "Array | slice", columns: "Array | slice") -> Lattice:
    """Return a lattice with its rows and columns in this order."""
    return lattice.map_parts(lambda part: part[rows][:, columns])
