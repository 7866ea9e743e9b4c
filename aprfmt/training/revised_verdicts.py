"""Revises the verdicts on parameters by what all of them show together."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from aprfmt.causes.training.gradient_case import GradientGuess
from aprfmt.causes.training.momentum import new_optimizer_sentence
from aprfmt.causes.training.optimizers import changed, parse_settings
from aprfmt.causes.training.step_case import StepGuess, held_in
from aprfmt.causes.training.step_size import SLACK
from aprfmt.model.ledger import NotCompared
from aprfmt.training.explained_step import ExplainedStep
from aprfmt.training.judgement import Judgement
from aprfmt.training.optimizer_inputs import inputs_of
from aprfmt.training.parameter_verdicts import judge_change, judge_parameters
from aprfmt.training.report import TensorStep
from aprfmt.training.step_recipe import recipe_of
from aprfmt.training.update_check import judge_update

ROUNDED_AWAY = "update_rounded_away"
UNNUMBERED = (
    "it is no first step, and nothing says its number: a later one needs --optimizer-state; step=1 "
    "says that it is the first"
)


def is_clipped_by_chance(judged: Mapping[str, Judgement]) -> bool:
    """Return whether clippings that nothing states explain few parameters, and no whole step.

    A step has one bound, to which all gradients are clipped: it has to explain most of the
    parameters that do not agree without clipping.
    """
    found = Counter(one.clipped for one in judged.values() if one.clipped is not None)
    if not found:
        return False
    wrong = sum(one.verdict == "differs" for one in judged.values())
    common = found.most_common(1)[0][1]
    return common <= (wrong + sum(found.values())) / 2


def accept_rounded_away_steps(
    step: ExplainedStep, rows: list[TensorStep], judged: dict[str, Judgement]
) -> list[TensorStep]:
    """Return the rows, with "agrees" for steps too small to show in a checkpoint of few bits.

    A trainer that holds weights in a finer type than it stores may make such a step without fault.
    This counts if it says so (`trained_in`), or the bits of other parameters show it. If they do
    not tell, `step.doubted` is set, which keeps that mistake from being confirmed. Entries of
    `judged` are changed too.
    """
    if step.recipe is None or step.recipe.step not in (None, 1):
        return rows
    gone = {
        key
        for key, one in judged.items()
        if any(guess.cause == ROUNDED_AWAY for guess in one.guesses)
    }
    held = weights_held_in(judged)
    if step.trained_in != "float32" and held != "finer":
        if not held:
            step.doubted = ROUNDED_AWAY
        return rows
    for key in gone:
        one = judged[key]
        decay = one.decay_shown
        judged[key] = Judgement("agrees", whole=True, shows=one.exact, decay_shown=decay)
    return [replace(row, verdict="agrees", why="") if row.key in gone else row for row in rows]


def weights_held_in(judged: Mapping[str, Judgement]) -> str:
    """Return the precision of the trainer's weights: "finer" than stored, "stored", or "" (open).

    It is told from the bits of parameters whose step agrees, or is rounded away by their type.
    """
    every = [
        one.held_counts
        for one in judged.values()
        if one.verdict == "agrees" or any(guess.cause == ROUNDED_AWAY for guess in one.guesses)
    ]
    moved, due, other, far = (sum(each[part] for each in every) for part in range(4))
    return held_in(int(moved), due, int(other), int(far))


def judge_as_first(
    step: ExplainedStep, rows: list[TensorStep], judged: dict[str, Judgement], norm: float | None
) -> list[TensorStep]:
    """Return the rows, with "differs" for later steps that the optimizer made as its first step.

    A new optimizer that lost its moments makes such steps. It is tried on the parameters whose
    moments are unknown. All of them must have made such a step, and no parameter may agree with
    what was stated. `norm` is that of all given gradients. `judged` gets the mistake, and moments
    that no verdict needs leave `step.left`.
    """
    recipe = step.recipe
    known = step.state is not None and not (step.state.indexed and step.state.left)
    first = recipe is None or recipe.step in (None, 1)
    if recipe is None or known or first or not recipe.keeps_moments:
        return rows
    says = new_optimizer_sentence(recipe)
    if any(row.verdict == "agrees" for row in rows):
        return rows
    found: dict[str, Judgement] = {}
    for parameter, row in zip(step.parameters, rows, strict=True):
        if row.verdict != "not compared" or parameter.after is None:
            continue
        held = inputs_of(step, parameter, norm)
        if held.first is not None or held.second is not None or held.gradient is None:
            continue
        one = changed(recipe_of(step, parameter), step=1)
        made = judge_update(parameter, one, held)
        parameter.drop()
        if made.verdict != "agrees":
            return rows
        guess = StepGuess("moments_lost", says, one)
        found[row.key] = replace(made, verdict="differs", why=guess.says, guesses=(guess,))
    judged |= found
    if found:
        step.left = [each for each in step.left if each.kind != "moment"]
    return [replace(row, verdict="differs", why=says) if row.key in found else row for row in rows]


def open_unnumbered(
    step: ExplainedStep, rows: list[TensorStep], judged: dict[str, Judgement]
) -> list[TensorStep]:
    """Return the rows, with "not compared" for differing steps whose step number nothing states.

    Such a step is compared as the optimizer's first. If less than half of the moved parameters
    agree with that, or have a mistake that explains it, it is a later step, and the mistakes found
    mean nothing. Entries of `judged` are changed too.
    """
    recipe = step.recipe
    if recipe is None or not recipe.keeps_moments or recipe.step or step.state is not None:
        return rows
    moved = [row for row in rows if row.key in judged and row.update and row.update.moved]
    known = [row for row in moved if row.verdict == "agrees" or judged[row.key].guesses]
    later = {
        row.key
        for row in moved
        if judged[row.key].verdict == "differs"
        and not step.has_wrong_gradient(row.key)
        and all(_is_other_recipe(guess) for guess in judged[row.key].guesses)
    }
    if len(known) >= len(moved) / 2:
        if moved and len(known) == len(moved):
            step.notes.append("no step=N is stated: the step is compared as the first")
        return rows
    judged |= {key: Judgement("not compared", UNNUMBERED) for key in later}
    return [
        replace(row, verdict="not compared", why=UNNUMBERED) if row.key in later else row
        for row in rows
    ]


def judge_by_schedule(
    step: ExplainedStep, rows: list[TensorStep], judged: dict[str, Judgement], norm: float | None
) -> tuple[list[TensorStep], dict[str, Judgement]]:
    """Return (rows, verdicts) by the learning rate that most steps show, if a schedule set it.

    A trainer saves the state after its schedule has set the next rate. So if only the state says
    the rate, and the steps are of another one, that is no mistake: `step.left` gets the rate, and
    all parameters are judged anew. Else both are returned as given. `norm` is that of all given
    gradients.
    """
    stated = {} if step.optimizer is None else parse_settings(step.optimizer)
    wrong = [key for key, one in judged.items() if one.verdict == "differs"]
    if step.state is None or not step.state.scheduled or "lr" in stated or not wrong:
        return rows, judged
    found: Counter[float] = Counter()
    step.schedule = 1.0
    for row in step.parameters:
        if row.key in wrong:
            one = judge_change(step, row, recipe_of(step, row), inputs_of(step, row, norm))
            row.drop()
            factors = [
                guess.number[1]
                for guess in one.guesses
                if isinstance(guess, StepGuess) and guess.number and guess.number[0] == "factor"
            ]
            found[1.0 if one.verdict == "agrees" else factors[0] if factors else 0.0] += 1
    near = {
        factor: sum(n for other, n in found.items() if abs(other - factor) <= SLACK * factor)
        for factor in found
    }
    step.schedule = max(near, key=lambda factor: (factor > 0, near[factor]))
    if not step.schedule or near[step.schedule] <= len(wrong) / 2:
        step.schedule = None
        return rows, judged
    why = (
        f"the steps are those of {step.schedule:.4g} times the group's first rate; the state "
        "has what the schedule set for the next step (lr=RATE states this one's)"
    )
    step.left.append(NotCompared("rate", "lr", "no counterpart", why))
    return judge_parameters(step, True, norm)


def _is_other_recipe(guess: StepGuess | GradientGuess) -> bool:
    """Return whether a guess is a recipe other than the stated one, such as another step number."""
    return isinstance(guess, StepGuess) and guess.recipe is not None
