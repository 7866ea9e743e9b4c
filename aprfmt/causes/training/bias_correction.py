"""Adam without the correction of its moments, which makes its first steps too long or too short."""

from collections.abc import Iterator

from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import Correction, Recipe, changed
from aprfmt.causes.training.step_case import StepCase, StepGuess, StepHypothesis

CAUSE_ROWS = (
    Cause(
        "bias_correction",
        "update",
        "bug",
        "Adam's moments are not corrected for having begun at zero, or only one of them is.",
        "The first steps have another size: with 0.9 and 0.999 the first is 3.16 times the rate.",
        "The step made without the correction gives every weight.",
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


HYPOTHESES = (
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
