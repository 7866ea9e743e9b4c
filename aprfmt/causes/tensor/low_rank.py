"""Matrices of which one side has only the largest singular values: a truncated decomposition.

A *piece* is some rows of a matrix, read together. A and B are the two files that are compared; a
*side* is one of them, or its tensor.

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
from aprfmt.causes.tensor.derived_weights import FEW, NEARLY_ALL, POWERS, SMALL
from aprfmt.causes.tensor.differing_pair import WINDOW, DifferingPair
from aprfmt.causes.tensor.guess import Group, JointHypothesis, PairHypothesis
from aprfmt.causes.tensor.proof import FEW as FEW_VALUES
from aprfmt.causes.tensor.proof import make_finding, prove_values
from aprfmt.causes.tensor.row_space import row_basis, squares_inside, tail_norms
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
    """How a matrix was truncated: `rank` left of `of`, a sentence, free numbers, distance after."""

    rank: int
    of: int
    what: str
    free: int
    after: float


def explain_low_rank(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that one side is the other truncated to a low rank."""
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
    """Return how each differing matrix of `mine` was truncated from that of `other`.

    [] if one was not. `tall` is the number of rows of a matrix, `unit` the rounding of `mine`.
    """
    found = []
    for first in range(0, mine.rows, tall):
        pair = MatrixPair(other, mine, first, tall)
        if all(np.array_equal(full, cut) for _, full, cut in pair.pieces()):
            continue
        one = _truncation(pair, unit)
        if one is None:
            return []
        found.append(one)
    return found


