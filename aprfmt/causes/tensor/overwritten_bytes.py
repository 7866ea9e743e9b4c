"""Overwritten ranges of bytes: their extent, what they contain now, and where that came from.

A page of zeros, a sector written twice, a block of another tensor: all bytes outside the range are
equal. The bytes inside are looked for in all stored tensors of both files.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.protocols import LazyTensor
from aprfmt.causes.tensor import coarse_damage
from aprfmt.causes.tensor.coarse_damage import GAP, LEAST, SHARE, SHOWN, SPANS
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.foreign_values import judge_foreign
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import fitted_proof, make_finding
from aprfmt.causes.tensor.stored_bytes import ANCHOR, byte_layouts, copy_bytes
from aprfmt.measure.byte_ranges import common_alignment, numbered_text, range_in_file, range_text
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import SelectedRows
from aprfmt.tensors.runs import RunBytes

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CONTENT = 64  # bytes from which a range's content says where it came from
SEARCHED = 2 << 30  # bytes looked through, of both files
STEP = 8 << 20
WILD = 30.0  # values so much larger than the largest of A's are no weights


@dataclass(frozen=True)
class ByteSpan:
    """Differing bytes [start, stop) of B's tensor, and what they contain ("": not known)."""

    start: int
    stop: int
    holds: str = ""


