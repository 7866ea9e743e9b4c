"""Begins the explanation of a step: its parameters, its recipe, and what cannot be compared."""

from collections.abc import Sequence

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.inference.gradients.given_points import ROLES_WITHOUT_GRADIENT
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.model.ledger import NotCompared, array_items
from aprfmt.training.explained_step import ExplainedStep
from aprfmt.training.parameters import Parameter
from aprfmt.training.step_recipe import find_recipe
from aprfmt.training.update import pieces


def _left_out_of_names(step: ExplainedStep) -> list[str]:
    """Return, quoted, the prefixes and endings that gradients' names add to those of weights."""
    found: dict[str, None] = {}
    for row in step.parameters if step.given is not None else ():
        assert step.given is not None
        place = step.given.placed.get(row.key)
        for name in () if place is None else place.names:
            own = next((each for each in row.names if each in name), name)
            found |= dict.fromkeys(each for each in name.split(own, 1) if each)
    return [f"'{each}'" for each in found]


def _leave_out_choices(step: ExplainedStep) -> None:
    """Move parameters that by their nature get no gradient from `step.parameters` to `step.left`.

    ROLES_WITHOUT_GRADIENT lists them. A parameter with a saved gradient or moment stays, and so
    does one with NaN or infinity.
    """
    kept = []
    states = () if step.state is None else (step.state.first, step.state.second)
    stores = [each for each in (step.given, *states) if each is not None]
    for row in step.parameters:
        role = split_key(row.key)[1]
        begin = next((each for each in ROLES_WITHOUT_GRADIENT if role.startswith(each)), None)
        saved = any(row.key in each.placed for each in stores)
        if begin is None or saved or not _is_finite(row):
            kept.append(row)
            continue
        why = ROLES_WITHOUT_GRADIENT[begin]
        step.left.append(NotCompared("parameter", row.key, "no counterpart", why))
    step.parameters = kept


def _is_finite(parameter: Parameter) -> bool:
    """Return whether a parameter holds no NaN and no infinity after the step, if that is given."""
    if parameter.after is None or parameter.after.encoding not in UNIT:
        return True
    sides = pieces(parameter.before, parameter.after)
    return all(after is not None and bool(np.isfinite(after).all()) for _, _, _, after in sides)


def lora_pairs(parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    """Return {key of a LoRA factor A or B: the parameter of the other factor of its weight}."""
    known = {row.key: row for row in parameters}
    found = {}
    for key in known:
        for end, other in ((".lora_a", ".lora_b"), (".lora_b", ".lora_a")):
            partner = key.removesuffix(end) + other
            if key.endswith(end) and partner in known:
                found[key] = known[partner]
    return found


def set_up_step(step: ExplainedStep) -> None:
    """Set a step's LoRA pairs and recipe, and list in `step.left` the arrays of no known parameter.

    Parameters that get no gradient by their nature are moved to `step.left`, too. Raises UsageError
    if the recipe cannot be known.
    """
    _leave_out_choices(step)
    step.pairs = lora_pairs(step.parameters)
    step.recipe = find_recipe(step)
    why = "it is of no parameter of the model"
    names = () if step.given is None else step.given.unplaced
    step.left += [NotCompared("gradient", name, "unreadable", why) for name in names]
    unread = step.facts.unread if step.checker is None else step.checker.unread
    step.left += array_items("batch array", unread)
    step.left += array_items("state array", () if step.state is None else step.state.unread)
    entries = () if step.state is None else step.state.left
    why = "which parameter it is of is not known"
    step.left += [NotCompared("moment", name, "unreadable", why) for name in entries]
    if step.state is not None and step.state.recognized:
        step.notes.append(
            "numbers of the state were told by the steps that their moments make, and by the "
            "order of layers and of modules in them"
        )
    if around := _left_out_of_names(step):
        step.notes.append(f"names of the gradients are read without {' and '.join(around)}")
