"""One vector added to every row of a matrix, or one number to every value of a row.

A *guess* is a change of one tensor of a pair after which both should be equal.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.arithmetic import LOOSE, NARROW
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.differing_pair import DifferingPair, row_distances
from aprfmt.causes.tensor.guess import Guess, PairHypothesis, Take
from aprfmt.codecs.base import Array
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

CAUSE_ROWS = (
    Cause(
        "added_vector",
        "tensor",
        "bug",
        "The same vector was added to every row of a matrix, or to every column, or taken away: "
        "another table's row or a bias added once too often, or a mean.",
        "The difference is the same in every row, or in every column.",
        "Adding it gives the other side; where it is a row, a bias or a mean of the model, its "
        "name is said.",
    ),
)

LEAST = 4  # rows that judge a vector
MOVED = 4.0  # times the rounding that rows are moved at least
FIRST_ROWS = 1024  # rows of another table that are compared with a vector


def guess_added_vector(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses that B is A with one vector added to all differing rows, or to all columns."""
    slack = 2 * case.slack(moved=False)
    if slack > LOOSE or case.a.columns < NARROW:
        return
    x, y = to_float64(case.sample_a), to_float64(case.sample_b)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return
    moved = row_distances(x, y) > slack
    for chosen in (np.ones_like(moved), moved)[: 1 if moved.all() else 2]:
        guess = _guess_of_rows(case, x[chosen], y[chosen], slack, bool(chosen.all()))
        if guess is not None:
            yield guess
            return


def _guess_of_rows(
    case: DifferingPair, x: Array, y: Array, slack: float, every: bool
) -> Guess | None:
    """Return the guess that rows `y` of B are rows `x` of A plus a vector; None if they are not.

    `every`: the guess is about all rows, otherwise about those that differ. `slack` is the
    relative distance of equal rows.
    """
    delta, usual = y - x, norms.exact_norm(x) / max(1, x.size) ** 0.5
    if len(x) < LEAST or norms.exact_norm(delta) <= MOVED * slack * norms.exact_norm(x):
        return None
    if np.ptp(delta) <= MOVED * slack * usual:
        return None  # one number for all of the matrix: a function of each value
    rows = None if every else case.changed_rows
    # Found on every second row or column, and judged on the others too.
    row, column = delta[::2].mean(0), delta[:, ::2].mean(1)
    made: Take
    if _are_equal(x + row, y, slack):
        vector, name = _named_row(case, row, slack)
        what = name or "plus one vector, the same for all"
        made, free = _take_plus_vector(case.a, vector), 0 if name else case.a.columns
    elif _are_equal(_without_row_means(x), y, slack):
        vector, what = column, "minus the mean of its values"
        made, free = (lambda index: _without_row_means(to_float64(case.a.take(index)))), 0
    elif _are_equal(x + column[:, None], y, slack):
        vector, what = column, "plus one number of its own"
        made, free = partial(_plus_numbers, case), case.a.rows if rows is None else len(rows)
    else:
        return None
    text = f"B's rows are A's, each {what}"
    if rows is not None:
        text += f": {len(rows)} of {case.a.rows} rows, from {case.row_name(int(rows[0]))} on"
    return case.guess(
        "added_vector", (text, _size_text(vector, x)), "A", made, slack, rows=rows, free=free
    )


def _plus_numbers(case: DifferingPair, rows: Array) -> Array:
    """Return rows of A, each plus one number: its mean distance from B's row.

    The number is measured in every second column.
    """
    mine, other = to_float64(case.a.take(rows)), to_float64(case.b.take(rows))
    found: Array = mine + (other - mine)[:, ::2].mean(1, keepdims=True)
    return found


def _are_equal(made: Array, wanted: Array, slack: float) -> bool:
    """Return whether every row of `made` is within the relative distance `slack` of `wanted`."""
    return bool((row_distances(made, wanted) <= slack).all())


def _without_row_means(values: Array) -> Array:
    """Return rows without their mean."""
    found: Array = values - values.mean(1, keepdims=True)
    return found


def _take_plus_vector(side: RowReader, vector: Array) -> Take:
    """Return a function from row numbers to these rows plus a vector [columns]."""
    return lambda rows: to_float64(side.take(rows)) + vector


def _size_text(vector: Array, rows: Array) -> str:
    """Return the root mean square of a vector and of the values it was added to, as text."""
    sizes = (norms.exact_norm(one) / max(1, one.size) ** 0.5 for one in (vector, rows))
    return "root mean square {:.3g}, that of A's values {:.3g}".format(*sizes)


def _named_row(case: DifferingPair, row: Array, slack: float) -> tuple[Array, str]:
    """Return (vector, what it is in words) for `row` [columns], which was added to every row.

    The vector is minus the mean of A's rows, a vector of the model, or a row of a table of it, if
    one of these is `row` up to rounding. Else it is `row` and the words are "".
    """
    mean: Array = np.zeros_like(row)
    for index in case.windows(None):
        mean += to_float64(case.a.take(index)).sum(0) / case.a.rows
    # The rounding of many rows is in the measured vector, that of one in a stored one.
    limit = 2 * slack * max(norms.exact_norm(row), norms.exact_norm(mean))
    if norms.exact_norm(row + mean) <= limit:
        return -mean, "minus the mean of all of them"
    for key, vectors in _vectors_of_model(case.context, row.size):
        for sign, word in ((1, "plus"), (-1, "minus")):
            away = np.linalg.norm(vectors - sign * row, axis=1)
            at = int(np.argmin(away))
            if away[at] <= 2 * slack * norms.exact_norm(row):
                which = f"row {at} of {key}" if len(vectors) > 1 else key
                return sign * vectors[at], f"{word} {which}"
    return row, ""


def _vectors_of_model(context: PairContext, size: int) -> Iterator[tuple[str, Array]]:
    """Yield (key, float64 [n, size]) of A's vectors of this size, and of its tables' first rows."""
    for key in context.sides("a"):
        reader = context.reader("a", key)
        if reader is None:
            continue
        if reader.columns == 1 and reader.rows == size:
            yield key, to_float64(reader.take(np.arange(size))).reshape(1, size)
        elif reader.columns == size and split_key(key)[0] is None:
            yield key, to_float64(reader.take(np.arange(min(reader.rows, FIRST_ROWS))))
        reader.drop()


HYPOTHESES = (
    PairHypothesis(
        ("added_vector",),
        guess_added_vector,
        115,
        "one vector for all rows, before a bound or a function of each value",
        part=True,
    ),
)
