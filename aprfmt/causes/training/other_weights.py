"""Weights that moved further than one step of the rule can move them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import Recipe
from aprfmt.causes.training.step_case import StepCase, StepGuess, StepHypothesis
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "other_weights",
        "update",
        "bug",
        "The step was made from other weights than those before it: float32 masters that the "
        "loaded checkpoint was not copied to, or a checkpoint of another run.",
        "Most elements moved further than the longest step of the rule, and neither along the step "
        "nor along the weight.",
        "Nothing repeats it. Give the checkpoint of the masters as MODEL. Many steps between "
        "the two checkpoints look the same.",
        most="located",
    ),
)
FAR = 1.5  # times the longest step: what most elements moved, at least
WHOLE = 0.5  # of the norm of the weight: moved as far, it is another weight altogether
ALONG = 0.9  # cosine of a change with a sum of step and weight, factors of which it mostly is


def share_along(change: "Array", directions: "Sequence[Array]") -> float:
    """Return the cosine, 0 to 1, of a change with the nearest sum of multiples of `directions`."""
    basis = np.stack([np.asarray(each, np.float64).reshape(-1) for each in directions], axis=1)
    wide = np.asarray(change, np.float64).reshape(-1)
    fitted = basis @ np.linalg.lstsq(basis, wide, rcond=None)[0]
    return norms.exact_norm(fitted) / (norms.exact_norm(wide) or 1.0)


def guess_other_weights(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that the step was made from other weights than those given as before it.

    Nothing where only signs of the gradient are known, for a rule whose steps have any length,
    for a vector, or where the change is mostly a multiple of the step or of the weight. Nothing
    for an entirely different weight, which is reported elsewhere.
    """
    if case.signs or case.vector or not recipe.row.sizes or not case.change.size:
        return
    update = case.predict(recipe)
    longest = 0.0 if update is None else float(np.abs(update.whole).max())
    if update is None or not longest:
        return
    if np.linalg.norm(case.change) > WHOLE * np.linalg.norm(case.before):
        return
    if share_along(case.change, (update.whole, case.before)) > ALONG:
        return
    if float(np.median(np.abs(case.change) - case.rounding)) < FAR * longest:
        return
    says = (
        "most elements moved further than the longest step of the rule, in other directions: the "
        "step was made from other weights than these (stale master weights), or many steps were"
    )
    yield StepGuess("other_weights", says, holds=lambda part: True, most="located")


HYPOTHESES = (
    StepHypothesis(
        ("other_weights",), guess_other_weights, 92, "nothing is made again: after all others"
    ),
)
