"""A constant, or the signs of the weight, added to the gradient or taken from the weight.

The weight decay of a rule is a multiple of the weight. A decay that adds something else shows it
in the update: the gradient that the optimizer must have used is the given one and a constant, or
a constant with the sign of each weight (L1 regularization).
"""

from collections.abc import Iterator

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import Recipe, changed, offset_units
from aprfmt.causes.training.step_case import ARITHMETIC, StepCase, StepGuess, StepHypothesis
from aprfmt.measure.verdicts import Certainty

CAUSE_ROWS = (
    Cause(
        "decay_constant",
        "update",
        "bug",
        "A constant is added to the gradient of a tensor, or taken from its weights, and not a "
        "multiple of the weight: the decay times a number, such as the parameter's own.",
        "Without the stated decay, what the update has besides the gradient is one number in all "
        "elements.",
        "The step of gradient and constant gives every weight that was not used to measure it.",
        told_by="--grads",
    ),
    Cause(
        "decay_of_signs",
        "update",
        "bug",
        "The weight decays by a constant with the sign of each weight (L1 regularization), and not "
        "by a multiple of the weight (L2).",
        "Without the stated decay, what the update has besides the gradient is of one size, and "
        "has the weight's sign.",
        "The step with that constant gives every weight that was not used to measure it.",
        told_by="--grads",
    ),
)
WORDS = {
    "ones": ("decay_constant", "a constant in each tensor is"),
    "signs": ("decay_of_signs", "a constant with the sign of each weight is"),
}
FEWEST = 8  # elements that have to tell a constant
LEAST = 1e-3  # of the gradient's median size: less is what its own rounding makes
KNOWN = 0.5  # of a constant: it is measured if its bounds are no further apart
WRITTEN = 4  # digits of a number that somebody wrote


