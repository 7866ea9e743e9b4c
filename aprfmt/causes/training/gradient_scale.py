"""Gradients that are zero, negated, or a constant times the right ones."""

from collections.abc import Iterator, Mapping

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.gradient_case import GradientCase, GradientGuess, GradientHypothesis
from aprfmt.causes.training.optimizers import F64
from aprfmt.causes.training.step_size import simple_value
from aprfmt.measure.verdicts import Certainty

EQUAL = 1e-6  # two numbers that one is written as

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
    """Yield the guess that the given gradient is the computed one times -1."""
    yield GradientGuess(
        "gradient_sign", "the gradient has the other sign", lambda part: -part.computed
    )


def guess_factor(case: GradientCase) -> Iterator[GradientGuess]:
    """Yield the guess that the given gradient is the computed one times a measured factor.

    Its text says what the factor equals (`factor_guess`). Nothing for a factor that is not positive
    or cannot be measured.
    """
    factor, off = case.factor
    if np.isfinite(off) and off <= 0.02 * abs(factor) and factor > 0:
        yield factor_guess(factor, case.factor_room, case.counts)


def factor_guess(factor: float, room: float, counts: Mapping[str, float]) -> GradientGuess:
    """Return the guess that a gradient is times a measured factor, with all mistakes that give it.

    `room` is the factor's largest error. `counts` are numbers of the batch and run, by what they
    are: they, whole numbers, and the inverses of both are tried. Where only one is near, the
    factor is taken to be that number. Where several mistakes give it, all are named and none is
    sure.
    """
    found = _readings(factor, room, counts)
    numbers = [number for number, _ in found]
    value = min(numbers, key=lambda number: abs(factor - number), default=factor)
    if any(abs(number - value) > EQUAL * value for number in numbers):
        value = factor  # which of them it is was not measured
    shown = f"{value:.4g}" if found else f"{value:.3g}"
    if found and value == round(value):
        shown = f"{value:.0f}"
    if abs(value - 1) <= 0.01:
        shown = f"{value:.5f}".rstrip("0")
    whole = round(1 / value)
    part = f"1/{whole} of" if abs(value * whole - 1) <= EQUAL and whole > 1 else f"{shown} times"
    says = f"the gradient is {part} the right one"
    if found:
        says += ": " + ", or ".join(text for _, text in found)

    def made(part: GradientCase) -> F64:
        """Return the gradient computed here times the guessed factor, `value`."""
        return value * part.computed

    most: Certainty = "explained" if len(found) > 1 else "confirmed"
    return GradientGuess("gradient_factor", says, made, 1, (factor, room), most)


def _readings(factor: float, room: float, counts: Mapping[str, float]) -> list[tuple[float, str]]:
    """Return (number, what makes it) for all numbers within `room` of a measured factor.

    They are the numbers of `counts`, whole numbers, and the inverses of both.
    """
    found = []
    for name, value in counts.items():
        over = f"1 / ({name})" if "/" in name else f"1 / {name}"
        for number, text in ((value, name), (1 / value if value else 0.0, over)):
            if number and abs(number - 1) > room and abs(factor - number) <= room:
                found.append((number, text))
    simple = simple_value(factor, room)
    if simple is not None:
        text = "a loss scale, 2^k" if simple > 64 else "summed, not averaged"
        if simple < 1:
            text = f"divided by {round(1 / simple)} once too often"
        found.append((simple, text))
    return found


def joined_factors(
    factors: Mapping[str, tuple[float, float]], counts: Mapping[str, float]
) -> list[tuple[GradientGuess, tuple[str, ...]]]:
    """Return (guess of one factor, keys of the gradients that may have it) each, most keys first.

    `factors` are {key: (measured factor, its largest error)}. Factors equal within their errors
    are joined to one, averaged over every second of them.
    """
    left = dict(sorted(factors.items(), key=lambda one: one[1][1] / one[1][0]))
    found = []
    while left:
        first, room = next(iter(left.values()))
        keys = tuple(
            key for key, (other, wide) in left.items() if abs(other - first) <= room + wide
        )
        used = [left[key] for key in keys[::2]]
        weights = np.array([1 / max(wide, 1e-300) ** 2 for _, wide in used])
        mean = float(np.average([factor for factor, _ in used], weights=weights))
        found.append((factor_guess(mean, room, counts), keys))
        left = {key: one for key, one in left.items() if key not in keys}
    return sorted(found, key=lambda one: -len(one[1]))


HYPOTHESES = (
    GradientHypothesis(("gradient_zero",), guess_zero, 200, "nothing is there: before any other"),
    GradientHypothesis(("gradient_sign",), guess_sign, 202, "exact, nothing is fitted"),
    GradientHypothesis(("gradient_factor",), guess_factor, 230, "one number is fitted: last"),
)
