"""Matrices that were pruned and then quantized; the pruning is the cause that is named.

Every value of a pruned matrix that is not zero is the other side's, so that a matrix whose small
values are zeros is known. A quantization after it changes the others too, and makes zeros of its
own; but with B's zeros put into A, B is A within what its encoding rounds off.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.tensor.context import PairContext, find_in_pairs
from aprfmt.causes.tensor.derived_weights import FEW, NEARLY_ALL, SMALL, SMALLER
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import make_finding
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import UNIT, pair_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE = "derived"
WEAK = ("bit_rot", "stale_tensor", "quantisation")
LEAST = 0.2  # share of zeros from which a matrix was pruned: an encoding of few bits makes some
GONE = 0.5  # of the distance at most is left with the zeros put into A


@dataclass(frozen=True)
class PrunedCopy:
    """A pruned and quantized matrix: its fraction of zeros, B's encoding, the distances."""

    key: str
    zeros: float
    encoding: str
    before: float
    after: float


def pruned_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield one function that explains all matrices that were pruned and then quantized.

    Called later, it returns {tensor key: finding}.
    """
    yield partial(_explain_pruned, context, pairs, rows)


def _explain_pruned(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} where most matrices are pruned and quantized; or {}."""
    matrices = [row for row in rows.values() if row.shape_b is not None and len(row.shape_b) > 1]
    open_ = (row.key for row in matrices if row.is_unexplained(WEAK))
    made = [found for _, found in find_in_pairs(context, pairs, open_, (CAUSE,), _pruned_copy)]
    if len(made) < max(FEW, NEARLY_ALL * len(matrices)):
        return {}
    shares = sorted(one.zeros for one in made)
    names = ", ".join(sorted({one.encoding for one in made}))
    text = (
        f"{len(made)} of {len(matrices)} matrices were pruned, {100 * shares[0]:.3g} to "
        f"{100 * shares[-1]:.3g} % of the values are zero, small ones, and then quantized: all "
        f"others are within what {names} rounds off"
    )
    return {
        one.key: make_finding(
            CAUSE,
            (one.key,),
            (text, f"{one.before:.3g} of the norm, {one.after:.3g} with B's zeros put into A"),
            one.before,
            None,
            None,
        )
        for one in made
    }


def _pruned_copy(pair: TensorPair) -> PrunedCopy | None:
    """Return how a matrix of B was pruned and quantized; None if it was not."""
    if pair.a is None or pair.b is None or pair.a.shape != pair.b.shape:
        return None
    if pair.b.encoding in UNIT or np.prod(pair.b.shape) > SMALL:
        return None
    x, y = (np.asarray(RowReader(side).whole, np.float32) for side in (pair.a, pair.b))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    gone = (y == 0) & (x != 0)
    share = float(gone.mean())
    if share < LEAST or not _are_small(x, gone):
        return None
    norm = norms.exact_norm(x) or 1.0
    before = norms.exact_norm(y - x) / norm
    after = norms.exact_norm(y - np.where(gone, np.float32(0), x)) / norm
    if after > min(GONE * before, pair_noise(pair.a.encoding, pair.b.encoding, moved=False)):
        return None
    return PrunedCopy(pair.key, share, pair.b.encoding, before, after)


def _are_small(x: "Array", gone: "Array") -> bool:
    """Return whether the values of `x` marked in `gone` are small next to the others."""
    left = np.abs(x[~gone])
    return bool(left.any() and np.abs(x[gone]).mean() <= SMALLER * left.mean())


HYPOTHESES = (
    JointHypothesis(
        ("derived",),
        pruned_groups,
        445,
        "zeros in most matrices, before they are called damage of each",
        weak=WEAK,
    ),
)
