"""Weight decay that is missing, of another size, of another kind, or on what should not decay."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import Recipe, changed, round_to
from aprfmt.causes.training.step_case import (
    FAINT,
    StepCase,
    StepGuess,
    StepHypothesis,
    is_one,
    number_text_apart,
)

CAUSE_ROWS = (
    Cause(
        "decay_missing",
        "update",
        "bug",
        "The weight does not decay, and the optimizer says that it does.",
        "Rows without a gradient stay as they are.",
        "The step without decay gives every weight.",
        told_by="--grads",
    ),
    Cause(
        "decay_factor",
        "update",
        "bug",
        "The weight decays by another share than the rate times the decay.",
        "Rows without a gradient shrink by one share, and it is another one.",
        "The step with that decay gives every weight that was not used to measure it.",
    ),
    Cause(
        "decay_coupled",
        "update",
        "bug",
        "Decay and gradient are coupled otherwise than stated: L2 regularization is added to the "
        "gradient (Adam), or it is taken from the weight (AdamW).",
        "Rows without a gradient move by whole steps, or shrink where they should step.",
        "The step with the other coupling gives every weight.",
        told_by="--grads",
    ),
    Cause(
        "decay_order",
        "update",
        "bug",
        "The weight decays after its step, as with bitsandbytes' AdamW, and not before it, as with "
        "torch's: the step decays too.",
        "The step is less than the expected one by the share that the weight decays.",
        "The step with its decay last gives every weight.",
        told_by="--grads",
    ),
    Cause(
        "decay_on_norms",
        "update",
        "bug",
        "Norms or biases decay, and only matrices should.",
        "A vector shrinks in addition to its step.",
        "The step with decay gives every weight of the vectors.",
    ),
)


def guess_vector_decay(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that norms and biases decay though the recipe has decay_on=matrices."""
    if not case.vector or not recipe.wd or recipe.decay_on != "matrices":
        return
    says = f"norms or biases decay by {recipe.lr * recipe.wd:g} of the weight"
    yield StepGuess("decay_on_norms", says, changed(recipe, decay_on="all"))


