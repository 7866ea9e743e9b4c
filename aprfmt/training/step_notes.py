"""Notes of an answer about a step that are no faults, and what was not compared."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.sequences import join_first
from aprfmt.causes.contradicted_flags import HEAD, TABLE
from aprfmt.causes.training.clipping import CLIPPED_BY
from aprfmt.causes.training.step_case import COARSE
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.named_causes import short_keys
from aprfmt.model.ledger import NotCompared
from aprfmt.training import ComputedGradients
from aprfmt.training.decay_verdicts import add_hidden_decays, must_decay
from aprfmt.training.explained_step import ExplainedStep
from aprfmt.training.judgement import Judgement
from aprfmt.training.parameters import Parameter
from aprfmt.training.reference_gradients import doubtful_loss
from aprfmt.training.report import TensorStep
from aprfmt.training.revised_verdicts import weights_held_in
from aprfmt.training.saved_arrays import hyper_of

ALIKE = 0.3  # of their length: how far most rows of a guessing head's gradient are from one
OURS = 0.5  # of how far those of the gradient computed here are


def add_notes(
    step: ExplainedStep, rows: Sequence[TensorStep], judged: Mapping[str, Judgement]
) -> None:
    """Add to `step.notes` what is no fault, and to `step.left` what could not be compared.

    These are steps below the stored type's resolution, rounding to a coarser type, steps compared
    by size because no gradient was given, weight decay and gradients that nothing shows, and the
    clipping that was found.
    """
    if step.state is not None and step.state.fewer:
        fewer = step.state.fewer
        least, most = min(fewer.values()), max(fewer.values())
        counts = f"{least}" if least == most else f"{least} to {most}"
        step.notes.append(
            f"steps are counted for each parameter: {len(fewer)} made {counts} of "
            f"{step.state.steps}, as those do that were frozen or had no gradient "
            f"({join_first(sorted(fewer), 2)})"
        )
    hidden = [key for key, one in judged.items() if one.verdict == "agrees" and not one.shows]
    if hidden:
        kinds = {row.key: row.encoding for row in rows}
        kind = Counter(kinds[key] for key in hidden).most_common(1)[0][0]
        step.left += [
            NotCompared("step", key, "no counterpart", f"smaller than {kind} shows")
            for key in hidden
        ]
        if kind in COARSE and step.trained_in != "float32":
            _add_lost_steps(step, hidden, kind, weights_held_in(judged))
    if step.given is None and step.computed is not None and judged:
        step.notes.append(
            "no gradients were given: the update is held to those computed of the batch"
        )
    stored = {row.key: row for row in step.parameters}
    coarser = [
        key
        for key, one in judged.items()
        if one.verdict == "agrees" and _is_stored_coarser(stored[key])
    ]
    if coarser:
        one = stored[coarser[0]]
        assert one.after is not None
        why = (
            f"{one.before.encoding} before the step, {one.after.encoding} after it: what that "
            "rounded away is not known"
        )
        step.left += [NotCompared("rounding", key, "unreadable", why) for key in coarser]
    signs = [key for key, one in judged.items() if one.verdict == "agrees" and one.signs]
    if signs:
        why = "no gradient was given: sizes are compared, not signs"
        step.left += [NotCompared("direction", key, "no counterpart", why) for key in signs]
    unseen = [key for key in signs if judged[key].decay is None and must_decay(step, stored[key])]
    why = "no gradient was given, and the sizes do not show the decay"
    step.left += [NotCompared("decay", key, "no counterpart", why) for key in unseen]
    add_hidden_decays(step, judged, {row.key: row.encoding for row in rows})
    if step.given is not None and step.computed is None and step.has_state_after():
        why = (
            "the moments of after the step do not say what it was; give --batch, the state of "
            "before the step, or clip=BOUND"
        )
        step.left += [
            NotCompared("gradient", key, "unreadable", why)
            for key, one in judged.items()
            if one.verdict == "agrees" and key in step.given.placed and key not in step.used
        ]
    _add_right_halves(step, rows)
    _add_guessing_head(step)
    _add_doubts(step)
    every = [key for key, one in judged.items() if one.decays_all]
    matrices = {one.verdict for key, one in judged.items() if not stored[key].vector}
    # Next to matrices of which none is right another mistake may look like decay.
    if every and not ("differs" in matrices and "agrees" not in matrices):
        step.notes.append(
            f"norms and biases decay, as all weights do: {short_keys(every)} "
            "(decay_on=matrices says that they should not)"
        )
    bounds = {one.clipped for one in judged.values() if one.clipped is not None}
    for by, bound in sorted(bounds):
        what = f"the gradients given were clipped by {CLIPPED_BY.get(by)} to"
        if by == "norm":
            what = "the gradients given were clipped to the norm"
        elif by == "value":
            what = "each element of the gradients given was clipped to"
        step.notes.append(f"{what} {bound:g} in the step")


def _add_lost_steps(step: ExplainedStep, hidden: Sequence[str], kind: str, held: str) -> None:
    """Add a note that steps below the resolution of the stored type are lost, or may be.

    `held` says what the trainer's weights are held in, as of `weights_held_in`. Nothing is lost
    where it is finer.
    """
    if held == "finer":
        return
    what = f"steps of {short_keys(hidden)} are smaller than {kind} shows, and leave no trace"
    if held == "stored":
        why = f"the bits of other weights show that none is held in more than {kind}"
        step.notes.append(f"{what}: they are lost, as {why} (aprfmt explain update_rounded_away)")
        return
    step.notes.append(
        f"{what}: they are lost unless the trainer holds finer copies; checkpoints of these "
        "in float32 show it"
    )


def _add_right_halves(step: ExplainedStep, rows: Sequence[TensorStep]) -> None:
    """Add a note where gradients are wrong and the updates right for them, or the reverse.

    The gradient of a batch, and the update of a gradient, are two questions with two answers.
    """
    wrong = [key for key in step.compared if step.has_wrong_gradient(key)]
    ruled = [key for key in wrong if step.follows_wrong_gradient(key)]
    if ruled and step.recipe is not None:
        count = f"all {len(ruled)}" if len(ruled) == len(wrong) else f"{len(ruled)} of {len(wrong)}"
        step.notes.append(
            f"the updates are what {step.recipe.name} makes of the given gradients, in {count} "
            "tensors whose gradients differ: the optimizer is right there, the gradients are not"
        )
    late = [row.key for row in rows if row.verdict == "differs" and row.update is not None]
    if late and not wrong and all(_has_right_gradient(step, key) for key in late):
        step.notes.append(
            f"the given gradients are those of the batch, in all {len(late)} tensors whose updates "
            "differ: the gradients are right, the update is not"
        )


def _add_guessing_head(step: ExplainedStep) -> None:
    """Add a note where the head's given gradient is that of a model that guesses.

    The row of a token that no text has is the sum of the last hidden states, each times the token's
    probability. Where all probabilities are much alike, such rows are nearly one vector. Most
    rows must be so, and those computed here not.
    """
    if step.given is None or step.computed is None:
        return
    key = HEAD if HEAD in step.given.placed else TABLE
    if not step.has_wrong_gradient(key):
        return
    head = next(row for row in step.parameters if row.key == key)
    given = step.given.values(head, step.given.placed[key])
    theirs = _spread_of_rows(given)
    if theirs > ALIKE or theirs > OURS * _spread_of_rows(step.computed.gradient_near(key, given)):
        return
    step.notes.append(
        "the head's gradient has nearly one row for most tokens, as where all tokens have about "
        "one probability: the given gradients are of weights that guess, as untrained ones do"
    )


def _spread_of_rows(values: NDArray[Any]) -> float:
    """Return how far the middle one of the rows [rows, columns] is from all rows' medians.

    It is a fraction of the length of the row of medians; infinite where that is 0.
    """
    wide = np.asarray(values, np.float64).reshape(len(values), -1)
    middle = np.median(wide, axis=0)
    length = float(np.linalg.norm(middle))
    apart = float(np.median(np.linalg.norm(wide - middle, axis=1)))
    return apart / length if length else math.inf


def _has_right_gradient(step: ExplainedStep, key: str) -> bool:
    """Return whether a parameter's given gradient was compared and is the one of the batch."""
    one = step.compared.get(key)
    return one is not None and one.found is not None and one.found.verdict == "agrees"


