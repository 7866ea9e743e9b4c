"""Values that are a function of the other side's: reciprocals, logarithms, a constant offset.

A and B are the two files that are compared; a *side* is one of them, or its tensor. A *guess* is a
change of one tensor of a pair after which both should be equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Guess, PairHypothesis, Take
from aprfmt.causes.tensor.rearrangements import take_rows_from
from aprfmt.causes.tensor.token_tables import is_longer_table
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "function_of", "tensor", "bug",
        "Values are a function of the other side's: reciprocals, squares, absolute values, "
        "logarithms, a constant taken away, the largest cut off.",
        "One function of one variable relates all values.",
        "Applying the function makes the tensors equal.",
    ),
)  # fmt: skip

PLAIN = 8.0  # the distance as stored must be so many times the rounding
ONE = 0.05  # an offset so near 1 is a norm's (arithmetic.py)
LEAST = 4  # values below which a function proves nothing


@dataclass(frozen=True, slots=True)
class ValueFunction:
    """One function: the name of its values, and the function (float64 to float64)."""

    says: str
    of: Take


def _softplus(x: "Array") -> "Array":
    """Return log(1 + exp(x))."""
    found: Array = np.logaddexp(0.0, x)
    return found


def _value_functions() -> tuple[ValueFunction, ...]:
    """Return the functions that are tried, simple ones first."""
    return (
        ValueFunction("the reciprocals of", lambda x: 1.0 / x),
        ValueFunction("the absolute values of", np.abs),
        ValueFunction("the squares of", np.square),
        ValueFunction("the exponentials of", np.exp),
        ValueFunction("the negated exponentials of", lambda x: -np.exp(x)),
        ValueFunction("the negated exponentials, taken twice, of", lambda x: -np.exp(-np.exp(x))),
        ValueFunction("softplus of", _softplus),
        ValueFunction("the sigmoid of", lambda x: 1.0 / (1.0 + np.exp(-x))),
        ValueFunction("the hyperbolic tangent of", np.tanh),
        ValueFunction("1 minus", lambda x: 1.0 - x),
    )


def guess_value_function(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses that each value of one side is a function of the other's value."""
    a, b = case.a, case.b
    x, y = to_float64(case.sample_a), to_float64(case.sample_b)
    if a.encoding not in UNIT or b.encoding not in UNIT or x.size < LEAST:
        return
    slack = 4 * case.slack(moved=False) + 1e-6
    if not case.before.relative > PLAIN * slack or not (
        np.isfinite(x).all() and np.isfinite(y).all()
    ):
        return
    for fine, coarse, one, other in ((x, y, "B", "A"), (y, x, "A", "B")):
        for function in _value_functions():
            if not _every_value_agrees(function.of(fine), coarse, slack):
                continue
            made = _take_applied(a if other == "A" else b, function.of)
            says = f"{one}'s values are {function.says} {other}'s"
            yield case.guess("function_of", (says,), other, made, slack, free=1)
    yield from _guess_constant_offset(case, slack)


def _take_applied(source: RowReader, function: Take) -> Take:
    """Return a function from row numbers to function(rows of `source`), in float64."""
    return lambda rows: function(to_float64(source.take(rows)))


def _every_value_agrees(made: "Array", wanted: "Array", slack: float) -> bool:
    """Return whether every value is within 4 * `slack` of the wanted one, relative.

    Relative to the value or to the root mean square, whichever is larger. False if `made` has a
    value that is not finite.
    """
    if not np.isfinite(made).all():
        return False
    norm = max(norms.exact_norm(made), norms.exact_norm(wanted))
    away = np.abs(made - wanted)
    usual = norm / max(1, made.size) ** 0.5
    return bool((away <= 4 * slack * np.maximum(np.abs(wanted), usual)).all())


