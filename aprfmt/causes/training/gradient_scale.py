"""Gradients that are zero, of the other sign, or a constant times the right ones."""

from collections.abc import Iterator, Mapping

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.gradient_case import (
    SIDES,
    SURE,
    GradientCase,
    GradientGuess,
    GradientHypothesis,
)
from aprfmt.causes.training.step_size import simple_value

CAUSE_ROWS = (
    Cause(
        "gradient_zero",
        "gradient",
        "bug",
        "The gradient is zero in every element, and it should not be: an operation has no "
        "backward, or the parameter is cut off from the loss.",
        "No element is other than zero.",
        "The gradient computed here is not zero.",
    ),
    Cause(
        "gradient_sign",
        "gradient",
        "bug",
        "The gradient has the other sign.",
        "It is the computed one times minus one.",
        "The computed gradient with the other sign gives every element.",
    ),
    Cause(
        "gradient_factor",
        "gradient",
        "bug",
        "The gradient is a constant times the right one: accumulation steps or ranks that are "
        "divided by once too often or not at all, a loss scale, a sum for a mean, a scale of an "
        "adapter.",
        "One factor holds for every element of the parameter.",
        "The computed gradient times the factor gives every element that was not used to "
        "measure it.",
    ),
)


def guess_zero(case: GradientCase) -> Iterator[GradientGuess]:
    """Yield the guess that the gradient is zero, where the computed one is not."""
    if not case.given.any() and case.computed.any():
        says = "the gradient is zero in every element; computed here it is not"
        yield GradientGuess("gradient_zero", says, lambda part: np.zeros_like(part.computed))


def guess_sign(case: GradientCase) -> Iterator[GradientGuess]:
    """Yield the guess that the given gradient is the computed one with the other sign."""
    yield GradientGuess(
        "gradient_sign", "the gradient has the other sign", lambda part: -part.computed
    )


def guess_factor(case: GradientCase) -> Iterator[GradientGuess]:
    """Yield the guess that the given gradient is the computed one times a measured factor.

    Its text says what the factor equals (`named_factor`). Nothing for a factor that is not positive
    or cannot be measured.
    """
    factor, off = case.factor
    if not np.isfinite(off) or off > 0.02 * abs(factor) or factor <= 0:
        return
    side = SIDES[case.coarse] if abs(factor - 1) > 2 * SIDES[case.coarse] else SURE
    slack = max(side * factor, 6 * off)
    value, says = named_factor(factor, slack, case.counts)
    yield GradientGuess("gradient_factor", says, lambda part: value * part.computed, 1)


def named_factor(factor: float, slack: float, counts: Mapping[str, float]) -> tuple[float, str]:
    """Return (factor, a sentence that says what it equals) for a measured factor.

    A number of `counts` within `slack` is taken in place of the measured one, or its inverse, else
    a whole number or its inverse, else the factor itself.
    """
    known = []
    for name, value in counts.items():
        over = f"1 / ({name})" if "/" in name else f"1 / {name}"
        for number, text in ((value, name), (1 / value if value else 0.0, over)):
            if number and abs(number - 1) > slack and abs(factor - number) <= slack:
                known.append((number, text))
    if known:
        number = min((number for number, _ in known), key=lambda number: abs(factor - number))
        texts = " or ".join(text for _, text in known)
        return number, f"the gradient is {number:.4g} times the right one: {texts}"
    simple = simple_value(factor, slack)
    if simple is None:
        shown = f"{factor:.3g}" if abs(factor - 1) > 0.01 else f"{factor:.5f}".rstrip("0")
        return factor, f"the gradient is {shown} times the right one"
    if simple > 64:
        return simple, f"the gradient is {simple:g} times the right one: a loss scale, 2^k"
    if simple > 1:
        return simple, f"the gradient is {simple:g} times the right one: summed, not averaged"
    times = round(1 / simple)
    return simple, f"the gradient is 1/{times} of the right one: divided by {times} once too often"


HYPOTHESES = (
    GradientHypothesis(("gradient_zero",), guess_zero, 200, "nothing is there: before any other"),
    GradientHypothesis(("gradient_sign",), guess_sign, 202, "exact, nothing is fitted"),
    GradientHypothesis(("gradient_factor",), guess_factor, 230, "one number is fitted: last"),
)
