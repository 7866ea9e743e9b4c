"""Judges a trainer's gradient by the computed one: which mistake or which rounding explains it."""

from collections.abc import Sequence

import numpy as np

from aprfmt.causes.training.gradient_case import GradientCase, GradientGuess
from aprfmt.causes.training.step_case import StepGuess
from aprfmt.causes.training.table import GRADIENTS
from aprfmt.training.judgement import ENOUGH, Judgement

# A gradient is what rounding leaves of zero where it is this small against a trainer's rounding.
NOTHING = 1e-6
# Such a one may be this many times what one pass shows: another order of adding leaves another.
LEFT = 32.0
# Where rounding chooses other experts, two passes of a trainer differ by up to this many times what
# the one computed here does: of few tokens, those that change in the one may all stay in the other.
CHOSEN = 8.0


def judge_gradient(
    case: GradientCase,
    rounding: float | None = None,
    *,
    stated: bool = False,
    floor: float = 0.0,
    flips: Sequence[str] = (),
) -> Judgement:
    """Return the verdict on a trainer's gradient against the computed one, with its mistakes.

    `guesses` are the mistakes that explain it. A fitted number is found on one half of the elements
    and judged on the other half. `rounding` is the L2 distance that the trainer's arithmetic alone
    makes of this gradient. "not compared" where that may explain the difference, or arithmetic in
    few bits, unless it is `stated` what the trainer computes in. Two gradients with norms of at
    most `floor` are zero up to rounding. `flips` are routers that chose other experts in the
    trainer's arithmetic: its own passes may differ by as much, and by more.
    """
    if case.right:
        return Judgement("agrees", whole=True)
    if floor and max(np.linalg.norm(case.given), np.linalg.norm(case.computed)) <= floor:
        return Judgement("agrees", whole=True)
    if rounding is not None:
        apart = float(np.linalg.norm(case.given - case.computed))
        size = float(np.linalg.norm(case.computed))
        if size <= NOTHING * rounding and apart <= LEFT * rounding:
            return Judgement("agrees", whole=True)
        if (found_rounded := judge_rounding(apart, size, rounding)) is not None:
            return found_rounded
    case = case.with_rounding(rounding)
    first, second = case.half(0), case.half(1)
    found: list[StepGuess | GradientGuess] = []
    for row in GRADIENTS:
        for guess in row.find(case if row.whole else first):
            if guess.free and second.given.size < ENOUGH * guess.free:
                continue
            if guess.right(case) and (row.whole or guess.right(second)):
                found.append(guess)
    why = f"the relative distance to the gradient computed here is {case.distance:.3g}"
    if not found and flips and case.rounding and case.distance <= CHOSEN * case.rounding:
        why += f", as other experts may leave it: the trainer's rounding chooses some at {flips[0]}"
        return Judgement("not compared", why, whole=True)
    if not found and case.rounded and not stated:
        why += ", as few bits may leave it: --trained-in bfloat16, or float32, says which it was"
        return Judgement("not compared", why, whole=True)
    return Judgement("differs", why, tuple(found), True)


def judge_rounding(apart: float, size: float, rounding: float) -> Judgement | None:
    """Return the verdict on a gradient whose error rounding explains; None where it does not.

    `apart` is its distance from the right one, `size` the norm of that, `rounding` what the
    trainer's arithmetic leaves; all L2. "not compared" where rounding may be all of the gradient.
    """
    if apart > 2 * rounding:
        return None
    if rounding <= size / 4:
        return Judgement("agrees", whole=True)
    share = f"{rounding / size:.2g} of the gradient itself" if size else "larger than the gradient"
    return Judgement("not compared", f"the trainer's rounding is {share}", whole=True)
