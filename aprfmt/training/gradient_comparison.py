"""Compares one given gradient with the one computed of the batch, or with differences."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aprfmt.base.shapes import matrix_shape
from aprfmt.causes.contradicted_flags import HEAD, TABLE
from aprfmt.causes.training.gradient_case import GradientCase
from aprfmt.causes.training.optimizers import F64
from aprfmt.causes.training.step_case import COARSE
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.model import Model
from aprfmt.tensors.stats import compute_stats
from aprfmt.training import ComputedGradients
from aprfmt.training.differences import DifferenceChecker
from aprfmt.training.explained_step import ComparedGradient, ExplainedStep
from aprfmt.training.gradient_verdict import judge_gradient, judge_rounding
from aprfmt.training.judgement import Judgement
from aprfmt.training.parameters import Parameter
from aprfmt.training.points import ZERO
from aprfmt.training.reference_gradients import Computed
from aprfmt.training.report import ArrayFacts
from aprfmt.training.saved_arrays import SavedArrays, hyper_of
from aprfmt.training.step_recipe import recipe_of
from aprfmt.training.update_check import AVERAGED


def compare_computed(
    step: ExplainedStep, parameter: Parameter, computed: ComputedGradients
) -> ComparedGradient:
    """Return how a parameter's given gradient compares with the one computed of the batch.

    If one of the two is missing, the result has no verdict, and its `why` says which. The distance
    is relative L2. A given gradient with NaN or infinity gets no verdict either.
    """
    key = parameter.key
    if key not in computed.keys:
        return ComparedGradient(why="no gradient of it was computed here")
    values = computed.gradient(key)
    # Without any gradients the update alone is held to those computed here.
    why = "" if step.given is None else "no gradient of it was given"
    found = ComparedGradient(array_facts(values), why=why)
    place = None if step.given is None else step.given.placed.get(key)
    if step.given is None or place is None:
        return found
    case = gradient_case(step, parameter, computed)
    found = replace(found, facts=array_facts(case.computed))
    if not np.isfinite(case.given).all():
        return replace(found, why="")
    judged = judge_gradient(
        case,
        computed.rounding(key),
        stated=step.trained_in is not None,
        floor=ZERO * step.largest_norm,
        flips=computed.flips if isinstance(computed, Computed) else (),
    )
    if judged.verdict == "differs" and not judged.guesses and isinstance(computed, Computed):
        judged = _by_measured_rounding(case, computed) or judged
    nothing = judged.verdict == "agrees" and case.distance > 1  # rounding of zero on both sides
    return ComparedGradient(found.facts, None if nothing else case.distance, judged)


def _by_measured_rounding(case: GradientCase, computed: Computed) -> Judgement | None:
    """Return the verdict that an unexplained gradient may be within rounding, or None.

    It is for a gradient that differs and that no known mistake gives. How far rounding moves it is
    measured by passes that round at random; None if that was not measured or is too little.
    """
    apart = float(np.linalg.norm(case.given - case.computed))
    most = computed.measured_rounding(case.key, apart)
    size = float(np.linalg.norm(case.computed))
    return None if most is None else judge_rounding(apart, size, most / 2)


def gradient_case(
    step: ExplainedStep, parameter: Parameter, computed: ComputedGradients
) -> GradientCase:
    """Return a parameter's given and computed gradients, float64 [rows, columns], for judging.

    It also has what may explain a difference: counts of heads and tokens, the earlier gradient.
    """
    assert step.given is not None
    rows = matrix_shape(parameter.before.shape)
    given = step.given.values(parameter, step.given.placed[parameter.key])
    given = given.astype(np.float64).reshape(rows)
    values = computed.gradient_near(parameter.key, given)
    return GradientCase(
        parameter.key,
        given,
        values.astype(np.float64).reshape(rows),
        _is_gradient_coarse(step, parameter, step.given),
        _cut_sizes(step),
        step.facts.counts,
        step.facts.tokens,
        step.facts.repeated,
        earlier=_earlier_gradient(step, parameter),
    )


def _earlier_gradient(step: ExplainedStep, parameter: Parameter) -> F64 | None:
    """Return a parameter's gradient of step 1, float64 [rows, columns]; None if it is unknown.

    It is read from the first moment that was saved before step 2, which is that gradient or
    1 - b1 times it.
    """
    state, recipe = step.state, step.recipe
    if state is None or recipe is None or recipe.step != 2 or state.steps not in (None, 1):
        return None
    recipe = recipe_of(step, parameter)
    reader = state.first.reader(parameter)
    decayed = recipe.adds_decay_to_gradient and recipe.decays(parameter.vector)
    if reader is None or decayed or recipe.name not in AVERAGED:
        return None
    whole = 1 - recipe.b1 if recipe.row.second else 1.0
    rows, columns = matrix_shape(parameter.before.shape)
    return reader.rows(0, rows).astype(np.float64).reshape(rows, columns) / whole


def _is_gradient_coarse(step: ExplainedStep, parameter: Parameter, given: SavedArrays) -> bool:
    """Return whether the weight, its given gradient or the run has 16 bits or fewer."""
    if step.trained_in in ("bfloat16", "float16") or parameter.before.encoding in COARSE:
        return True
    reader = given.reader(parameter)
    return reader is not None and reader.noise >= UNIT["F16"]


def compare_checked(
    step: ExplainedStep, parameter: Parameter, checker: DifferenceChecker
) -> ComparedGradient:
    """Return how a parameter's given gradient compares with differences of the batch's loss.

    Its `why` says if no gradient was given, or no pass reads the weight. All its fields are empty
    for a gradient that is not finite.
    """
    place = None if step.given is None else step.given.placed.get(parameter.key)
    if step.given is None or place is None:
        return ComparedGradient(why="no gradient of it was given")
    coarse = _is_gradient_coarse(step, parameter, step.given)
    given = step.given.values(parameter, place).astype(np.float64)
    if not np.isfinite(given).all():
        return ComparedGradient()
    largest = max(one.norm for one in step.gradients.values())
    found, apart = checker.judge(parameter.key, given, coarse, largest)
    if found is None:
        return ComparedGradient(why="no pass of the batch reads it")
    return ComparedGradient(None, apart, found)


def _cut_sizes(step: ExplainedStep) -> dict[str, int]:
    """Return {hyperparameter: value} of the counts of heads and experts that divide weights.

    The keys are n_heads, n_kv_heads, n_experts and tied_embeddings (0 or 1); those that the model
    does not have are left out.
    """
    hyper = hyper_of(step.base or step.model)
    names = ("n_heads", "n_kv_heads", "n_experts", "tied_embeddings")
    found = {name: int(hyper[name]) for name in names if isinstance(hyper.get(name), int)}
    if step.base is None and head_is_table(step.model, step.parameters):
        found["tied_embeddings"] = 1
    return found


def head_is_table(model: Model, parameters: Sequence[Parameter]) -> bool:
    """Return whether a file stores an output head that is tied, and so no separate parameter."""
    head, table = model.roles.get(HEAD), model.roles.get(TABLE)
    stored = head is not None and table is not None and head.names != table.names
    return stored and all(row.key != HEAD for row in parameters)


def array_facts(values: "np.ndarray[tuple[int, ...], np.dtype[np.floating]]") -> ArrayFacts:
    """Return an array's norm, its largest value, and its counts of zeros and non-finite numbers."""
    found = compute_stats(values)
    return ArrayFacts(found.l2 or 0.0, found.absmax or 0.0, found.zeros, found.nan + found.inf)
