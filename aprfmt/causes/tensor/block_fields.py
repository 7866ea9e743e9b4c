"""Values decoded from blocks of which a field was read from other bytes of the block.

A field is what a block's layout names: scales, minimums, codes. A reader with a wrong layout takes
a field's bytes from another place, two fields for one another, or the two bytes of a number in the
other order. Every such reading is executed on the blocks of the packed side.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.base.encodings import find_encoding
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Guess, PairHypothesis
from aprfmt.codecs import CODECS
from aprfmt.codecs import decode as decode_values
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader, widen_values

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "block_fields", "tensor", "bug",
        "Blocks were decoded by another layout of their fields: codes or scales were taken from "
        "other bytes of the block.",
        "Every block is wrong, and all tensors of the encoding are.",
        "The blocks, read so, give all values of the other side.",
        next="again",
    ),
)  # fmt: skip

AROUND = 8  # bytes before and after a block from which a field may be taken
FAILED = 4  # tensors without a result, after which no other is asked
ROWS, VALUES = 2, 1024  # of a matrix, or a vector, on which readings are tried first
ROUNDED = 4.0  # units of the plain type within which decoded values are the other side's


class FieldReading(NamedTuple):
    """A wrong way to read the blocks of an encoding.

    `places` has, for each byte of a block, where it is read from, counted from the block's
    beginning, int64 [block bytes]; `says` describes it. `cause` is what such a reading is called.
    """

    says: str
    places: "Array"
    cause: str = "block_fields"


def guess_block_fields(case: DifferingPair) -> Iterator[Guess]:
    """Yield the first guess that fits: plain values are blocks with a field read elsewhere."""
    schemes = case.context.schemes
    if case.numbers is not None or case.a.shape != case.b.shape or schemes.failed_fields >= FAILED:
        return
    for plain, packed, one, other in ((case.b, case.a, "B", "A"), (case.a, case.b, "A", "B")):
        if plain.encoding not in UNIT or plain.side.parts or not _has_fields(packed):
            continue
        schemes.failed_fields += 1
        slack = max(ROUNDED * UNIT[plain.encoding], UNIT["F32"] * ROUNDED)
        count = ROWS if packed.columns > 1 else VALUES
        rows = np.unique(np.linspace(0, packed.rows - 1, count).astype(np.int64))
        wanted = to_float64(plain.take(rows))
        for reading in field_readings(CODECS[packed.encoding].layout):
            read = partial(read_with_fields, packed, reading)
            with np.errstate(all="ignore"):
                made = np.asarray(read(rows), np.float64)
            if not np.isfinite(made).any() or not rel_l2(made, wanted) <= slack:
                continue
            says = (
                f"{one} holds {other}'s {packed.encoding} blocks decoded by another layout: "
                f"{reading.says}",
            )
            schemes.failed_fields = 0
            yield case.guess(reading.cause, says, other, read, slack, free=1)
            return


def _has_fields(reader: RowReader) -> bool:
    """Return whether a side is stored in blocks whose fields are known, and can be read so."""
    row = find_encoding(reader.encoding.split("+")[0])
    codec = CODECS.get(reader.encoding)
    known = codec is not None and codec.layout is not None and codec.layout.fields is not None
    whole = reader.columns == 1 and len(reader.bytes) * row.block_size == (
        reader.rows * row.type_size
    )
    return known and row.block_size > 1 and not row.row_header and (reader.decodes_rows or whole)


def field_readings(layout: np.dtype | None) -> Iterator[FieldReading]:
    """Yield the wrong ways to read blocks of a layout, none of which is the right one.

    One field from other bytes; a field and all after it from so many bytes on; two fields of one
    kind exchanged; the two bytes of all numbers of one kind exchanged.
    """
    assert layout is not None and layout.fields is not None
    size, fields = layout.itemsize, dict(layout.fields)
    right = np.arange(size)
    ends = {name: (row[1], row[1] + row[0].itemsize) for name, row in fields.items()}
    for name, (begin, end) in ends.items():
        for at in range(-AROUND, size - (end - begin) + AROUND + 1):
            if at != begin:
                places = right.copy()
                places[begin:end] = np.arange(at, at + end - begin)
                says = f"{name} is read from byte {at} of a block on, and not from byte {begin}"
                yield FieldReading(says, places)
    for name, (begin, end) in ends.items():
        for by in (-4, -2, -1, 1, 2, 4) if 0 < begin and end < size else ():
            places = np.where(right >= begin, right + by, right)
            way = f"{abs(by)} bytes too {'late' if by > 0 else 'early'}"
            yield FieldReading(f"{name} and what follows it are read {way}", places)
    names = list(ends)
    for number, name in enumerate(names):
        for other in names[number + 1 :]:
            if fields[name][0] == fields[other][0]:
                places = right.copy()
                places[slice(*ends[name])] = np.arange(*ends[other])
                places[slice(*ends[other])] = np.arange(*ends[name])
                yield FieldReading(
                    f"{name} and {other} are read for one another", places, "quant_min"
                )
    wide = [name for name in names if fields[name][0].base.itemsize == 2]
    if wide:
        places = right.copy()
        for name in wide:
            places[slice(*ends[name])] = np.arange(*ends[name]).reshape(-1, 2)[:, ::-1].reshape(-1)
        says = f"the two bytes of {' and '.join(wide)} are exchanged"
        yield FieldReading(says, places, "endianness")


def read_with_fields(reader: RowReader, reading: FieldReading, rows: "Array") -> "Array":
    """Return rows of a side, decoded from blocks whose bytes are taken as `reading` says.

    `rows` are row numbers. Bytes before the first row and after the last one are 0.
    """
    rows = np.asarray(rows, np.int64)
    if not reader.decodes_rows:  # a vector: its blocks are one row
        raw = np.frombuffer(reader.bytes.window(0, len(reader.bytes)), np.uint8)
        outside = np.zeros((1, AROUND), np.uint8)
        made = _rearrange_bytes(reading, outside, raw.reshape(1, -1), outside)
        found: Array = decode_values(reader.encoding, {"": made.tobytes()}, (1, reader.rows))
        return widen_values(found).reshape(-1, 1)[rows]
    raw = reader.raw(rows)
    before, after = (np.zeros((len(rows), AROUND), np.uint8) for _ in range(2))
    if (inner := rows > 0).any():
        before[inner] = reader.raw(rows[inner] - 1)[:, -AROUND:]
    if (inner := rows < reader.rows - 1).any():
        after[inner] = reader.raw(rows[inner] + 1)[:, :AROUND]
    return reader.decode_rows(_rearrange_bytes(reading, before, raw, after))


def _rearrange_bytes(
    reading: FieldReading, before: "Array", raw: "Array", after: "Array"
) -> "Array":
    """Return blocks with their bytes taken as `reading` says, uint8 [rows, bytes], as `raw` is.

    `before` and `after` are the AROUND bytes on both sides of each row, uint8 [rows, AROUND].
    """
    whole = np.concatenate([before, raw, after], axis=1)
    starts = np.arange(0, raw.shape[1], len(reading.places))[:, None] + AROUND
    return np.ascontiguousarray(whole[:, (starts + reading.places).reshape(-1)])


HYPOTHESES = (
    PairHypothesis(
        ("block_fields", "quant_min", "endianness"),
        guess_block_fields,
        103,
        "blocks read by another layout, before any order of their codes is looked for",
        facts=("two encodings", "blocks"),
    ),
)
