"""Matrices replaced by one rank's flat part of them, as a partitioned optimizer stores them.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

FSDP keeps the parameters of a module as one vector, padded and cut into equal parts, one a rank. A
checkpoint saved without gathering has consecutive values of it (a *run*) under a matrix's name: of
the matrix alone, or of what lies before and after it in the vector, too.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "flat_shard", "tensor", "bug",
        "A matrix is stored as a run of its values, one rank's part of flat parameters: a "
        "partitioned run (FSDP) was saved without gathering.",
        "A vector stands where the other side has a matrix.",
        "The vector is a run of the other side's values in their order.",
    ),
)  # fmt: skip

STEP = 1 << 20  # values looked at together
TRIED = 16  # places at which the first value is found
LEAST = 64  # values that judge a place


def explain_flat_shard(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that one side has a vector of consecutive values of the other's matrix.

    Confirmed where the values are equal; nothing unless one side is a vector. A vector of all
    values of the matrix and no others has its axes joined: that is `stored_shape`.
    """
    for flat, matrix, label in ((case.b, case.a, "B"), (case.a, case.b, "A")):
        if len(flat.shape) != 1 or len(matrix.shape) < 2 or flat.size < LEAST:
            continue
        shape = (
            f"{label} has shape {list(flat.shape)} where the other side has {list(matrix.shape)}"
        )
        saved = "saved without gathering the ranks' parts (FSDP)"
        for place, start, count in _runs(flat, matrix):
            if not is_run(flat, matrix, place, start, count, case.slack()):
                continue
            what = (
                "all values" if count == matrix.size else f"values {start} to {start + count - 1}"
            )
            text = f"{label} holds a flat part of the matrix: {saved}"
            others = flat.size - count
            rest = f"; {others} more are of tensors next to it, or padding" if others else ""
            held = f"it is {what} of {matrix.size}, in their order{rest}"
            proof = prove_values(
                matrix_values(matrix, start, start + min(count, FEW)), count, 2, case.slack()
            )
            yield make_finding(
                "flat_shard", (case.key,), (f"{text}; {held}", shape), None, 0.0, proof
            )
            return
        text = f"{label} holds one run of values and no matrix, as where it was {saved}"
        yield make_finding(
            "flat_shard", (case.key,), (text, shape), None, None, None, confirmed=False
        )
        return


def matrix_values(matrix: RowReader, start: int, stop: int) -> "Array":
    """Return values [start, stop) of a tensor in row-major order."""
    rows = np.arange(start // matrix.columns, -(-stop // matrix.columns))
    found: Array = matrix.take(rows).reshape(-1)[start - rows[0] * matrix.columns :]
    return found[: stop - start]


def _runs(flat: RowReader, matrix: RowReader) -> Iterator[tuple[int, int, int]]:
    """Yield (first index in the vector, first in the matrix, length) of runs that may be equal.

    Either the vector begins inside the matrix or the matrix inside the vector.
    """
    for inside, outside, swapped in ((flat, matrix, False), (matrix, flat, True)):
        first = matrix_values(inside, 0, 1)[0]
        for at in _places_of(first, outside):
            start, place = (0, at) if swapped else (at, 0)
            count = min(flat.size - place, matrix.size - start)
            if count >= LEAST:
                yield place, start, count


def _places_of(value: float, side: RowReader) -> Iterator[int]:
    """Yield the first TRIED flat indices at which a tensor has exactly `value`."""
    seen = 0
    for start in range(0, side.size, STEP):
        values = matrix_values(side, start, min(side.size, start + STEP))
        for at in np.flatnonzero(values == value).tolist():
            yield start + at
            seen += 1
            if seen == TRIED:
                return


def is_run(
    flat: RowReader, matrix: RowReader, place: int, start: int, count: int, slack: float
) -> bool:
    """Return whether `count` values of the vector from `place` are the matrix's from `start`.

    `slack` is the relative distance of equal values.
    """
    for offset in range(0, count, STEP):
        size = min(STEP, count - offset)
        x = to_float64(matrix_values(flat, place + offset, place + offset + size))
        y = to_float64(matrix_values(matrix, start + offset, start + offset + size))
        few = slice(None, LEAST)
        for part in (few, slice(None)):
            norm = max(norms.exact_norm(x[part]), norms.exact_norm(y[part]))
            if not norms.exact_norm(x[part] - y[part]) <= slack * norm:
                return False
    return True


HYPOTHESES = (
    PairHypothesis(
        ("flat_shard",),
        explain_flat_shard,
        148,
        "a vector where a matrix is due, before an order of its rows",
        shapes=True,
    ),
)
