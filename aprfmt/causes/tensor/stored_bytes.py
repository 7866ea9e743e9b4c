"""Hypotheses about stored bytes: a wrong type, another byte order, damaged bits.

A and B are the two files that are compared; a *side* is one of them, or its tensor. A *guess* is a
change of one tensor of a pair after which both should be equal.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.arch.element_moves import to_stored
from aprfmt.base.encodings import ENCODINGS, block_numbers
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.sequences import first_and_more
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Guess, PairHypothesis, Take
from aprfmt.causes.tensor.proof import fitted_proof, make_finding
from aprfmt.codecs import CODECS, decode, encode
from aprfmt.measure.byte_ranges import range_text, units_text
from aprfmt.measure.encoding_noise import UNIT, pair_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors.runs import RunBytes
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "dtype_mislabel", "tensor", "bug",
        "The same bytes under the label of another 16-bit type, such as BF16 weights tagged F16.",
        "Equal bytes and other encodings, or values that are finite and moderate but unrelated.",
        "Reading the bytes as the other type gives the other side's values, bit for bit.",
        weights="mislabelled",
    ),
    Cause(
        "endianness", "tensor", "bug",
        "Values stored in the other byte order.",
        "Values of wild magnitude; the same multiset of bytes.",
        "Swapping the bytes of every value gives the other side's values, bit for bit.",
    ),
    Cause(
        "bit_rot", "tensor", "bug",
        "Very few damaged bits in data that is otherwise equal to the byte.",
        "One or a few differing bytes; the other blocks and tensors are equal.",
        "Undoing the named bits makes the bytes equal.",
        weights="lost",
    ),
)  # fmt: skip


SIXTEEN = ("BF16", "F16")
NARROW = 16  # rows and columns from which a factor of one of them is looked for
SIGNED = ("F64", "F32", "F16", "BF16")  # whose highest bit is the sign
MOST = 0.5  # share of a tensor's values up to which single ones are damaged
EXCHANGED = 0.25  # share of a tensor's values up to which single ones were exchanged
FEW_BITS = 16  # damaged bits up to which they are named one by one
FEW_BYTES = 64  # differing bytes beyond which a tensor is not damaged but another one
ANCHOR = 48  # bytes that must be found again
KEPT = 16  # a tensor this part of which was written is damaged, not left at zero
STORED = 64 << 20  # bytes up to which A is laid out as B stores it


def _half_float_offsets(encoding: str) -> list[int]:
    """Return the byte offsets of the 16-bit floats in a block of an encoding; [] if it has none."""
    found, at = [], 0
    for kind, width in block_numbers(encoding_row(encoding).layout):
        found += [at] * (kind == "f2")
        at += width
    return found


def guess_dtype_mislabel(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses that bytes of one type were read as another type.

    Either both files have the same bytes, or one has values that such a reading gave.
    """
    a, b = case.a, case.b
    # The same bytes under two labels.
    if a.encoding != b.encoding and a.row_bytes is not None and a.row_bytes == b.row_bytes:
        says = f"B's bytes read as {a.encoding} instead of {b.encoding} are A's values"
        read = lambda rows: b.decode_rows(b.raw(rows), a.encoding)  # noqa: E731
        yield case.guess("dtype_mislabel", (says,), "B", read, 0.0)
    # Values that were made by reading one 16-bit type as the other.
    for label, side, other, mine in (("A", a, b, case.sample_a), ("B", b, a, case.sample_b)):
        told = "B" if label == "A" else "A"
        for first in SIXTEEN:
            if encoding_row(side.encoding).block_size != 1 or not _fits_16_bits(mine, first):
                continue
            second = SIXTEEN[1 - SIXTEEN.index(first)]
            says = f"{told}'s values are {label}'s {first} bits read as {second}"
            yield case.guess(
                "dtype_mislabel",
                (says,),
                label,
                _read_bits_as(side, first, second),
                pair_noise(second, other.encoding),
            )
    # Bytes of one encoding under another label of the same size.
    for label, side, other in (("B", b, a), ("A", a, b)):
        for name in _same_size_encodings(side):
            if name == other.encoding and side.row_bytes == other.row_bytes:
                continue  # asked above
            whose = "A" if label == "B" else "B"
            says = f"{label} holds {whose}'s values as {name}, under the label {side.encoding}"
            read = side.rows_as(name)
            few = case.sample[:2]
            exact = np.array_equal(read(few), other.take(few), equal_nan=True)
            if exact and other.encoding in UNIT:  # as a reader of the bytes makes them, too
                says += f"; or {whose}'s values are {label}'s {side.encoding} bytes read as {name}"
            left, right = (other.take, read) if label == "B" else (read, other.take)
            slack = pair_noise(name, other.encoding)
            guess = Guess("dtype_mislabel", (says,), left, right, slack=slack)
            yield replace(guess, either=exact and other.encoding in UNIT)


