"""Usual mistakes in runs that are rounded as well: larger than the rounding, or inside it."""

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from aprfmt.causes.forward.mismatch import Mismatch
from aprfmt.diagnosis.accumulated_rounding import supposed, with_direction
from aprfmt.diagnosis.answers import Divergence, Solution, agreement, scopes_of, weights_inside
from aprfmt.diagnosis.search import Search
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import ShadowPass, shadow_pass

Array = NDArray[Any]
NEAR = 4  # usual mistakes beside which a run may be rounded
NEARLY = 0.1  # such a mistake leaves this share of the difference at most
FAINT = 0.8  # a mistake inside the rounding leaves this share of the difference at most


def find_faint_mistakes(
    case: Mismatch, search: Search
) -> tuple[Divergence, PatchedModel, RecordedTrace, str] | None:
    """Return the usual mistake that, once removed, leaves only rounding; None if no one does.

    It has to take away nearly all of the difference; what it leaves has to be what TF32 or 16 bits
    make, at every point and in every row.
    """
    assert case.view.residual is not None
    near = sorted(search.singles, key=lambda one: one.residual)[:NEAR]
    for one in near:
        change = one.steps[0].change
        if one.residual > NEARLY * case.view.residual:
            break
        for layers in dict.fromkeys((one.steps[0].layers, *scopes_of(case, change))):
            patched = change.make(case.patched, layers)
            left = shadow_pass(patched, case.recorded)
            guess = supposed(patched, case.recorded, left, 1.0) if left.flagged else None
            if guess is not None:
                recorded, says = guess
                agrees = agreement(case, shadow_pass(patched, recorded))
                answer = Solution(
                    change, layers, one.residual, None, math.inf, patched, recorded, agrees
                )
                return Divergence(case.view, answer), patched, recorded, says
    return None


def faint_in(
    patched: PatchedModel, recorded: RecordedTrace, found: ShadowPass, plain: Mapping[str, Array]
) -> list[Divergence]:
    """Return the usual mistake that lies in a difference no larger than the run's own rounding.

    It is never confirmed: taking it away takes away a part only. Where none does, it is not known
    whether the run is only rounded, and that is said.
    """
    view = with_direction(patched, recorded, found)
    if view is None or not view.residual:
        return []
    case = Mismatch(patched, recorded, view, found, plain)
    search = Search(case)
    search.run(joined=False)
    best = min(search.singles, key=lambda one: one.residual, default=None)
    if best is None or best.residual > FAINT * view.residual:
        return [Divergence(view, None, (), "", weights_inside(case), search.tried)]
    step = best.steps[0]
    answer = Solution(
        step.change, step.layers, best.residual, None, math.inf, case.patched, case.recorded
    )
    return [Divergence(view, answer, faint=True)]