def guess_constants(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that a constant, or one with the weight's signs, stands in place of the decay.

    It is added to the gradient, or taken from the weight if decay is decoupled. A constant that is
    added besides the stated decay is tried, too. Nothing where the gradient is not known or is in
    the stored moments already, and for weights stored in BF16 or F16.
    """
    after = case.moments is not None and case.moments.after
    if case.gradient is None or case.signs or case.coarse or after:
        return
    decays = recipe.decays(case.vector)
    apart = not recipe.adds_decay_to_gradient
    for of, (cause, what) in WORDS.items():
        for kept in (0.0, 1.0) if decays else (1.0,):
            for from_weight in (True, False) if apart else (False,):
                plain = changed(
                    recipe, decay_factor=kept, offset_of=of, offset_from_weight=from_weight
                )
                found = _measured(case, plain)
                if found is None:
                    continue
                offset, shown = found
                where = "taken from the weight" if from_weight else "added to the gradient"
                says = f"{what} {where}"
                if recipe.wd:
                    besides = decays and kept
                    says += ", besides the decay" if besides else ", and no share of the weight"
                made = changed(plain, offset=offset)
                own = _offset_text(offset, recipe.wd) if shown else ""
                most: Certainty = "confirmed" if shown else "located"
                yield StepGuess(cause, says, made, 1, most=most, own=own)


def _measured(case: StepCase, recipe: Recipe) -> tuple[float, bool] | None:
    """Return (constant that a recipe lacks, whether the elements show its size); None without one.

    A number with few digits, or a multiple of the decay, is taken where it is as good as the
    measured one.
    """
    plain = case.fit(changed(recipe, offset=0.0))
    if plain is None or plain.right:
        return None
    linear = recipe.offset_from_weight or not recipe.row.sizes
    half = case.part(np.arange(case.before.size) % 2 == 0)  # the other half judges the number
    found = _solved(half, recipe) if linear else _between_signs(case, recipe)
    if found is None:
        return None
    low, high = found
    if low <= 0 <= high:
        return None
    if np.isfinite(high - low) and high - low <= KNOWN * max(abs(low), abs(high)):
        return _written(low, high, recipe.wd), True
    if recipe.offset_of == "signs":
        return None  # a large decay of the usual kind makes the same signs
    near = 2 * (low if low > 0 else high)
    if not low < near < high:
        near = (low + high) / 2
    return (near, False) if np.isfinite(near) else None


def _solved(case: StepCase, recipe: Recipe) -> tuple[float, float] | None:
    """Return (least, largest) constant, for a step that is linear in it; None where none fits."""
    none = case.fit(changed(recipe, offset=0.0))
    one = case.fit(changed(recipe, offset=1.0))
    if none is None or one is None:
        return None
    slope = one.update.whole - none.update.whole
    some = slope != 0
    if np.count_nonzero(some) < FEWEST:
        return None
    rest = case.change - none.update.whole
    room = case.rounding + case.noise * np.abs(none.update.step)
    each, off = rest[some] / slope[some], room[some] / np.abs(slope[some])
    low, high = float((each - off).max()), float((each + off).min())
    if low > high:  # rounding is no hard bound of every element
        middle = float(np.median(each))
        low, high = middle - float(off.min()), middle + float(off.min())
    return low, high


def _between_signs(case: StepCase, recipe: Recipe) -> tuple[float, float] | None:
    """Return (least, largest) constant with which each element steps in its direction.

    For rules whose first step has one size: the direction of an element's step bounds the constant
    from one side, and what epsilon takes away from a short one bounds it from both. That one
    constant is within the bounds of all elements is what they judge. An end is infinite where no
    element bounds it. None where no constant will do.
    """
    if case.moments is not None or not recipe.lr or recipe.step not in (None, 1):
        return None
    plain = case.fit(changed(recipe, offset=0.0))
    if plain is None or case.gradient is None:
        return None
    step = (case.change - plain.update.decay) / recipe.lr
    room = case.rounding / recipe.lr + ARITHMETIC
    unit = offset_units(recipe, case.before)
    sure = (np.abs(step) > 2 * room) & (unit != 0)
    if np.count_nonzero(sure) < FEWEST:
        return None
    there = recipe.scale * case.gradient
    if recipe.adds_decay_to_gradient and recipe.decays(case.vector):
        there = there + recipe.wd * recipe.decay_factor * case.before
    # A step of 1 - eps / g rates is of the gradient g; one of a whole rate is of any above that.
    eps = recipe.eps if "eps" in recipe.row.settings else 0.0
    least, most = (np.abs(step) + side * room for side in (-1.0, 1.0))
    with np.errstate(divide="ignore"):
        far = np.where(most < 1, eps * most / (1 - most), np.inf)
    near = eps * least / np.maximum(1 - least, room)
    sign = -np.sign(step) * recipe.sign
    ends = np.stack([sign * near, sign * far])[:, sure]
    bounds = np.sort((ends - there[sure]) / unit[sure], axis=0)
    low, high = float(bounds[0].max()), float(bounds[1].min())
    if max(abs(low), abs(high)) < LEAST * float(np.median(np.abs(there))):
        return None
    return (low, high) if low < high else None


def _offset_text(offset: float, decay: float) -> str:
    """Return a constant as text, with the multiple of the stated decay that it is, if it is one."""
    times = round(offset / decay) if decay else 0
    if times and abs(times * decay - offset) <= 1e-4 * abs(offset):
        return f"{offset:.4g} ({times} times the decay)"
    return f"{offset:.4g}"


def _written(low: float, high: float, decay: float) -> float:
    """Return the number between `low` and `high` that a program most likely has there.

    A whole multiple of the decay if the interval has just one, else the number of the fewest
    digits, else the middle.
    """
    if decay and 0 < (high - low) < decay:
        times = np.ceil(low / decay)
        if times and times * decay <= high:
            return float(times * decay)
    middle = (low + high) / 2
    for digits in range(1, WRITTEN + 1):
        if low <= (near := float(f"{middle:.{digits}g}")) <= high:
            return near
    return middle


HYPOTHESES = (
    StepHypothesis(
        ("decay_constant", "decay_of_signs"),
        guess_constants,
        62,
        "one number is fitted, after the share that decays",
        whole=True,
    ),
)
