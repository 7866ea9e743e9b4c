"""Plain values that are the other side's codes, read as numbers of a wrong type.

A *side* is the tensor of file A or of file B. The *packed side* is stored as codes, the *plain
side* as floats or integers.

A value is (the code's number - zero) * scale + offset. A reader that takes the codes for integers,
or for another small float, has another number for each code; it may have left out scales, zeros and
offsets as well. Every such reading is executed on the packed side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.base.encodings import find_encoding
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis, Take
from aprfmt.causes.tensor.proof import make_finding, prove_values
from aprfmt.codecs import fp8
from aprfmt.codecs.weight_layout import GroupNumbers
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.codecs.lattice import PackedWeight
    from aprfmt.codecs.weight_layout import WeightLayout

CAUSE_ROWS = (
    Cause(
        "code_type", "tensor", "bug",
        "Stored bytes or codes are read as numbers of another kind: blocks as those of another "
        "type, 8-bit floats as integers, signed codes as unsigned ones, two codes as one byte.",
        "Values of wild size, or whole numbers where weights should be, in all tensors of a type.",
        "The bytes or codes of one side, read so, give all values of the other.",
        next="again",
    ),
)  # fmt: skip

ROUNDED = 4.0  # units of the plain type within which a product of code and scale is the value
FAR = 0.25  # relative distance below which no code was read as another number
FEW = 16  # codes below which nothing is shown


class Reading(NamedTuple):
    """A way to read codes: the number of each code, float64 [2**bits]; `kind` names it."""

    kind: str
    numbers: "Array"


class CodedSide:
    """A side stored in codes: the code of each value, and scale, zero point and offset of each.

    Arrays are [rows, columns], numbers float32; those that the packing has not are None.
    """

    def __init__(self, reader: RowReader) -> None:
        """Store the side's reader; nothing is decoded yet."""
        self.reader = reader
        self.name = reader.encoding

    @cached_property
    def _packed(self) -> "list[PackedWeight]":
        """The stored tensors of this side that are packed weights."""
        return [one.packed() for one in self.reader.side.stored if one.packed is not None]

    @cached_property
    def weights(self) -> "list[WeightLayout]":
        """The layouts of the packed weights; [] where the side is not packed by a known dialect.

        Raises CodecError for codes and scales that do not fit together.
        """
        if len(self._packed) < len(self.reader.side.stored):
            return []
        if not all(weight.codes() for weight in self._packed):
            return []
        laid = [weight.laid_out() for weight in self._packed]
        return [one for one in laid if one is not None]

    @cached_property
    def table(self) -> "Array | None":
        """The number that each code of the packed weights stands for, float64 [2**bits].

        None where the weights' tables differ.
        """
        plain = next((kind for kind in fp8.OF_TWO_SIGNS if kind.name == self.name), None)
        if plain is not None:
            return plain.values.astype(np.float64)
        found = [np.asarray(rows.values, np.float64) for w in self._packed if (rows := w.codes())]
        if not found or not self.weights:
            return None
        return found[0] if all(_same_numbers(one, found[0]) for one in found) else None

    def _read(self, numbers: "Array", *parts: str) -> "Array":
        """Return the values, float32 [rows, columns], if the codes stood for `numbers`.

        Of scale, zero and offset only those named in `parts` are applied.
        """
        made = []
        for one in self.weights:
            wide = np.full(len(one.values), np.nan, np.float32)
            wide[: len(numbers)] = numbers
            bare = replace(
                one,
                values=wide,
                factor=None,
                scale=one.scale if "scale" in parts else None,
                zero=one.zero if "zero" in parts else None,
                offset=one.offset if "offset" in parts else None,
            )
            made.append(bare.decode().reshape(one.shape))
        values = self.reader.side.undo_layout(list(made))
        found: Array = np.asarray(values, np.float32)
        return found.reshape(self.reader.rows, self.reader.columns)

    @cached_property
    def codes(self) -> "Array":
        """The code that stores each value of this side, uint8 or uint16 [rows, columns]."""
        assert self.table is not None
        if not self.weights:
            data = self.reader.side.raw()
            held = np.frombuffer(data, np.uint8).reshape(self.reader.rows, self.reader.columns)
            return held
        count = np.arange(len(self.table))
        kind = np.uint8 if len(count) <= 1 << 8 else np.uint16
        return self._read(count).astype(kind)

    def _has_part(self, part: str) -> bool:
        """Return whether any of the weights has a scale, zero point or offset, as `part` says."""
        return any(getattr(one, part) is not None for one in self.weights)

    @cached_property
    def scale(self) -> "Array | None":
        """The scale of every value, float32 [rows, columns]; None without scales."""
        assert self.table is not None
        ones = np.ones(len(self.table))
        return self._read(ones, "scale") if self._has_part("scale") else None

    def read_scale_bytes(self, tables: "Sequence[Array]") -> "Array | None":
        """Return the number of every value's scale byte, float32; None where scales are no bytes.

        `tables` are the numbers of the 256 bytes for each weight, [1 or matrices, 256].
        """
        made = []
        for one, table in zip(self.weights, tables, strict=True):
            if one.scale is None or one.scale.table is None:
                return None
            each = GroupNumbers(one.scale.array, np.asarray(table, np.float32))
            ones = np.ones(len(one.values), np.float32)
            bare = replace(one, values=ones, factor=None, scale=each, zero=None, offset=None)
            made.append(bare.decode().reshape(one.shape))
        if not made or self.table is None:
            return None
        values = np.asarray(self.reader.side.undo_layout(list(made)), np.float32)
        return values.reshape(self.reader.rows, self.reader.columns)

    @cached_property
    def zero(self) -> "Array | None":
        """The zero point of every value, in numbers of codes, [rows, columns]; None without any."""
        assert self.table is not None
        nothing = np.zeros(len(self.table))
        return -self._read(nothing, "zero") if self._has_part("zero") else None

    @cached_property
    def offset(self) -> "Array | None":
        """The number added to every value, float32 [rows, columns]; None without offsets."""
        assert self.table is not None
        nothing = np.zeros(len(self.table))
        return self._read(nothing, "offset") if self._has_part("offset") else None

    def read_as(self, numbers: "Array", rows: "Array", *, scaled: bool, moved: bool) -> "Array":
        """Return rows of values if the codes stood for `numbers`, with scales if `scaled`.

        `moved`: with the zero points and offsets, too.
        """
        values: Array = numbers[self.codes[rows]]
        if moved and self.zero is not None:
            values = values - self.zero[rows]
        if scaled and self.scale is not None:
            values = values * self.scale[rows]
        if moved and self.offset is not None:
            values = values + self.offset[rows]
        return values


