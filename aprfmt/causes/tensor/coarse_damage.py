"""Damage under quantization, in runs of values: zeros, flipped bits, overwritten ranges.

A *run* is values that follow each other in a row. A and B are the two files that are compared; a
*side* is one of them, or its tensor.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.tensor.differing_pair import STRAY, DifferingPair, Distance
from aprfmt.causes.tensor.outliers import FINE, flipped_bit_text
from aprfmt.causes.tensor.proof import fitted_proof, make_finding
from aprfmt.measure.byte_ranges import numbered_text
from aprfmt.measure.encoding_noise import storage_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

GAP = 64  # equal bytes in a row that do not end a range
SPANS = 32  # ranges beyond which a tensor is not damaged but another one
LEAST = 16  # bytes below which a range proves nothing
SHARE = 0.5  # of a tensor's bytes that may be overwritten
SHOWN = 4
BLOCK = 256  # values of the largest block, which has one smallest magnitude at most
SLIGHT = 2.0**-8  # a scale is stored in F16 or BF16


def explain_damaged_runs(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that both tensors are equal up to rounding, except for a few runs."""
    found: list[list[int]] = []
    slack, count = 4 * case.slack(), 0
    usual = max(case.before.norms) / max(1, case.before.count) ** 0.5
    # Collect runs of values that rounding does not explain.
    for rows in case.windows(None):
        x, y = to_float64(case.a.take(rows)).reshape(-1), to_float64(case.b.take(rows)).reshape(-1)
        largest = np.maximum(np.maximum(np.abs(x), np.abs(y)), usual)
        at = np.flatnonzero(~(np.abs(x - y) <= slack * largest))
        start, count = int(rows[0]) * case.a.columns, count + at.size
        for one in at.tolist():
            if found and start + one - found[-1][1] <= GAP:
                found[-1][1] = start + one + 1
            else:
                found.append([start + one, start + one + 1])
        if len(found) > SPANS or count > SHARE * case.before.count:
            return
    if not found or max(stop - start for start, stop in found) < LEAST:
        return
    if not _others_are_equal(case, found):
        return
    # A flipped bit explains a run of one block.
    flips = _repairing_flips(case, found)
    if flips:
        many = "one bit is" if len(flips) == 1 else f"{len(flips)} bits are"
        text = f"all other values are within the rounding of the coarser encoding: {many} flipped"
        lines = [f"flipping {flip} brings its block back within the bound" for flip in flips]
        yield make_finding(
            "bit_rot", (case.key,), (text, *lines), case.before.relative, 0.0, fitted_proof(count)
        )
        return
    width = case.a.columns
    # Otherwise describe the runs; only zeros are surely damage.
    lines, sure = [], True
    for start, stop in found[:SHOWN]:
        rows = np.arange(start // width, -(-stop // width))
        part = to_float64(case.b.take(rows)).reshape(-1)[start - rows[0] * width :][: stop - start]
        zero = not part.any()
        sure = sure and zero
        lines.append(
            f"values {start} to {stop - 1}"
            + (", all zero" if zero else "")
            + f": in {numbered_text('row', int(rows[0]), int(rows[-1]) + 1)}"
        )
    # Zeros in whole experts of a stack mean that they were never filled.
    size = case.shape[1] * width if len(case.shape) == 3 else 0
    stale = (
        size and sure and all(start % size < GAP and -stop % size < GAP for start, stop in found)
    )
    general = "all other values are within the rounding of the coarser encoding"
    experts = ", ".join(
        numbered_text("expert", start // size, -(-stop // size)) for start, stop in found if size
    )
    if stale:
        general = f"{experts}: B holds 0 there, and was never filled"
    yield make_finding(
        "stale_tensor" if stale else "bit_rot",
        (case.key,),
        (general, f"{count} values in {len(found)} runs are not: {lines[0]}", *lines[1:]),
        case.before.relative,
        0.0,
        fitted_proof(count) if sure else None,
        confirmed=sure and len(found) <= SHOWN,
    )


def _others_are_equal(case: DifferingPair, runs: list[list[int]]) -> bool:
    """Return whether the values outside the runs, most of the tensor, are equal up to rounding.

    `runs` are [start, stop] of values. Values that are within a wide bound one by one may still
    differ as a whole; so their joint error is judged.
    """
    if sum(stop - start for start, stop in runs) > SHARE * case.before.count:
        return False
    width = case.a.columns

    def outside(values: "Array", rows: "Array") -> "Array":
        """Return the values of consecutive rows [rows, width] with 0 inside the damaged runs.

        `rows` are their numbers in the tensor.
        """
        flat = to_float64(values).reshape(-1).copy()
        first = int(rows[0]) * width
        for start, stop in runs:
            flat[max(0, start - first) : max(0, stop - first)] = 0.0
        return flat.reshape(len(rows), width)

    rest = case.distance(
        lambda rows: outside(case.a.take(rows), rows),
        lambda rows: outside(case.b.take(rows), rows),
        None,
    )
    slack = case.slack(moved=False)
    return rest.relative <= slack and not rest.leaves_factor(slack)


def _repairing_flips(case: DifferingPair, found: list[list[int]]) -> list[str]:
    """Return sentences on the flipped bits that repair the runs; [] unless all are repaired.

    `found` are [start, stop] of runs of wrong values.
    """
    if len(found) > SHOWN:
        return []
    flips = []
    for start, stop in found:
        for label, side, other in (("B", case.b, case.a), ("A", case.a, case.b)):
            bit = None
            if storage_noise(other.encoding) <= FINE:
                bit = flipped_bit_text(side, other, [start, stop - 1])
            if bit is not None:
                flips.append(f"{bit} of {label}")
                break
        else:
            return []
    return flips


def explain_zero_runs(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that both sides are equal up to rounding except for runs of zeros.

    Where a run ends inside a quantization block, the other values of the block are rounded
    otherwise: rows next to a run may differ.
    """
    slack = case.slack()
    if case.numbers is not None or case.a.shape != case.b.shape or not slack:
        return
    lost = np.zeros((2, case.a.rows), np.int64)
    square, theirs, away = (np.zeros(case.a.rows) for _ in range(3))
    # Count zeros of each side by row, and measure the rest of the row.
    for rows in case.windows(None):
        values = [to_float64(side.take(rows)) for side in (case.a, case.b)]
        holes = [_find_zero_runs(x, y) for x, y in (values, values[::-1])]
        lost[:, rows] = [hole.sum(1) for hole in holes]
        kept = ~(holes[0] | holes[1])
        x, y = (np.where(kept, value, 0.0) for value in values)
        square[rows], theirs[rows] = (x * x).sum(1), (y * y).sum(1)
        away[rows] = ((x - y) ** 2).sum(1)
    zeroed = np.flatnonzero(lost.any(0))
    if not len(zeroed):
        return
    # Rows with zeros and their neighbours are not measured.
    neighbours = np.clip(np.concatenate([zeroed - 1, zeroed, zeroed + 1]), 0, case.a.rows - 1)
    far = ~(away <= (STRAY * slack) ** 2 * square)
    far[np.unique(neighbours)] = False
    sure = np.setdiff1d(np.arange(case.a.rows), neighbours)
    total, other, apart = (float(sums[sure].sum()) for sums in (square, theirs, away))
    if far.any() or not total or not apart <= slack**2 * total:
        return
    rest = (apart / max(total, other)) ** 0.5
    others = Distance(rest, len(sure), len(sure), 0.0, (total**0.5, other**0.5), rest=rest)
    if others.leaves_factor(slack):
        return
    # Say which rows hold zeros, and whether they reach to the end.
    lines = []
    for label, counts in zip("AB", lost, strict=True):
        chosen = np.flatnonzero(counts)
        if len(chosen):
            name = numbered_text("row", int(chosen[0]), int(chosen[-1]) + 1)
            whole = (counts[chosen[1:]] == case.a.columns).all()
            tail = chosen[-1] == len(counts) - 1 and len(chosen) > 1 and whole
            end = ", to the end: the data was cut short" if tail else ""
            lines.append(f"{label} holds zeros in {int(counts.sum())} values, in {name}{end}")
    text = "zeros stand where values should; all others are within the rounding of the coarser one"
    proof = fitted_proof(int(lost.sum()))
    yield make_finding("bit_rot", (case.key,), (text, *lines), case.before.relative, 0.0, proof)


def _half_step(x: "Array") -> "Array":
    """Return, for each value, half the smallest nonzero magnitude in its block of BLOCK values.

    `x` is [rows, columns]; the result has its shape, 0 for a block of zeros. A value below that
    may be rounded to zero.
    """
    parts = []
    for start in range(0, x.shape[1], BLOCK):
        part = np.abs(x[:, start : start + BLOCK])
        least = np.min(part, axis=1, where=part > 0, initial=np.inf, keepdims=True)
        half = np.where(np.isfinite(least), least / 2, 0.0)
        parts.append(np.broadcast_to(half * (1 + SLIGHT), part.shape))
    return np.concatenate(parts, axis=1)


def _find_zero_runs(x: "Array", y: "Array") -> "Array":
    """Return the bool mask of runs of zeros in `x`, of GAP or a whole row, where `y` has values.

    Values of `y` that rounding to the encoding of `x` makes zero do not count: types of few codes
    have many.
    """
    y = np.where(np.abs(y) > _half_step(x), y, 0.0)
    zero = x == 0
    run = min(GAP, x.shape[1])
    cut = x.shape[1] // run * run
    found = np.zeros(x.shape, bool)
    blocks = [part.reshape(len(x), -1, run) for part in (zero[:, :cut], y[:, :cut] != 0)]
    whole = blocks[0].all(2) & (blocks[1].mean(2) > SHARE)
    found[:, :cut] = np.repeat(whole, run, axis=1)
    rest = found[:, cut - 1 : cut] & zero[:, cut:]
    found[:, cut:] = rest
    return found
