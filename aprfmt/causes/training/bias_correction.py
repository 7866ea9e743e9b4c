"""Adam's moments without bias correction or with a wrong one: first steps of wrong length."""

from collections.abc import Iterator

from aprfmt.causes.row import Cause
from aprfmt.causes.training.momentum import FIRST_RATES, SECOND_RATES
from aprfmt.causes.training.optimizers import Correction, Recipe, changed
from aprfmt.causes.training.step_case import StepCase, StepGuess, StepHypothesis

CAUSE_ROWS = (
    Cause(
        "bias_correction",
        "update",
        "bug",
        "Adam's moments are not corrected for having begun at zero, or only one of them is, or "
        "with another rate than they are made with.",
        "The first steps have another size: with 0.9 and 0.999 the first is 3.16 times the rate.",
        "The step made without the correction, or with the other one, gives every weight.",
        told_by="--optimizer-state, which has rate and moments",
    ),
)
_WORDS: dict[Correction, str] = {
    "none": "neither moment is corrected for having begun at zero",
    "first": "the first moment alone is corrected for having begun at zero, the second is not",
}
_SECOND = "the second moment alone is corrected for having begun at zero, the first is not"


def guess_uncorrected(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that neither of Adam's moments is bias-corrected, or the first one alone."""
    if recipe.row.second:
        for correction, says in _WORDS.items():
            yield StepGuess("bias_correction", says, changed(recipe, correction=correction))


def guess_second_alone(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that only Adam's second moment is bias-corrected.

    The first step is then a tenth of the right one at beta 1 of 0.9.
    """
    if recipe.row.second:
        yield StepGuess("bias_correction", _SECOND, changed(recipe, correction="second"))


def guess_other_correction(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that a moment is averaged at the stated rate and corrected for another rate.

    Nothing unless the state was saved before the step: one saved after it shows only the rate of
    the correction. Nothing at the first step, where averaging and correcting by another rate give
    the same.
    """
    held = case.moments
    if held is None or held.after or not held.step or not recipe.row.second:
        return
    for name, stated, field, rates in (
        ("beta 1", recipe.b1, "corrected_b1", FIRST_RATES),
        ("beta 2", recipe.b2, "corrected_b2", SECOND_RATES),
    ):
        for value in (case.others[field],) if field in case.others else rates:
            if value != stated:
                says = (
                    f"the moments are made with {name} of {stated:g}, as stated, and corrected for "
                    f"one of {value:g}"
                )
                one = changed(recipe, **{field: value})
                yield StepGuess("bias_correction", says, one, number=(field, value))


HYPOTHESES = (
    StepHypothesis(
        ("bias_correction",), guess_other_correction, 32, "a rate out of a few, after one for both"
    ),
    StepHypothesis(
        ("bias_correction",), guess_uncorrected, 20, "a fixed factor, before a fitted one"
    ),
    StepHypothesis(
        ("bias_correction",),
        guess_second_alone,
        72,
        "after a factor: a tenth of the rate is likelier",
    ),
)
