"""Compares all given gradients of a step, and finds mistakes that several share."""

from dataclasses import replace

import numpy as np

from aprfmt.causes.contradicted_flags import HEAD, TABLE
from aprfmt.causes.training.backward_case import BackwardGuess
from aprfmt.causes.training.gradient_case import GradientGuess
from aprfmt.causes.training.gradient_scale import joined_factors
from aprfmt.training.backward_mistakes import accept_mistake, explain_backward
from aprfmt.training.clipped_gradients import accept_clipping
from aprfmt.training.explained_step import ComparedGradient, ExplainedStep
from aprfmt.training.gradient_comparison import (
    array_facts,
    compare_checked,
    compare_computed,
    gradient_case,
)
from aprfmt.training.gradient_verdict import judge_gradient
from aprfmt.training.judgement import Judgement
from aprfmt.training.saved_arrays import SavedArrays


def measure_gradients(step: ExplainedStep) -> float | None:
    """Compare all gradients of a step and return the L2 norm of the given ones, None without any.

    Sets `step.gradients` to the facts of each given gradient, `step.compared` to how it compares
    with the computed one, with clipping and mistakes of the backward pass explained.
    """
    for parameter in step.parameters:
        place = None if step.given is None else step.given.placed.get(parameter.key)
        if step.given is not None and place is not None:
            values = step.given.values(parameter, place)
            step.gradients[parameter.key] = array_facts(values)
            step.sums[parameter.key] = float(np.abs(values).sum(dtype=np.float64))
    for parameter in step.parameters:
        if step.computed is not None:
            step.compared[parameter.key] = compare_computed(step, parameter, step.computed)
        elif step.checker is not None:
            step.compared[parameter.key] = compare_checked(step, parameter, step.checker)
    if step.given is None:
        return None
    norm = float(np.sqrt(sum(row.norm**2 for row in step.gradients.values())))
    _join_factors(step)
    accept_clipping(step, norm)
    explain_backward(step)
    _judge_second_table(step, step.given)
    return norm


def _judge_second_table(step: ExplainedStep, given: SavedArrays) -> None:
    """Set a tied embedding to "differs" if a gradient of the head is given, too, and differs.

    If the sum of both gradients is the computed one, the cause is "gradient_tied": a trainer holds
    the embedding and the head as two weights. Changes `step.compared`.
    """
    found = given.second_table(step.parameters)
    if found is None or not found[1]:
        return
    name, apart = found
    table = next(row for row in step.parameters if row.key == TABLE)
    why = f"{name} is the same weight, and its gradient is another one, {apart:.3g} from it"
    judged = Judgement("differs", why, whole=True)
    one = step.compared.get(TABLE, ComparedGradient())
    step.compared[TABLE] = replace(one, found=judged, why="")
    if step.computed is None or TABLE not in step.computed.keys:
        return
    case = gradient_case(step, table, step.computed)
    head = given.values(table, given.placed[HEAD]).astype(np.float64)
    both = replace(case, given=case.given + head.reshape(case.given.shape))
    if judge_gradient(both, step.computed.rounding(TABLE)).verdict == "agrees":
        says = (
            f"the trainer holds the table and the head, {name}, as two weights: each has a "
            "part of the gradient, and both together are the computed one"
        )
        accept_mistake(step, BackwardGuess("gradient_tied", says), [TABLE], ())


def _join_factors(step: ExplainedStep) -> None:
    """Give several gradients that are off by similar factors one common factor, in `step.compared`.

    It is tried on all gradients with a measured factor and on those that nothing explains. A
    gradient that it does not explain keeps its own.
    """
    measured = {}
    for key, one in step.compared.items():
        for guess in () if one.found is None else one.found.guesses:
            if isinstance(guess, GradientGuess) and guess.factor is not None:
                measured[key] = guess.factor
    by_key = {row.key: row for row in step.parameters}
    counts = step.facts.counts if step.checker is None else step.checker.counts
    differ = [
        key
        for key, one in step.compared.items()
        if one.found is not None
        and one.found.verdict == "differs"
        and (key in measured or not one.found.guesses)
    ]
    for joined, keys in joined_factors(measured, counts):
        for key in [*differ]:
            held = step.compared[key].found
            assert held is not None
            if step.computed is None:
                made = key in keys  # a pass along the factor was made of each
            else:
                case = gradient_case(step, by_key[key], step.computed)
                case = case.with_rounding(step.computed.rounding(key))
                wanted = joined.made(case)
                alone = key in keys and joined.right(case)
                made = alone or case.near(case.given, wanted, case.residual)
            if made:
                differ.remove(key)
                others = [each for each in held.guesses if not getattr(each, "factor", None)]
                found = replace(held, guesses=(*others, joined))
                step.compared[key] = replace(step.compared[key], found=found)
