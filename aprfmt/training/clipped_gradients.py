"""Whether the given gradients are those of after clipping, and which clipping it was."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from aprfmt.base.shapes import matrix_shape
from aprfmt.causes.training.backward_case import BackwardGuess
from aprfmt.causes.training.clipped_parts import clipping_by_part, counted_norms, part_norms
from aprfmt.causes.training.clipped_shards import shard_clipping
from aprfmt.causes.training.clipping import (
    CLIPPED_BY,
    CLIPS,
    ON_PURPOSE,
    Clipping,
    other_norm_clipping,
    row_clipping,
    scaled_bound,
    tensor_clipping,
    value_clipping,
)
from aprfmt.causes.training.gradient_case import GradientCase
from aprfmt.causes.training.optimizers import F64
from aprfmt.causes.training.step_size import SLACK, simple_value
from aprfmt.training.backward_mistakes import accept_mistake
from aprfmt.training.explained_step import ExplainedStep
from aprfmt.training.gradient_comparison import gradient_case
from aprfmt.training.judgement import Judgement
from aprfmt.training.parameters import Parameter


def accept_clipping(step: ExplainedStep, norm: float) -> None:
    """Find whether the given gradients are the computed ones clipped, and set their verdicts so.

    Changes `step.compared`: to "agrees", with a note, for usual clipping; to a mistake for clipping
    under a loss scale, by the norm of each tensor, row, rank's shard or optimizer group, or by
    another norm than the stated one. A usual bound agrees only where none is stated. `norm` is the
    L2 norm of all given gradients.
    """
    held = [one.found for one in step.compared.values() if one.found is not None]
    before = step.computed_norm()
    if step.computed is not None and any(one.verdict == "differs" for one in held):
        by_key = {row.key: row for row in step.parameters}
        cases = {
            key: gradient_case(step, by_key[key], step.computed)
            for key, one in step.compared.items()
            if one.found is not None
        }
        clipping = value_clipping(cases)
        if clipping is not None:
            _accept_clipped(step, clipping, max(abs(x.computed).max() for x in cases.values()))
            return
        each = tensor_clipping(cases)
        each = each or row_clipping(cases, lambda key: _weights_of_rows(by_key[key]))
        if each is None:
            each = _shard_clipping(step, cases, by_key)
        if each is not None:
            _accept_own_norms(step, *each)
            return
    stated = None if step.recipe is None else step.recipe.clip
    bounds = (stated,) if stated else CLIPS
    bound = usual = _usual_bound(norm)
    if stated:
        bound = stated if abs(norm - stated) <= 1e-3 * stated else None
    if before is None or norm >= before or not held:
        return
    causes = [{guess.cause for guess in one.guesses} for one in held]
    if not all("gradient_factor" in each for each in causes):
        return
    if bound is not None:
        _accept_clipped(step, Clipping("norm", bound), before)
        return
    other = other_norm_clipping(step.other_norms, norm / before, bounds)
    if other is not None:
        size = next(value for by, value in step.other_norms.items() if by == other.by)
        _accept_clipped(step, other, size * before / norm)
        return
    parts = part_norms(step.computed_norms, step.optimizer_groups)
    of_part = clipping_by_part(parts, norm / before, before, (stated,) if stated else CLIPS)
    if of_part is None and stated:  # of an unstated bound too many counts would fit
        of_part = clipping_by_part(counted_norms(parts, before), norm / before, before, (stated,))
    if of_part is not None:
        says, one = of_part
        says += "" if stated else ON_PURPOSE
        if usual is not None:
            says += f"; or by the norm of all to {usual:g}, and not to the stated {stated:g}"
        keys = [key for key, each in step.compared.items() if each.found is not None]
        sure = stated is not None and one and usual is None
        accept_mistake(
            step,
            BackwardGuess("clip_by_part", says),
            keys,
            (),
            "confirmed" if sure else "explained",
        )
        step.clipped_before = True
        return
    # A factor that is a power of two by itself is a loss scale or ranks.
    scaled = scaled_bound(norm, bounds)
    if scaled is not None and simple_value(norm / before, SLACK * norm / before) is None:
        _accept_clipped(step, Clipping("norm", *scaled), before)


def _usual_bound(norm: float) -> float | None:
    """Return the bound that trainers clip to whose result has a norm; None where it is none.

    A number of one digit is one, too: somebody wrote it.
    """
    found = next((each for each in CLIPS if abs(norm - each) <= 1e-3 * each), None)
    written = float(f"{norm:.1g}")
    if found is None and norm and abs(norm - written) <= 1e-5 * written:
        return written
    return found


def _shard_clipping(
    step: ExplainedStep, cases: Mapping[str, GradientCase], by_key: Mapping[str, Parameter]
) -> tuple[str, tuple[str, ...]] | None:
    """Return (sentence, keys) if each rank clipped its gradient shards by their norm; else None.

    `cases` are the compared gradients and `by_key` the parameters, both by key.
    """
    stated = None if step.recipe is None else step.recipe.clip
    shapes = {key: by_key[key].before.shape for key in cases}
    says = shard_clipping(cases, shapes, (stated,) if stated else CLIPS)
    return None if says is None else (says, tuple(cases))


def _weights_of_rows(parameter: Parameter) -> F64:
    """Return a parameter before the step, float64 [rows, last axis]; a vector is one row."""
    values = parameter.before.numpy().astype(np.float64)
    parameter.drop()
    return values.reshape((1, -1) if parameter.vector else matrix_shape(values.shape))


def _accept_own_norms(step: ExplainedStep, says: str, keys: Collection[str]) -> None:
    """Set, in `step.compared`, that the gradients of `keys` were not clipped by the norm of all.

    They were clipped each by its own norm, or by that of some of its elements; `says` describes it.
    It may be "confirmed" if the recipe states clipping by the norm of all gradients, else only
    "explained".
    """
    stated = step.recipe is not None and step.recipe.clip is not None
    if not stated:
        says += ON_PURPOSE
    guess = BackwardGuess("clip_by_tensor", says)
    accept_mistake(step, guess, keys, (), "confirmed" if stated else "explained")


def _accept_clipped(step: ExplainedStep, clipping: Clipping, before: float) -> None:
    """Set all compared gradients to "agrees" with a note, or to a mistake for wrong clipping.

    Wrong is clipping under a loss scale, or by another size than the norm that the recipe states.
    `before` is that size without the clipping: the norm, or the largest element.
    """
    keys = [key for key, one in step.compared.items() if one.found is not None]
    recipe = step.recipe
    if clipping.by != "norm" and recipe is not None and recipe.clip and not recipe.clip_value:
        cause = "clip_by_value" if clipping.by == "value" else "clip_other_norm"
        says = f"{clipping.says}, from {before:.4g}, and not the norm of all"
        accept_mistake(step, BackwardGuess(cause, says), keys, ())
        return
    if clipping.scale != 1.0:
        says = f"{clipping.says}: it was {before:.4g} without the scale"
        guess = BackwardGuess("clip_before_unscale", says)
        accept_mistake(step, guess, keys, ())
        return
    for key in keys:
        agreed = Judgement("agrees", whole=True)
        step.compared[key] = replace(step.compared[key], found=agreed)
    if clipping.by == "norm":
        text = f"clipping to the norm {clipping.bound:g}; it was {before:.4g}"
    elif clipping.by in CLIPPED_BY:
        text = f"clipping by {CLIPPED_BY[clipping.by]} to {clipping.bound:g}; it was {before:.4g}"
    else:
        text = f"clipping each element to {clipping.bound:g}; the largest was {before:.4g}"
    step.notes.append(f"the gradients are those of after {text}")