def _same_size_encodings(side: RowReader) -> Iterator[str]:
    """Yield encodings whose rows take as many bytes as this side's, and may be mistaken for it.

    They are plain numbers of 16 bits, and blocks whose rows are decoded one by one.
    """
    own = encoding_row(side.encoding)
    if side.row_bytes is None or len(side.shape) < 2:
        return
    for name in ENCODINGS:
        row = ENCODINGS[name]
        if name == own.name or not row.known or row.removed or row.flat or row.claim:
            continue
        if name not in SIXTEEN and not row.layout:
            continue
        if side.columns % row.block_size or row.row_bytes((side.columns,)) != side.row_bytes:
            continue
        if name in CODECS:
            yield name


def _fits_16_bits(values: "Array", encoding: str) -> bool:
    """Return whether float32 values survive storage in a 16-bit type; False for other dtypes."""
    if values.dtype != np.float32:
        return False
    again = decode(encoding, encode(encoding, values), values.shape)
    return bool(np.array_equal(again, values, equal_nan=True))


def _read_bits_as(side: RowReader, first: str, second: str) -> Take:
    """Return a function from row numbers to rows: encoded as `first`, the bits read as `second`."""

    def take(rows: "Array") -> "Array":
        """Return rows of `side` whose bits, encoded as `first`, are read as `second`.

        `rows` are row numbers.
        """
        if side.encoding == first and side.row_bytes is not None:
            return side.decode_rows(side.raw(rows), second)
        values = side.take(rows)
        return decode(second, encode(first, values), values.shape)

    return take


