"""Codes of a packed weight that are in a wrong order in their words or blocks, found by values.

A and B are the two files that are compared; a *side* is one of them, or its tensor. A *guess* is a
change of one tensor of a pair after which both should be equal.

The known orders of writers are tried elsewhere; here none has to be known. A *unit* is a word or a
block, and a *place* is the number of a code in it. The weight is decoded with all codes at value 0,
then all at 1, and so on, which gives what each element could be; so the right code of each element
is the one next to the other side's value, and the stored place of each code is found by decoding
codes that count the places. Where every place of a word or block holds what belongs at another one,
that is the order. A code may also be stored as another, such as complemented: signs that turned.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.number_ranges import number_ranges
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Guess, PairHypothesis
from aprfmt.causes.tensor.proof import either_side_text
from aprfmt.codecs import CODECS
from aprfmt.codecs import decode as decode_values
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.codecs.weight_layout import AWQ_BACK, AWQ_ORDER, unpack_codes
from aprfmt.errors import AprfmtError
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

UNITS = 512  # words or blocks whose codes are looked at
MOST = 1 << 24  # elements of a packed weight that is decoded once for every code
WORD = 4  # bytes of a word
PARTS = (2, 4, 8)  # equal parts of the stored codes whose orders are looked for
FAILED = 4  # tensors without a result, after which no other is asked
AGREE = 0.6  # share of the codes that must be in place in the order
BETTER = 0.1  # by which more must be so than by any other
DECODED = 2.0**-7  # relative L2 within which values are decoded codes
LISTED = 32  # numbers of an order that are printed

# Where a code's bits are read as another code: words, and the code by the stored one.
SIGNED = "codes are signed where they have an offset of half the codes, or reverse"
MAPS: tuple[tuple[str, Callable[[int, int], int]], ...] = (
    ("", lambda code, most: code),
    ("each code is stored as its complement, so that signs turn", lambda code, most: most - code),
    (SIGNED, lambda code, most: code ^ (most + 1) // 2),
)


class CodeUnits(NamedTuple):
    """Codes of a weight as stored: [units, places] of `bits` bits, and the values they stand for.

    `decode` gives float64 values [units, places] of other codes of that shape, in the order of the
    elements; `wanted` are the other side's values in that order.
    """

    codes: "Array"
    bits: int
    decode: "Callable[[Array], Array]"
    wanted: "Array"


class FoundOrder(NamedTuple):
    """How codes are misplaced in every unit: `order`[j] is the place with the code of place j.

    `codes` is a table that maps each stored code to the right one, and `says` describes both.
    """

    order: "Array"
    codes: "Array"
    says: str

    def put_right(self, stored: "Array") -> "Array":
        """Return stored codes [units, places] put in the right order, and mapped by `codes`."""
        right: Array = self.codes[stored[:, self.order]]
        return right


def unpack_whole(raw: "Array", bits: int) -> "Array":
    """Return all codes of `bits` bits (1, 2, 4 or 8) in bytes [units, size], low bits first."""
    return unpack_codes(raw, bits, raw.shape[1] * 8 // bits)


def pack_codes(codes: "Array", bits: int) -> "Array":
    """Return codes packed to bytes [units, size], which `unpack_whole` reads."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    both = codes.astype(np.uint8).reshape(len(codes), -1, 8 // bits) << shifts
    found: Array = np.bitwise_or.reduce(both, axis=-1)
    return found