def _add_doubts(step: ExplainedStep) -> None:
    """Add notes on a batch or gradients that agree but are hardly those of a trainer.

    Doubtful are a loss that no trained model has, and gradients equal to the bit to those computed
    here, which another arithmetic would not reach.
    """
    loss, vocabulary = step.loss()[0], hyper_of(step.base or step.model).get("vocab_size")
    if loss is not None and isinstance(vocabulary, int):
        doubt = doubtful_loss(loss, vocabulary)
        step.notes += [doubt] if doubt else []
    computed = step.computed
    step.notes += step.facts.notes
    if computed is None or step.given is None:
        return
    rounded = [
        key
        for key in step.given.placed
        if key in computed.keys and computed.gradient(key).any() and computed.rounding(key)
    ]
    by_key = {row.key: row for row in step.parameters}
    if rounded and all(_is_copy(step, by_key[key], computed) for key in rounded):
        step.notes.append(
            "every gradient is equal to the bit to the one computed here, which another "
            "arithmetic does not reach: these are no trainer's gradients, and show nothing"
        )


def _is_copy(step: ExplainedStep, parameter: Parameter, computed: ComputedGradients) -> bool:
    """Return whether a given gradient is exactly the computed one, rounded to its stored type."""
    assert step.given is not None
    given = step.given.values(parameter, step.given.placed[parameter.key])
    values = computed.gradient_near(parameter.key, given).reshape(given.shape)
    return bool(np.array_equal(given, values.astype(given.dtype)))


def _is_stored_coarser(parameter: Parameter) -> bool:
    """Return whether a parameter is stored in fewer bits after the step than before it."""
    after = parameter.after
    if after is None or parameter.before.encoding not in UNIT or after.encoding not in UNIT:
        return False
    return UNIT[after.encoding] > UNIT[parameter.before.encoding]