@dataclass(frozen=True)
class MatrixPair:
    """A matrix (`full`) and its possible truncation (`cut`), read some rows at a time."""

    full: RowReader
    cut: RowReader
    first: int
    rows: int

    @property
    def columns(self) -> int:
        """The number of values in a row."""
        return self.cut.columns

    def pieces(self) -> "Iterator[tuple[slice, Array, Array]]":
        """Yield (row numbers as a slice, rows of `full`, rows of `cut`), float32, in order.

        A piece has at most WINDOW values, or one row.
        """
        step = max(1, WINDOW // max(1, self.columns))
        for start in range(0, self.rows, step):
            part = slice(start, min(self.rows, start + step))
            numbers = np.arange(self.first + part.start, self.first + part.stop)
            full, cut = (np.asarray(x.take(numbers), np.float32) for x in (self.full, self.cut))
            yield part, full, cut
            self.full.side.drop()
            self.cut.side.drop()

    def cut_pieces(self) -> "Iterator[Array]":
        """Yield the rows of `cut` alone, in the same pieces, float32."""
        for _, _, cut in self.pieces():
            yield cut


def _truncation(pair: MatrixPair, unit: float) -> Truncation | None:
    """Return how `cut` was truncated from `full`; None if it is no such truncation.

    A matrix that lost whole rows or columns is not looked for here.
    """
    sizes = _sizes(pair)
    if sizes is None:
        return None
    size, cut_size = sizes
    allowed = max(2 * unit, LEAST)
    spaces = _spaces(pair, cut_size, allowed)
    if spaces is None:
        return None
    values, right = spaces
    distances = _project(pair, values, right)
    by_outputs, by_inputs = (one.within(allowed) for one in distances)
    if not (by_outputs or by_inputs):
        return None
    rank, what = len(values), "outputs" if by_outputs else "inputs"
    what = f"in {rank} directions of its {what} alone"
    least = SAME * values[-1] + 2 * allowed * size
    if by_outputs and by_inputs and _largest_value(pair) <= least:
        what = f"with its {rank} largest singular values alone"
    after = distances[0 if by_outputs else 1].size / size
    side = pair.rows if by_outputs else pair.columns
    return Truncation(rank, min(pair.rows, pair.columns), what, rank * (side - rank), after)


def _sizes(pair: MatrixPair) -> tuple[float, float] | None:
    """Return the Frobenius norms of (`full`, `cut`).

    None where one is not a finite number above zero, or where `cut` has rows or columns of zeros
    that `full` does not have.
    """
    squares = [0.0, 0.0]
    held = np.zeros((2, pair.columns), bool)
    for _, full, cut in pair.pieces():
        if (full.any(1) & ~cut.any(1)).any():
            return None
        for at, values in enumerate((full, cut)):
            squares[at] += norms.exact_norm(values) ** 2
            held[at] |= values.any(0)
    size, cut_size = np.sqrt(squares)
    if not 0 < size < np.inf or (held[0] & ~held[1]).any():
        return None
    return float(size), float(cut_size)


class RemainingDistance:
    """The distance of a matrix from its prediction, added up some rows at a time."""

    def __init__(self, columns: int) -> None:
        """Start without rows, for a matrix of so many columns."""
        self.apart, self.whole = np.zeros(columns), np.zeros(columns)  # squares by column
        self.rows = 0.0  # the largest distance of a row, as a share of its norm in the full matrix

    def add(self, made: "Array", cut: "Array", full: "Array") -> None:
        """Add rows [n, columns]: `made` as predicted, `cut` as stored, `full` for the scale.

        The scale of a row or column is its norm in the full matrix.
        """
        apart = np.square(made - cut, dtype=np.float64)
        whole = np.square(full, dtype=np.float64)
        self.apart += apart.sum(0)
        self.whole += whole.sum(0)
        by_row = _root_ratios(apart.sum(1), whole.sum(1))
        self.rows = max(self.rows, float(by_row.max(initial=0.0)))

    def within(self, allowed: float) -> bool:
        """Return whether every row and every column is within 2 * `allowed` of its prediction.

        The distance is relative to the row or column of the full matrix, since a large row would
        hide the others.
        """
        columns = float(_root_ratios(self.apart, self.whole).max(initial=0.0))
        return self.rows <= 2 * allowed and columns <= 2 * allowed

    @property
    def size(self) -> float:
        """The Frobenius norm of stored minus predicted rows, of all rows added so far."""
        return float(np.sqrt(self.apart.sum()))


def _root_ratios(apart: "Array", whole: "Array") -> "Array":
    """Return sqrt(apart / whole) of two arrays of squares, element by element.

    0 where `apart` is 0, infinite where only `whole` is, and for NaN.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(apart == 0, 0.0, np.sqrt(apart / whole))
    return np.where(np.isnan(found), np.inf, found)


def _project(
    pair: MatrixPair, values: "Array", right: "Array"
) -> tuple[RemainingDistance, RemainingDistance]:
    """Return (distance by the directions of outputs, distance by the directions of inputs).

    Each is how far `cut` is from `full` projected onto these directions of `cut`. `values` are
    the singular values of `cut` [rank], `right` its directions of inputs [rank, columns].
    """
    along = (right.T / values).astype(np.float32)  # the part times this: its directions of outputs
    kept = np.zeros(right.shape)
    for _, full, cut in pair.pieces():
        kept += (cut @ along).T @ full
    kept = kept.astype(np.float32)
    found = RemainingDistance(pair.columns), RemainingDistance(pair.columns)
    for _, full, cut in pair.pieces():
        found[0].add((cut @ along) @ kept, cut, full)
        found[1].add((full @ right.T) @ right, cut, full)
    return found


def _spaces(pair: MatrixPair, size: float, allowed: float) -> "tuple[Array, Array] | None":
    """Return (singular values [rank], directions of inputs [rank, columns]) of `cut`, if low-rank.

    `size` is its norm, `allowed` the fraction of it that rounding may add. None if its rank is
    not low.
    """
    limit = int(LIMIT * min(pair.rows, pair.columns))
    for tried in dict.fromkeys(min(one, limit) for one in SKETCHES):
        basis = row_basis(pair.cut_pieces, pair.columns, tried)
        inside = squares_inside(pair.cut_pieces, basis, allowed * size)
        if inside is None:
            continue
        squares, vectors = np.linalg.eigh(inside[0])
        squares, vectors = np.maximum(squares[::-1], 0.0), vectors[:, ::-1]
        rank = int((tail_norms(squares) > allowed * size).sum())
        if 0 < rank <= limit:
            right = (basis @ vectors[:, :rank]).T
            return np.sqrt(squares[:rank]), right.astype(np.float32)
        return None
    return None


def _largest_value(pair: MatrixPair) -> float:
    """Return the largest singular value of `full` minus `cut`, or slightly less.

    It is found by power iteration, of POWERS steps, which never gives more.
    """
    squares = np.zeros(pair.columns)
    for _, full, cut in pair.pieces():
        squares += np.square(full - cut, dtype=np.float64).sum(0)
    along = np.zeros(pair.columns)
    along[int(np.argmax(squares))] = 1.0
    found = 0.0
    for _ in range(POWERS):
        size, onward = 0.0, np.zeros(pair.columns)
        for _, full, cut in pair.pieces():
            lost = (full - cut).astype(np.float64)
            vector = lost @ along
            size += float(vector @ vector)
            onward += vector @ lost
        length = norms.exact_norm(onward)
        found = length / (size**0.5 or 1.0)
        along = onward / (length or 1.0)
    return found


def low_rank_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield one function that returns {tensor key: finding} of a model truncated as a whole."""
    yield partial(_explain_compressed, rows)


def _explain_compressed(rows: Mapping[str, TensorDiff]) -> dict[str, Finding]:
    """Return {tensor key: finding} if most matrices were truncated, to shrink the model; or {}."""
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
