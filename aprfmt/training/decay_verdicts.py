"""Whether the weights of all tensors show their weight decay, and which mistake of it."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from aprfmt.causes.training.gradient_case import GradientGuess
from aprfmt.causes.training.lost_updates import DecayEvidence, lost_decay_guess
from aprfmt.causes.training.optimizers import Recipe
from aprfmt.causes.training.step_case import StepGuess
from aprfmt.causes.training.weight_decay import no_decay_guess
from aprfmt.model.ledger import NotCompared
from aprfmt.training.explained_step import ExplainedStep
from aprfmt.training.judgement import Judgement
from aprfmt.training.parameters import Parameter
from aprfmt.training.report import TensorStep
from aprfmt.training.step_recipe import recipe_of

NO_DECAY = ("decay_missing", "decay_rounded_away")


def mark_lost_decay(
    step: ExplainedStep, rows: list[TensorStep], judged: dict[str, Judgement]
) -> list[TensorStep]:
    """Return the rows, with "differs" where the stored type rounded the weight decay away.

    Their entries in `judged` are changed, too. A decay far below the type's spacing shows in few
    elements of one tensor, so the evidence of all tensors is added up.
    """
    agreeing = {
        key: one.decay_shown
        for key, one in judged.items()
        if one.verdict == "agrees" and one.decay_shown is not None and one.decay_shown.lost
    }
    if not sum(agreeing.values(), DecayEvidence()).none:
        return rows
    made = []
    for row in rows:
        if row.key in agreeing:
            recipe = recipe_of(step, next(p for p in step.parameters if p.key == row.key))
            guesses = _lost_decay_guesses(step, recipe, row)
            judged[row.key] = Judgement("differs", guesses[0].says, guesses, whole=True)
            row = replace(row, verdict="differs", why=guesses[0].says)
        made.append(row)
    return made


def _lost_decay_guesses(
    step: ExplainedStep, recipe: Recipe, row: TensorStep
) -> tuple[StepGuess, ...]:
    """Return the guesses why a tensor did not decay: decay was rounded away, or not applied.

    Only one of them if the optimizer's state gives the weight decay of the parameter group that has
    the tensor.
    """
    decay = step.group_of(row.names[0]).get("weight_decay")
    lost = lost_decay_guess(recipe, row.encoding, stated=decay == recipe.wd)
    if decay == recipe.wd:
        return (lost,)
    return (no_decay_guess(recipe),) if decay == 0 else (lost, no_decay_guess(recipe))


def add_hidden_decays(
    step: ExplainedStep, judged: Mapping[str, Judgement], kinds: Mapping[str, str]
) -> None:
    """Add to `step.left` the tensors whose weight decay coarse weights cannot confirm.

    The evidence of all agreeing tensors is added up. `kinds` is {key: encoding}. If another decay
    than the stated one fits the weights better, the entry is "unreadable", else "no counterpart".
    """
    stored = {row.key: row for row in step.parameters}
    shown = {
        key: one.decay_shown
        for key, one in judged.items()
        if one.verdict == "agrees" and one.decay_shown and must_decay(step, stored[key])
    }
    every = sum(shown.values(), DecayEvidence())
    if every.stated:
        return
    less = every.interval[1] <= 1 if every.allowed else every.size[0] < 1
    amount = "less" if less else "more"
    between = decay_interval_text(every)
    for key in shown:
        if every.other:
            why = f"the weights show {amount} of it than was stated, each within its rounding"
            why += between
            step.left.append(NotCompared("decay", key, "unreadable", why))
        else:
            why = f"{kinds[key]} is too coarse to show how large it is{between}"
            step.left.append(NotCompared("decay", key, "no counterpart", why))


def must_decay(step: ExplainedStep, parameter: Parameter) -> bool:
    """Return whether the recipe surely applies decoupled weight decay to a parameter.

    False for vectors (norms, biases), unless the recipe says that all parameters decay.
    """
    recipe = recipe_of(step, parameter)
    if recipe.adds_decay_to_gradient or (parameter.vector and recipe.decay_on != "all"):
        return False
    return recipe.decays(parameter.vector)


def decay_interval_text(shown: DecayEvidence) -> str:
    """Return the range of decays that the weights' bits allow, to end a sentence; "" for any."""
    least, largest = shown.interval
    if not np.isfinite(largest):
        return f": it is more than {least:g} times the stated one" if least else ""
    return f": it may be {least:g} to {largest:g} times the stated one"


def limit_missing_decays(judged: dict[str, Judgement]) -> None:
    """Limit the guesses in `judged` that tensors did not decay, by the evidence of all of them.

    They are at most "explained" if rounding may hide a small decay, or the type would round it
    away. They are dropped if the bits of the weights contradict them.
    """
    held = {
        key: one.decay_shown
        for key, one in judged.items()
        if one.decay_shown is not None and any(each.cause in NO_DECAY for each in one.guesses)
    }
    shown = sum(held.values(), DecayEvidence())

    def limited(guess: StepGuess | GradientGuess) -> StepGuess | GradientGuess:
        """Return a guess about a step, at most "explained" where bits do not decide it.

        Only guesses that the tensor did not decay are limited; others are returned unchanged.
        """
        open_ = shown.lost and guess.cause == "decay_missing"
        sure = shown.told if shown.coarse else shown.none
        if isinstance(guess, StepGuess) and guess.cause in NO_DECAY and (open_ or not sure):
            return replace(guess, most="explained")
        return guess

    for key in held:
        kept = shown.none or not shown.coarse
        left = [g for g in judged[key].guesses if kept or g.cause not in NO_DECAY]
        judged[key] = replace(judged[key], guesses=tuple(map(limited, left)))
