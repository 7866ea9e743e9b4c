"""Steps of which each rank clipped the gradients of its own shards by their own norm."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.shapes import matrix_shape
from aprfmt.causes.training.clipped_shards import (
    Sharding,
    element_factors,
    shard_clipping_sentence,
    shardings,
)
from aprfmt.causes.training.clipping import SAME, clip_factor
from aprfmt.causes.training.optimizers import F64
from aprfmt.causes.training.step_case import StepGuess
from aprfmt.training.explained_step import ExplainedStep
from aprfmt.training.judgement import Judgement
from aprfmt.training.optimizer_inputs import inputs_of
from aprfmt.training.parameters import Parameter
from aprfmt.training.step_recipe import recipe_of
from aprfmt.training.update_check import (
    RowReader,
    StepInputs,
    judge_update,
    possible_recipes,
    sample_case,
)

BLOCK = 1 << 20  # elements of a gradient that are read at once


def judge_by_shards(step: ExplainedStep, judged: dict[str, Judgement], norm: float | None) -> None:
    """Set the mistake of differing updates to ranks' own clipping, where it gives all updates.

    The factor of each rank follows from the norm of its shards of the gradients, which are given
    or computed of the batch: nothing is fitted. Entries of `judged` are changed. Nothing is done if
    the recipe states no clipping, or one mistake explains all that differs. `norm` is that of all
    given gradients.
    """
    wrong = [key for key, one in judged.items() if one.verdict == "differs"]
    if step.recipe is None or step.recipe.clip is None or _has_common_mistake(judged, wrong):
        return
    known = [row for row in step.parameters if _is_made_of_gradient(step, row, judged, norm)]
    if not set(wrong) <= {row.key for row in known}:
        return
    shapes = {
        row.key: row.before.shape
        for row in step.parameters
        if inputs_of(step, row, norm).gradient is not None
    }
    ways = list(shardings(shapes))
    for sharding, norms in zip(ways, _rank_norms(step, shapes, ways, norm), strict=True):
        factors = np.array([clip_factor(step.recipe.clip, each) for each in norms])
        if np.ptp(factors) <= SAME:
            continue
        if not _gives_updates(step, known, norm, sharding, factors):
            continue
        says = shard_clipping_sentence(sharding, step.recipe.clip, factors, norms)
        guess = StepGuess("clip_by_tensor", says, holds=lambda part: True)
        for key in wrong:
            judged[key] = replace(judged[key], why=says, guesses=(guess,), whole=True)
        return


def _has_common_mistake(judged: Mapping[str, Judgement], wrong: Sequence[str]) -> bool:
    """Return whether one mistake explains the updates of all parameters `wrong`; True for none."""
    each = [{(guess.cause, guess.says) for guess in judged[key].guesses} for key in wrong]
    return not each or bool(set.intersection(*each))


def _is_made_of_gradient(
    step: ExplainedStep, parameter: Parameter, judged: Mapping[str, Judgement], norm: float | None
) -> bool:
    """Return whether a judged update is made of a right gradient, and clipping is due.

    False for an update made of moments saved after the step, and where the norm of all gradients is
    not above the stated bound. `norm` is that of all given gradients.
    """
    held = inputs_of(step, parameter, norm)
    one = judged.get(parameter.key)
    if held.gradient is None or (held.after and held.first is not None):
        return False
    if one is None or one.verdict == "not compared" or step.has_wrong_gradient(parameter.key):
        return False
    bound = None if step.recipe is None else step.recipe.clip
    return bound is not None and held.others.get("norm", 0.0) > bound


def _rank_norms(
    step: ExplainedStep, keys: Collection[str], ways: Sequence[Sharding], norm: float | None
) -> list[F64]:
    """Return the L2 norms of each rank's shards of the gradients `keys`, [ranks] for each sharding.

    `norm` is that of all given gradients.
    """
    squares = [np.zeros(len(next(iter(way.cuts.values())))) for way in ways]
    for parameter in step.parameters:
        gradient = inputs_of(step, parameter, norm).gradient
        if parameter.key not in keys or gradient is None:
            continue
        ends = np.unique(np.concatenate([way.cuts[parameter.key] for way in ways]))
        sums = _sums_of_squares(gradient, matrix_shape(parameter.before.shape), ends)
        for total, way in zip(squares, ways, strict=True):
            cuts = np.searchsorted(ends, way.cuts[parameter.key])
            total += np.diff(sums[cuts], prepend=0.0)
        parameter.drop()
    return [np.sqrt(np.maximum(each, 0.0)) for each in squares]


def _sums_of_squares(gradient: RowReader, shape: tuple[int, int], ends: NDArray[np.int64]) -> F64:
    """Return the sum of squares of a gradient's flat elements before each of `ends`, [ends].

    `shape` is (rows, columns), `ends` are sorted. The gradient is read BLOCK elements at once.
    """
    rows, columns = shape
    found, running = np.zeros(len(ends)), 0.0
    block = max(1, BLOCK // max(1, columns))
    for start in range(0, rows, block):
        values = gradient.rows(start, min(rows, start + block)).reshape(-1)
        sums = running + np.cumsum(np.square(values))
        first = start * columns
        inside = (ends > first) & (ends <= first + values.size)
        found[inside] = sums[ends[inside] - first - 1]
        running = float(sums[-1]) if sums.size else running
    return found


def _gives_updates(
    step: ExplainedStep,
    known: Sequence[Parameter],
    norm: float | None,
    sharding: Sharding,
    factors: F64,
) -> bool:
    """Return whether clipping by ranks gives the updates of all parameters `known`, and shows.

    It shows where other factors do not give them as well. `factors` [ranks] are what each rank
    multiplies its shards of the gradients by. All elements are held to it, after a sample of each
    parameter. `norm` is that of all given gradients.
    """
    shown = False
    for parameter in known:
        clipped = _clipped_inputs(step, parameter, norm, sharding, factors)
        case = sample_case(parameter, clipped, False)
        parameter.drop()
        recipes = possible_recipes(recipe_of(step, parameter), case)
        guesses = (StepGuess("clip_by_tensor", "", recipe) for recipe in recipes)
        right = next((guess for guess in guesses if guess.right(case)), None)
        if right is None:
            return False
        shown = shown or (right.seen(case) and right.shows_scale(case))
    return shown and all(_gives_every_element(step, row, norm, sharding, factors) for row in known)


def _gives_every_element(
    step: ExplainedStep, parameter: Parameter, norm: float | None, sharding: Sharding, factors: F64
) -> bool:
    """Return whether clipping by ranks gives every element of one update; see `_gives_updates`."""
    clipped = _clipped_inputs(step, parameter, norm, sharding, factors)
    found = judge_update(parameter, recipe_of(step, parameter), clipped)
    parameter.drop()
    return found.verdict == "agrees"


def _clipped_inputs(
    step: ExplainedStep, parameter: Parameter, norm: float | None, sharding: Sharding, factors: F64
) -> StepInputs:
    """Return a parameter's inputs with its gradient as clipped by ranks, and no norm to clip by.

    `factors` are what each rank multiplies its elements by, [ranks]. `norm` is that of all given
    gradients.
    """
    held = inputs_of(step, parameter, norm)
    whole, ends = held.gradient, sharding.cuts[parameter.key]
    assert whole is not None

    def rows(start: int, stop: int) -> F64:
        """Return rows [start, stop) of the clipped gradient, float64 [rows, last axis]."""
        values = whole.rows(start, stop)
        columns = values.shape[1]
        each = element_factors(ends, factors, start * columns, stop * columns)
        return np.asarray(values * each.reshape(values.shape))

    others = {name: each for name, each in held.others.items() if name != "norm"}
    return replace(held, gradient=replace(whole, rows=rows), others=others)