def _readings(table: "Array") -> Iterator[Reading]:
    """Yield the other numbers that codes may be read as.

    `table` has the right number of each code, float64 [2**bits].
    """
    count = len(table)
    plain = np.arange(count, dtype=np.float64)
    yield Reading("unsigned integers", plain)
    yield Reading("signed integers", np.where(plain < count / 2, plain, plain - count))
    yield Reading(f"integers less {count // 2}", plain - count / 2)
    if table.min() < 0 and (table == np.round(table)).all():
        yield Reading(f"integers plus {count // 2}", table + count / 2)
    if count == 1 << 8:
        for kind in fp8.OF_TWO_SIGNS:
            yield Reading(kind.name, kind.values.astype(np.float64))


def _same_numbers(x: "Array", y: "Array") -> bool:
    """Return whether two tables of code numbers are equal, NaN being equal to NaN."""
    return bool(np.array_equal(x, y, equal_nan=True))


def nearly_equal(made: "Array", values: "Array", slack: float) -> bool:
    """Return whether all values of `made` equal `values` within `slack`, relative.

    NaN equals NaN.
    """
    with np.errstate(invalid="ignore"):
        near = np.abs(made - values) <= slack * np.abs(made)
    return bool((near | (made == values) | (np.isnan(made) & np.isnan(values))).all())


