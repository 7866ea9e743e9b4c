"""A gradient of another scale than the given one, which Adam shows in its smallest elements."""

from collections.abc import Iterator

from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import Recipe, changed
from aprfmt.causes.training.step_case import StepCase, StepGuess, StepHypothesis

CAUSE_ROWS = (
    Cause(
        "gradient_scaled",
        "update",
        "bug",
        "The optimizer had a constant times the gradient that was given: a loss scale that was not "
        "taken out of it, or accumulation steps that were not divided by.",
        "Elements whose gradient is as small as epsilon step further, or less far.",
        "The step of the scaled gradient gives every weight.",
        told_by="--optimizer-state, which has epsilon and the moments",
    ),
)
WHOLE = (*range(2, 33), *(1 << power for power in range(6, 25)), 10, 100, 1000)


def guess_scale(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that the optimizer's gradient was the given one times or over a whole number.

    There is one for each number of WHOLE and its inverse. Nothing without a gradient, for an
    optimizer without epsilon, and where the stored moments already have the gradient in them.
    """
    if case.gradient is None or "eps" not in recipe.row.settings:
        return
    if case.moments is not None and case.moments.after:
        return  # the gradient is in the moments
    for number in dict.fromkeys(WHOLE):
        for scale, words in ((number, f"{number} times"), (1 / number, f"1/{number} of")):
            says = f"the optimizer had {words} the gradient that was given"
            yield StepGuess("gradient_scaled", says, changed(recipe, scale=recipe.scale * scale))


HYPOTHESES = (
    StepHypothesis(
        ("gradient_scaled",),
        guess_scale,
        36,
        "numbers that trainers multiply by, before a fitted one",
    ),
)
