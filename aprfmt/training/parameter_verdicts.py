"""The verdict on each parameter of a step: its gradient, and its change."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from aprfmt.causes.training.optimizers import Recipe, changed, parse_settings
from aprfmt.causes.training.step_case import StepGuess
from aprfmt.training.explained_step import ComparedGradient, ExplainedStep
from aprfmt.training.judgement import Judgement
from aprfmt.training.optimizer_inputs import inputs_of
from aprfmt.training.parameters import Parameter
from aprfmt.training.report import TensorStep, UpdateFacts
from aprfmt.training.step_recipe import adafactor_recipe, recipe_of
from aprfmt.training.update import Sums, pieces, same_bytes
from aprfmt.training.update_check import (
    StepInputs,
    is_idle,
    judge_count,
    judge_moments,
    judge_update,
    moved_without_gradient,
)


def judge_parameters(
    step: ExplainedStep,
    updates: bool,
    norm: float | None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[TensorStep], dict[str, Judgement]]:
    """Return (the report's row of every parameter, {key: verdict to find causes by}).

    `updates`: a checkpoint of after the step was given. `norm` is that of all given gradients.
    Parameters of which nothing was compared are not in the dict. `progress` gets (done, all).
    """
    rows: list[TensorStep] = []
    judged: dict[str, Judgement] = {}
    for number, parameter in enumerate(step.parameters, 1):
        row, found = _judge_parameter(step, parameter, updates, norm)
        rows.append(row)
        if found is not None:
            judged[parameter.key] = found
        parameter.drop()
        if progress is not None:
            progress(number, len(step.parameters))
    return rows, judged


def judge_change(
    step: ExplainedStep, parameter: Parameter, recipe: Recipe, held: StepInputs
) -> Judgement:
    """Return the verdict on one parameter's change: the recipe gives it, or not.

    `held` is what the optimizer had: gradient, moments. If the change differs, and the state may be
    the one before the step, that is tried too; then `step.used` gets the parameter's key.
    """
    if recipe.name == "adafactor":
        recipe = adafactor_recipe(step, parameter, recipe, held)
    state = step.state
    if state is not None and parameter.key in state.fewer and is_idle(parameter, held):
        why = f"made {held.step} of {state.steps} steps, and none now: it did not move"
        return Judgement("not compared", why)
    found = judge_update(parameter, recipe, held)
    if held.ungiven and step.state is not None and step.state.steps is None:
        # A state without step counts may be that of before the step.
        before = replace(held, step=max(1, held.step - 1), after=False)
        alone = moved_without_gradient(parameter, recipe, before)
        found = found if alone is None else alone
    counted = state is not None and state.steps is not None
    if found.verdict == "agrees" and counted and not step.has_codes(parameter):
        found = judge_count(parameter, recipe, held) or found
    if found.verdict == "agrees":
        found = _check_moments(step, parameter, recipe, held, found)
    if found.verdict == "differs" and _may_be_state_before(step, held):
        first = 1 if held.first is None else held.step
        number = first if step.state is None or step.state.steps is None else held.step + 1
        before = replace(held, step=held.step if counted else first - 1, after=False)
        other = judge_update(parameter, changed(recipe, step=number), before)
        if other.verdict == "agrees" or (other.guesses and not found.guesses):
            step.used.add(parameter.key)
            found = other
    found = _judge_never_seen(step, parameter, recipe, held, found)
    return _leave_open_if_signs_unknown(
        step, parameter, held, _leave_open_if_state_unused(step, parameter, found)
    )


def _judge_never_seen(
    step: ExplainedStep, parameter: Parameter, recipe: Recipe, held: StepInputs, found: Judgement
) -> Judgement:
    """Return "differs" if the optimizer's state lacks this parameter, as never seen; else `found`.

    Such a parameter did not move although it has a gradient, and the state has moments of others
    and none of it. Its missing first step must be large enough to show in the stored type.
    """
    state = step.state
    if found.verdict != "not compared" or state is None or step.given is None:
        return found
    unknown = state.indexed and state.left
    coded = parameter.names[0] in step.names_in_8_bits()
    moments = held.first is not None or held.second is not None
    if unknown or coded or moments or held.gradient is None or not recipe.keeps_moments:
        return found
    gradient = step.gradients.get(parameter.key)
    if not state.first.placed or gradient is None or not gradient.largest:
        return found
    first = judge_update(parameter, changed(recipe, step=1), held)
    frozen = next((each for each in first.guesses if each.cause == "frozen"), None)
    if not isinstance(frozen, StepGuess):
        return found
    says = "did not move, and the optimizer's state has nothing of it: it is in no group"
    return replace(first, why=says, guesses=(replace(frozen, says=says),))


def _leave_open_if_state_unused(
    step: ExplainedStep, parameter: Parameter, found: Judgement
) -> Judgement:
    """Return "not compared" for a differing `found` if the state has an array that no rule uses.

    An example is the remainder of Kahan summation: a rule not known here may have made the step.
    """
    names = {} if step.state is None else step.state.unused
    name = names.get(parameter.names[0]) or names.get(parameter.key)
    if found.verdict != "differs" or name is None:
        return found
    why = f"the state has {name}, which no rule here uses: the step may be that of another rule"
    return replace(found, verdict="not compared", why=why, guesses=())


def _check_moments(
    step: ExplainedStep, parameter: Parameter, recipe: Recipe, held: StepInputs, found: Judgement
) -> Judgement:
    """Return the verdict on a right update after checking its moments for the given gradient.

    `found` is the verdict on the update, which moments saved after the step give by themselves.
    Where the check was possible, the parameter's key is added to `step.used`.
    """
    if step.given is None or held.gradient is None:
        return found
    if held.first is None or not held.after or recipe.nesterov or recipe.name == "lion":
        step.used.add(parameter.key)  # the step was made of it
        return found
    other = judge_moments(parameter, recipe, held)
    if other is None:
        return found
    step.used.add(parameter.key)
    if other.verdict == "agrees":
        return replace(found, clipped=other.clipped or found.clipped)
    return replace(found, verdict="differs", why=other.why, guesses=other.guesses, whole=True)


def _may_be_state_before(step: ExplainedStep, held: StepInputs) -> bool:
    """Return whether the optimizer's state may have been saved before the step instead of after it.

    It may if the gradient is given, and either the state or --optimizer leaves out the step number.
    """
    if step.state is None or held.gradient is None or not held.after:
        return False
    stated = {} if step.optimizer is None else parse_settings(step.optimizer)
    return (held.first is not None) and (step.state.steps is None or "step" not in stated)


def _leave_open_if_signs_unknown(
    step: ExplainedStep, parameter: Parameter, held: StepInputs, found: Judgement
) -> Judgement:
    """Return "not compared" if a parameter's steps agree only in size, not in sign; else `found`.

    Sizes do not show that a parameter is right if gradients or moments were given, and its own are
    missing.
    """
    if found.verdict != "agrees" or not found.signs or held.idle:
        return found
    if step.state is not None and parameter.names[0] in step.names_in_8_bits():
        why = (
            "its moments were rounded to 8 bits after the step; give those of before it and --grads"
        )
    elif step.state is not None and step.state.steps != 0:
        why = "the optimizer's state has no moments of it"
        if step.state.indexed and not step.state.recognized and step.state.left:
            why = "no number of the optimizer's state is known to be its own"
    elif step.given is not None:
        why = "no gradient of it was given"
    else:
        return found
    return replace(found, verdict="not compared", why=why)


def _judge_parameter(
    step: ExplainedStep, parameter: Parameter, updates: bool, norm: float | None
) -> tuple[TensorStep, Judgement | None]:
    """Return (the report's row of one parameter, the verdict to find causes by or None).

    `updates`: a checkpoint of after the step was given. `norm` is that of all given gradients. The
    verdict is None if nothing was compared, or the gradient is not finite.
    """
    before = parameter.before
    paired = updates and parameter.after is not None
    facts, size = None, None
    if paired and same_bytes(parameter):
        facts = UpdateFacts(int(np.prod(before.shape)), 0, 0, 0.0, 0.0)
    elif paired:
        sums = Sums()
        for _, _, values, after in pieces(before, parameter.after):
            assert after is not None
            sums.add(values, after, before.encoding)
        facts, size = sums.facts(), sums.weight**0.5
    gradient = step.gradients.get(parameter.key)
    row = TensorStep(
        parameter.key, parameter.names, before.shape, before.encoding, size, gradient, update=facts
    )
    one = step.compared.get(parameter.key, ComparedGradient())
    wrong = one.found
    row = replace(row, computed=one.facts, distance=one.distance, why=one.why)
    if wrong is not None:
        row = replace(row, verdict=wrong.verdict, why=wrong.why)
    if gradient is not None and gradient.nonfinite:
        why = f"its gradient holds {gradient.nonfinite} NaN or infinite numbers"
        return replace(row, verdict="differs", why=why), None
    if not paired:
        why = row.why or "no batch says its gradient, and no checkpoint is of after the step"
        if step.given is None and step.computed is not None:
            why = row.why or "computed, and nothing to hold it against: give --grads, or --after"
        return replace(row, why=why if row.verdict == "not compared" else row.why), wrong
    if step.recipe is None:
        if row.verdict == "differs":
            return row, wrong
        why = row.why or "no --optimizer says what the step was to do"
        return replace(row, verdict="not compared", why=why), wrong
    recipe = recipe_of(step, parameter)
    found = judge_change(step, parameter, recipe, inputs_of(step, parameter, norm))
    assert row.update is not None
    step.ruled.discard(parameter.key)
    if found.verdict == "agrees" and found.shows and not found.signs and gradient is not None:
        step.ruled.add(parameter.key)
    update = replace(row.update, step=found.step, decay=found.decay, arrived=found.arrived)
    row = replace(row, update=update)
    if row.verdict == "differs" and found.verdict != "differs":
        return row, wrong
    if one.why and found.verdict == "agrees":  # the gradient could not be compared
        return replace(row, verdict="not compared"), found
    guesses = (*(() if wrong is None else wrong.guesses), *found.guesses)
    row = replace(row, verdict=found.verdict, why=found.why)
    return row, replace(found, guesses=guesses)
