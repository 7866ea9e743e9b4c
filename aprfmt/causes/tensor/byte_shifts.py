"""Hypotheses about tensor data read some bytes too early or too late, in whole or in part.

A *guess* is a change of one tensor of a pair after which both should be equal.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Guess, PairHypothesis
from aprfmt.causes.tensor.own_parts import moved_parts
from aprfmt.causes.tensor.proof import make_finding, prove_bytes
from aprfmt.causes.tensor.stored_bytes import ANCHOR, STORED, byte_layouts, copy_bytes
from aprfmt.measure.findings import Finding
from aprfmt.tensors import norms
from aprfmt.tensors.runs import RunBytes, difference_offset

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "byte_offset", "tensor", "bug",
        "The data is read or was written some bytes too early or too late.",
        "Equal byte runs at another place of the tensor.",
        "Shifting by the printed number of bytes makes the overlapping bytes equal.",
    ),
    Cause(
        "row_offset", "tensor", "bug",
        "Rows are stored some rows further down or up, as in an embedding read one token off.",
        "Every row equals a row of the other side at one constant distance.",
        "Moving the rows by the printed number makes them equal.",
    ),
)  # fmt: skip

REACH = 1 << 16  # furthest shift looked for, in bytes


def explain_byte_offset(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that B's bytes are A's, read some bytes too early or too late."""
    for a, b, name in byte_layouts(case):
        shift = _find_shift(a, b)
        if shift is not None:
            if not _is_copied_part(a, b, shift) and not _is_cyclic_head_move(case, a, b, shift):
                yield _offset_explanation(case, shift, (a, b), name)
            return
        late = _shift_inside(a, b)
        if late is not None:
            start, shift = late
            if _is_copied_part(a, b, shift) or _is_cyclic_head_move(case, a, b, shift, start):
                return
            found = _offset_explanation(case, shift, (a, b), name, start)
            line = f"from byte {start} on; everything before it is equal"
            yield replace(found, evidence=(found.evidence[0], line))
            return


_WRAPPED = (
    "offsets were kept in {0} bits: the data stand a multiple of 2^{0} bytes too early, and their "
    "own place was never written"
)
WRAPS = (1 << 32, 1 << 31)  # bytes that an offset of 32 bits, unsigned and signed, counts to
READ = 1 << 20