def guess_byte_order(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses that every value, or every block's scales, has its bytes reversed."""
    for label, side, other in (("B", case.b, case.a), ("A", case.a, case.b)):
        row = encoding_row(side.encoding.split("+")[0])
        whole = bool(row.numpy) or side.encoding in SIXTEEN
        if side.row_bytes is None or (whole and row.type_size == 1):
            continue
        if not whole and not _half_float_offsets(row.name):
            continue
        what = f"{row.type_size}-byte value" if whole else f"{side.encoding} block's 16-bit scales"
        says = f"{label} has every {what} in the other byte order"
        yield case.guess(
            "endianness",
            (says,),
            label,
            take_byte_swapped(side, whole),
            pair_noise(side.encoding, other.encoding),
        )
        if side.encoding == other.encoding:
            return  # swapping either side is the same test


def take_byte_swapped(side: RowReader, whole: bool) -> Take:
    """Return a function from row numbers to rows with bytes reversed.

    `whole`: in every value; otherwise only in the 16-bit floats of blocks.
    """
    row = encoding_row(side.encoding)

    def take(rows: "Array") -> "Array":
        """Return rows of `side` decoded with bytes reversed: in each value, or in blocks' floats.

        `rows` are row numbers.
        """
        raw = side.raw(rows).copy()
        blocks = raw.reshape(-1, row.type_size)
        if whole:
            blocks[:] = blocks[:, ::-1]
        else:
            for at in _half_float_offsets(row.name):
                blocks[:, [at, at + 1]] = blocks[:, [at + 1, at]]
        return side.decode_rows(raw)

    return take


# --- damaged bits ---------------------------------------------------------------------------


def explain_bit_rot(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding of a few damaged bits, or one run of lost bytes; all else is equal."""
    a, b = case.a, case.b
    if a.encoding == b.encoding and a.row_bytes is not None and a.row_bytes == b.row_bytes:
        found = None
        for one, other, _ in byte_layouts(case):
            found = found or _explain_byte_damage(case, one, other)
    else:
        found = _explain_float_bits(case)
    if found is not None:
        yield found


def _may_be_rounding(case: DifferingPair) -> bool:
    """Return whether all values differ by at most one unit in the last place.

    Another arithmetic makes such values as well, be it a single one: of two merges in half
    precision one value in thousands differs in its last bit. Below that unit nothing is a bug.
    """
    from aprfmt.causes.tensor.arithmetic import all_within_last_place

    if not all(side.encoding in UNIT for side in (case.a, case.b)):
        return False
    return case.before.nonfinite is None and all_within_last_place(case, largest=False)


def _explain_byte_damage(case: DifferingPair, a: RunBytes | bytes, b: RunBytes) -> Finding | None:
    """Return the finding of damaged bytes, or None where the difference is of another kind.

    `a` and `b` are both sides' bytes in one order. If more than FEW_BYTES differ, only one run of
    zeros in B counts as damage.
    """
    first = last = -1
    places: list[int] = []
    lost = True  # all of B between the first and the last difference is zero
    count = 0
    # Compare window by window, and give up once the difference is no damage.
    for start in range(0, len(a), 1 << 20):
        stop = min(len(a), start + (1 << 20))
        x = np.frombuffer(copy_bytes(a, start, stop), np.uint8)
        y = np.frombuffer(b.window(start, stop), np.uint8)
        at = np.flatnonzero(x != y)
        if first >= 0 and last + 1 < start and at.size:
            lost = lost and _is_zero(b, last + 1, start + int(at[0]))
        if at.size:
            lost = lost and not y[at[0] : at[-1] + 1].any()
            first = start + int(at[0]) if first < 0 else first
            last = start + int(at[-1])
        count += at.size
        if count <= FEW_BYTES:
            places += [start + int(i) for i in at]
        elif not lost:
            return None
    if not count:
        return None
    # Many bytes: one run of zeros, or nothing that this function explains.
    if count > FEW_BYTES:
        # All of it zero is a tensor never written; a run inside is damage.
        if last - first + 1 > len(a) - len(a) // KEPT:
            return None
        if _is_whole_experts(case, first, last + 1):
            return None  # damage.py says so
        text = f"bytes {first} to {last} are zero in B ({last - first + 1} bytes)"
        if a is not case.a.bytes:
            return _damage_explanation(case, text, (), True)
        text += units_text(case.b, first, last + 1)
        return _damage_explanation(case, text, (range_text(case.b, first, last + 1),), True)
    # Few bytes: changes that have a name come before damaged bits.
    exchanged = _exchanged_share(case, places)
    if exchanged > EXCHANGED:
        return None  # much of a small tensor in another order: one of heads or rows says more
    if exchanged:
        text = f"values are exchanged, each is as it was: {_elements_text(case, places)}"
        return _damage_explanation(case, text, (), True, named=True)
    if len({_block_of_byte(case, place)[0] for place in places}) > MOST * _block_count(case) > MOST:
        return None  # most of a small tensor: another function of all its values, or other values
    turned = _turned_signs_text(case, a, b, places)
    if turned and _are_whole_lines(case, places):
        return None  # of a row or a column: the hypothesis of factors says which
    if turned:
        return _damage_explanation(case, turned, (), True, named=True)
    # Otherwise name the bits, if they are few.
    flips = []
    for place in places:
        changed = copy_bytes(a, place, place + 1)[0] ^ b.window(place, place + 1)[0]
        flips += [(place, bit) for bit in range(8) if changed >> bit & 1]
    lines = tuple(_flip_text(case, place, bit) for place, bit in flips[:FEW_BITS])
    if _may_be_rounding(case):
        return None
    if len(flips) == 1:
        return _damage_explanation(case, f"one bit differs: {lines[0]}", (), True)
    if len(flips) <= FEW_BITS and len(flips) <= 2 * len(places):
        text = f"{len(flips)} bits in {count} bytes differ, in {_elements_text(case, places)}"
        return _damage_explanation(case, text, lines, True)
    text = f"{count} bytes differ, in {_elements_text(case, places)}"
    return _damage_explanation(case, text, (), False)


def _block_count(case: DifferingPair) -> int:
    """Return the number of blocks in the tensor; for plain types the number of values."""
    return max(1, case.before.count // encoding_row(case.b.encoding).block_size)


def _are_whole_lines(case: DifferingPair, places: list[int]) -> bool:
    """Return whether the differing values are whole rows, or whole columns, of a matrix.

    `places` are the offsets of the differing bytes.
    """
    rows, columns = case.a.rows, case.a.columns
    at = np.array(places) // encoding_row(case.b.encoding).type_size
    if min(rows, columns) < NARROW:
        return False
    lines, across = len(set((at // columns).tolist())), len(set((at % columns).tolist()))
    return len(at) == lines * across and (across == columns or lines == rows)


def _turned_signs_text(
    case: DifferingPair, a: RunBytes | bytes, b: RunBytes, places: list[int]
) -> str:
    """Return a sentence if only the signs of some values differ, else "".

    `places` are the offsets of the differing bytes.
    """
    row = encoding_row(case.b.encoding)
    if case.b.encoding not in SIGNED or any(
        at % row.type_size != row.type_size - 1 for at in places
    ):
        return ""
    if any(copy_bytes(a, at, at + 1)[0] ^ b.window(at, at + 1)[0] != 0x80 for at in places):
        return ""
    one = len(places) == 1
    return (
        f"the sign{'' if one else 's'} of {len(places)} value{'' if one else 's'} "
        f"{'is' if one else 'are'} turned: {_elements_text(case, places)}"
    )


def _exchanged_share(case: DifferingPair, places: list[int]) -> float:
    """Return the fraction of a tensor's bytes that differ only by the order of elements, or 0.

    `places` are the offsets of the differing bytes; 0 if an element of B there is none of A's.
    """
    row = encoding_row(case.b.encoding)
    starts = sorted({at // row.type_size * row.type_size for at in places})
    if row.block_size != 1 or len(starts) < 2 or case.a.bytes is None or case.b.bytes is None:
        return 0.0
    held = [
        sorted(bytes(copy_bytes(side, at, at + row.type_size)) for at in starts)
        for side in (case.a.bytes, case.b.bytes)
    ]
    if held[0] != held[1]:
        return 0.0
    return len(starts) * row.type_size / len(case.b.bytes)


def _is_whole_experts(case: DifferingPair, start: int, stop: int) -> bool:
    """Return whether bytes [start, stop) cover nearly whole experts of a stacked tensor."""
    size = (case.b.row_bytes or 0) * case.shape[1] if len(case.shape) == 3 else 0
    return bool(size) and start % size < size // 8 and -stop % size < size // 8


def _is_zero(data: RunBytes, start: int, stop: int) -> bool:
    """Return whether bytes [start, stop) are all zero."""
    return not any(bytes(data.window(start, stop)))


def _damage_explanation(
    case: DifferingPair, text: str, more: tuple[str, ...], confirmed: bool, named: bool = False
) -> Finding:
    """Return the finding of damage (bit_rot), with `text` and the sentences `more` as evidence.

    `named`: `text` says what happened, and comes first.
    """
    general = "all other bytes are equal: damage or an edit, no transformation"
    first = (text, "all other bytes are equal") if named else (general, text)
    proof = fitted_proof(case.before.changed) if confirmed else None
    return make_finding(
        "bit_rot",
        (case.key,),
        (*first, *more),
        case.before.relative,
        0.0,
        proof,
        confirmed=confirmed,
    )


def _element_of_byte(case: DifferingPair, at: int) -> tuple[int, ...]:
    """Return the index of the first element that byte `at` of the logical tensor belongs to."""
    element = _block_of_byte(case, at)[0] * encoding_row(case.b.encoding).block_size
    return tuple(int(i) for i in np.unravel_index(element, case.shape or (1,)))


def _block_of_byte(case: DifferingPair, at: int) -> tuple[int, int]:
    """Return (block number, offset in the block) of byte `at` of the logical tensor.

    An offset below 0 is in the header of the block's row.
    """
    row = encoding_row(case.b.encoding)
    if not row.row_header:
        return divmod(at, row.type_size)
    line, inside = divmod(at, case.b.row_bytes or len(case.b.bytes))
    number, place = divmod(max(inside - row.row_header, 0), row.type_size)
    before = line * (case.b.columns // row.block_size)
    return before + number, place if inside >= row.row_header else inside - row.row_header


def _elements_text(case: DifferingPair, places: list[int]) -> str:
    """Return in words the elements (or blocks) that byte offsets are in, at most three of them."""
    found = list(dict.fromkeys(_element_of_byte(case, at) for at in places))
    plain = encoding_row(case.b.encoding).block_size == 1
    what = "value" if plain else "block"
    shown = first_and_more(found, 3, lambda index: _element_text(case, index, plain))
    return f"the {what}{'s' if len(found) > 1 else ''} at {shown}"


def _element_text(case: DifferingPair, index: tuple[int, ...], plain: bool) -> str:
    """Return an element's index as text, and for a `plain` type both sides' values."""
    if not plain:
        return str(list(index))
    flat = int(np.ravel_multi_index(index, case.shape or (1,)))
    x, y = (_value_text(side, flat) for side in (case.a, case.b))
    return f"{list(index)} ({x} | {y})"


def _flip_text(case: DifferingPair, at: int, bit: int) -> str:
    """Return in words which bit of which value or block differs, with its offset in B's file.

    `at` is a byte offset in the logical tensor.
    """
    row = encoding_row(case.b.encoding)
    inside = _block_of_byte(case, at)[1]
    place = list(_element_of_byte(case, at))
    if row.block_size == 1:
        flat = at // row.type_size
        x, y = (_value_text(side, int(flat)) for side in (case.a, case.b))
        where = f"bit {8 * inside + bit} of the {row.name} value at {place}: {x} | {y}"
    else:
        of = f"byte {inside} of the {row.name} block at {place}"
        if inside < 0:
            of = f"byte {inside + row.row_header} of the {row.name} row's header at {place}"
        where = f"bit {bit} of {of}"
    tensor, offset = _file_offset(case.b, at)
    return f"{where} (byte {offset} of the file, in {tensor})"


def _value_text(reader: RowReader, flat: int) -> str:
    """Return element `flat` (row-major) as text; integers with all digits."""
    if encoding_row(reader.encoding).numpy == "complex64":
        return str(reader.side[np.unravel_index(flat, reader.shape)])
    row, column = divmod(flat, reader.columns)
    value = reader.take([row])[0, column]
    return str(int(value)) if value.dtype.kind == "i" else f"{value:g}"


def _file_offset(side: RowReader, at: int) -> tuple[str, int]:
    """Return (stored tensor name, offset in the file) of byte `at` of the logical tensor."""
    tensor, inside = side.bytes.locate(at)
    return tensor.info.name, tensor.info.offset + inside


def _explain_float_bits(case: DifferingPair) -> Finding | None:
    """Return the finding of a few float32 values that differ, compared bit by bit, or None.

    The tensors have different encodings. It is confirmed only if few bits of each value differ.
    """
    from aprfmt.causes.tensor.arithmetic import equal_with_one_added

    a, b = case.a, case.b
    if case.before.changed > FEW_BITS or not case.before.changed or equal_with_one_added(case):
        return None
    flips = []
    # List every bit that differs, with its element and both values.
    for rows in case.windows(None):
        x, y = a.take(rows), b.take(rows)
        if x.dtype != np.float32 or y.dtype != np.float32:
            return None
        at = np.argwhere((x != y) & ~(np.isnan(x) & np.isnan(y)))
        for i, j in at:
            changed = int(x[i, j].view(np.uint32) ^ y[i, j].view(np.uint32))
            flat = int(rows[i]) * a.columns + int(j)
            place = [int(k) for k in np.unravel_index(flat, case.shape or (1,))]
            flips += [(place, bit, x[i, j], y[i, j]) for bit in range(32) if changed >> bit & 1]
    lines = tuple(
        f"bit {bit} (of float32) of the value at {place}: {x:g} | {y:g}"
        for place, bit, x, y in flips[:FEW_BITS]
    )
    if len(flips) == 1:
        return _damage_explanation(case, f"one bit differs: {lines[0]}", (), True)
    few = len(flips) <= FEW_BITS and len(flips) <= 2 * case.before.changed
    text = f"{len(flips)} bits in {case.before.changed} values differ, the first at {flips[0][0]}"
    return _damage_explanation(case, text, lines if few else (), few)


# --- bytes of both sides in one order ------------------------------------------------------


def byte_layouts(case: DifferingPair) -> Iterator[tuple[RunBytes | bytes, RunBytes, str]]:
    """Yield (A's bytes, B's bytes, B's stored name) in each order in which to compare them.

    First in logical order, then in the order of B's file if that is another. Nothing if the
    encodings or row sizes differ.
    """
    a, b = case.a, case.b
    if a.encoding != b.encoding or a.row_bytes is None or a.row_bytes != b.row_bytes:
        return
    yield a.bytes, b.bytes, b.name
    if b.side.whole is None:
        laid = _bytes_as_stored(case, b.side)
        if laid is not None:
            yield laid, RunBytes.of_tensor(b.side.stored[0]), b.name


def _bytes_as_stored(case: DifferingPair, side: View) -> bytes | None:
    """Return A's bytes in the order in which B's file stores them.

    None if they are too many, if the layout does more than move elements, or if B's tensor is one
    of several in a stored tensor. `side` is the view of B's tensor.
    """
    a = case.a
    steps = side.layout
    if len(side.stored) != 1 or len(side.roles) != 1 or len(a.bytes) > STORED:
        return None
    if not all(step.permutes for step in steps):
        return None
    row = encoding_row(a.encoding)
    flat = np.frombuffer(a.bytes.window(0, len(a.bytes)), np.uint8)
    shape = case.shape if row.block_size == 1 else case.shape[:-1]
    # Move whole elements, or whole rows of blocks, without decoding.
    cell = row.type_size if row.block_size == 1 else a.row_bytes or 0
    cells = flat.view(np.dtype((np.void, cell))).reshape(shape)
    arrays = to_stored(steps, [cells], case.context.models["b"].hyper)
    return np.ascontiguousarray(arrays[0]).tobytes()


def copy_bytes(data: RunBytes | bytes, start: int, stop: int) -> bytes:
    """Return a copy of bytes [start, stop)."""
    return bytes(data.window(start, stop) if isinstance(data, RunBytes) else data[start:stop])


HYPOTHESES = (
    PairHypothesis(
        ("dtype_mislabel",),
        guess_dtype_mislabel,
        10,
        "equal bytes are seen without decoding a value",
    ),
    PairHypothesis(("endianness",), guess_byte_order, 20, "a sample of the bytes decides it"),
    PairHypothesis(
        ("bit_rot",),
        explain_bit_rot,
        60,
        "few differing bytes, before what fits numbers",
        stored=True,
    ),
)