def guess_no_decay(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that no weight decay was applied where the recipe states one.

    Nothing where the optimizer's state says that the decay is in the gradient, where the weights
    shrink as by some decay, or where another guess says more (`_has_better_guess`).
    """
    if case.others.get("decoupled") == 0.0 and case.moments is not None:
        return  # the state says that the decay is in the gradient
    fit = case.fit(recipe)
    if case.coarse and fit is not None and fit.shrinks:
        return
    if recipe.decays(case.vector) and not _has_better_guess(case, recipe):
        yield no_decay_guess(recipe)


def no_decay_guess(recipe: Recipe) -> StepGuess:
    """Return the guess that no weight decay was applied where the recipe states one."""
    says = f"no decay; {recipe.lr * recipe.wd:g} of the weight is stated (lr times wd)"
    return StepGuess("decay_missing", says, changed(recipe, decay_factor=0.0))


def _has_better_guess(case: StepCase, recipe: Recipe) -> bool:
    """Return whether another guess explains more than that the decay is missing.

    True where rows step towards zero, as with decay in the gradient, or where the optimizer's
    state has the decay and the stored type rounds it away.
    """
    if case.signs:
        return _steps_towards_zero(case, recipe.lr / 2)
    if case.others.get("decay") != recipe.wd:
        return False
    plain = changed(recipe, wd=0.0)
    fit = case.fit(plain)
    kept = round_to(case.before * (1 - recipe.lr * recipe.wd), case.encodings[1])
    return fit is not None and fit.direct and bool(np.array_equal(kept, case.before))


def guess_coupling(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that the decay is added to the gradient though stated apart, or the reverse.

    In the gradient (coupled) is Adam's L2 regularization, apart (decoupled) is AdamW's.
    """
    if not recipe.decays(case.vector):
        return
    added = recipe.adds_decay_to_gradient
    if not added and case.signs and not case.coarse:
        says = (
            "weights without a gradient do not shrink, or move by whole steps towards zero: the "
            "decay is added to the gradient, as Adam's L2 regularization is"
        )
        coupled = changed(recipe, coupled=True)
        yield StepGuess("decay_coupled", says, holds=partial(_moves_as_coupled, recipe=coupled))
        return
    says = (
        "the decay is taken from the weight (decoupled, as AdamW does)"
        if added
        else "the decay is added to the gradient (coupled, as Adam's L2 regularization)"
    )
    guess = StepGuess("decay_coupled", says, changed(recipe, coupled=not added))
    yield guess
    if added and not case.signs and not guess.right(case):
        last = changed(recipe, coupled=False, decays_last=True)
        if _shows_order(case, last):
            says = "the decay is taken from the weight (decoupled), after its step"
            yield StepGuess("decay_coupled", says, last)


def guess_decay_order(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that decoupled decay is taken from the weight after its step."""
    if case.signs or not recipe.decays(case.vector) or recipe.adds_decay_to_gradient:
        return
    last = changed(recipe, decays_last=True)
    if _shows_order(case, last):
        says = (
            "the weight decays after its step and not before it: the step, too, decays by "
            f"{recipe.lr * recipe.wd:g} of itself"
        )
        yield StepGuess("decay_order", says, last)


def _shows_order(case: StepCase, last: Recipe) -> bool:
    """Return whether the change has the step of recipe `last`, whose decay comes last, once.

    Its factor must be 1 within a quarter of what the order changes: another rate would not be.
    """
    fit = case.fit(last)
    if fit is None:
        return False
    step, off = fit.factors[:2]
    return abs(step - 1) <= max(last.lr * last.wd / 4, 4 * off)


LEAST = 32  # elements of a row that all step towards zero: by chance in one row of 2**32


def _moves_as_coupled(case: StepCase, recipe: Recipe) -> bool:
    """Return whether a recipe with decay in the gradient explains the sizes of all changes.

    Such a decay moves every row: False if a row of LEAST elements or more did not change.
    """
    fit = case.fit(recipe)
    order = np.unique(case.rows, return_inverse=True)[1]
    still = np.bincount(order, case.change != 0) == 0
    return fit is not None and fit.right and not (still & (np.bincount(order) >= LEAST)).any()


def _steps_towards_zero(case: StepCase, size: float) -> bool:
    """Return whether all elements of some row move towards zero, by more than `size`.

    Rows of fewer than LEAST elements do not count.
    """
    towards = (np.sign(case.change) == -np.sign(case.before)) & (np.abs(case.change) > size)
    order = np.unique(case.rows, return_inverse=True)[1]
    counts = np.bincount(order)
    same = np.bincount(order, towards.astype(np.float64))
    return bool(((same == counts) & (counts >= LEAST)).any())


def _usual_shares(lr: float) -> dict[float, str]:
    """Return {factor of lr * wd: what the decay then is, in words} for usual mistakes of decay."""
    return {
        1 / lr: "wd itself, without lr",
        lr: "lr squared times wd",
        2.0: "twice lr times wd",
        0.5: "half of lr times wd",
    }


def guess_other_decay(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that the weight decays by another fraction than lr * wd, or though wd is 0.

    The fraction is measured on the elements. One near a usual mistake's is replaced by that.
    Nothing where it cannot be measured. Where the step is not linear in a decay that is added to
    the gradient, usual mistakes are tried.
    """
    if not recipe.lr or case.coarse:
        return
    if recipe.wd and recipe.adds_decay_to_gradient and not _is_linear_in_decay(case, recipe):
        yield from _usual_coupled_decays(case, recipe)
        return
    # Without a stated decay the one of wd = 1 is measured.
    wanted = changed(recipe, decay_on="all", wd=recipe.wd or 1.0, coupled=False)
    fit = case.fit(wanted)
    if fit is None:
        return
    _, _, factor, off = fit.factors
    if "decay_factor" in case.others:
        factor, off = case.others["decay_factor"], 0.0
    # Where only sizes are known, epsilon and the weight are not independent.
    least = FAINT if case.signs and recipe.wd else 0.0
    if not np.isfinite(off) or off > 0.05 * max(1.0, abs(factor)):
        return
    if abs(factor) < max(10 * off, least) or not factor:
        return
    share, stated = recipe.lr * wanted.wd * factor, recipe.lr * recipe.wd
    if recipe.wd and is_one(factor, off):
        return  # what is stated, on what should not decay
    decays = number_text_apart(share, stated)
    says = f"the weight decays by {decays}; {stated:.3g} is stated (lr times wd)"
    if not recipe.wd:
        says = f"the weight decays by {share:.3g}, a decay of {factor:.3g}; none is stated"
    for value, what in _usual_shares(recipe.lr).items() if recipe.wd else ():
        if abs(factor - value) <= max(6 * off, 1e-2 * value):
            factor, says = value, f"the weight decays by {what}"
            break
    if factor < 0:
        says = f"the weight grows by {abs(share):.3g}: {OTHER_SIGN}"
    other = changed(wanted, decay_factor=factor)
    yield StepGuess("decay_factor", says, other, 1, number=("decay_factor", factor))


OTHER_SIGN = "its decay has the other sign"


def _usual_coupled_decays(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess of the one usual mistake of a decay in the gradient that gives all elements.

    Nothing where none or several give them, or where the gradient is not known.
    """
    if case.gradient is None or not recipe.decays(case.vector):
        return
    ways = {-1.0: f"the weight grows: {OTHER_SIGN}"}
    for factor, what in _usual_shares(recipe.lr).items():
        ways[factor] = f"the decay in the gradient is {what.replace('lr times ', '')} of the weight"
    fits = [(way, case.fit(changed(recipe, decay_factor=way))) for way in ways]
    right = [way for way, fit in fits if fit is not None and fit.right]
    if len(right) == 1:
        other = changed(recipe, decay_factor=right[0])
        yield StepGuess("decay_factor", ways[right[0]], other)


def _is_linear_in_decay(case: StepCase, recipe: Recipe) -> bool:
    """Return whether a decay in the gradient takes lr * wd of the weight, as a decoupled one does.

    SGD's does where the decay of this step is in no moment yet.
    """
    plain = recipe.name == "sgd" and not recipe.nesterov and not recipe.dampening
    after = case.moments is not None and case.moments.after
    return plain and not (recipe.momentum and after)


HYPOTHESES = (
    StepHypothesis(
        ("decay_on_norms",), guess_vector_decay, 10, "what is not stated to decay, first"
    ),
    StepHypothesis(("decay_missing",), guess_no_decay, 12, "nothing is less than something fitted"),
    StepHypothesis(("decay_coupled",), guess_coupling, 14, "another rule, before a fitted share"),
    StepHypothesis(("decay_order",), guess_decay_order, 15, "another rule, before a fitted factor"),
    StepHypothesis(("decay_factor",), guess_other_decay, 60, "one number is fitted"),
)
