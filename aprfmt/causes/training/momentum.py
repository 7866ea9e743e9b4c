"""Moments of another step, or a momentum used otherwise than stated."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import Recipe, changed
from aprfmt.causes.training.step_case import StepCase, StepGuess, StepHypothesis

CAUSE_ROWS = (
    Cause(
        "stale_moments",
        "update",
        "bug",
        "The step was made of the moments of before it: this step's gradient is not in them.",
        "The step is the one of the moments alone.",
        "The step of the older moments gives every weight.",
    ),
    Cause(
        "moments_lost",
        "update",
        "bug",
        "The step was made with moments of zero, not those that were saved: a run that was resumed "
        "without them.",
        "The step is this step's gradient over its moments, as a first step's is.",
        "The step with the first moment, the second, or both at zero gives every weight; that of a "
        "new optimizer is a first step, which needs no moments to be known.",
    ),
    Cause(
        "step_count",
        "update",
        "bug",
        "The moments are corrected for another number of steps: the count is off, or began anew.",
        "The step is the expected one times a number that follows from the counts.",
        "The step with that count gives every weight.",
    ),
    Cause(
        "moment_rounded",
        "update",
        "bug",
        "The second moment is kept in a type of few bits, in which small squares are zero.",
        "Elements with a small gradient step far too long, others nearly right.",
        "The step made with the second moment rounded to the type gives every weight.",
    ),
    Cause(
        "momentum",
        "update",
        "bug",
        "The momentum is used otherwise than stated: left out, Nesterov's or not, damped, or on "
        "the gradient in place of the buffer.",
        "The step is the gradient alone, or the gradient is in it once more.",
        "The step made that way gives every weight.",
    ),
    Cause(
        "betas",
        "update",
        "bug",
        "The rates of the moments differ from the stated ones, or are exchanged.",
        "With another usual rate, or beta 1 for beta 2, the step is the one that is there.",
        "The step with these rates gives every weight.",
    ),
)
# Rates that trainers state: torch's, those of language models, and of image models.
FIRST_RATES, SECOND_RATES = (0.8, 0.85, 0.9, 0.95, 0.98), (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
MICRO_BATCHES = 32  # of a step, that a trainer may count as steps
_COUNTS = (1, 2, 3, 4, 5, 10, 100, 1000)


def new_optimizer_sentence(recipe: Recipe) -> str:
    """Return the sentence on a step of an optimizer that was created again, without its state."""
    was = "both moments were zero and the count began anew, as a new optimizer's are"
    if not recipe.row.second:
        was = "the momentum was zero, as a new optimizer's is, or none is used"
    return (
        f"{was}: the saved state is to be loaded (optimizer.load_state_dict) before the first step "
        "that goes on"
    )


def guess_stale(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that the step used the moments of before it, without this step's gradient.

    Nothing unless the optimizer's state is that of before the step.
    """
    if case.moments is not None and not case.moments.after:
        says = "the moments do not have this step's gradient"
        yield StepGuess("stale_moments", says, changed(recipe, old_moments=True))