def find_code_order(units: CodeUnits) -> FoundOrder | None:
    """Return the order of places and the map of codes that give the weight the wanted values.

    None if there are none, or if the codes are in that order already.
    """
    count, places = units.codes.shape
    most = (1 << units.bits) - 1
    levels = np.stack([units.decode(np.full((count, places), v)) for v in range(most + 1)])
    span = np.ptp(levels, axis=0)
    if not np.isfinite(levels).all() or not span.any():
        return None
    place = _places_of_elements(units, levels)
    if place is None or len(np.unique(place)) != places:
        return None
    # The right code of each place, from the other side's values.
    nearest = np.abs(levels - units.wanted).argmin(axis=0)
    right = np.full((count, places), -1)
    right[:, place] = np.where(span > 0, nearest, -1)
    held = np.stack([right == v for v in range(most + 1)]).astype(np.float32)
    for says, change in MAPS:
        if units.bits == 1 and says == SIGNED:
            continue  # the complement again
        codes = np.array([change(v, most) for v in range(most + 1)])
        stored = codes[units.codes]
        there = np.stack([stored == v for v in range(most + 1)]).astype(np.float32)
        agree = np.einsum("vui,vuj->ij", held, there, optimize=True) / count
        order = agree.argmax(axis=1)
        if len(np.unique(order)) != places or (not says and (order == np.arange(places)).all()):
            continue
        best = agree[np.arange(places), order]
        agree[np.arange(places), order] = 0
        if best.min() > AGREE and (best - agree.max(axis=1)).min() > BETTER:
            told = [] if (order == np.arange(places)).all() else [order_text(order, units.bits)]
            return FoundOrder(order, codes, "; ".join([*told, *filter(None, [says])]))
    return None