def explain_misread_codes(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that a side's values are the other's codes, read as other numbers.

    Nothing for two sides that are as near to each other as right copies are.
    """
    if case.numbers is not None or case.a.shape != case.b.shape or case.a.columns < 2:
        return
    if case.before.relative < FAR:
        return
    for plain, coded, one, other in ((case.b, case.a, "B", "A"), (case.a, case.b, "A", "B")):
        if plain.side.parts or any(t.packed is not None for t in plain.side.stored):
            continue
        side = CodedSide(coded)
        if side.table is None or (plain.encoding not in UNIT and not plain.side.whole):
            continue
        found = _misread(case, plain, side, one, other)
        if found is not None:
            yield found
            return


def _misread(
    case: DifferingPair, plain: RowReader, side: CodedSide, one: str, other: str
) -> Finding | None:
    """Return the finding of the first reading of the codes of `side` that gives all of `plain`.

    `one` and `other` name the plain and the coded side in the sentences. None if no reading does.
    """
    assert side.table is not None
    x = to_float64(plain.take(case.sample))
    if len(np.unique(side.codes[case.sample])) < min(FEW, len(side.table)) or np.ptp(x) == 0:
        return None
    unit = UNIT.get(plain.encoding, 0.0)
    scales = (False, True) if side.scale is not None else (True,)
    moves = (False, True) if side.zero is not None or side.offset is not None else (True,)
    for reading, scaled, moved in product(
        (Reading("", side.table), *_readings(side.table)), scales, moves
    ):
        if _same_numbers(reading.numbers, side.table) and (reading.kind or (scaled and moved)):
            continue  # as it is meant, or said already
        computed = (scaled and side.scale is not None) or len(moves) > 1
        slack = ROUNDED * unit if computed else unit
        read = partial(side.read_as, reading.numbers, scaled=scaled, moved=moved)
        if not nearly_equal(read(case.sample), x, slack):
            continue
        if not all(
            nearly_equal(read(rows), to_float64(plain.take(rows)), slack)
            for rows in case.windows(np.arange(plain.rows))
        ):
            continue
        says = _words(one, other, reading, scaled, moved)
        proof = prove_values(x, plain.size, 0, slack)
        cause = _cause_of(reading, scaled)
        return make_finding(cause, (case.key,), says, case.before.relative, 0.0, proof)
    return None


def explain_whole_bytes(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that a side's integers are the bytes of 8-bit floats.

    The other side has the weights before they were packed: they must be the floats of these bytes
    times scales.
    """
    from aprfmt.causes.tensor import packed_scales
    from aprfmt.causes.tensor.explanation import Transformed
    from aprfmt.causes.tensor.packed_copies import packed_copies

    if case.numbers is not None or case.a.shape != case.b.shape or case.a.columns < 2:
        return
    for label, side, other in (("B", case.b, case.a), ("A", case.a, case.b)):
        if CodedSide(other).table is not None:
            continue  # its own codes are there: a neighbouring one is no rounding of them
        low = _whole_numbers_from(to_float64(case.sample_b if label == "B" else case.sample_a))
        if side.encoding not in UNIT or low is None:
            continue
        if any(
            _whole_numbers_from(to_float64(side.take(rows)), few=True) is None
            for rows in case.windows(None)
        ):
            continue
        for kind in fp8.OF_TWO_SIGNS:
            read = _take_bytes_as(side, kind.values)
            made = Transformed(side, read)
            a, b = (case.a, made) if label == "B" else (made, case.b)
            reread = DifferingPair(case.key, a, b, case.context)
            reread.known = False
            for copy in packed_copies(reread):
                for found in packed_scales.explain_scales(copy):
                    if not found.confirmed:
                        continue
                    what = "unsigned" if low >= 0 else "signed"
                    says = (
                        f"{label}'s values are the bytes of {kind.name} numbers, read as {what} "
                        "integers",
                        *found.evidence,
                    )
                    before = case.before.relative
                    yield make_finding(
                        "code_type", (case.key,), says, before, found.residual_after, found.proof
                    )
                    return


def explain_words_as_values(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that values are the words or bytes in which codes are stored.

    The sides then have two shapes: a word has several codes, and blocks also have scales.
    """
    for plain, coded, one, other in ((case.b, case.a, "B", "A"), (case.a, case.b, "A", "B")):
        tensor = coded.side.stored[0]
        if len(coded.side.stored) > 1 or plain.side.parts or plain.size < FEW:
            continue
        if tensor.packed is not None:
            weight = tensor.packed()
            raw = weight.parts[weight.dialect.main].raw
        elif tensor.parts:
            raw = tensor.parts[""].raw()
        elif find_encoding(coded.encoding.split("+")[0]).block_size > 1:
            raw = tensor.raw()
        else:
            continue
        data = np.frombuffer(raw, np.uint8)
        values = to_float64(plain.whole).reshape(-1)
        if data.size % plain.size or np.ptp(values) == 0:
            continue
        width = data.size // plain.size
        unit = UNIT.get(plain.encoding, 0.0)
        for sign in ("u", "i"):
            if width not in (1, 2, 4):
                break
            words = data.view(f"<{sign}{width}").astype(np.float64)
            if not nearly_equal(words, values, unit):
                continue
            kind = "unsigned" if sign == "u" else "signed"
            what = "bytes" if width == 1 else f"words of {width} bytes"
            each = coded.size // plain.size
            of, more = "codes", f"{each} codes are taken for one value"
            if tensor.packed is None and not tensor.parts:
                of, more = f"{coded.encoding} blocks", "they were never decoded"
            says = (
                f"{one}'s values are the {what} of {other}'s {of}, read as {kind} integers: {more}",
            )
            proof = prove_values(values, values.size, 0, unit)
            yield make_finding("code_type", (case.key,), says, None, 0.0, proof)
            return


def _whole_numbers_from(values: "Array", *, few: bool = False) -> float | None:
    """Return the smallest of values that are all integers of one byte; None if not all are.

    They must have at least FEW different values, unless `few`.
    """
    if not np.isfinite(values).all() or (values != np.round(values)).any():
        return None
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    if low < -128 or high > (255 if low >= 0 else 127):
        return None
    return low if few or len(np.unique(values)) >= FEW else None


def _take_bytes_as(side: RowReader, numbers: "Array") -> Take:
    """Return a function from row numbers to these rows with each integer read as a code.

    `numbers` [256] are the numbers of the codes.
    """

    def take(rows: "Array") -> "Array":
        """Return rows of `side` in which each integer is replaced by the number of its low byte.

        `rows` are row numbers; numbers[code] is a code's value.
        """
        held = to_float64(side.take(rows)).astype(np.int64) & 255
        found: Array = numbers[held]
        return found

    return take


def _cause_of(reading: Reading, scaled: bool) -> str:
    """Return the cause's name for a misreading: of the codes' numbers, else of what was ignored.

    `scaled`: the scales were applied.
    """
    if not reading.kind:
        return "zero_point" if scaled else "quant_scale"
    return "fp8_variant" if reading.kind.startswith("F8_") else "code_type"


def _words(one: str, other: str, reading: Reading, scaled: bool, moved: bool) -> tuple[str, ...]:
    """Return the sentences on how `one` read the codes of `other`, and what it ignored.

    `scaled` and `moved`: scales, and zero points, were applied.
    """
    lost = ["scales"] * (not scaled) + ["zero points"] * (not moved)
    more = f", and their {' and '.join(lost)} are ignored" if lost else ""
    if reading.kind:
        times = ", times their scales" if scaled else ""
        return (f"{one}'s values are the codes of {other}, read as {reading.kind}{times}{more}",)
    if scaled:
        text = f"{one} holds the codes of {other} times their scales"
        return (f"{text}: their zero points are ignored",)
    said = f"{one} holds the codes of {other} as numbers"
    said += ": their scales are ignored, as if each were 1"
    return (said,) if moved else (said, "their zero points are ignored, too")


HYPOTHESES = (
    PairHypothesis(
        ("code_type", "fp8_variant", "quant_scale", "zero_point"),
        explain_misread_codes,
        88,
        "one side's codes give every value of the other, before steps are looked for in it",
        facts=("two encodings",),
    ),
    PairHypothesis(
        ("code_type",),
        explain_whole_bytes,
        89,
        "whole numbers are bytes before they are values of a copy",
    ),
    PairHypothesis(
        ("code_type",),
        explain_words_as_values,
        145,
        "words that hold codes have another shape",
        shapes=True,
    ),
)
