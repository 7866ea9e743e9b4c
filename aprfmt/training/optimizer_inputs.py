"""What the optimizer had for a parameter: its gradient, its moments, and norms."""

from dataclasses import replace

import numpy as np

from aprfmt.base.shapes import matrix_shape
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.training.explained_step import ExplainedStep
from aprfmt.training.parameters import Parameter
from aprfmt.training.update_check import RowReader, StepInputs

BLUR = 32.0  # of the root mean square of a trainer's rounding: no element of it is further off


def inputs_of(step: ExplainedStep, parameter: Parameter, norm: float | None) -> StepInputs:
    """Return what the optimizer had for one parameter's step: its gradient, moments and norms.

    `norm` is that of all given gradients. If none were given, the gradients computed of the batch
    are used. 8-bit moments saved after the step are left out: they were rounded since.
    """
    gradient = None if step.given is None else step.given.reader(parameter)
    if step.given is None:
        gradient = _computed_reader(step, parameter)
        norm = step.computed_norm()
    if step.clipped_before:
        norm = None
    others = {}
    facts = step.gradients.get(parameter.key)
    if facts is None and step.given is None and parameter.key in step.compared:
        facts = step.compared[parameter.key].facts
    if norm is not None and facts is not None:
        others = {"norm": norm, "own_norm": facts.norm}
        others.update((str(by), size) for by, size in step.other_norms.items())
        if (kind := step.kind_norms.get(parameter.vector)) is not None:
            others["kind_norm"] = kind
    if step.unclipped:
        others["unclipped"] = 1.0
    group = step.group_of(parameter.names[0])
    for key, name in (("rate", "lr"), ("decay", "weight_decay")):
        if isinstance(group.get(name), float):
            others[key] = group[name]
    ungiven = bool(step.gradients) and parameter.key not in step.gradients
    parts = step.part_norms if norm is not None else {}
    bare = StepInputs(gradient, others=others, part_norms=parts, ungiven=ungiven)
    if step.state is None or step.recipe is None:
        return replace(bare, idle=step.is_idle(parameter.key))
    first, second = (kept.reader(parameter) for kept in (step.state.first, step.state.second))
    after = step.has_state_after()
    if after and step.has_codes(parameter):
        first = second = None  # rounded to 8 bits after the step was made of them
    # Without a count the rule has no use for one but that it is not the first step.
    own = step.state.fewer.get(parameter.key, step.state.steps)
    steps = next((n for n in (own, step.recipe.step) if n is not None), 2)
    flags = {group.get("decoupled_weight_decay") for group in step.state.groups}
    if flags == {False}:
        others["decoupled"] = 0.0
    if first is None and second is None:
        return replace(bare, idle=step.is_idle(parameter.key))
    return replace(bare, first=first, second=second, step=steps, after=after)


def _computed_reader(step: ExplainedStep, parameter: Parameter) -> RowReader | None:
    """Return a reader of a parameter's gradient that was computed of the batch; None without one.

    The reader's `noise` (relative) and `blur` (absolute) say how far the rounding of the trainer's
    arithmetic may move its values.
    """
    if step.computed is None or parameter.key not in step.computed.keys:
        return None
    values = step.computed.gradient(parameter.key).astype(np.float64)
    values = values.reshape(matrix_shape(parameter.before.shape))
    rounding = step.computed.rounding(parameter.key) or 0.0
    # What the trainer's arithmetic may leave in one element, of the L2 distance over all.
    blur = BLUR * rounding / max(1.0, values.size**0.5)
    floor = UNIT["F32"] * float(np.abs(values).max(initial=0.0))
    size = float(np.linalg.norm(values))
    noise = max(UNIT["F32"], BLUR * rounding / size if size else 0.0)
    return RowReader(lambda start, stop: values[start:stop], noise, max(blur, floor))
