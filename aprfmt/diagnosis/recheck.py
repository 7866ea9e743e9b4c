"""Judges earlier answers again with what is known at the end.

When the first of several faults is met, the others hide what would tell its explanations apart.
With all of them put right, an explanation in the place of the chosen one either agrees as well or
does not; and a point that agrees as it was recorded was not taken elsewhere.
"""

from collections.abc import Sequence
from dataclasses import replace

from aprfmt.causes.forward.mismatch import Change, Layers
from aprfmt.diagnosis.answers import Divergence
from aprfmt.inference.replay.patched_model import MOVES, PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import ShadowPass, shadow_pass

MOST = 16  # passes
_COMMON = {"add", "linear", *MOVES}  # operations of nearly every point
LayerChanges = list[tuple[Change, Layers]]


def recheck_answers(
    divergences: Sequence[Divergence],
    patched: PatchedModel,
    recorded: RecordedTrace,
    final: ShadowPass,
) -> list[Divergence]:
    """Return the divergences without explanations that the others disprove.

    `world` and `recorded` are those before any change, `final` the pass with all changes.
    """
    divergences = [replace(d, doubtful=_doubtful(d, divergences)) for d in divergences]
    answered = [d for d in divergences if d.answer is not None]
    if sum(not d.answer.change.drop for d in answered if d.answer is not None) < 2:
        return divergences
    bound = {view.key for view in final.flagged}
    left = MOST

    def agrees(steps: LayerChanges) -> bool:
        nonlocal left
        left -= 1
        found = shadow_pass(*_applied(patched, recorded, steps))
        return {view.key for view in found.flagged} <= bound

    kept: list[Divergence] = []
    for divergence in divergences:
        answer, others = divergence.answer, []
        rest = [d for d in divergences if d is not divergence]
        if answer is not None and answer.change.drop and left > 0 and agrees(_steps(rest)):
            continue  # the point agrees as it was recorded: it was not taken elsewhere
        for other in divergence.others:
            own = replace(divergence, answer=other)
            steps = _steps([own if d is divergence else d for d in divergences])
            if left <= 0 or agrees(steps):
                others.append(other)
        kept.append(replace(divergence, others=tuple(others)))
    return kept


def _doubtful(divergence: Divergence, divergences: Sequence[Divergence]) -> bool:
    """Say whether a loose fit does not explain the same operations at another point.

    Several changes together, or one with a free value for every column, fit one point by chance
    where a change that nobody tried is the cause.
    """
    ops = {call.op for call in divergence.view.calls} - _COMMON
    answer = divergence.answer
    loose = divergence.joined or (answer is not None and answer.change.general)
    return loose and any(
        other.answer is None and not other.likely and ops & {call.op for call in other.view.calls}
        for other in divergences
    )


def _steps(divergences: Sequence[Divergence]) -> LayerChanges:
    return [(d.answer.change, d.answer.layers) for d in divergences if d.answer is not None]


def _applied(
    patched: PatchedModel, recorded: RecordedTrace, steps: LayerChanges
) -> tuple[PatchedModel, RecordedTrace]:
    """Return the pass with changes made one after the other, and the trace without their keys."""
    without = set(recorded.without)
    for change, layers in steps:
        patched = change.make(patched, layers)
        without |= change.drop
    return patched, recorded.leaving(without)
