"""Bits of the codes of a block encoding that were never written, so that a field is constant.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

Block types keep the low and the high bits of a code in members of their own (`ql` and `qh`, `qs`
and `hmask`). A writer that leaves one out, or a kernel that does not fill it, gives values that are
on the right scale and too coarse, which looks like other scales or another quantizer's work.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.encodings import member_offsets
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import make_finding
from aprfmt.codecs import CODECS
from aprfmt.measure.bounds import quantization_steps
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import steps_between, to_float64
from aprfmt.measure.proofs import Proof
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

FEWEST_BLOCKS = 16  # blocks in which the same bits must be turned
CODES = ("qs", "ql", "qh", "hmask")  # members that hold bits of codes and nothing else
UNIFORM = {1: (0x00, 0xFF), 2: (0x00, 0x55, 0xAA, 0xFF), 4: tuple(17 * v for v in range(16))}


def explain_lost_bits(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that a field of a block's codes is the same byte in all blocks.

    If these bits are chosen freely for each value, and nothing else is changed, every value must
    be within a step of the other side's. It is not confirmed if the field holds all bits of the
    codes.
    """
    for label, side, other in (("B", case.b, case.a), ("A", case.a, case.b)):
        if side.encoding == other.encoding or side.row_bytes is None or case.numbers is not None:
            continue
        row = encoding_row(side.encoding)
        if side.encoding not in CODECS or row.block_size == 1 or row.row_layout or row.flat:
            continue
        places = _member_bytes(row.layout)
        # A member that is the same byte in all blocks may be lost.
        for name, (start, stop) in places.items():
            bits = 8 * (stop - start) // row.block_size
            value = _constant_byte(case, side, start, stop, row.type_size)
            if bits not in UNIFORM or value not in UNIFORM[bits]:
                continue
            alone = len(places) == 1
            # Other bits of the codes must still be right.
            if not alone and not _is_restored(case, side, other, (start, stop), UNIFORM[bits]):
                continue
            says = [
                f"member {name} of all {side.encoding} blocks of {label} is 0x{value:02x}: "
                + (f"the codes ({bits} bits)" if alone else f"{bits} of the bits of its codes")
                + " are lost"
            ]
            if not alone:
                says.append(
                    "with these bits chosen anew, every value is within a step of the other side's"
                )
            rest = sum(8 * (stop - start) // row.block_size for start, stop in places.values())
            proof = Proof(case.before.count, 1.0, 0, _evidence_bits(bits, rest - bits))
            yield make_finding(
                "bit_rot",
                (case.key,),
                says,
                case.before.relative,
                None,
                None if alone else proof,
                confirmed=not alone,
            )


def explain_turned_bits(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that the same few bits of all blocks are turned, or zero or one on a side.

    Both sides are of one block encoding, and all other bits are equal. Bits are turned where they
    differ in every block; where one side has a constant there, its bits are the lost ones.
    """
    a, b = case.a, case.b
    row = encoding_row(a.encoding)
    if a.encoding != b.encoding or a.shape != b.shape or row.block_size == 1 or row.row_layout:
        return
    size = row.type_size
    if case.numbers is not None or not a.row_bytes or a.row_bytes % size:
        return
    if b.row_bytes != a.row_bytes:
        return
    apart: Array = np.zeros(size, np.uint8)  # bits that differ in some block
    always: Array = np.full(size, 0xFF, np.uint8)  # bits that differ in every block
    ones = {side: np.full(size, 0xFF, np.uint8) for side in "AB"}  # bits set in every block
    some = {side: np.zeros(size, np.uint8) for side in "AB"}  # bits set in some block
    blocks = 0
    for index in case.windows(None):
        held = {"A": a.raw(index).reshape(-1, size), "B": b.raw(index).reshape(-1, size)}
        differ = held["A"] ^ held["B"]
        apart |= np.bitwise_or.reduce(differ)
        always &= np.bitwise_and.reduce(differ)
        for side, own in held.items():
            ones[side] &= np.bitwise_and.reduce(own)
            some[side] |= np.bitwise_or.reduce(own)
        blocks += len(differ)
    count = int(np.unpackbits(apart).sum())
    # A plane of one bit a value, at most, in blocks enough that no chance gives it.
    if not 0 < count <= row.block_size or blocks < FEWEST_BLOCKS:
        return
    how, side = "", ""
    if np.array_equal(always, apart):
        how = "turned: every block differs there"
    for label in "BA":
        if not how and not (some[label] & apart).any():
            how, side = f"zero in every block of {label}", label
        if not how and np.array_equal(ones[label] & apart, apart):
            how, side = f"one in every block of {label}", label
    if not how:
        return
    verb = "is" if count == 1 else "are"
    says = f"{_bits_text(apart, count, row.layout)} of all {a.encoding} blocks {verb} {how}"
    proof = Proof(blocks * count, 1.0, 0, 1.0)
    found = make_finding(
        "bit_rot",
        (case.key,),
        [says, "all other bits are equal"],
        case.before.relative,
        0.0,
        proof,
        confirmed=True,
    )
    yield replace(found, side=side) if side else found


def _bits_text(mask: "Array", count: int, layout: str) -> str:
    """Return where the bits of `mask` [bytes of a block] are: a bit of a byte, or of a field."""
    places = np.flatnonzero(mask)
    start = int(places[0])
    fields = member_offsets(layout)
    own = [name for name, (at, stop) in fields.items() if at <= start and places[-1] < stop]
    of = f" ({own[0]})" if own else ""
    if len(places) == 1:
        bits = ", ".join(str(bit) for bit in range(8) if mask[start] >> bit & 1)
        return f"bit{'s' if count > 1 else ''} {bits} of byte {start}{of}"
    return f"the same {count} bits of bytes {start} to {int(places[-1])}{of}"


def _evidence_bits(lost: int, left: int) -> float:
    """Return how many bits of evidence a value gives that `lost` bits of its code are missing.

    `left` is the number of the other bits. Where the lost bits are the code's highest, three
    codes in 2**left are within a step by chance. Where they are its lowest, 2**lost + 2 of all
    codes are.
    """
    return max(left - math.log2(3), lost + left - math.log2(2**lost + 2))


def _member_bytes(layout: str) -> dict[str, tuple[int, int]]:
    """Return {name: (start, stop)} of the bytes that each field of codes has in a block."""
    return {name: place for name, place in member_offsets(layout).items() if name in CODES}


def _constant_byte(
    case: DifferingPair, side: RowReader, start: int, stop: int, size: int
) -> int | None:
    """Return the byte that a field of codes has in all blocks; None if it has several values.

    The field is bytes [start, stop) of a block of `size` bytes.
    """
    value: int | None = None
    for index in case.windows(None):
        held = side.raw(index).reshape(-1, size)[:, start:stop]
        if value is None:
            value = int(held[0, 0])
        if (held != value).any():
            return None
    return value


def _is_restored(
    case: DifferingPair,
    side: RowReader,
    other: RowReader,
    place: tuple[int, int],
    patterns: tuple[int, ...],
) -> bool:
    """Return whether some choice of the lost bits brings every value within a step of `other`.

    `place` is the [start, stop) of the bytes in a block, `patterns` are the byte values to try
    there.
    """
    size = encoding_row(side.encoding).type_size
    for index in case.windows(None):
        raw = side.raw(index).copy()
        step = quantization_steps(side.encoding, {"": raw.tobytes()}, len(index) * side.columns)
        if step is None:
            return False
        theirs = to_float64(other.take(index)).reshape(-1)
        nearest: Array | None = None
        # Choose for every value the bits that bring it nearest.
        for byte in patterns:
            raw.reshape(-1, size)[:, place[0] : place[1]] = byte
            values = to_float64(side.decode_rows(raw)).reshape(-1)
            if nearest is None:
                nearest = values
            else:
                nearer = np.abs(values - theirs) < np.abs(nearest - theirs)
                nearest = np.where(nearer, values, nearest)
        if nearest is None or (steps_between(theirs, nearest, step) > 1.0).any():
            return False
    return True


HYPOTHESES = (
    PairHypothesis(
        ("bit_rot",),
        explain_lost_bits,
        75,
        "members that are one byte, before other scales are tried",
        facts=("two encodings", "blocks"),
    ),
    PairHypothesis(
        ("bit_rot",),
        explain_turned_bits,
        74,
        "equal bytes but for the same bits, before bounds of values",
        facts=("blocks",),
    ),
)
