"""Adam's epsilon in another place of the quotient."""

from collections.abc import Iterator

from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import Epsilon, Recipe, changed
from aprfmt.causes.training.step_case import StepCase, StepGuess, StepHypothesis

CAUSE_ROWS = (
    Cause(
        "epsilon_place",
        "update",
        "bug",
        "Adam's epsilon stands inside the root, or is added before the second moment is corrected.",
        "Elements with a small gradient move less than they should, all others are right.",
        "The step made with the epsilon there gives every weight.",
    ),
    Cause(
        "epsilon_value",
        "update",
        "bug",
        "Adam's epsilon is another number than the one that was stated.",
        "Elements with a small gradient move more or less than they should.",
        "The step made with another power of ten gives every weight.",
        told_by="--optimizer-state, which has epsilon and the moments",
    ),
)
_WORDS: dict[Epsilon, str] = {
    "inside": "epsilon stands inside the root",
    "uncorrected": "epsilon is added before the second moment is corrected, as TensorFlow does",
}
_POWERS = (*range(1, 11), 12, 15)


def guess_epsilon(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that Adam's epsilon is elsewhere in its quotient, or is another power of ten.

    Nothing where only the signs of the gradient are known: they do not show epsilon.
    """
    if case.signs or "eps" not in recipe.row.settings:
        return
    for place, says in _WORDS.items():
        yield StepGuess("epsilon_place", says, changed(recipe, epsilon=place))
    for power in _POWERS:
        eps = float(f"1e-{power}")
        if eps != recipe.eps:
            says = f"epsilon is {eps:g}, stated is {recipe.eps:g}"
            yield StepGuess("epsilon_value", says, changed(recipe, eps=eps))


HYPOTHESES = (
    StepHypothesis(
        ("epsilon_place", "epsilon_value"), guess_epsilon, 30, "fixed forms, before a fitted factor"
    ),
)