def _guess_constant_offset(case: DifferingPair, slack: float) -> Iterator[Guess]:
    """Yield the guess that B is A plus one number, other than 1 or -1 (another cause)."""
    x, y = to_float64(case.sample_a), to_float64(case.sample_b)
    apart = y - x
    usual = float(np.sqrt(np.mean(np.maximum(x * x, y * y))))
    value = float(np.median(apart))
    if abs(value) <= PLAIN * slack * usual or float(np.ptp(x)) <= PLAIN * slack * usual:
        return
    if float(np.abs(apart - value).max()) > 4 * slack * usual or abs(abs(value) - 1) < ONE:
        return
    told = f"plus {value:.6g}" if value > 0 else f"minus {-value:.6g}"
    moved = _take_applied(case.a, lambda values: values + value)
    yield case.guess("function_of", (f"B's values are A's {told}",), "A", moved, slack, free=1)


def guess_clipped(case: DifferingPair) -> Iterator[Guess]:
    """Yield the guess that one side's values are the other's, clipped at the ends of a range."""
    if case.numbers is not None or case.a.shape != case.b.shape or case.a.columns < 2:
        return
    if case.a.encoding not in UNIT or case.b.encoding not in UNIT:
        return
    first, second = to_float64(case.sample_a), to_float64(case.sample_b)
    for short, other, label, away, x, y in (
        (case.b, case.a, "B", "A", first, second),
        (case.a, case.b, "A", "B", second, first),
    ):
        moved = y[x != y]
        if case.before.nonfinite is None and ((moved > y.min()) & (moved < y.max())).any():
            continue  # a value inside the range differs
        low, high, ends = np.inf, -np.inf, 0
        for rows in case.windows(None):
            values = to_float64(short.take(rows))
            if not np.isfinite(values).all():
                return
            low, high = min(low, float(values.min())), max(high, float(values.max()))
        if not np.array_equal(np.clip(x, low, high), y) or low >= high:
            continue
        for rows in case.windows(None):
            values = to_float64(short.take(rows))
            ends += int(((values == low) | (values == high)).sum())
        if ends < LEAST:
            continue
        says = f"{label}'s values are {away}'s, and the largest are cut off"
        where = f"at {low:.4g} and {high:.4g}: {ends} values stand there"
        made = _take_applied(other, partial(np.clip, a_min=low, a_max=high))
        yield case.guess("function_of", (says, where), away, made, free=2)
        return


def guess_prefix(case: DifferingPair) -> Iterator[Guess]:
    """Yield the guess that one vector is some consecutive values of the other (shapes differ)."""
    a, b = case.a, case.b
    if a.columns != 1 or b.columns != 1 or a.rows == b.rows or len(a.shape) != len(b.shape):
        return
    small, other, large, label = (a, "A", b, "B") if a.rows < b.rows else (b, "B", a, "A")
    if small.rows < LEAST or large.rows > 1 << 22:
        return
    part = to_float64(small.whole).reshape(-1)
    every = to_float64(large.whole).reshape(-1)
    limit = 2 * case.slack() * np.abs(part[0])
    for at in np.flatnonzero(
        np.abs(every[: large.rows - small.rows + 1] - part[0]) <= limit
    ).tolist():
        if at == 0 and is_longer_table(case.context, case.key, a, b):
            continue
        what = "the first" if at == 0 else f"values {at} to {at + small.rows - 1}"
        count = f" {small.rows}" if at == 0 else ""
        says = f"{other}'s values are {what}{count} of {label}'s {large.rows}"
        yield case.guess(
            "row_offset", (says,), label, take_rows_from(large, at), rows=np.arange(small.rows)
        )
        return


HYPOTHESES = (
    PairHypothesis(
        ("function_of",),
        guess_clipped,
        175,
        "bits of all values between two ends, before a function of all",
    ),
    PairHypothesis(
        ("function_of",),
        guess_value_function,
        180,
        "any function of one value fits more than a factor",
    ),
    PairHypothesis(
        ("row_offset",), guess_prefix, 340, "other shapes, rows that begin alike", shapes=True
    ),
)