def explain_wrapped_offset(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that B's writer used 32-bit offsets: data is 2^32 bytes too early.

    It may be a multiple of 2^32. At the tensor's own offset B's file has zeros, as any range of a
    file that was never written.
    """
    data, wanted = case.b.bytes, case.a.bytes
    if case.a.encoding != case.b.encoding or len(data) != len(wanted) or not len(data):
        return
    # The offset of the data, counted from the first tensor of the file.
    tensor, inside = data.locate(0)
    stored = case.context.stored("b")
    begin = min((each.info.offset for each in stored), default=0)
    offset = tensor.info.offset + inside - begin
    # The wrapped offset must be inside another tensor that holds A's bytes.
    for wrap in WRAPS:
        if offset < wrap or not _is_unwritten(data):
            continue
        at = begin + offset % wrap
        holder = next(
            (
                each
                for each in stored
                if each.path == tensor.path
                and each.info.offset <= at
                and at + len(data) <= each.info.offset + each.info.nbytes
            ),
            None,
        )
        if holder is None:
            continue
        place = at - holder.info.offset
        if all(
            bytes(holder.raw(place + start, place + min(len(data), start + READ)))
            == copy_bytes(wanted, start, min(len(data), start + READ))
            for start in range(0, len(data), READ)
        ):
            power = wrap.bit_length() - 1
            says = (
                _WRAPPED.format(power),
                f"A's {len(data)} bytes stand in B's {holder.info.name} at +{place:#x} "
                f"(byte {at} of the file); B is zero from byte {begin + offset} on",
            )
            proof = prove_bytes(copy_bytes(wanted, 0, min(len(data), READ)), len(data), 1)
            yield make_finding("byte_offset", (case.key,), says, case.before.relative, 0.0, proof)
            return


def explain_overwritten_by_wrapped(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that B differs only where other tensors' wrapped offsets overwrote it.

    A writer with 32-bit offsets puts tensors beyond 4 GiB there.
    """
    data, wanted = case.b.bytes, case.a.bytes
    size = encoding_row(case.b.encoding).type_size
    if case.a.encoding != case.b.encoding or len(data) != len(wanted) or not len(data) or not size:
        return
    tensor, inside = data.locate(0)
    stored = [each for each in case.context.stored("b") if each.path == tensor.path]
    begin, own = min(each.info.offset for each in stored), tensor.info.offset + inside
    for wrap in WRAPS:
        spans = [
            (begin + (each.info.offset - begin) % wrap - own, each.info.nbytes, each.info.name)
            for each in stored
            if each.info.offset - begin >= wrap
        ]
        spans = [span for span in spans if 0 <= span[0] and span[0] + span[1] <= len(data)]
        if not spans or any(start % size or length % size for start, length, _ in spans):
            continue
        apart = 0
        for start, length, _ in spans:
            x, y = (
                np.frombuffer(copy_bytes(b, start, start + length), np.uint8)
                for b in (wanted, data)
            )
            apart += int((x != y).reshape(-1, size).any(axis=1).sum())
        if apart and apart == case.before.changed:
            names = ", ".join(name for _, _, name in spans)
            says = (_WRAPPED.format(wrap.bit_length() - 1), f"those of {names} were written here")
            first = copy_bytes(data, spans[0][0], spans[0][0] + min(READ, spans[0][1]))
            proof, away = prove_bytes(first, apart, 1), case.before.relative
            yield make_finding(
                "byte_offset", (case.key,), says, away if math.isfinite(away) else None, 0.0, proof
            )
            return


def _is_unwritten(data: RunBytes) -> bool:
    """Return whether all bytes are zero."""
    return not any(
        np.frombuffer(data.window(start, min(len(data), start + READ)), np.uint8).any()
        for start in range(0, len(data), READ)
    )


def _shift_inside(a: RunBytes | bytes, b: RunBytes) -> tuple[int, int] | None:
    """Return (first differing byte, k) with B[i] == A[i + k] from there on; None for no such k."""
    size = len(b)
    if len(a) != size or size < 4 * ANCHOR or size > STORED:
        return None
    first = _find_difference(a, b)
    if not first or first >= size - 4 * ANCHOR:
        return None
    # Find a piece of the rest in A.
    at = (first + size) // 2
    anchor = copy_bytes(b, at, at + ANCHOR)
    low, high = max(0, at - REACH), min(size, at + ANCHOR + REACH)
    found = copy_bytes(a, low, high).find(anchor)
    shift = low + found - at
    if found < 0 or shift == 0 or len(set(anchor)) < 8 or abs(shift) > (size - first) // 2:
        return None
    start, stop = first + max(0, -shift), min(size, size - shift)
    return (first, shift) if _range_is_equal(a, b, shift, start, stop) else None


def _find_difference(a: RunBytes | bytes, b: RunBytes) -> int | None:
    """Return the first index at which the bytes of A and B, equally many, differ; None if equal."""
    for at in range(0, len(b), READ):
        end = min(len(b), at + READ)
        offset = difference_offset(copy_bytes(a, at, end), copy_bytes(b, at, end))
        if offset is not None:
            return at + offset
    return None


def _is_copied_part(a: RunBytes | bytes, b: RunBytes, shift: int) -> bool:
    """Return whether the bytes of B that differ are a copy of bytes that stand at their place too.

    With B[i] == A[i + shift] where B differs, that is a range no longer than the shift. Nothing
    moved then: a part stands twice, and what stood there is lost (`misplaced_rows`).
    """
    first = _find_difference(a, b)
    if first is None:
        return False
    for at in range(first // READ * READ, len(b), READ):
        here, there = (
            np.frombuffer(copy_bytes(side, at, min(len(b), at + READ)), np.uint8) for side in (a, b)
        )
        apart = np.flatnonzero(here != there)
        if len(apart) and at + int(apart[-1]) >= first + abs(shift):
            return False
    return True


def _is_cyclic_head_move(
    case: DifferingPair, a: RunBytes | bytes, b: RunBytes, shift: int, start: int = 0
) -> bool:
    """Return whether a byte shift is a rotation by whole heads, experts or parts: no offset.

    True if B begins with the bytes that A ends with, or the reverse. `start` is the first byte that
    differs: heads or experts before it are right.
    """
    row, size, distance = case.b.row_bytes or 0, len(b), abs(shift)
    if row and distance % row == 0 and moved_parts(case) is not None:
        return True  # the parts of the role in another order
    parts = case.sizes("head_dim") if case.role.startswith("attn_") else []
    if len(case.shape) == 3:
        parts = [int(case.shape[1])]
    if not row or case.b.columns == 1:
        return False
    for rows in parts:
        block = row * rows
        if distance % block:
            continue
        first = start // block * block
        left, right = (a, b) if shift > 0 else (b, a)
        if copy_bytes(left, first, first + distance) == copy_bytes(right, size - distance, size):
            return True
    return False


def _count_sourceless(a: RunBytes | bytes, b: RunBytes, shift: int, start: int, unit: int) -> int:
    """Return the number of differing bytes of B that a shift cannot explain, for want of a source.

    With B[i] = A[i + shift] from `start` on, the first byte that differs, these are the last
    `shift` bytes, or for a negative shift the first ones after `start`. 0 for a rotation, where
    they are the bytes at A's other end. Bytes count in whole units of `unit` bytes: a value, or a
    row.
    """
    size, distance = len(b), abs(shift)
    rest, round_ = (size - distance, start) if shift > 0 else (start, size - distance)
    lost = 0
    comes_round = True
    step = max(unit, READ // unit * unit)
    for at in range(0, distance, step):
        count = min(step, distance - at)
        held = copy_bytes(b, rest + at, rest + at + count)
        comes_round = comes_round and held == copy_bytes(a, round_ + at, round_ + at + count)
        here, there = (
            np.frombuffer(each, np.uint8)
            for each in (held, copy_bytes(a, rest + at, rest + at + count))
        )
        lost += unit * int((here != there).reshape(-1, unit).any(axis=1).sum())
    return 0 if comes_round else lost


def _offset_explanation(
    case: DifferingPair,
    shift: int,
    sides: tuple[RunBytes | bytes, RunBytes],
    name: str,
    start: int = 0,
) -> Finding:
    """Return the finding of a shift of B's bytes: by whole rows, by values or by bytes.

    `sides` are the bytes of A and B, `name` is B's stored name, `start` the first byte that
    differs. The finding's residual is the fraction of bytes that differ all the same.
    """
    a, b = sides
    row, total = case.b.row_bytes or 0, len(b)
    # Whole rows are another cause than single bytes.
    rows = shift // row if case.b.columns > 1 and row and shift % row == 0 else 0
    kept = total - abs(shift)
    values = ""
    size = encoding_row(case.b.encoding).type_size
    if shift % size == 0 and encoding_row(case.b.encoding).block_size == 1:
        values = f" ({abs(shift) // size} values)"
    if rows:
        text = f"row i of B is row i{rows:+d} of A"
        more = f"{kept // row} of {case.b.rows} rows are equal there, byte for byte"
        cause = "row_offset"
    else:
        way = "too late" if shift > 0 else "too early"
        text = f"B's data begins {abs(shift)} bytes{values} {way}"
        more = f"{kept} of {total} bytes of {name} are equal when shifted"
        cause = "byte_offset"
    shown = prove_bytes(copy_bytes(b, 0, min(total, READ)), kept, 1)
    unit = row if rows else size if shift % size == 0 else 1
    reached, lost = kept - start, _count_sourceless(a, b, shift, start, unit)
    if not lost:
        more += "; the others come round, or are equal where they stand"
    proof = replace(shown, share=reached / (reached + lost))
    return make_finding(cause, (case.key,), (text, more), case.before.relative, 0.0, proof)


def _find_shift(a: RunBytes | bytes, b: RunBytes) -> int | None:
    """Return the k, not 0, with B[i] == A[i + k] wherever both exist; None if there is none."""
    size = len(b)
    if len(a) != size or size < 4 * ANCHOR:
        return None
    for part in (2, 3, 5, 7):
        at = size // part
        if at + ANCHOR > size:
            continue
        anchor = copy_bytes(b, at, at + ANCHOR)
        if len(set(anchor)) < 8:
            continue  # zeros are found everywhere
        low, high = max(0, at - REACH), min(size, at + ANCHOR + REACH)
        hay = copy_bytes(a, low, high)
        found = hay.find(anchor)
        if found < 0:
            return None
        shift = low + found - at
        if shift == 0 or abs(shift) > size // 2:
            return None
        equal = _overlap_is_equal(a, b, shift, shift)
        # What stands at its own place too explains nothing: A repeats rows that B has once.
        return shift if equal and not _overlap_is_equal(a, b, shift, 0) else None
    return None


def _overlap_is_equal(a: RunBytes | bytes, b: RunBytes, shift: int, offset: int) -> bool:
    """Return whether B[i] == A[i + offset] for all bytes that a shift of B keeps in the tensor."""
    start, stop = max(0, -shift), min(len(b), len(b) - shift)
    return _range_is_equal(a, b, offset, start, stop)


def _range_is_equal(a: RunBytes | bytes, b: RunBytes, offset: int, start: int, stop: int) -> bool:
    """Return whether B[i] == A[i + offset] for all bytes i of [start, stop)."""
    for at in range(start, stop, READ):
        end = min(stop, at + READ)
        if copy_bytes(a, at + offset, end + offset) != copy_bytes(b, at, end):
            return False
    return True


# --- values, seen through other encodings ---------------------------------------------------------

FLAT_REACH = 2048  # values, or two rows, up to which a shift over row ends is looked for
ANCHORED = 256  # values that are looked for
FOUND_AGAIN = 0.75  # correlation of values that were found again, at least


def guess_flat_offset(case: DifferingPair) -> Iterator[Guess]:
    """Yield the guess that B's values are A's moved by some values, across the ends of rows."""
    width, rows = case.a.columns, case.a.rows
    if case.numbers is not None or width == 1 or case.a.shape != case.b.shape or rows < 4:
        return
    # The shift must not be of whole rows.
    shift = _find_flat_shift(case)
    if not shift or shift % width == 0:
        return
    down, rest = divmod(shift, width)
    # Only rows that differ and have both sources in A are compared.
    changed = case.changed_rows
    inside = changed[(changed + down >= 0) & (changed + down + 1 < rows)]
    if len(inside) < max(2, len(changed) // 2):
        return

    def shifted_rows(index: "Array") -> "Array":
        """Return rows of A with the values shifted across the ends of rows.

        `index` are row numbers; values come from `down` rows and `rest` values further.
        """
        first, second = case.a.take(index + down), case.a.take(index + down + 1)
        return np.concatenate([first[:, rest:], second[:, :rest]], axis=1)

    way = "late" if shift < 0 else "early"
    says = f"B's values stand {abs(shift)} places too {way}, over the ends of rows"
    start = f"in {len(inside)} of {rows} rows, from row {int(changed[0])} on"
    yield case.guess("byte_offset", (says, start), "A", shifted_rows, rows=inside)


def _find_flat_shift(case: DifferingPair) -> int:
    """Return s such that value i of B is value i + s of A where they differ; 0 if none fits.

    Only shifts that show near the middle of the differing rows are tried.
    """
    width, rows = case.a.columns, case.a.rows
    changed = case.differing_sample
    middle = int(changed[len(changed) // 2])
    some = min(rows, -(-ANCHORED // width))
    reach = max(2, -(-FLAT_REACH // width))
    middle = min(middle, rows - some)
    first, last = max(0, middle - reach), min(rows, middle + some + reach)
    # Take a run of B's values, and A's values round its place.
    anchor, hay = (
        np.nan_to_num(np.asarray(side.take(np.arange(start, stop)), np.float64).reshape(-1))
        for side, start, stop in ((case.b, middle, middle + some), (case.a, first, last))
    )
    anchor = anchor[:ANCHORED]
    norm = norms.exact_norm(anchor)
    if not norm or hay.size < anchor.size:
        return 0
    # The place with the highest correlation is the shift.
    sums = np.convolve(hay * hay, np.ones(anchor.size), "valid")
    found = np.correlate(hay, anchor, "valid") / (norm * np.sqrt(np.maximum(sums, 1e-300)))
    at = int(found.argmax())
    return at + (first - middle) * width if found[at] >= FOUND_AGAIN else 0


HYPOTHESES = (
    PairHypothesis(
        ("byte_offset",),
        explain_wrapped_offset,
        30,
        "offsets that an integer of 32 bits wraps: bytes alone",
        stored=True,
    ),
    PairHypothesis(
        ("byte_offset",),
        explain_overwritten_by_wrapped,
        31,
        "where such data landed, before damage",
        stored=True,
    ),
    PairHypothesis(
        ("byte_offset", "row_offset"),
        explain_byte_offset,
        80,
        "runs of equal bytes elsewhere are exact",
        stored=True,
    ),
    PairHypothesis(
        ("byte_offset",),
        guess_flat_offset,
        210,
        "values moved across rows, once no order of rows fits",
    ),
)
