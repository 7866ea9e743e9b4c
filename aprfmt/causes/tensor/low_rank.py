"""Matrices of which one side has the largest singular values alone: a truncated decomposition.

What was left out is at right angles to what was kept, so that three norms, which the comparison
knows, say whether a matrix is worth a decomposition.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.derived_weights import FEW, NEARLY_ALL, POWERS, PROBES, SMALL
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Group, JointHypothesis, PairHypothesis
from aprfmt.causes.tensor.proof import FEW as FEW_VALUES
from aprfmt.causes.tensor.proof import make_finding, prove_values
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import storage_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE = "low_rank"
CAUSE_ROWS = (
    Cause(
        "low_rank",
        "tensor",
        "bug",
        "A matrix has the other side's largest singular values alone, or its part in a few "
        "directions: a truncated decomposition, joined again.",
        "One side has a low rank, and what it lacks of the other is at right angles to it.",
        "The other side, put into the directions that are left, is equal to it.",
    ),
)

LIMIT = 0.5  # of a matrix's smaller side that a rank has at most: more numbers are no saving
SKETCHES = (24, 256, 1024)  # ranks that are looked for, one after the other
FINE = 0.01  # rounding of the side of low rank up to which its rank shows
LEAST = 1e-5  # of the norm: what sums in float32 round off
RIGHT_ANGLE = 1e-2  # of the square of the norm, by which three norms may miss a right angle
SAME = 1.01  # times the least singular value kept that what was left out has at most


@dataclass(frozen=True)
class Truncation:
    """How a matrix was cut: the rank left, of how many, how it is said, free numbers, distance."""

    rank: int
    of: int
    what: str
    free: int
    after: float


def explain_low_rank(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that one side is the other's part in a few directions."""
    if case.numbers is not None or case.a.columns < 2 or case.a.size > SMALL:
        return
    tall = case.shape[-2] if len(case.shape) > 1 else 0
    full = case.before.norms
    apart = case.before.rest * max(full)
    for label, mine, other, less, more in (
        ("B", case.b, case.a, full[1], full[0]),
        ("A", case.a, case.b, full[0], full[1]),
    ):
        unit = storage_noise(mine.encoding)
        if not tall or unit > FINE or not 0 < less < more or case.before.nonfinite is not None:
            continue
        if abs(more**2 - less**2 - apart**2) > RIGHT_ANGLE * more**2:
            continue
        found = _truncations(mine, other, tall, unit)
        if not found:
            continue
        one = max(found, key=lambda cut: cut.rank)
        there = "A" if label == "B" else "B"
        text = f"{label} is {there} {one.what}: it has rank {one.rank} of {one.of}"
        if len(found) > 1:
            text += f", at most, in each of {len(found)} matrices"
        kept = f"{(less / more) ** 2:.3g} of the squares of {there}'s values are left in {label}"
        changed = case.before.changed
        sample = mine.take(np.arange(min(mine.rows, FEW_VALUES)))
        free = sum(cut.free for cut in found)
        proof = prove_values(sample, changed, min(free, changed), max(unit, LEAST))
        after = max(cut.after for cut in found)
        told = text, kept, "what was left out is not in the file"
        finding = make_finding(CAUSE, (case.key,), told, case.before.relative, after, proof)
        yield replace(finding, side=label)
        return


def _truncations(mine: RowReader, other: RowReader, tall: int, unit: float) -> list[Truncation]:
    """Return how each differing matrix of `mine` was cut from that of `other`; [] if one was not.

    `tall` is the number of rows of a matrix, `unit` the rounding of `mine`.
    """
    x, y = (np.asarray(side.whole, np.float32) for side in (other, mine))
    x, y = (values.reshape(-1, tall, values.shape[-1]) for values in (x, y))
    found = []
    for full, cut in zip(x, y, strict=True):
        if np.array_equal(full, cut):
            continue
        one = _truncation(full, cut, unit)
        if one is None:
            return []
        found.append(one)
    return found


