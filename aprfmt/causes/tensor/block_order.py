"""Blocks of quantized encodings whose fields are in another order, or that begin some bytes late.

A *block* is a quantization block, and its *parts* are fields such as scales and codes. The stored
bytes are read in the other way and decoded; the result must be the other side's values within what
the type rounds off, so that files of different encodings can be compared too. A and B are the two
files that are compared; a *side* is one of them, or its tensor. A *guess* is a change of one tensor
of a pair after which both should be equal.
"""

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Guess, PairHypothesis
from aprfmt.codecs import CODECS
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

FIELDS = 5  # parts of a block whose orders are all tried
ROWS = 6  # rows that every reading is tried on first
LOOSE = 1.5  # times the rounding of the type, on so few rows


def guess_block_layout(case: DifferingPair) -> Iterator[Guess]:
    """Yield the first guess that fits: the parts of each block are stored in another order."""
    for reader, other, whose in _block_sides(case):
        for says, cause, order in _part_orders(reader):

            def read(rows: "Array", reader: RowReader = reader, order: "Array" = order) -> "Array":
                """Return rows of one side, decoded with the bytes of each block in another `order`.

                `rows` are row numbers; `reader` reads that side's stored bytes.
                """
                raw = reader.raw(rows)
                size = len(order)
                return reader.decode_rows(raw.reshape(-1, size)[:, order].reshape(raw.shape))

            found = _guess_if_rows_agree(
                case, reader, other, read, cause, (f"{whose} {says}", reader.encoding)
            )
            if found is not None:
                yield found
                return


def guess_late_blocks(case: DifferingPair) -> Iterator[Guess]:
    """Yield the first guess that fits: blocks are read some bytes too early or too late."""
    for reader, other, whose in _block_sides(case):
        size = encoding_row(reader.encoding).type_size
        inner = np.arange(1, reader.rows - 1)
        for shift in sorted(range(1 - size, size), key=abs) if len(inner) else ():
            if not shift:
                continue

            def read(rows: "Array", reader: RowReader = reader, shift: int = shift) -> "Array":
                """Return rows of one side, decoded from bytes that begin `shift` later.

                `rows` are row numbers; `reader` reads that side's stored bytes.
                """
                return reader.decode_rows(_shifted_rows(reader, rows, shift))

            way = "late" if shift > 0 else "early"
            says = f"{whose} blocks begin {abs(shift)} bytes too {way}"
            found = _guess_if_rows_agree(
                case, reader, other, read, "byte_offset", (says, reader.encoding), inner
            )
            if found is not None:
                yield found
                return


def _block_sides(case: DifferingPair) -> Iterator[tuple[RowReader, RowReader, str]]:
    """Yield (tensor stored in blocks, the other file's tensor, name of the first).

    The name is "A's" or "B's". If both tensors are stored in blocks, each is yielded, B's first.
    Nothing for pairs of unequal shape, or of which only some rows are compared.
    """
    if case.numbers is not None or case.a.shape != case.b.shape:
        return
    for reader, other, whose in ((case.b, case.a, "B's"), (case.a, case.b, "A's")):
        row = encoding_row(reader.encoding)
        if row.block_size > 1 and not row.row_header and reader.decodes_rows:
            yield reader, other, whose


def few_rows(rows: "Array") -> "Array":
    """Return some of the row numbers `rows`, from everywhere."""
    return rows[np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).astype(np.int64)]


def rows_agree(x: "Array", y: "Array", slack: float) -> bool:
    """Return whether a few rows are equal within the rounding of their types, `slack`."""
    first, second = (np.asarray(values, np.float64) for values in (x, y))
    norm = norms.exact_norm(first)
    return norm > 0 and bool(norms.exact_norm(first - second) <= LOOSE * slack * norm)


def _guess_if_rows_agree(
    case: DifferingPair,
    reader: RowReader,
    other: RowReader,
    read: Callable[["Array"], "Array"],
    cause: str,
    says: tuple[str, ...],
    rows: "Array | None" = None,
) -> Guess | None:
    """Return the guess that a side is decoded wrongly, if a few rows agree with it; else None.

    `read` gives the rows of side `reader`, decoded in another way. `cause` and `says` go into the
    guess; `rows` are the only rows compared (None: all).
    """
    # Compare a few rows only.
    few = case.differing_sample if rows is None else np.intersect1d(case.differing_sample, rows)
    few = few_rows(few)
    if not len(few) or not rows_agree(other.take(few), read(few), case.slack()):
        return None
    return case.guess(cause, says, "B" if reader is case.b else "A", read, rows=rows)


def _part_orders(reader: RowReader) -> Iterator[tuple[str, str, "Array"]]:
    """Yield (words, cause, byte index) of each other order in which a block's parts may be stored.

    Taking a stored block's bytes at the index puts them into the right order. Nothing for an
    encoding whose parts are unknown or too many.
    """
    codec = CODECS.get(reader.encoding)
    fields = None if codec is None or codec.layout is None else codec.layout.fields
    if codec is None or codec.layout is None or not fields or len(fields) > FIELDS:
        return
    # The parts of a block must fill it.
    names = sorted(fields, key=lambda name: fields[name][1])
    spans = {
        name: np.arange(fields[name][1], fields[name][1] + fields[name][0].itemsize)
        for name in names
    }
    if sum(map(len, spans.values())) != codec.layout.itemsize:
        return
    # For every other order, find where each byte of the right order is.
    for stored in permutations(names):
        if list(stored) == names:
            continue
        order = np.zeros(codec.layout.itemsize, np.int64)
        at = 0
        for name in stored:
            order[spans[name]] = np.arange(at, at + len(spans[name]))
            at += len(spans[name])
        moved = [x for x, y in zip(names, stored, strict=True) if x != y]
        alike = {fields[name][0] for name in moved}
        if len(moved) == 2 and len(alike) == 1:
            yield f"{moved[0]} and {moved[1]} are exchanged", "quant_min", order
        else:
            text = f"blocks hold {', '.join(stored)} where {', '.join(names)} stand"
            yield text, "packing_order", order


def _shifted_rows(reader: RowReader, index: "Array", shift: int) -> "Array":
    """Return the bytes of the rows `index`, uint8 [n, row bytes], read `shift` bytes later."""
    size = reader.row_bytes
    assert size is not None
    made = np.empty((len(index), size), np.uint8)
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    at = 0
    for run in np.split(np.asarray(index, np.int64), breaks):
        start, stop = int(run[0]) * size + shift, (int(run[-1]) + 1) * size + shift
        made[at : at + len(run)] = np.frombuffer(
            reader.bytes.window(start, stop), np.uint8
        ).reshape(len(run), size)
        at += len(run)
    return made


HYPOTHESES = (
    PairHypothesis(
        ("packing_order", "quant_min"),
        guess_block_layout,
        100,
        "other orders of bytes, before what fits a scale to them",
        facts=("blocks",),
    ),
    PairHypothesis(
        ("byte_offset",),
        guess_late_blocks,
        220,
        "blocks read late, once no whole value moved",
        facts=("blocks",),
    ),
)