def guess_rounded_moment(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that the second moment is kept in F16 or BF16.

    Nothing without a gradient, and where the state has the moments of after the step.
    """
    if case.gradient is None or not recipe.row.second or case.coarse:
        return
    if case.moments is not None and case.moments.after:
        return
    for encoding in ("F16", "BF16"):
        says = f"the second moment is kept in {encoding}"
        yield StepGuess("moment_rounded", says, changed(recipe, second_kept_in=encoding))


def guess_lost_moments(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that the step started with moments of zero, or with a new step count.

    Nothing unless the state was saved before the step and has two moments, and the gradient is
    known.
    """
    held = case.moments
    if held is None or held.after or case.gradient is None or not recipe.row.second:
        return
    yield StepGuess(
        "moments_lost", new_optimizer_sentence(recipe), holds=partial(is_first_step, recipe)
    )
    ways = {
        "the first moment was zero, not the saved one": ("first",),
        "the second moment was zero, not the saved one": ("second",),
        "both moments were zero, not the saved ones": ("first", "second"),
    }
    for says, names in ways.items():
        if any(getattr(held, name) is None for name in names):
            continue

        def holds(part: StepCase, names: tuple[str, ...] = names) -> bool:
            """Return whether the recipe predicts `part` with the moments `names` at zero.

            `part` has some elements of one parameter before and after the step.
            """
            assert part.moments is not None
            zero: dict[str, Any] = dict.fromkeys(names, np.zeros_like(part.before))
            fit = replace(part, moments=replace(part.moments, **zero)).fit(recipe)
            return fit is not None and fit.right

        yield StepGuess("moments_lost", says, holds=holds)
    if held.step:
        says = f"the correction is that of step 1; the moments are of step {held.step}"
        yield StepGuess("step_count", says, changed(recipe, counted=1))


def is_first_step(recipe: Recipe, part: StepCase) -> bool:
    """Return whether the elements moved as in the first step of an optimizer without a state."""
    fit = replace(part, moments=None).fit(changed(recipe, step=1, counted=None))
    return fit is not None and fit.right


def guess_step_count(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that Adam's bias correction uses another step count than the state has.

    Nothing unless the state was saved after the step.
    """
    held = case.moments
    if held is None or not held.after or not recipe.row.second:
        return
    for step in dict.fromkeys((held.step - 1, held.step + 1, *_COUNTS)):
        if step < 1 or step == held.step:
            continue
        says = f"the correction is that of step {step}; the moments are of step {held.step}"

        def holds(part: StepCase, step: int = step) -> bool:
            """Return whether the recipe predicts `part` with Adam's bias correction of step `step`.

            `part` has some elements of one parameter before and after the step.
            """
            assert part.moments is not None
            other = replace(part, moments=replace(part.moments, step=step))
            fit = other.fit(recipe)
            return fit is not None and fit.right

        yield StepGuess("step_count", says, holds=holds)


def guess_first_step_count(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that a first step's bias correction uses a later step count.

    It does in a trainer that counts micro-batches. Nothing where the gradient is not known, or
    where the moments are known.
    """
    if not recipe.row.second or case.gradient is None or case.moments is not None:
        return
    for number in range(2, MICRO_BATCHES + 1):
        says = f"the moments are corrected as at step {number}, and this is the first"
        yield StepGuess("step_count", says, changed(recipe, counted=number), 1)


def guess_momentum(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that SGD's momentum is used otherwise.

    It is Nesterov's or not, left out, dampened, or multiplies the gradient in place of the buffer.
    Nothing for a recipe without momentum.
    """
    if not recipe.momentum:
        return
    if recipe.nesterov:
        says = "the momentum is not Nesterov's"
        yield StepGuess("momentum", says, changed(recipe, nesterov=False))
    elif case.gradient is not None:
        says = "the momentum is Nesterov's"
        yield StepGuess("momentum", says, changed(recipe, nesterov=True))
    if case.gradient is not None:
        says = "the step is the gradient without its momentum"
        yield StepGuess("momentum", says, changed(recipe, momentum=0.0))
        says = "the momentum multiplies the gradient, not the buffer, which never decays"
        yield StepGuess("momentum", says, changed(recipe, growing=True))
    if not recipe.dampening:
        says = f"the gradient is damped by the momentum, {recipe.momentum:g}"
        yield StepGuess("momentum", says, changed(recipe, dampening=recipe.momentum))


def guess_exchanged_betas(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that beta 1 and beta 2 are exchanged; nothing without a gradient."""
    if recipe.b1 != recipe.b2 and "b1" in recipe.row.settings and case.gradient is not None:
        says = f"the rates of the moments are exchanged: {recipe.b2:g} and {recipe.b1:g}"
        yield StepGuess("betas", says, changed(recipe, b1=recipe.b2, b2=recipe.b1))


def guess_other_betas(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that one of the moments' two decay rates is another usual one.

    Nothing without moments, or at the first step, where the rates cancel out. Of Lion, whose
    steps are signs, few elements tell rates apart: for vectors, only rates measured on other
    parameters are tried.
    """
    held = case.moments
    if held is None or held.step < 1 + held.after or "b1" not in recipe.row.settings:
        return
    rates: Sequence[float]
    for name, field, rates in (("beta 1", "b1", FIRST_RATES), ("beta 2", "b2", SECOND_RATES)):
        stated, known = getattr(recipe, field), case.others.get(field)
        if known is not None:
            rates = (known,)
        elif case.vector and not recipe.row.second:
            rates = ()
        for value in rates:
            if value != stated:
                says = f"{name} is {value:g}, stated is {stated:g}"
                one = changed(recipe, **{field: value})
                yield StepGuess("betas", says, one, number=(field, value))


HYPOTHESES = (
    StepHypothesis(("stale_moments",), guess_stale, 22, "exact, nothing is fitted"),
    StepHypothesis(
        ("moments_lost", "step_count"), guess_lost_moments, 23, "exact, after older moments"
    ),
    StepHypothesis(
        ("step_count",), guess_step_count, 24, "a count out of a few, before a fitted factor"
    ),
    StepHypothesis(
        ("step_count",), guess_first_step_count, 68, "a whole number, before a fitted factor"
    ),
    StepHypothesis(("momentum",), guess_momentum, 26, "another rule, before a fitted factor"),
    StepHypothesis(
        ("moment_rounded",), guess_rounded_moment, 33, "a type out of two, before a fitted factor"
    ),
    StepHypothesis(("betas",), guess_exchanged_betas, 28, "exact, rarer than a wrong count"),
    StepHypothesis(("betas",), guess_other_betas, 31, "a rate out of a few, after exchanged ones"),
)
