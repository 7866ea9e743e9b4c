"""Matrices, or the blocks of their heads, that were written transposed with the same shape.

A *guess* is a change of one tensor of a pair after which both should be equal.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Guess, Take
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array


UNRELATED = 1.0  # of the norm: zeros are no further from any values
PLACES = 1 << 17  # elements whose places are computed at a time


def samples_agree(x: "Array", y: "Array", slack: float) -> bool:
    """Return whether two samples are equal: to the bit for a slack of 0, else within 2 * `slack`.

    `slack` is a relative distance. False for one so wide that unrelated values are within it, as
    for ternary codes.
    """
    if slack == 0:
        return bool(np.array_equal(x, y, equal_nan=True))
    if 2 * slack >= UNRELATED:
        return False
    x, y = to_float64(x), to_float64(y)
    norm = max(norms.exact_norm(x), norms.exact_norm(y))
    return norms.exact_norm(x - y) <= 2 * slack * norm


def guess_transposed_inside(case: DifferingPair) -> Iterator[Guess]:
    """Yield the guess that values were written transposed with the same shape.

    Transposed is the whole matrix, or the block of each head.
    """
    a, b = case.a, case.b
    rows, columns = a.shape[-2:]
    size = rows * columns
    # Compare a few values before all of them.
    probe = np.linspace(0, size - 1, min(64, size)).astype(np.int64)
    here = _values_at_places(b, probe, columns)
    counts = [1] if case.numbers is None else []
    if case.role.startswith("attn_"):
        counts += [h for h in case.sizes("n_heads", "n_kv_heads") if h > 1]
    # Transposed as a whole, or block by block of each head.
    for heads in dict.fromkeys(counts):
        for cut, across in ((rows, False), (columns, True)):
            if cut % heads or (heads == 1 and (across or rows == columns)):
                continue
            what = "the matrix" if heads == 1 else f"the block of each of {heads} heads"
            ways = {"by columns, under A's shape": (rows, columns, heads, across)}
            if heads == 1:
                ways["as if they stood there by columns"] = (columns, rows, heads, across)
            for how, way in ways.items():
                there = _values_at_places(a, _transposed_places(probe, *way), columns)
                if samples_agree(there[None], here[None], case.slack()):
                    says = f"B has A's values of {what} {how}"
                    yield case.guess("transpose", (says,), "A", _take_transposed(a, *way))
                    return


def _take_transposed(side: RowReader, rows: int, columns: int, heads: int, across: bool) -> Take:
    """Return a function from row numbers to rows of matrices whose heads' blocks are transposed.

    A matrix is [rows, columns]. A block is the rows of one of `heads` heads, or (`across`) its
    columns. The indices of only about PLACES elements are in memory at once: indices of all
    requested rows take several times as much as their values.
    """
    tall, wide = side.shape[-2:]

    def take(numbers: "Array") -> "Array":
        """Return rows [n, wide] of a tensor whose matrices, or heads' blocks, are transposed back.

        `numbers` count the rows through all of the tensor's matrices.
        """
        matrix, row = np.divmod(np.asarray(numbers, np.int64)[:, None], tall)
        found: Array = np.empty((len(row), wide), side.whole.dtype)
        step = max(1, PLACES // wide)
        for start in range(0, len(row), step):
            part = slice(start, start + step)
            places = row[part] * wide + np.arange(wide)
            places = _transposed_places(places, rows, columns, heads, across)
            found[part] = side.whole[matrix[part] * tall + places // wide, places % wide]
        return found

    return take


def _values_at_places(side: RowReader, at: "Array", columns: int) -> "Array":
    """Return the values at flat (row-major) indices `at` of the first matrix."""
    lines, places = np.unique(at // columns, return_inverse=True)
    found: Array = side.take(lines)[places, at % columns]
    side.side.drop()
    return found


def _transposed_places(p: "Array", rows: int, columns: int, heads: int, across: bool) -> "Array":
    """Return where the values at flat indices `p` come from, if heads' blocks are transposed.

    The matrix is [rows, columns]. A block is the rows of one of `heads` heads, or (`across`) its
    columns. The result is flat indices.
    """
    if across:
        size = columns // heads
        source: Array = (p % rows) * columns + p // rows % heads * size + p // (rows * heads)
        return source
    size = rows // heads
    head, rest = p // (size * columns), p % (size * columns)
    found: Array = (head * size + rest % size) * columns + rest // size
    return found