def explain_overwritten(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that all but a few ranges of bytes are equal, and what those contain.

    Where there are no such ranges, the finding is about columns, or about damaged values if the
    encodings differ.
    """
    best: tuple[list[ByteSpan], RunBytes, RunBytes | bytes] | None = None
    # Take the byte order in which the difference has fewer ranges.
    for a, b, _ in byte_layouts(case):
        found = _differing_spans(a, b)
        if found and (best is None or len(found) < len(best[0])):
            best = found, b, a
    # No ranges of bytes: look for columns, or for damage seen through values.
    if best is None:
        yield from _explain_columns(case)
        if case.a.encoding != case.b.encoding:
            yield from coarse_damage.explain_damaged_runs(case)
            yield from coarse_damage.explain_zero_runs(case)
        return
    if max(span.stop - span.start for span in best[0]) < LEAST:
        return
    spans, b, _ = best
    if b is case.b.bytes:
        yield from _explain_units(case, spans)
    # Say what each range holds, and whether that must be damage.
    spans = _fill_contents(case, spans, b)
    known = [span for span in spans if span.holds]
    sure = all(span.holds or _is_surely_damage(case, span, b) for span in spans)
    total = sum(span.stop - span.start for span in spans)
    lines = [_span_text(case, span, b) for span in spans[:SHOWN]]
    more = (f"{len(spans) - SHOWN} more ranges",) if len(spans) > SHOWN else ()
    text = (
        f"{total} of {len(b)} bytes are overwritten, in {len(spans)} range{'s' * (len(spans) > 1)}"
    )
    if known and len(known) < len(spans):
        text += f"; of {len(known)} it is known with what"
    yield make_finding(
        "bit_rot",
        (case.key,),
        ("all other bytes are equal: damage or an edit, no transformation", text, *lines, *more),
        case.before.relative,
        0.0,
        fitted_proof(total) if len(known) == len(spans) else None,
        confirmed=sure,
    )


def _explain_units(case: DifferingPair, spans: list[ByteSpan]) -> Iterator[Finding]:
    """Yield the finding of whole rows or experts that were never written, or are older.

    `spans` are the ranges of differing bytes.
    """
    size = case.b.row_bytes or 0
    if case.a.columns == 1 or not size:
        return
    # Extend the ranges to whole rows or experts.
    one = size * case.shape[1] if len(case.shape) == 3 else size
    firsts = [span.start // one for span in spans]
    lasts = [-(-span.stop // one) for span in spans]
    units = np.concatenate([np.arange(a, b) for a, b in zip(firsts, lasts, strict=True)])
    rows = (units[:, None] * (one // size) + np.arange(one // size)).reshape(-1)
    if len(rows) > SHARE * case.a.rows:
        return
    name = "expert" if len(case.shape) == 3 else "row"
    shown = ", ".join(numbered_text(name, a, b) for a, b in zip(firsts, lasts, strict=True))
    # They may be constant, or of another tensor.
    values = case.b.take(rows)
    text = ""
    if values.size > 1 and np.ptp(to_float64(values)) == 0 and (name == "expert" or values.any()):
        value = float(values.flat[0])
        text = f"{shown}: B holds {value:g} everywhere there, and was never filled"
    elif all(_covers_whole_units(span, one) for span in spans):
        judged = judge_foreign(SelectedRows(case.a, rows), SelectedRows(case.b, rows))
        if judged.sure:
            text = f"{shown}: other values, as of another state of training: {judged.says}"
    if text:
        more = f"all {case.a.rows - len(rows)} other rows are equal to the byte"
        proof = None if values.any() else fitted_proof(values.size)
        yield make_finding(
            "stale_tensor", (case.key,), (text, more), case.before.relative, 0.0, proof
        )


def _covers_whole_units(span: ByteSpan, one: int) -> bool:
    """Return whether a range covers nearly whole units, such as rows, of `one` bytes."""
    return span.start % one < GAP and -span.stop % one < GAP


def _explain_columns(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that only some columns differ, which in B are all zero: never filled."""
    columns = case.a.columns
    if columns == 1 or case.a.rows != case.b.rows or case.a.encoding != case.b.encoding:
        return
    apart = np.zeros(columns, bool)
    held = np.zeros(columns, bool)
    # Find the columns that differ, and whether B has values there.
    for rows in case.windows(None):
        x, y = case.a.take(rows), case.b.take(rows)
        apart |= (x != y).any(axis=0)
        held |= (y != 0).any(axis=0)
        if apart.mean() > SHARE:
            return
    if not apart.any() or held[apart].any():
        return
    # Say the columns as ranges.
    chosen = np.flatnonzero(apart)
    ends = np.flatnonzero(np.diff(chosen) != 1)
    firsts, lasts = chosen[np.append(0, ends + 1)], chosen[np.append(ends, len(chosen) - 1)]
    shown = ", ".join(
        numbered_text("column", first, last + 1)
        for first, last in zip(firsts.tolist()[:SHOWN], lasts.tolist()[:SHOWN], strict=True)
    )
    text = f"{shown}: B holds 0 there, in every row, and was never filled"
    yield make_finding(
        "stale_tensor",
        (case.key,),
        (text, f"the other {columns - len(chosen)} columns are equal"),
        case.before.relative,
        0.0,
        fitted_proof(case.before.changed),
    )


def _span_text(case: DifferingPair, span: ByteSpan, b: RunBytes) -> str:
    """Return in words where a range is, in the tensor or in the file, and what it contains."""
    logical = b is case.b.bytes or len(case.b.side.layout) == 0
    where = range_text(case.b, span.start, span.stop) if logical else _file_place(b, span)
    return where + (f", {span.holds}" if span.holds else "")


def _file_place(b: RunBytes, span: ByteSpan) -> str:
    """Return in words where a range of B is in its file."""
    tensor, at = b.locate(span.start)
    begin = tensor.info.offset + at
    even = common_alignment(begin, begin + span.stop - span.start)
    return (
        f"bytes {begin:#x} to {begin + span.stop - span.start - 1:#x} of the file, in "
        f"{tensor.info.name} at +{at:#x}, {span.stop - span.start} bytes"
        + (f", aligned to {even}" if even else "")
    )


def _differing_spans(a: RunBytes | bytes, b: RunBytes) -> list[ByteSpan]:
    """Return the ranges of differing bytes; [] if none, too many, or over SHARE of all bytes."""

    def differing_places() -> "Iterator[Array]":
        """Yield the offsets of bytes in which `a` and `b` differ, ascending, by windows."""
        for start in range(0, len(b), STEP):
            stop = min(len(b), start + STEP)
            x = np.frombuffer(copy_bytes(a, start, stop), np.uint8)
            y = np.frombuffer(b.window(start, stop), np.uint8)
            at = np.flatnonzero(x != y) + start
            del x, y
            for side in (a, b):
                if isinstance(side, RunBytes):
                    side.drop(start, stop)
            yield at

    # Join near places to ranges.
    found = join_places(differing_places(), GAP, SPANS)
    if not found:
        return []
    if sum(stop - start for start, stop in found) > SHARE * len(b):
        return []
    return [ByteSpan(start, stop) for start, stop in found]


def join_places(apart: "Iterable[Array]", gap: int, most: int) -> list[list[int]] | None:
    """Return [start, stop) ranges of byte offsets with gaps of at most `gap` between them.

    `apart` are ascending arrays of offsets, window by window. None if there are over `most` ranges.
    """
    found: list[list[int]] = []
    for at in apart:
        if not at.size:
            continue
        breaks = np.flatnonzero(np.diff(at) > gap)
        firsts = at[np.concatenate([[0], breaks + 1])]
        lasts = at[np.concatenate([breaks, [at.size - 1]])]
        if len(firsts) > most:
            return None
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if found and first - found[-1][1] <= gap:
                found[-1][1] = last + 1
            else:
                found.append([first, last + 1])
    return found if len(found) <= most else None


def _fill_contents(case: DifferingPair, spans: list[ByteSpan], b: RunBytes) -> list[ByteSpan]:
    """Return the ranges, each with words on what B has there: a pattern, or a copy from elsewhere.

    "" where neither is found.
    """
    made, unknown = [], []
    for span in spans:
        text = ""
        if span.stop - span.start >= CONTENT:
            text = _simple_content(bytes(b.window(span.start, span.stop)))
        made.append(ByteSpan(span.start, span.stop, text))
        if not text and span.stop - span.start >= CONTENT:
            unknown.append(len(made) - 1)
    if unknown:
        searched = {i: bytes(b.window(made[i].start, made[i].stop)) for i in unknown[:8]}
        for i, text in _find_copies(case, searched, b, made).items():
            made[i] = ByteSpan(made[i].start, made[i].stop, text)
    return made


def _simple_content(data: bytes) -> str:
    """Return in words what bytes contain: one byte everywhere, or a repeated pattern; else ""."""
    if set(data) == {0, 0x80}:
        return "all zero, with signs"
    if len(set(data)) == 1:
        return "all zero" if not data[0] else f"all bytes {data[0]:#04x}"
    for period in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        if len(data) >= 3 * period and data[period:] == data[:-period]:
            return f"{period} bytes over and over"
    return ""


def _find_copies(
    case: DifferingPair, searched: dict[int, bytes], b: RunBytes, spans: list[ByteSpan]
) -> dict[int, str]:
    """Return {number of a range: words on where either file has the same bytes elsewhere}.

    `searched` are the ranges' bytes by number, `spans` all ranges. Ranges not found are left out.
    """
    # Search for a short piece of each range that is unlikely to occur twice.
    needles = {}
    for i, data in searched.items():
        at = len(data) // 2 - min(ANCHOR, len(data)) // 2
        needle = data[at : at + ANCHOR]
        if len(set(needle)) >= 8:
            needles[i] = at, needle
    found: dict[int, str] = {}
    left = SEARCHED
    # Look through all stored tensors of both files.
    for label in ("b", "a"):
        for tensor in case.context.stored(label):
            size = tensor.info.nbytes
            if left < size or len(found) == len(needles):
                return found
            left -= size
            for start in range(0, size, STEP):
                window = bytes(tensor.raw(start, min(size, start + STEP + ANCHOR)))
                for i, (at, needle) in needles.items():
                    if i in found:
                        continue
                    own: tuple[LazyTensor | None, int] = (None, 0)
                    if label == "b":
                        own = b.locate(spans[i].start)
                    text = _match_text(tensor, start, window, needle, at, searched[i], own)
                    if text:
                        found[i] = f"bytes of {label.upper()}'s {text}"
            tensor.drop()
    return found


def _match_text(
    tensor: LazyTensor,
    start: int,
    window: bytes,
    needle: bytes,
    at: int,
    data: bytes,
    own: tuple[LazyTensor | None, int],
) -> str:
    """Return in words where a tensor contains all of `data`; "" if it does not.

    `window` are its bytes from `start`. `needle` are bytes of `data` from offset `at`, which are
    searched for first. `own` is where the data itself is stored, which does not count.
    """
    here = window.find(needle)
    while here >= 0:
        begin = start + here - at
        inside = begin >= 0 and begin + len(data) <= tensor.info.nbytes
        if inside and not (own[0] is tensor and own[1] == begin):
            if bytes(tensor.raw(begin, begin + len(data))) == data:
                return f"{tensor.info.name} at +{begin:#x}"
        here = window.find(needle, here + 1)
    return ""


def _is_surely_damage(case: DifferingPair, span: ByteSpan, b: RunBytes) -> bool:
    """Return whether a range of unknown origin must be damage.

    It must be if it covers whole disk pages, or contains values that no weight has.
    """
    if b is case.b.bytes:
        place = range_in_file(case.b, span.start, span.stop)
        even = common_alignment(place[1], place[2]) if place is not None else 0
        size = case.b.row_bytes or 1
        if even >= 512 and (span.start % size or span.stop % size):
            return True
        if case.b.columns > 1 and case.b.row_bytes:
            rows = np.arange(span.start // size, -(-span.stop // size))
            x, y = to_float64(case.a.take(rows)), to_float64(case.b.take(rows))
            usual = float(np.abs(x).max(initial=0.0))
            wild = ~np.isfinite(y) | (np.abs(y) > WILD * usual)
            return bool(wild.any())
    return False


HYPOTHESES = (
    PairHypothesis(
        ("bit_rot",),
        explain_overwritten,
        240,
        "what holds where a part is overwritten, whatever it is",
        stored=True,
    ),
)
