"""Gradients of the step before, in place of this one's or added to them."""

from collections.abc import Iterator

from aprfmt.causes.row import Cause
from aprfmt.causes.training.gradient_case import GradientCase, GradientGuess, GradientHypothesis

_MADE = "The gradient that the moments of before the step were made of gives every element."
CAUSE_ROWS = (
    Cause(
        "gradient_stale",
        "gradient",
        "bug",
        "The gradient is that of the step before: the backward of this batch did not reach the "
        "optimizer.",
        "It is the gradient in the moments of before the step, and not that of the batch.",
        _MADE,
    ),
    Cause(
        "gradient_not_zeroed",
        "gradient",
        "bug",
        "The gradient of the step before was not set to zero, and that of the batch was added "
        "to it.",
        "Its difference from the batch's gradient is the gradient in the moments of before the "
        "step.",
        _MADE,
    ),
)


def guess_earlier_gradient(case: GradientCase) -> Iterator[GradientGuess]:
    """Yield guesses that the step before's gradient was used, alone or added to this batch's.

    Nothing where that gradient is not known, or is zero.
    """
    earlier = case.earlier
    if earlier is None or not earlier.any():
        return
    says = "the gradient is that of the step before, which the state's moments were made of"
    yield GradientGuess("gradient_stale", says, lambda part: earlier)
    says = "the gradient of the step before was not set to zero, and the batch's was added to it"
    yield GradientGuess("gradient_not_zeroed", says, lambda part: part.computed + earlier)


HYPOTHESES = (
    GradientHypothesis(
        ("gradient_stale", "gradient_not_zeroed"),
        guess_earlier_gradient,
        203,
        "nothing is fitted",
        whole=True,
    ),
)
