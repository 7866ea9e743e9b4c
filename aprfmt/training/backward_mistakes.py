"""Explains differing gradients by a mistake of the whole backward pass."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.causes.training.backward_case import BackwardCase, BackwardGuess, first_place
from aprfmt.causes.training.gradient_case import PART, GradientGuess
from aprfmt.causes.training.step_case import StepGuess
from aprfmt.causes.training.table import BACKWARDS
from aprfmt.inference.gradients.misread_base import base_quantization
from aprfmt.measure.verdicts import Certainty
from aprfmt.model import Model
from aprfmt.model.adapter_parts import peft_config
from aprfmt.training.explained_step import ExplainedStep
from aprfmt.training.gradient_comparison import gradient_case
from aprfmt.training.gradient_verdict import judge_gradient
from aprfmt.training.judgement import Judgement
from aprfmt.training.reference_gradients import Computed


def explain_backward(step: ExplainedStep) -> None:
    """Explain gradients that differ by mistakes of a whole backward pass, in `step.compared`.

    It is tried where no mistake of one parameter explains a differing gradient. A mistake counts
    if the batch's gradients, computed with it, are the given ones.
    """
    computed = step.computed
    if not isinstance(computed, Computed):
        return
    for row in BACKWARDS:
        case = _backward_case(step, computed)
        unlike = case.wrong or case.open  # what few bits may leave may be a small mistake, too
        if all(_has_untied_guess(step, key) for key in unlike):
            break
        for guess in row.find(case):
            keys = _keys_explained_by(step, guess, computed, case)
            if keys and guess.objective:
                _leave_open(step, guess.says)
                return
            if keys:
                accept_mistake(step, guess, keys, case.right, guess.most)
                break
    _doubt_tied_tables(step)


def _leave_open(step: ExplainedStep, why: str) -> None:
    """Set all given gradients to "not compared", in `step.compared`: nothing says what is right."""
    for key, one in step.compared.items():
        if one.found is not None:
            judged = Judgement("not compared", why, whole=True)
            step.compared[key] = replace(one, found=judged, why=why)


def _doubt_tied_tables(step: ExplainedStep) -> None:
    """Drop a guess: that a tied table's gradient lacks what the embedding, or the head, adds.

    It is dropped from `step.compared` if another gradient differs unexplained. What the embedding
    adds comes through all layers, so it may be there and be wrong like the other gradients.
    """
    found = {key: one.found for key, one in step.compared.items() if one.found is not None}
    if not any(one.verdict == "differs" and not one.guesses for one in found.values()):
        return
    for key, one in found.items():
        if one.guesses and not _has_untied_guess(step, key):
            step.compared[key] = replace(step.compared[key], found=replace(one, guesses=()))


def _backward_case(step: ExplainedStep, computed: Computed) -> BackwardCase:
    """Return the step's gradients, sorted by their present verdicts, for the search of mistakes.

    Differing gradients that a mistake of the backward pass explains already are left out.
    """
    found = {key: one.found for key, one in step.compared.items() if one.found is not None}
    given = {key for key, one in found.items() if any(map(_is_of_backward, one.guesses))}
    wrong = {key for key, one in found.items() if one.verdict == "differs"}
    by_key = {row.key: row for row in step.parameters}
    norms = {}
    for key, one in step.compared.items():
        if key in step.gradients and one.facts is not None:
            norms[key] = step.gradients[key].norm, one.facts.norm
    return BackwardCase(
        lambda key: gradient_case(step, by_key[key], computed),
        {row.key: row.names for row in step.parameters},
        frozenset(key for key, one in found.items() if one.verdict == "agrees"),
        frozenset(wrong - given),
        frozenset(key for key in step.compared if key not in found and key in computed.keys),
        norms,
        computed.recompute,
        step.facts.labels,
        step.facts.row_length,
        step.facts.packed,
        _dropout_rates(step.model, step.base or step.model),
        frozenset(key for key, one in found.items() if one.verdict == "not compared"),
        computed.by_label,
        step.facts.routers,
        step.facts.experts,
        step.facts.padded_first,
        step.facts.adapter,
        step.facts.padded_last,
        _norm_offset(step.base or step.model),
        None if step.base is None else base_quantization(step.base),
        step.facts.partly_labelled,
        _has_window(step.base or step.model),
    )


def _has_untied_guess(step: ExplainedStep, key: str) -> bool:
    """Return whether a guess other than "gradient_tied" explains this parameter's gradient.

    That guess, that a tied embedding has one of its two uses, says little where others differ.
    """
    found = step.compared[key].found
    return found is not None and any(g.cause != "gradient_tied" for g in found.guesses)


def _keys_explained_by(
    step: ExplainedStep, guess: BackwardGuess, computed: Computed, case: BackwardCase
) -> frozenset[str]:
    """Return the keys of the gradients that a mistake explains; empty if the mistake does not fit.

    The batch's gradients are computed with the mistake. They must be the given ones in every
    parameter, zero where none was given, and most of the difference must be gone.
    """
    found = {key: one.found for key, one in step.compared.items() if one.found is not None}
    unlike = frozenset(
        key
        for key, one in found.items()
        if one.verdict != "agrees" and not any(map(_is_of_backward, one.guesses))
    )
    if guess.source:
        return frozenset(guess.source)  # they were compared where they were found
    if guess.change is None:
        return unlike & case.wrong
    made = computed.recompute(guess.change)
    for key in case.missing:
        if key in made.keys and made.gradient(key).any():
            return frozenset()
    left = there = 0.0
    for key in unlike if guess.alone else unlike | case.right:
        pair = case.case(key)
        values = (
            made.gradient_near(key, pair.given)
            if key in made.keys
            else np.zeros_like(pair.computed)
        )
        other = replace(pair, computed=values.astype(np.float64).reshape(pair.given.shape))
        if judge_gradient(other, computed.rounding(key)).verdict != "agrees":
            return frozenset()
        if key in unlike and pair.computed.any() and other.computed.any():
            left, there = left + other.distance**2, there + pair.distance**2
    # What leaves as much as there was is within the trainer's rounding, and says nothing.
    return unlike | case.missing if left <= PART**2 * there else frozenset()


def accept_mistake(
    step: ExplainedStep,
    guess: BackwardGuess,
    keys: Collection[str],
    right: Collection[str],
    most: Certainty = "confirmed",
) -> None:
    """Set a guessed mistake as the one explanation of the gradients of `keys`, in `step.compared`.

    `right` are the keys of the gradients that agree: with them the text says where in the backward
    pass the mistake begins. `most` is the highest certainty the guess may get.
    """
    says = guess.says
    change = guess.change
    if change is not None and change.is_of_backward:
        says += f"; backward from the loss it begins {first_place(keys, right)}"
    one = BackwardFound(guess.cause, says, lambda case: case.given, most=most)
    for key in keys:
        judged = Judgement("differs", says, (one,), whole=True)
        step.compared[key] = replace(step.compared[key], found=judged, why="")


class BackwardFound(GradientGuess):
    """A mistake of a whole backward pass, as the explanation of one parameter's gradient."""


def _is_of_backward(guess: StepGuess | GradientGuess) -> bool:
    """Return whether a guess is about a whole backward pass."""
    return isinstance(guess, BackwardFound)


def _dropout_rates(*models: Model) -> dict[str, float]:
    """Return {key of a configuration: dropout rate} for the rates that are not zero.

    The configuration of an adapter is its adapter_config.json.
    """
    configs: list[Mapping[str, Any]] = [
        each.config if isinstance(each.config, Mapping) else peft_config(each) for each in models
    ]
    return {
        str(key): float(value)
        for config in configs
        for key, value in config.items()
        if "drop" in str(key) and isinstance(value, int | float) and 0 < value < 1
    }


def _has_window(model: Model) -> bool:
    """Return whether some layers of a model attend to a sliding window."""
    return bool(model.hyper.get("sliding_window") and np.any(model.hyper.get("window_layers")))


def _norm_offset(model: Model) -> int | None:
    """Return what a model's RMSNorm adds to its weight, 0 or 1; None for other norms."""
    block = model.spec.block
    return block.norm_offset if block.norm == "rms" else None
