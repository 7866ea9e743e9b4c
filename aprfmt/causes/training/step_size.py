"""A step of another size or direction: by its learning rate or gradient, or made twice."""

from collections.abc import Iterator

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import Recipe, changed
from aprfmt.causes.training.step_case import StepCase, StepGuess, StepHypothesis, number_text_apart
from aprfmt.measure.verdicts import Certainty

CAUSE_ROWS = (
    Cause(
        "step_sign",
        "update",
        "bug",
        "The step goes up the gradient, not down.",
        "The change is the expected one with the other sign.",
        "The step with the other sign gives every weight.",
    ),
    Cause(
        "step_twice",
        "update",
        "bug",
        "The step was taken twice.",
        "Step and decay are both twice the expected ones.",
        "Twice the step and the decay gives every weight.",
        told_by="--optimizer-state, whose groups have the rate",
    ),
    Cause(
        "step_factor",
        "update",
        "bug",
        "The step is a constant times the expected one: another rate, or a gradient that was "
        "scaled.",
        "One factor holds for every element of a tensor.",
        "The step times that factor gives every weight that was not used to measure it.",
        told_by="--optimizer-state, whose groups have the rate",
    ),
)


def guess_step_sign(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that the step goes up the gradient instead of down.

    Nothing if `case.signs`: without a gradient its signs are read from the step itself.
    """
    if not case.signs:
        yield StepGuess(
            "step_sign", "the step goes up the gradient", changed(recipe, sign=-recipe.sign)
        )


def guess_double_step(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that step and weight decay were both made twice.

    Nothing without decay, or where the optimizer's state has another rate than the stated one.
    """
    if recipe.wd and case.others.get("rate", recipe.lr) == recipe.lr:
        recipe = changed(recipe, factor=2.0, decay_factor=2.0)
        yield StepGuess("step_twice", "the step was taken twice, its decay too", recipe)


def guess_parameter_size(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that Adafactor's rate is multiplied by the parameter's size, or is not.

    It is the other of the two than stated.
    """
    if recipe.size is not None:
        times = 1 / recipe.size if recipe.size_scaled else recipe.size
        is_not = " not" if recipe.size_scaled else ""
        says = f"the rate is{is_not} multiplied by the parameter's size (scale_parameter)"
        yield StepGuess("step_factor", says, changed(recipe, factor=times * recipe.factor))


def guess_step_factor(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that the step, or step and decay, is a measured factor times the expected one.

    A factor near a whole number or its inverse is replaced by that. Nothing where the factor
    cannot be measured. If the optimizer's state has the stated rate, twice step and decay is no
    wrong rate: `guess_double_step` has it.
    """
    if not recipe.lr:
        yield from _guess_rate(case, recipe)
        return
    given = case.others.get("factor")
    factor, off = measured_factor(case, recipe) if given is None else (given, 0.0)
    if not np.isfinite(factor) or off > 0.05 * abs(factor) or factor <= 0:
        return
    slack = max(SLACK * factor, 6 * off)
    near, value = simple_factor(factor, slack), simple_value(factor, slack) or factor
    number = number_text_apart(value, 1.0)
    if not number or abs(value - 1) <= 6 * off:
        return  # no other one than the stated
    lr = number_text_apart(recipe.lr * value, recipe.lr)
    rate = f": the rate is {lr}, stated is {recipe.lr:g}"
    times = near or f"{number} times"
    one = changed(recipe, factor=value * recipe.factor)
    says = f"the step is {times} the expected one" + (rate if case.signs else "")
    says += _clipping_clause(case, recipe, value)
    # An average takes the same part of the step and of its decay.
    averaged = AVERAGE if value <= AVERAGED else ""
    most: Certainty = "explained" if averaged else "confirmed"
    measured = ("factor", value)
    if recipe.wd and not recipe.adds_decay_to_gradient:  # a rate is in both
        both = changed(one, decay_factor=value * recipe.decay_factor)
        says_both = f"step and decay are {times} the expected ones{rate}{averaged}"
        if value != 2 or case.others.get("rate") != recipe.lr:
            free = 0 if near else 1
            yield StepGuess("step_factor", says_both, both, free, number=measured, most=most)
    # Where it decays, a rate is in the decay too.
    if not (recipe.decays(case.vector) and recipe.row.sizes):
        free = 0 if near and recipe.row.sizes else 1
        if recipe.wd:
            yield StepGuess("step_factor", says, one, free, number=measured)
        else:
            yield StepGuess("step_factor", says + averaged, one, free, number=measured, most=most)


def _clipping_clause(case: StepCase, recipe: Recipe, factor: float) -> str:
    """Return the clause that clipping by another norm makes a step `factor` times as long; else "".

    "" where the recipe does not clip, where the step does not depend on the size of the gradient,
    and for a norm that the bound does not clip.
    """
    norm = case.others.get("norm")
    if recipe.clip is None or norm is None or case.signs or recipe.row.sizes:
        return ""
    other = recipe.clip / (recipe.scale * factor)
    if other <= recipe.clip:
        return ""
    return (
        f", as of clipping to {recipe.clip:g} by a norm of {other:.4g}; that of all is {norm:.4g}"
    )


def _guess_rate(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that a step was made at a measured rate, where a rate of 0 is stated."""
    given = case.others.get("factor")
    rate, off = measured_factor(case, changed(recipe, lr=1.0)) if given is None else (given, 0.0)
    if not np.isfinite(rate) or off > 0.05 * abs(rate) or rate <= 0:
        return
    written = float(f"{rate:.3g}")
    rate = written if abs(rate - written) <= 6 * off else rate
    says = f"the step is that of a rate of {rate:.3g}; a rate of 0 is stated"
    yield StepGuess("step_factor", says, changed(recipe, lr=rate), 1, number=("factor", rate))


AVERAGED = 0.0101  # of a step, and less: the part of it that an average of weights takes
AVERAGE = "; an average of the weights (EMA) saved in place of them gives the same"
SLACK = 2e-3


def measured_factor(case: StepCase, recipe: Recipe) -> tuple[float, float]:
    """Return (factor of the expected step in the change, its deviation); (nan, inf) if unknown."""
    fit = case.fit(recipe)
    factor, off = (np.nan, np.inf) if fit is None else fit.factors[:2]
    return (factor, off) if np.isfinite(off) else (np.nan, np.inf)


def simple_value(factor: float, slack: float) -> float | None:
    """Return the whole number, or inverse of one, that is near `factor`; None for none.

    Tried are numbers to 64, and powers of two to 2**24. Near is within `slack` (absolute) and 0.4
    %.
    """
    for number in (*range(2, 65), *(1 << power for power in range(7, 25))):
        for value in (float(number), 1.0 / number):
            if abs(factor - value) <= min(slack, 0.004 * value):
                return value
    return None


def simple_factor(factor: float, slack: float) -> str:
    """Return "3 times" or "1/3 of" for a factor near a whole number or its inverse, else "".

    `simple_value` says which numbers are tried; `slack` is the factor's largest error.
    """
    value = simple_value(factor, slack)
    if value is None:
        return ""
    return f"{value:g} times" if value > 1 else f"1/{round(1 / value)} of"


HYPOTHESES = (
    StepHypothesis(("step_factor",), guess_parameter_size, 69, "exact, before a fitted factor"),
    StepHypothesis(("step_sign",), guess_step_sign, 16, "exact, nothing is fitted"),
    StepHypothesis(("step_twice",), guess_double_step, 18, "two factors that are one statement"),
    StepHypothesis(
        ("step_factor",), guess_step_factor, 70, "one number is fitted: after all others"
    ),
)
