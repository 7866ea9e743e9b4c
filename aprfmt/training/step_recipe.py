"""The optimizer and its settings for each parameter, as stated and as the state has them.

A *recipe* is an optimizer with its settings and the number of the step. A *group* is a parameter
group of the optimizer's state.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from aprfmt.causes.training.optimizers import (
    CALLED,
    OPTIMIZERS,
    Recipe,
    changed,
    parse_recipe,
    parse_settings,
)
from aprfmt.errors import UsageError
from aprfmt.training.explained_step import ExplainedStep
from aprfmt.training.parameters import Parameter
from aprfmt.training.saved_arrays import OptimizerState
from aprfmt.training.update import pieces
from aprfmt.training.update_check import StepInputs


def find_recipe(step: ExplainedStep) -> Recipe | None:
    """Return the step's recipe: optimizer, settings and step number; None if nothing states one.

    Settings that --optimizer leaves out are taken from the optimizer state's groups. Raises
    UsageError if no learning rate is known, or the state is of another kind of optimizer.
    """
    if step.state is None:
        return None if step.optimizer is None else parse_recipe(step.optimizer)
    settings = _state_settings(step.state)
    stated = {} if step.optimizer is None else parse_settings(step.optimizer)
    name = stated.get("name", step.state.kind)
    if bool(step.state.factored) != (name == "adafactor"):
        kept = step.state.factored or "no second moments by row and column"
        raise UsageError(
            f"{step.state.path}: has {kept}, and --optimizer says {name}; expected the rule "
            "that made it: adafactor has moments by row and column, no other has"
        )
    if "lr" not in settings and "lr" not in stated:
        if step.optimizer is not None:
            return _with_step_number(step, parse_recipe(step.optimizer))
        raise UsageError(
            f"{step.state.path}: holds no settings of its optimizer (no param_groups with lr); "
            "give them with --optimizer adamw:lr=..."
        )
    if "lr" in stated:  # a rule that states its rate is complete
        assert step.optimizer is not None
        return _with_step_number(step, _with_direction(step, parse_recipe(step.optimizer)))
    name = str(stated.get("name", step.state.kind))
    known = {"lr", "wd", *OPTIMIZERS[name].settings}
    held = {key: value for key, value in settings.items() if key in known}
    text = ",".join(f"{key}={value}" for key, value in held.items())
    step.notes.append(f"settings of the optimizer are those of its state: {name}:{text}")
    recipe = parse_recipe(f"{name}:{text}")
    return _with_step_number(step, _with_direction(step, changed(recipe, **stated)))


def _with_direction(step: ExplainedStep, recipe: Recipe) -> Recipe:
    """Return the recipe, which goes up the gradient if the optimizer's state says `maximize`.

    A note is added then.
    """
    assert step.state is not None
    if not any(group.get("maximize") is True for group in step.state.groups):
        return recipe
    step.notes.append("the state says maximize: the step goes up the gradient")
    return changed(recipe, scale=-1.0)  # torch turns the gradient before all else


def _with_step_number(step: ExplainedStep, recipe: Recipe) -> Recipe:
    """Return the recipe with the step number of the optimizer's state, if --optimizer gives none.

    Raises UsageError if Adam's step number is in neither, or the state is of another step than
    this one or the one before.
    """
    if step.state is None:
        return recipe
    steps = step.state.steps
    if steps is None and recipe.step is None and recipe.row.second:
        raise UsageError(
            f"{step.state.path}: does not say how many steps were made; add step=N to --optimizer"
        )
    if steps is None or recipe.step is None:
        # A state of no steps is that of before the first.
        return changed(recipe, step=recipe.step if steps is None else max(1, steps))
    if recipe.step not in (steps, steps + 1):
        raise UsageError(
            f"{step.state.path}: is of step {steps}; expected that of step {recipe.step}, or "
            f"of {recipe.step - 1} before it"
        )
    return recipe


def recipe_of(step: ExplainedStep, parameter: Parameter) -> Recipe:
    """Return the recipe of one parameter: the step's, with the settings of its optimizer group.

    Learning rate and weight decay are those of the parameter's group in the optimizer's state, and
    so are settings that --optimizer does not state. Without a state, or if --optimizer states a
    rate that no group has, the step's common settings hold. Only token tables have sparse updates.
    """
    assert step.recipe is not None
    recipe = step.recipe
    if recipe.sparse and "embd" not in parameter.key:
        recipe = changed(recipe, sparse=False)
    if step.state is not None and step.state.steps is not None and recipe.step is not None:
        less = step.state.steps - step.state.fewer.get(parameter.key, step.state.steps)
        recipe = changed(recipe, step=max(1, recipe.step - less))
    stated = {} if step.optimizer is None else parse_settings(step.optimizer)
    if step.state is None or ("lr" in stated and not step.has_rates(stated["lr"])):
        return recipe
    found = step.state.group_of(parameter.names[0])
    values = _group_settings(found)
    values = {
        field: value
        for field, value in values.items()
        if field in ("lr", "wd", *step.recipe.row.settings)
        and (field not in stated or field in ("lr", "wd"))
    }
    if "wd" in values and "decay_on" not in stated:
        values["decay_on"] = "all"
    first = found.get("initial_lr")
    if step.schedule is not None and isinstance(first, int | float):
        values["lr"] = first * step.schedule
    return changed(recipe, **values)


def adafactor_recipe(
    step: ExplainedStep, parameter: Parameter, recipe: Recipe, held: StepInputs
) -> Recipe:
    """Return the recipe with the factor that Adafactor puts on one parameter's learning rate.

    The rate is multiplied by the weight's root mean square if it is scaled by the parameter; the
    step is divided by its own root mean square if that is above the threshold, 1. torch also
    bounds the rate by one over the root of the step number; transformers scales the decay with the
    rate. Unchanged without gradient or second moments. Sources: torch.optim.Adafactor,
    transformers.optimization.Adafactor.
    """
    if step.state is None or held.gradient is None or held.second is None or not recipe.lr:
        return recipe
    group = step.state.group_of(parameter.names[0])
    squares = weights = count = 0.0
    for start, stop, values, _ in pieces(parameter.before, parameter.after):
        root = np.sqrt(np.maximum(held.second.rows(start, stop), 0.0))
        change = held.gradient.rows(start, stop) / np.where(root == 0, 1.0, root)
        squares += float(np.square(change).sum())
        weights += float(np.square(values, dtype=np.float64).sum())
        count += change.size
    threshold = next((group[key] for key in ("d", "clip_threshold") if key in group), 1.0)
    of_torch = "clip_threshold" not in group
    smallest = group.get("eps", (None, 1e-3))
    least = float(smallest[1]) if isinstance(smallest, list | tuple) else 1e-3
    rate = recipe.lr
    if of_torch and recipe.step is not None:
        rate = min(rate, recipe.step**-0.5)
    size = max(least, (weights / count) ** 0.5)
    scaled = of_torch or group.get("scale_parameter") is True
    if scaled:
        rate *= size
    decay = recipe.decay_factor if of_torch else recipe.decay_factor * rate / recipe.lr
    over = max(1.0, (squares / count) ** 0.5 / float(threshold))
    relative = rate / over / recipe.lr
    return changed(recipe, relative=relative, decay_factor=decay, size=size, size_scaled=scaled)


def _state_settings(state: OptimizerState) -> dict[str, float]:
    """Return {field of Recipe: value} from all groups of a state; the largest weight decay counts.

    Zeros are left out, except a learning rate of zero.
    """
    found: dict[str, float] = {}
    for group in state.groups:
        for name, value in _group_settings(group).items():
            found[name] = max(found.get(name, 0.0), value) if name == "wd" else value
    return {name: value for name, value in found.items() if value or name == "lr"}


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return {field of Recipe: value} of one parameter group of a state.

    `step`, `clip` and settings that a recipe does not have are left out.
    """
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name == "betas" and isinstance(value, list) and len(value) == 2:
            found["b1"], found["b2"] = (float(each) for each in value)
        elif name == "nesterov":
            found["nesterov"] = value is True
        elif name in CALLED and isinstance(value, int | float) and not isinstance(value, bool):
            found[CALLED[name]] = float(value)
    return {
        name: value for name, value in found.items() if name not in ("step", "clip", "clip_value")
    }