def _truncation(full: "Array", cut: "Array", unit: float) -> Truncation | None:
    """Return how `cut` was made of `full`, both [rows, columns]; None if it is no such part.

    Rows or columns of zeros are a part of a matrix in another way, which is not said here.
    """
    size = norms.exact_norm(full)
    if not 0 < size < np.inf or any((full.any(axis) & ~cut.any(axis)).any() for axis in (0, 1)):
        return None
    allowed = max(2 * unit, LEAST)
    spaces = _spaces(cut, allowed)
    if spaces is None:
        return None
    left, values, right = spaces
    outputs, inputs = left @ (left.T @ full), (full @ right.T) @ right
    by_outputs, by_inputs = (_are_equal(made, cut, full, allowed) for made in (outputs, inputs))
    if not (by_outputs or by_inputs):
        return None
    rank, what = len(values), "outputs" if by_outputs else "inputs"
    what = f"in {rank} directions of its {what} alone"
    least = SAME * values[-1] + 2 * allowed * size
    if by_outputs and by_inputs and _largest_value(full - cut) <= least:
        what = f"with its {rank} largest singular values alone"
    after = norms.exact_norm((outputs if by_outputs else inputs) - cut) / size
    side = len(full) if by_outputs else full.shape[1]
    return Truncation(rank, min(full.shape), what, rank * (side - rank), after)


def _are_equal(made: "Array", cut: "Array", full: "Array", allowed: float) -> bool:
    """Return whether every row and every column is equal within `allowed` of what it was.

    A large row would hide what the others are.
    """
    return all(
        bool(
            (
                np.linalg.norm(made - cut, axis=axis)
                <= 2 * allowed * np.linalg.norm(full, axis=axis)
            ).all()
        )
        for axis in (0, 1)
    )


def _spaces(cut: "Array", allowed: float) -> "tuple[Array, Array, Array] | None":
    """Return (left [rows, rank], values [rank], right [rank, columns]) of a matrix of low rank.

    `allowed` is the share of its norm that rounding may add. None if its rank is not low.
    """
    limit = int(LIMIT * min(cut.shape))
    size = norms.exact_norm(cut)
    rng = np.random.default_rng(12)
    for tried in dict.fromkeys(min(one, limit) for one in SKETCHES):
        probes = rng.standard_normal((cut.shape[1], tried + PROBES)).astype(np.float32)
        basis, _ = np.linalg.qr(cut @ probes)
        inside = basis.T @ cut
        if norms.exact_norm(cut - basis @ inside) > allowed * size:
            continue
        left, values, right = np.linalg.svd(inside, full_matrices=False)
        tails = np.sqrt(np.cumsum(np.square(values[::-1], dtype=np.float64))[::-1])
        rank = int((tails > allowed * size).sum())
        if 0 < rank <= limit:
            return basis @ left[:, :rank], values[:rank], right[:rank]
        return None
    return None


def _largest_value(matrix: "Array") -> float:
    """Return the largest singular value of a matrix, by powers of its square; at most that."""
    vector = matrix[:, int(np.argmax(np.square(matrix).sum(0)))].astype(np.float64)
    found = 0.0
    for _ in range(POWERS):
        vector = vector / (norms.exact_norm(vector) or 1.0)
        along = vector @ matrix
        found = norms.exact_norm(along)
        vector = matrix @ along
    return found


def low_rank_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield one function that returns {tensor key: finding} of a model that was cut as a whole."""
    yield partial(_explain_compressed, rows)


def _explain_compressed(rows: Mapping[str, TensorDiff]) -> dict[str, Finding]:
    """Return {tensor key: finding} where most matrices were cut: a model made smaller; or {}."""
    matrices = [row for row in rows.values() if row.shape_b is not None and len(row.shape_b) > 1]
    cut = {
        row.key: row.explanation
        for row in matrices
        if row.explanation is not None and row.explanation.cause == CAUSE
    }
    if len(cut) < max(FEW, NEARLY_ALL * len(matrices)):
        return {}
    text = (
        f"{len(cut)} of {len(matrices)} matrices are cut to a low rank, each the other side's part "
        "in a few directions"
    )
    return {
        key: make_finding("derived", (key,), (text, *one.evidence), one.residual_before, None, None)
        for key, one in cut.items()
    }


HYPOTHESES = (
    PairHypothesis(
        ("low_rank",),
        explain_low_rank,
        305,
        "a part of the other side, before it is said that nothing relates the two",
    ),
    JointHypothesis(
        ("derived",),
        low_rank_groups,
        446,
        "a low rank in most matrices, before they are called damage of each",
        weak=("low_rank",),
    ),
)
