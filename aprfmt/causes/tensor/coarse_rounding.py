"""Rounding to encodings of one to three bits (IQ types), for which there is no encoder here.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

A copy that was rounded so cannot be made again and compared. What can be said is that its values
follow the source's everywhere alike, no further away than the type's few bits take them. A copy of
a model that was changed by less than that looks the same, which the sentence says.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import accused_proof, make_finding
from aprfmt.codecs import CODECS
from aprfmt.measure.encoding_noise import storage_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

FINE = 0.05  # noise of the side that is the source
SPREAD = 2.5  # a block's error over the median block's: 2.1 of heavy tails, damage is further away
DAMAGED = 4.0  # such a share from which a block is damaged, where few are
LIKE = 0.6  # least correlation of a block
RUN = 32  # values that share a scale in these types, or two scales
FURTHER = 1.4  # times the sum of squared errors that zeros would make; 1.07 of heavy tails
LARGE = 0.5  # of the mean sum of squares of a block's runs: smaller ones are below their scale
WORSE = 6.0  # times the squared error of the median block: 5 of heavy tails
APART = 2.0  # times the squared error of the next run
FEW = 64  # runs beyond which a copy is another one
BIAS = 0.15  # the one factor between both sides is no further above 1 than this
# ... and no further below what errors that have nothing to do with the values make of it, which
# make the copy larger than its source.
BELOW = 0.05
_NONE = np.zeros(0)


def explain_coarse_rounding(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that one side is the other, quantized to its encoding, block by block.

    Every block's error must be of the size that the encoding's rounding has. Where a few runs or
    blocks are far further off than all others, they are named instead.
    """
    for source, copy, whose in ((case.a, case.b, "B"), (case.b, case.a, "A")):
        name = copy.encoding
        row = ENCODINGS.get(name)
        if row is None or row.ggml is None or row.block_size < 2 or name not in CODECS:
            continue
        # Only types that cannot be encoded here, from a finer source.
        if CODECS[name].has_encoder or storage_noise(source.encoding) > FINE:
            continue
        allowed = storage_noise(name)
        if case.a.columns % row.block_size or not case.before.relative <= allowed:
            continue
        found = _block_errors(case, source is case.b, row.block_size)
        if found is None:
            continue
        errors, like, factor, away, worse = found
        middle = float(np.median(errors))
        worse += (np.flatnonzero(errors > DAMAGED * middle) * row.block_size).tolist()
        if 0 < len(worse) <= FEW and 2 * len(worse) < len(errors):
            at, column = divmod(min(worse), case.a.columns)
            says = "a few runs are far worse than all others: damage or an edit, no rounding"
            many = f"{len(worse)} runs of values in {name}, the first at [{at}, {column}]"
            before = case.before.relative
            yield make_finding("bit_rot", (case.key,), (says, many), before, None, None)
            return
        # Errors must be alike in all blocks, without a common factor.
        least = 1 / (1 + away) - BELOW
        if errors.max() > SPREAD * middle or like.min() < LIKE:
            continue
        if not least <= factor <= 1 + BIAS:
            continue
        yield make_finding(
            "quantisation",
            (case.key,),
            (
                f"{whose}'s values are the other side's within what {name} rounds off",
                f"relative distance {case.before.relative:.3g}, of blocks {errors.min():.3g} to "
                f"{errors.max():.3g}; {name} is not encoded here: a change as small would not show",
            ),
            case.before.relative,
            0.0,
            accused_proof(case.before.changed),
        )


def _block_errors(
    case: DifferingPair, swapped: bool, size: int
) -> "tuple[Array, Array, float, float, list[int]] | None":
    """Return (relative error of each block, its correlation, factor, error, runs far off), or None.

    The least-squares factor is that of all values, and so is the sum of squared errors, as a share
    of the source's sum of squares. Runs far off (`_far_runs`) are the numbers of
    their first values. `size` is a block's number of values. `swapped`: B is the source. None where
    a block is zero on a side, or a value is not finite.
    """
    runs_off: list[tuple[float, int]] = []
    start = 0
    errors, like, xx, xy, yy, ee = [_NONE], [_NONE], 0.0, 0.0, 0.0, 0.0
    for rows in case.windows(None):
        a, b = (to_float64(side.take(rows)).reshape(-1, size) for side in (case.a, case.b))
        x, y = (b, a) if swapped else (a, b)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return None
        squares, off = x * x, (x - y) ** 2
        own, other, both, away = (part.sum(1) for part in (squares, y * y, x * y, off))
        if not own.all() or not other.all():
            return None
        errors.append(np.sqrt(away / own))
        xx, ee = xx + float(own.sum()), ee + float(off.sum())
        like.append(both / np.sqrt(own * other))
        xy, yy = xy + float(both.sum()), yy + float(other.sum())
        runs, far = (part.reshape(len(x), -1, RUN).sum(-1) for part in (squares, off))
        large = runs >= LARGE * runs.mean(axis=1, keepdims=True)
        shares = np.where(large, far / runs, 0.0).reshape(-1)
        last = np.argpartition(shares, -min(FEW + 1, shares.size))[-FEW - 1 :]
        runs_off += [(float(shares[at]), start + int(at) * RUN) for at in last]
        runs_off = sorted(runs_off, reverse=True)[: FEW + 1]
        start += x.size
    every = np.concatenate(errors)
    worse = _far_runs(runs_off, float(np.median(every)) ** 2)
    return every, np.concatenate(like), xy / yy, ee / xx, worse


def _far_runs(shares: list[tuple[float, int]], usual: float) -> list[int]:
    """Return the first values of the runs that are far off; [] where there are none, or many.

    `shares` are (squared error over the squared values, first value) of the FEW + 1 runs that are
    furthest off, the worst first; `usual` is such a share of the median block. A run is far off
    where zeros would be nearer, or where nothing lies between it and runs half as far off.
    """
    further = sum(share > FURTHER for share, _ in shares)
    if further > FEW:
        return []
    gaps = (
        at + 1
        for at, ((share, _), (after, _)) in enumerate(pairwise(shares))
        if share > WORSE * usual and share >= APART * after
    )
    return [first for _, first in shares[: max(further, max(gaps, default=0))]]


HYPOTHESES = (
    PairHypothesis(
        ("quantisation",),
        explain_coarse_rounding,
        335,
        "a type that cannot be encoded here, at last",
        facts=("two encodings", "blocks"),
    ),
)
