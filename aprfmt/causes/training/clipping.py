"""Gradients that were clipped otherwise than stated."""

from collections.abc import Iterator

from aprfmt.causes.row import Cause
from aprfmt.causes.training.case import StepCase, StepGuess, StepHypothesis
from aprfmt.causes.training.optimizers import Recipe, changed
from aprfmt.causes.training.step_size import SLACK, measured_factor

CAUSE_ROWS = (
    Cause(
        "clip_missing",
        "update",
        "bug",
        "The gradients were not clipped, and their norm is above the bound.",
        "The step is that of the gradient as it is.",
        "The step of the whole gradient gives every weight.",
    ),
    Cause(
        "clip_by_tensor",
        "update",
        "bug",
        "Each tensor's gradient was clipped by its own norm, not by the norm of all.",
        "The factor of each tensor is the bound over its own norm.",
        "The step clipped by the tensor's own norm gives every weight.",
    ),
    Cause(
        "clip_twice",
        "update",
        "bug",
        "The gradient was scaled down twice by the factor that clips it once.",
        "The step has the square of the factor.",
        "The step clipped twice gives every weight.",
    ),
)


def clip_factor(bound: float, norm: float) -> float:
    """Return the factor, at most 1.0, that torch's clip_grad_norm_ multiplies all gradients by.

    `norm` is the norm of all gradients together, `bound` the largest allowed.
    """
    return min(1.0, bound / (norm + 1e-6))


def otherwise(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that gradients were not clipped, clipped twice, or each by its own norm.

    Nothing where the recipe does not clip, a norm is not known, or the step does not depend on the
    size of the gradient.
    """
    norm, own = case.others.get("norm"), case.others.get("own_norm")
    if recipe.clip is None or norm is None or own is None or case.gradient is None:
        return
    if recipe.row.sizes or case.signs:
        return  # the size of the gradient is not in the step
    right = clip_factor(recipe.clip, norm)
    if right < 1 - SLACK:
        says = (
            f"the gradients were not clipped; their norm is {norm:.4g}, the bound {recipe.clip:g}"
        )
        yield StepGuess("clip_missing", says, changed(recipe, scale=1.0))
        says = f"the gradients were clipped twice, by {right:.4g} each time"
        yield StepGuess("clip_twice", says, changed(recipe, scale=right * right))
    alone = clip_factor(recipe.clip, own)
    factor, _ = measured_factor(case, changed(recipe, scale=1.0))
    if abs(factor - alone) <= SLACK * alone and abs(alone - right) > SLACK * right:
        says = f"each gradient was clipped by its own norm to {recipe.clip:g}"
        yield StepGuess("clip_by_tensor", says, changed(recipe, scale=alone))


HYPOTHESES = (
    StepHypothesis(
        ("clip_missing", "clip_by_tensor", "clip_twice"),
        otherwise,
        40,
        "factors that follow from norms, before a fitted one",
    ),
)