def _places_of_elements(units: CodeUnits, levels: "Array") -> "Array | None":
    """Return, for each element of a unit, the place of its code, [elements].

    It is found by decoding codes that spell the number of their place; `levels` are the values of
    each code everywhere. None where units do not have their elements in one order.
    """
    count, places = units.codes.shape
    base = 1 << units.bits
    digits = max(1, math.ceil(math.log(places, base)))
    best = np.ptp(levels, axis=0).argmax(axis=0)  # a unit in which the element's code tells
    each = np.arange(places)
    found = np.zeros(places, np.int64)
    for digit in range(digits):
        counted = np.broadcast_to(each // base**digit % base, (count, places))
        values = units.decode(counted)
        told = np.abs(levels - values).argmin(axis=0)
        found += told[best, each] * base**digit
    return found if (found < places).all() else None


def order_text(order: "Array", bits: int) -> str:
    """Return an order of codes in words, with its usual name where it has one.

    Of an order that repeats itself only one period is printed: [1, 0] exchanges neighbours.
    """
    size = len(order)
    part = next(
        n for n in range(1, size + 1)
        if size % n == 0 and all(order[i] == order[i % n] + i // n * n for i in range(size))
    )  # fmt: skip
    shown = [int(at) for at in order[:part]]
    runs = number_ranges(shown).split(", ")
    told = runs if 2 * len(runs) <= part else [str(at) for at in shown]
    text = f"[{', '.join(told[:LISTED])}{', ...' if len(told) > LISTED else ''}]"
    name = next((name for name, known in _named_orders(part, bits) if known == shown), "")
    return f"the code of each place is at {text} of every {part}" + (f": {name}" if name else "")


def _named_orders(size: int, bits: int) -> Iterator[tuple[str, list[int]]]:
    """Yield (name in words, order) of the usual wrong orders of `size` codes of `bits` bits."""
    each = list(range(size))
    half, per_byte = size // 2, 8 // bits
    awq = [*AWQ_ORDER]
    if size == per_byte:
        yield "the codes of each byte stand in reverse, the high one first", each[::-1]
    yield "all stand in reverse", each[::-1]
    if size == len(awq):
        yield "AWQ's order of eight codes in a word, where plain order belongs", [*AWQ_BACK]
        yield "plain order, where AWQ's order of eight codes in a word belongs", awq
    if size % per_byte == 0:
        whole = [at // per_byte * per_byte for at in each]
        yield (
            "the bytes of each word stand in reverse",
            [size - per_byte - at + i % per_byte for i, at in enumerate(whole)],
        )
    if size % 2 == 0:
        yield "the two halves are exchanged", each[half:] + each[:half]
        mixed = [i // 2 + half * (i % 2) for i in each]
        yield "neighbours where halves belong", mixed
        yield "halves where neighbours belong", [mixed.index(at) for at in each]


# --- blocks of GGUF -------------------------------------------------------------------------------


def is_decoded_copy(made: "Array", values: "Array") -> bool:
    """Return whether `values` are themselves the decoded codes `made`, up to 16-bit rounding.

    Then they are no original that could tell which of two orders is right.
    """
    return rel_l2(np.asarray(made, np.float64), values) <= DECODED


def guess_code_order(case: DifferingPair) -> Iterator[Guess]:
    """Yield the first guess that fits: codes inside every block are stored in another order."""
    schemes = case.context.schemes
    if case.numbers is not None or case.a.shape != case.b.shape or schemes.failed_orders >= FAILED:
        return
    for reader, other, whose in ((case.b, case.a, "B's"), (case.a, case.b, "A's")):
        for field, bits in _code_fields(reader):
            found = _order_of_field(reader, other, field, bits)
            if found is None:
                continue

            def read(
                rows: "Array",
                reader: RowReader = reader,
                field: str = field,
                bits: int = bits,
                found: FoundOrder = found,
            ) -> "Array":
                """Return rows of one side, decoded with a field's codes put right in each block.

                `rows` are row numbers; `field` is the blocks' field, with codes of `bits` bits.
                """
                raw = reader.raw(rows)
                blocks = _blocks_of(reader, raw)
                stored = unpack_whole(_field_bytes(blocks, field), bits)
                made = _with_field(blocks, field, found.put_right(stored), bits)
                return reader.decode_rows(made.reshape(raw.shape))

            says = f"{whose} blocks have their codes ({field}) in another order: {found.says}"
            rows = np.linspace(0, reader.rows - 1, min(reader.rows, PARTS[-1])).astype(np.int64)
            either = is_decoded_copy(read(rows), to_float64(other.take(rows)))
            if either:
                says += either_side_text(whose, "order is")
            side = "B" if reader is case.b else "A"
            guess = case.guess("packing_order", (says, reader.encoding), side, read)
            yield replace(guess, either=either)
            return
    schemes.failed_orders += 1


def _code_fields(reader: RowReader) -> list[tuple[str, int]]:
    """Return (name, bits) of each field of a block that has one code per element; [] without."""
    row = encoding_row(reader.encoding.split("+")[0])
    codec = CODECS.get(reader.encoding)
    if row.block_size < 2 or row.row_header or not reader.decodes_rows or codec is None:
        return []
    fields = None if codec.layout is None else codec.layout.fields
    sizes = {
        name: 8 * kind[0].itemsize / row.block_size
        for name, kind in (fields or {}).items()
        if kind[0].base.itemsize == 1
    }
    return [(name, int(bits)) for name, bits in sizes.items() if bits in (1, 2, 4, 8)]


def _blocks_of(reader: RowReader, raw: "Array") -> "Array":
    """Return the blocks in rows of bytes: a structured array [blocks] by the encoding's layout."""
    layout = CODECS[reader.encoding].layout
    assert layout is not None, "a code field without a layout"
    found: Array = np.ascontiguousarray(raw).reshape(-1).view(layout)
    return found


def _field_bytes(blocks: "Array", field: str) -> "Array":
    """Return the bytes of a field of blocks, uint8 [blocks, size]."""
    held = np.ascontiguousarray(blocks[field])
    found: Array = held.view(np.uint8).reshape(len(blocks), -1)
    return found


def _with_field(blocks: "Array", field: str, codes: "Array", bits: int) -> "Array":
    """Return the bytes, uint8 1-d, of blocks with the codes of a field replaced by `codes`."""
    made = blocks.copy()
    packed = np.ascontiguousarray(pack_codes(codes, bits))
    made[field] = packed.view(made[field].dtype).reshape(made[field].shape)
    found: Array = made.view(np.uint8).reshape(-1)
    return found


def _order_of_field(
    reader: RowReader, other: RowReader, field: str, bits: int
) -> FoundOrder | None:
    """Return the order of a field's codes by which some rows equal `other`'s rows; None if none."""
    size = encoding_row(reader.encoding).block_size
    count = min(reader.rows, max(1, UNITS * size // reader.columns))
    rows = np.linspace(0, reader.rows - 1, count).astype(np.int64)
    blocks = _blocks_of(reader, reader.raw(rows))[:UNITS]
    wanted = np.asarray(other.take(rows), np.float64).reshape(-1, size)[: len(blocks)]

    def decode(codes: "Array") -> "Array":
        """Return the values [blocks, size] of the sampled blocks with other codes in a field."""
        raw = _with_field(blocks, field, codes, bits).tobytes()
        return np.asarray(
            decode_values(reader.encoding, {"": raw}, (len(blocks), size)), np.float64
        )

    stored = unpack_whole(_field_bytes(blocks, field), bits)
    return find_code_order(CodeUnits(stored, bits, decode, wanted))


# --- words of a dialect ---------------------------------------------------------------------------


class ReorderedWeight(NamedTuple):
    """A packed weight with its codes in order, what was wrong, and `free`, the fitted numbers."""

    weight: PackedWeight
    says: str
    free: int


class WordCodes:
    """The codes of a packed weight by the words that store them, [words, places].

    `wanted` are the right values of the weight's elements.
    """

    def __init__(
        self, weight: PackedWeight, bits: int, restored: "Callable[[Array], Array]", wanted: "Array"
    ) -> None:
        """Read the codes of `weight`, which have `bits` bits each; no values are decoded.

        `restored` brings decoded values into the layout of `wanted`.
        """
        self.weight, self.bits, self._restored = weight, bits, restored
        self.main = weight.parts[weight.dialect.main]
        self.wanted = wanted.reshape(-1)
        words = np.frombuffer(self.main.raw, np.uint8).reshape(-1, WORD)
        self.stored = unpack_whole(words, bits)

    def with_codes(self, codes: "Array") -> PackedWeight:
        """Return the weight with its codes replaced by `codes` [words, places]."""
        packed = np.ascontiguousarray(pack_codes(codes, self.bits)).tobytes()
        return self.weight.replace_parts({self.weight.dialect.main: self.main._replace(raw=packed)})

    def decode(self, codes: "Array") -> "Array":
        """Return the values that `codes` would stand for in this weight, float64 1-d.

        They are in the layout of `wanted`.
        """
        return np.asarray(self._restored(self.with_codes(codes).decode()), np.float64).reshape(-1)

    def order_in_words(self, by_word: "Array") -> ReorderedWeight | None:
        """Return the weight with the codes inside every word put in order; None if no order fits.

        `by_word` has the numbers of each word's elements, [words, places].
        """
        count = len(self.stored)
        chosen = np.unique(np.linspace(0, count - 1, min(count, UNITS)).astype(np.int64))

        def decode_chosen(codes: "Array") -> "Array":
            """Return the values [words, places] of the words `chosen`, decoded with other codes."""
            every = self.stored.copy()
            every[chosen] = codes
            values: Array = self.decode(every)[by_word[chosen]]
            return values

        wanted = self.wanted[by_word[chosen]]
        found = find_code_order(CodeUnits(self.stored[chosen], self.bits, decode_chosen, wanted))
        if found is None or found.says == SIGNED:  # in no other order: `zero_point` says that
            return None
        says = f"words hold their codes in another order: {found.says}"
        return ReorderedWeight(
            self.with_codes(found.put_right(self.stored)), says, len(found.order)
        )

    def order_of_parts(self, by_word: "Array") -> ReorderedWeight | None:
        """Return the weight with equal parts of its rows, or columns, put in order, or None.

        `by_word` has the numbers of each word's elements, [words, places].
        """
        shape = self.main.shape
        across = self.stored.size // (by_word.shape[1] * shape[0])
        codes = self.stored.reshape(shape[0], across, -1)
        right = self._nearest_codes(by_word).reshape(codes.shape)
        for axis in (0, 1):
            for parts in PARTS:
                if codes.shape[axis] % parts:
                    break
                held, wanted = (np.split(x, parts, axis) for x in (codes, right))
                agree = np.array([[float((x == y).mean()) for y in held] for x in wanted])
                order = [int(at) for at in agree.argmax(axis=1)]
                if order == sorted(order) or len(set(order)) < parts or agree.max(1).min() < AGREE:
                    continue
                made = np.concatenate([held[at] for at in order], axis).reshape(self.stored.shape)
                says = (
                    f"codes are stored with their {('rows', 'columns')[axis]} in another order, in "
                    f"{parts} equal parts: the right order of them is {order}"
                )
                return ReorderedWeight(self.with_codes(made), says, parts)
        return None

    def _nearest_codes(self, by_word: "Array") -> "Array":
        """Return the code that is nearest to the wanted value at each place, [words, places]."""
        place, best = self._places(by_word), np.full(self.wanted.size, np.inf)
        nearest = np.zeros(self.wanted.size, np.uint8)
        for code in range(1 << self.bits):
            apart = np.abs(self.decode(np.full_like(self.stored, code)) - self.wanted)
            nearest[apart < best] = code
            best = np.minimum(best, apart)
        found = np.zeros_like(self.stored)
        found[:, place] = nearest[by_word]
        return found

    def _places(self, by_word: "Array") -> "Array":
        """Return the place in its word of the code of each column of `by_word`, [places]."""
        base, places = 1 << self.bits, by_word.shape[1]
        low = self.decode(np.zeros_like(self.stored))
        found = np.zeros(places, np.int64)
        for digit in range(max(1, math.ceil(math.log(places, 2)))):
            ones = np.broadcast_to(
                np.where(np.arange(places) >> digit & 1, base - 1, 0), self.stored.shape
            )
            moved = self.decode(ones) != low
            found += moved[by_word].mean(axis=0).round().astype(np.int64) << digit
        return found


def reorder_codes(
    weight: PackedWeight, restored: "Callable[[Array], Array]", wanted: "Array"
) -> ReorderedWeight | None:
    """Return a packed weight with its codes put in order, such that it has the wanted values.

    `restored` brings decoded values into the layout of `wanted`, the other file's values (float64).
    None where no order of the codes gives `wanted`, or the weight is too large to be decoded for
    every code.
    """
    table, main = weight.codes(), weight.parts[weight.dialect.main]
    size = len(memoryview(main.raw).cast("B"))
    if table is None or table.bits not in (2, 4, 8) or len(main.shape) != 2 or wanted.size > MOST:
        return None
    if size % (WORD * main.shape[0]) or size * 8 // table.bits != wanted.size:
        return None
    try:
        codes = WordCodes(weight, table.bits, restored, wanted)
        count, places = codes.stored.shape
        by_word = _elements_by_word(codes.decode, count, places, table.bits)
        if by_word is None:
            return None
        return codes.order_in_words(by_word) or codes.order_of_parts(by_word)
    except AprfmtError:
        return None


def _elements_by_word(
    decode: "Callable[[Array], Array]", count: int, places: int, bits: int
) -> "Array | None":
    """Return the numbers of the elements that each word's codes stand for, [words, places].

    None where a word does not have as many elements as places, as where a scale is 0.
    """
    base = 1 << bits
    low, high = (decode(np.full((count, places), v)) for v in (0, base - 1))
    digits = max(1, math.ceil(math.log(count, 2)))
    word = np.zeros(low.size, np.int64)
    numbers = np.arange(count)[:, None]
    for digit in range(digits):
        ones = np.where(numbers >> digit & 1, base - 1, 0)
        values = decode(np.broadcast_to(ones, (count, places)))
        word += (np.abs(values - high) < np.abs(values - low)).astype(np.int64) << digit
    if (np.bincount(word, minlength=count) != places).any():
        return None
    found: Array = np.argsort(word, kind="stable").reshape(count, places)
    return found


HYPOTHESES = (
    PairHypothesis(
        ("packing_order",),
        guess_code_order,
        105,
        "any order of codes, once no order of a block's parts fits",
        facts=("blocks",),
    ),
)
