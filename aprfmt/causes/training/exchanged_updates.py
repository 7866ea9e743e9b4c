"""Updates that were made of a gradient in another order of elements."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import F64, Recipe
from aprfmt.causes.training.step_case import StepCase, StepGuess, StepHypothesis

CAUSE_ROWS = (
    Cause(
        "update_transposed",
        "update",
        "bug",
        "The update of a matrix is that of its transposed gradient.",
        "The change is no step of the gradient, and one of its transposed.",
        "The step of the transposed gradient and moments gives every weight.",
    ),
)


def guess_transposed(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that the update was made of the transposed gradient and moments.

    Nothing unless all elements of a matrix are in the case, with its gradient or its moments.
    """
    if case.shape is None or case.shape[0] == 1 or case.shape[1] == 1 or case.signs:
        return
    rows, columns = case.shape

    def turned(values: F64 | None) -> F64 | None:
        """Return a matrix's elements, given flat by rows, flat by columns; None for None."""
        if values is None:
            return None
        # Of a matrix that is not square the elements were written in the other order.
        return np.ascontiguousarray(values.reshape(rows, columns).T).reshape(-1)

    def holds(part: StepCase) -> bool:
        """Return whether the recipe predicts `part` with its gradient and moments transposed.

        `part` has the elements of one parameter before and after the step.
        """
        moments = part.moments
        if moments is not None:
            moments = replace(moments, first=turned(moments.first), second=turned(moments.second))
        fit = replace(part, gradient=turned(part.gradient), moments=moments).fit(recipe)
        return fit is not None and fit.right

    says = "the update is that of the transposed gradient"
    yield StepGuess("update_transposed", says, holds=holds)


HYPOTHESES = (
    StepHypothesis(
        ("update_transposed",), guess_transposed, 34, "an order, before a fitted factor", whole=True
    ),
)
