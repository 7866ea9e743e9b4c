"""Rounding to encodings of one to three bits (IQ types), for which there is no encoder here.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

A copy that was rounded so cannot be made again and compared. What can be said is that its values
follow the source's everywhere alike, no further away than the type's few bits take them. A copy of
a model that was changed by less than that looks the same, which the sentence says.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import accused_proof, make_finding
from aprfmt.codecs import CODECS
from aprfmt.measure.bounds import NMSE_SLACK
from aprfmt.measure.encoding_noise import storage_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

FINE = 0.05  # noise of the side that is the source
SPREAD = 2.0  # a block's error over the median block's; damage of one is further away
LIKE = 0.6  # least correlation of a block
BIAS = 0.15  # the one factor between both sides is this near to 1
_NONE = np.zeros(0)


def explain_coarse_rounding(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that one side is the other, quantized to its encoding, block by block.

    Every block's error must be of the size that the encoding's rounding has.
    """
    for source, copy, whose in ((case.a, case.b, "B"), (case.b, case.a, "A")):
        name = copy.encoding
        row = ENCODINGS.get(name)
        if row is None or row.ggml is None or row.block_size < 2 or name not in CODECS:
            continue
        # Only types that cannot be encoded here, from a finer source.
        if CODECS[name].has_encoder or storage_noise(source.encoding) > FINE:
            continue
        allowed = storage_noise(name) / NMSE_SLACK**0.5
        if case.a.columns % row.block_size or not case.before.relative <= allowed:
            continue
        found = _block_errors(case, source is case.b, row.block_size)
        if found is None:
            continue
        errors, like, factor = found
        # Errors must be alike in all blocks, without a common factor.
        middle = float(np.median(errors))
        if errors.max() > SPREAD * middle or like.min() < LIKE or abs(factor - 1) > BIAS:
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
) -> "tuple[Array, Array, float] | None":
    """Return (relative error of each block, its correlation, the least-squares factor), or None.

    The factor is that of all values. `size` is a block's number of values. `swapped`: B is the
    source. None where a block is zero on a side, or a value is not finite.
    """
    errors, like, xy, yy = [_NONE], [_NONE], 0.0, 0.0
    for rows in case.windows(None):
        a, b = (to_float64(side.take(rows)).reshape(-1, size) for side in (case.a, case.b))
        x, y = (b, a) if swapped else (a, b)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return None
        own, other, both = ((x * x).sum(1), (y * y).sum(1), (x * y).sum(1))
        if not own.all() or not other.all():
            return None
        errors.append(np.sqrt(((x - y) ** 2).sum(1) / own))
        like.append(both / np.sqrt(own * other))
        xy, yy = xy + float(both.sum()), yy + float(other.sum())
    return np.concatenate(errors), np.concatenate(like), xy / yy


HYPOTHESES = (
    PairHypothesis(
        ("quantisation",),
        explain_coarse_rounding,
        335,
        "a type that cannot be encoded here, at last",
        facts=("two encodings", "blocks"),
    ),
)
