"""Values that are the other side's stored bytes, decoded as another type of the encoding table.

A *side* is the tensor of file A or of file B. The *storing side* is the one whose bytes are
decoded, the *reading side* the one whose values they then are. Two types may take blocks of
different sizes: a reader that expects shorter blocks takes the first part of the bytes, one that
expects longer blocks comes to their end. Every type of the table is tried on the stored bytes, and
no number is fitted.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.base.encodings import Encoding, find_encoding
from aprfmt.base.protocols import LazyTensor
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.misread_codes import FAR
from aprfmt.causes.tensor.proof import make_finding, prove_values
from aprfmt.codecs import CODECS, decode, encode
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

FEW = 32  # values below which nothing is shown
KINDS = 4  # different numbers among them, at least
FAILED = 4  # pairs of two encodings without a result, after which no other is asked
PROBED = 1024  # values on which every type is tried first
PIECE = 1 << 22  # values that are decoded at a time
MOST = 1 << 26  # values of a tensor with moved elements, which is decoded as a whole
ROUNDED = 4.0  # units of the reading side's type within which decoded values are its values


class Decoded(NamedTuple):
    """Values of stored bytes, float64 [n], and which of them the bytes give, bool [n]."""

    values: "Array"
    given: "Array"


class StoredBytes:
    """The bytes in which one side is stored, decoded as any type of the table.

    `by_rows`: a row begins where a row of the side's own type begins. Otherwise the values follow
    one another without a gap. `beyond`: the bytes that the file holds after the tensor are read
    as well.
    """

    def __init__(self, reader: RowReader, *, by_rows: bool = False, beyond: bool = False) -> None:
        """Store the side's reader and where its values are; no byte is read."""
        self.reader, self.by_rows, self.beyond = reader, by_rows, beyond
        self._made: dict[str, Decoded] = {}

    @cached_property
    def _whole(self) -> LazyTensor | None:
        """The one stored tensor with the side's values in its own order, or None."""
        return self.reader.side.whole

    def size(self, tensor: LazyTensor) -> int:
        """Return how many bytes can be read from the beginning of a stored tensor."""
        place = tensor.location() if self.beyond else None
        return tensor.info.nbytes if place is None else place[0].size - place[1]

    def _bytes(self, tensor: LazyTensor, start: int, stop: int) -> bytes:
        """Return a copy of bytes [start, stop) of a stored tensor, or of what follows it."""
        place = tensor.location() if self.beyond else None
        if place is None:
            return bytes(tensor.raw(start, stop))
        source, at = place
        return bytes(source.view[at + start : at + stop])

    def first(self, encoding: str, size: int) -> tuple[int, Decoded]:
        """Return (number of a value, values from there on) for a first look; `size` are wanted.

        There are at most PROBED values; none where the side's elements are not moved as they are.
        """
        if self.by_rows:
            at = (self.reader.rows - 1) * self.reader.columns
            return at, self.values(encoding, at, at + min(self.reader.columns, PROBED))
        if self._whole is not None:
            return 0, self.values(encoding, 0, min(size, PROBED))
        moves = self.reader.side.moves
        if not moves or self.reader.size > MOST or size != self.reader.size:
            return 0, _nothing(0)
        first = moves[0]
        stored = self.reader.side.stored[first.source]
        stop = first.start + min(first.count, PROBED)
        return 0, self._consecutive(stored, encoding, first.start, stop)

    def values(self, encoding: str, start: int, stop: int) -> Decoded:
        """Return values [start, stop) of the side in row-major order, its bytes read as a type.

        By rows, both are multiples of the row's length or in one row.
        """
        if self.by_rows:
            return self._of_rows(encoding, start, stop)
        if self._whole is not None:
            return self._consecutive(self._whole, encoding, start, stop)
        if encoding not in self._made:
            self._made = {encoding: self._moved(encoding)}
        whole = self._made[encoding]
        return Decoded(whole.values[start:stop], whole.given[start:stop])

    def _of_rows(self, encoding: str, start: int, stop: int) -> Decoded:
        """Return values [start, stop), each row decoded from the first bytes of the stored row."""
        columns = self.reader.columns
        rows = np.arange(start // columns, -(-stop // columns))
        size = find_encoding(encoding).row_bytes((columns,))
        values = self.reader.decode_rows(self.reader.raw(rows)[:, :size], encoding)
        found = to_float64(values).reshape(-1)[start % columns :][: stop - start]
        return Decoded(found, np.ones(len(found), bool))

    def _consecutive(self, tensor: LazyTensor, encoding: str, start: int, stop: int) -> Decoded:
        """Return values [start, stop) of a stored tensor in its own order, decoded one by one."""
        row = find_encoding(encoding)
        blocks = (self.size(tensor) - row.header) // row.type_size
        low, high = start // row.block_size, min(-(-stop // row.block_size), blocks)
        made = _nothing(stop - start)
        if high <= low:
            return made
        head = self._bytes(tensor, 0, row.header)
        raw = head + self._bytes(
            tensor, row.header + low * row.type_size, row.header + high * row.type_size
        )
        values = decode(encoding, raw, ((high - low) * row.block_size,))
        found = to_float64(values)[start - low * row.block_size :][: stop - start]
        made.values[: len(found)], made.given[: len(found)] = found, True
        return made

    def _moved(self, encoding: str) -> Decoded:
        """Return all values of a side whose elements its file stores in another order."""
        side = self.reader.side
        parts = [self._consecutive(one, encoding, 0, prod(one.info.shape)) for one in side.stored]
        shapes = [one.info.shape for one in side.stored]
        values, given = (
            np.asarray(side.undo_layout([x.reshape(s) for x, s in zip(each, shapes, strict=True)]))
            for each in ([one.values for one in parts], [one.given for one in parts])
        )
        return Decoded(values.reshape(-1), given.reshape(-1))


def _nothing(count: int) -> Decoded:
    """Return `count` values of which the bytes give none; each is 0."""
    return Decoded(np.zeros(count), np.zeros(count, bool))


def explain_misread_type(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that a side's values are the other's bytes, decoded as another type.

    Bytes of packed blocks come first, and types that take no more bytes than there are. Nothing
    for two sides that are as near to each other as right copies are.
    """
    kinds = case.a.encoding, case.b.encoding
    failed = case.context.schemes.failed_types
    same = case.a.shape == case.b.shape
    if case.numbers is not None or failed[kinds] >= FAILED or min(case.a.size, case.b.size) < FEW:
        return
    if same and case.before.relative < FAR:
        return
    sides = [(case.a, case.b, "B", "A"), (case.b, case.a, "A", "B")]
    # Numbers made of a packed side's bytes hold these bytes again.
    sides.sort(key=lambda row: find_encoding(row[0].side.encodings[0]).block_size == 1)
    for (mine, read, one, other), full in product(sides, (True, False) if same else (True,)):
        if not _has_bytes(mine) or not _can_be_read_wrong(read):
            continue
        for encoding in _other_types(mine, read, full=full):
            found = _explain_reading(case, mine, read, encoding, (one, other))
            if found is not None:
                yield found
                return
    failed[kinds] += 1


def _has_bytes(reader: RowReader) -> bool:
    """Return whether a side is stored without companion tensors, in bytes that are in a file."""
    side = reader.side
    packed = any(one.parts or one.packed is not None for one in side.stored)
    return not packed and len(side.encodings) == 1 and not side.restored


def _can_be_read_wrong(reader: RowReader) -> bool:
    """Return whether a side's values are plain numbers or blocks, and no packed weight."""
    return not any(one.parts or one.packed is not None for one in reader.side.stored)


def _other_types(mine: RowReader, read: RowReader, *, full: bool) -> Iterator[str]:
    """Yield the types as which the bytes of `mine` may have been read for the values of `read`.

    They are plain numbers, and types of a container that has the right one. `full`: those that
    take no more bytes than there are, else those that take more. For another number of values only
    those that take exactly the bytes, without integers.
    """
    have = sum(one.info.nbytes for one in mine.side.stored)
    count = sum(prod(one.info.shape) for one in mine.side.stored)
    own = _containers(find_encoding(mine.encoding))
    for name in CODECS:
        row = find_encoding(name)
        if name == mine.encoding or not row.known or row.claim or row.row_header:
            continue
        if row.numpy in ("bool", "complex64") or not (row.numpy or own & _containers(row)):
            continue
        if mine.shape != read.shape:
            if row.numpy.startswith(("int", "uint")):
                continue  # bytes and words of blocks have a hypothesis of their own
            if read.size % row.block_size == 0 and row.nbytes((read.size,)) == have:
                yield name
        elif count % row.block_size == 0 and (row.nbytes((count,)) <= have) == full:
            yield name


def _containers(row: Encoding) -> set[str]:
    """Return the names of the containers in which a type of the table has a code."""
    codes = {"gguf": row.ggml is not None, "safetensors": bool(row.safetensors)}
    codes["apr"] = row.apr is not None
    return {name for name, known in codes.items() if known}


def _explain_reading(
    case: DifferingPair, mine: RowReader, read: RowReader, encoding: str, names: tuple[str, str]
) -> Finding | None:
    """Return the finding that `read` has the bytes of `mine`, decoded as `encoding`; None if not.

    `names` are those of the reading and of the storing side.
    """
    own, taken = find_encoding(mine.encoding), find_encoding(encoding)
    ways = [StoredBytes(mine)]
    if mine.shape == read.shape:
        if taken.bits_per_weight > own.bits_per_weight:
            ways.insert(0, StoredBytes(mine, beyond=True))
        size = taken.row_bytes((mine.columns,)) if mine.columns > 1 else None
        if size is not None and mine.row_bytes is not None and size < mine.row_bytes:
            ways.append(StoredBytes(mine, by_rows=True))
    for stored in ways:
        judged = _judge_reading(stored, read, encoding)
        if judged is None:
            continue
        one, other = names
        says = [
            f"{one}'s values are {other}'s stored bytes read as {encoding}, "
            f"{_size_text(taken)}, where they are {own.name}, {_size_text(own)}"
        ]
        if stored.by_rows:
            says.append("each row is read from its first byte on")
        says += judged.says(stored.beyond)
        proof = prove_values(read.take([0]), judged.given, 0, judged.slack)
        if judged.other:
            proof = replace(proof, share=judged.given / (judged.given + judged.other))
        before = case.before.relative if mine.shape == read.shape else None
        after = 0.0 if not judged.other else None
        found = make_finding(
            "code_type", (case.key,), says, before, after, proof, confirmed=not judged.other
        )
        either = own.bits_per_weight == taken.bits_per_weight
        return replace(found, side="" if either else one, leaves_side_open=either)
    return None


def _size_text(row: Encoding) -> str:
    """Return how many bytes a type takes for how many values, in words."""
    size = f"{row.type_size} byte{'s' * (row.type_size > 1)}"
    return (
        f"{size} for every value"
        if row.block_size == 1
        else (f"{size} for every {row.block_size} values")
    )


class JudgedReading(NamedTuple):
    """How many values the bytes give, how many after them are 0, and how many are others.

    `lost` is how many values are 0 where the bytes give no finite number, `slack` the relative
    distance within which the others agree.
    """

    given: int
    zero: int
    other: int
    lost: int
    slack: float

    def says(self, beyond: bool) -> list[str]:
        """Return the sentences on values that the tensor's own bytes do not give.

        `beyond`: bytes after the tensor were read as well.
        """
        said = []
        total = self.given + self.zero + self.other
        if beyond:
            said.append("the last values are what the file holds after the tensor")
        if self.zero or self.other:
            rest = "are 0" if self.zero else "are others"
            said.append(f"the bytes end after {self.given} of {total} values; the rest {rest}")
        if self.lost:
            said.append(f"{self.lost} values that are not finite then are 0")
        return said


def _judge_reading(stored: StoredBytes, read: RowReader, encoding: str) -> JudgedReading | None:
    """Return how the stored bytes, read as `encoding`, give the values of `read`; None if not.

    All values that the bytes give must be equal within the rounding of the reading side's type.
    """
    size = find_encoding(encoding).block_size
    at, probe = stored.first(encoding, read.size)
    if probe.given.sum() < FEW or len(np.unique(probe.values[probe.given])) < KINDS:
        return None
    columns = read.columns
    rows = np.arange(at // columns, -(-(at + len(probe.values)) // columns))
    wanted = to_float64(read.take(rows)).reshape(-1)[at % columns :][: len(probe.values)]
    if not agreeing_values(probe, wanted, read.encoding, size).all():
        return None
    given = zero = other = lost = 0
    step = max(1, PIECE // columns)
    for start in range(0, read.rows, step):
        rows = np.arange(start, min(read.rows, start + step))
        x = to_float64(read.take(rows)).reshape(-1)
        made = stored.values(encoding, start * columns, start * columns + len(x))
        if not agreeing_values(made, x, read.encoding, size).all():
            return None
        given += int(made.given.sum())
        lost += int((made.given & ~np.isfinite(made.values) & (x == 0)).sum())
        rest = x[~made.given]
        zero, other = zero + int((rest == 0).sum()), other + int((rest != 0).sum())
    if stored.beyond and (zero or other):
        return None  # the file ends before the values do
    zero, other = (0, zero + other) if other else (zero, 0)
    return JudgedReading(given, zero, other, lost, ROUNDED * UNIT.get(read.encoding, 0.0))


def agreeing_values(made: Decoded, values: "Array", encoding: str, block: int) -> "Array":
    """Return where `values`, float64 [n], are the decoded ones; True where the bytes give none.

    `encoding` is that of `values`. They may be off by its rounding of the largest value of each
    `block` decoded values, and hold 0 where the decoded value is not finite.
    """
    held = _stored_in(made.values, encoding)
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.where(np.isfinite(held), np.abs(held), 0.0)
        starts = np.arange(0, len(size), block)
        top = np.repeat(np.maximum.reduceat(size, starts), block)[: len(size)]
        near = np.abs(held - values) <= ROUNDED * UNIT.get(encoding, 0.0) * top
    odd = ~np.isfinite(held) & ((values == 0) | (np.isnan(held) & np.isnan(values)))
    found: Array = near | (held == values) | odd | ~made.given
    return found


def _stored_in(values: "Array", encoding: str) -> "Array":
    """Return float64 values as a plain float type holds them; as they are for any other type."""
    if encoding not in UNIT or encoding == "F64":
        return values
    narrow = values.astype(np.float32)
    return to_float64(decode(encoding, encode(encoding, narrow), narrow.shape))


HYPOTHESES = (
    PairHypothesis(
        ("code_type",),
        explain_misread_type,
        62,
        "stored bytes give every value with no number fitted, before what fits numbers",
        shapes=True,
    ),
)
