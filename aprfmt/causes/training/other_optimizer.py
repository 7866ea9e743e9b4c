"""Steps that follow another optimizer's rule than the stated one.

Sources: Jordan 2024 (Muon, and the coefficients of its iteration), torch.optim.Muon; Shazeer and
Stern 2018 (Adafactor); Chen et al. 2023 (Lion).
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import F64, Recipe
from aprfmt.causes.training.step_case import StepCase, StepGuess, StepHypothesis

CAUSE_ROWS = (
    Cause(
        "other_optimizer",
        "update",
        "bug",
        "The update is that of another optimizer than the stated one: Muon, Adafactor, plain "
        "gradient descent, or one whose steps are signs.",
        "The change is no step of the stated rule, and one of the other's direction.",
        "The other rule's first step, times one fitted rate, gives every weight; whether its "
        "settings are the trainer's is not known.",
        most="explained",
    ),
)
FEWEST = 32  # elements that tell one direction from another
EXACT, FEW_BITS = 2e-3, 0.2  # of a step: what float32 leaves, and Muon's iteration in BF16
ITERATION, ROUNDS = (3.4445, -4.7750, 2.0315), 5


def orthogonal(gradient: F64) -> F64:
    """Return Muon's direction for a gradient [rows, columns]: all singular values near 1."""
    turned = gradient.shape[0] > gradient.shape[1]
    x = gradient.T if turned else gradient
    x = x / max(float(np.linalg.norm(x)), 1e-300)
    a, b, c = ITERATION
    for _ in range(ROUNDS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if turned else x


def factored(gradient: F64) -> F64:
    """Return Adafactor's direction: the gradient over the root of its squares' rank-one estimate.

    `gradient` is [rows, columns]; the estimate is made of the means by row and by column.
    """
    squares = gradient * gradient
    rows, columns = squares.mean(1, keepdims=True), squares.mean(0, keepdims=True)
    root = np.sqrt(rows * columns / max(float(squares.mean()), 1e-300))
    return gradient / np.where(root == 0, 1.0, root)


def directions(case: StepCase, stated: str) -> Iterator[tuple[str, F64, float]]:
    """Yield (sentence, direction [n], relative error of it) of other optimizers' first steps.

    A direction points up the gradient. `stated` is the optimizer whose own direction is left out.
    """
    assert case.gradient is not None
    if stated != "sgd":
        says = "the update is the gradient times a rate, as plain gradient descent (SGD) makes it"
        yield says, case.gradient, EXACT
    if stated in ("sgd", "adafactor"):
        says = "the update is of one size everywhere, as Lion's is, or Adam's first"
        yield says, np.sign(case.gradient), EXACT
    if case.shape is None or min(case.shape) == 1:
        return
    matrix = case.gradient.reshape(case.shape)
    if stated != "adafactor":
        says = "the update is Adafactor's: the second moment has rank one"
        yield says, factored(matrix).reshape(-1), EXACT
    says = "the update is Muon's: that of the gradient made orthogonal"
    yield says, orthogonal(matrix).reshape(-1), FEW_BITS


def is_step_along(direction: F64, room: float, recipe: Recipe, case: StepCase) -> bool:
    """Return whether a case moved against `direction` [n], and by decay, with fitted factors.

    What is left must be rounding, and at most `room` of the step.
    """
    parts = [-direction]
    if recipe.decays(case.vector):
        parts.append(-case.before)
    if direction.size != case.change.size or not direction.any():
        return False
    basis = np.stack(parts, axis=1)
    found, *_ = np.linalg.lstsq(basis, case.change, rcond=1e-9)
    step = float(found[0]) * basis[:, 0]
    left = float(np.linalg.norm(case.change - basis @ found))
    rounding = float(np.linalg.norm(case.rounding))
    size = float(np.linalg.norm(step))
    return bool(found[0] > 0 and 4 * rounding <= size and left <= room * size + rounding)


def guess_other_optimizer(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that another optimizer made a first step.

    Nothing without the gradient, for a later step, for few elements, and in BF16 or F16.
    """
    if case.gradient is None or case.moments is not None or recipe.step not in (None, 1):
        return
    if case.coarse or case.gradient.size < FEWEST:
        return
    fit = case.fit(recipe)
    if fit is not None and fit.right:
        return
    for says, direction, room in directions(case, recipe.name):
        if is_step_along(direction, room, recipe, case):
            says = f"{says}; stated is {recipe.name}"
            holds = partial(is_step_along, direction, room, recipe)
            yield StepGuess("other_optimizer", says, free=1, holds=holds, most="explained")
            return


HYPOTHESES = (
    StepHypothesis(
        ("other_optimizer",),
        guess_other_optimizer,
        90,
        "another rule with a fitted rate: after all of the stated one",
        whole=True,
    ),
)
