"""The causes that an answer about a step names, by the mistakes found for its parameters."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aprfmt.causes import CAUSES
from aprfmt.causes.training.backward_case import first_place
from aprfmt.causes.training.clipping import CLIPS, clip_factor
from aprfmt.causes.training.step_case import StepGuess
from aprfmt.causes.training.step_size import SLACK
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import NamedCause, short_keys
from aprfmt.measure.proofs import Proof, cap_proof
from aprfmt.measure.verdicts import CERTAINTIES, Certainty, Level
from aprfmt.training.explained_step import ExplainedStep
from aprfmt.training.judgement import Judgement
from aprfmt.training.optimizer_inputs import inputs_of
from aprfmt.training.parameter_verdicts import judge_change
from aprfmt.training.report import TensorStep
from aprfmt.training.step_recipe import recipe_of
from aprfmt.training.update_check import share_reproduced, telling_elements

SEVERAL = 4  # parameters, from which all of them may be said to have other gradients
OTHER = 0.5  # of a matrix' norm: no step of a model that learns is this long


def step_cause(
    cause: str,
    says: str,
    keys: Sequence[str],
    stored: Mapping[str, Sequence[str]],
    proof: Proof | None,
    *,
    size: float | None = None,
    also: tuple[str, ...] = (),
) -> NamedCause:
    """Return a cause of the parameters `keys` for the report.

    `cause` is its name, "" if none is known, `says` its text, `stored` {key: names in the file},
    `size` the largest update relative to the weight, `also` causes that explain as much.
    """
    level: Level = CAUSES[cause].level if cause else "update"
    text = f"{short_keys(keys)} - {says}"
    places = tuple(keys)
    found = Finding(
        cause, text, level, "bug", places, True, residual_before=size, also=also, proof=proof
    )
    return found.to_named_cause({key: tuple(names) for key, names in stored.items()})


def nonfinite_causes(
    rows: Sequence[TensorStep], judged: Mapping[str, Judgement], stored: Mapping[str, Sequence[str]]
) -> Iterator[NamedCause]:
    """Yield a cause for weights, gradients and moments each that hold NaN or infinity, if any."""
    after = {r.key: r.update.nonfinite for r in rows if r.update and r.update.nonfinite}
    gradients = {r.key: r.gradient.nonfinite for r in rows if r.gradient and r.gradient.nonfinite}
    moments = {key: 0 for key, one in judged.items() if one.nonfinite}  # they are not counted
    for what, found in (
        ("the weight after the step", after),
        ("the gradient", gradients),
        ("a moment in the optimizer's state", moments),
    ):
        if found:
            count = f"{every} " if (every := sum(found.values())) else ""
            says = f"{what} holds {count}NaN or infinite numbers"
            yield step_cause("nonfinite", says, [*found], stored, None)


def rivals_text(cause: str, also: Sequence[str], given: Collection[str]) -> str:
    """Return, for a sentence, other causes that explain the same and the option that tells which.

    "" without other causes. `given` are options that the command has already: they told nothing.
    """
    if not also:
        return ""
    every = (CAUSES[one].told_by for one in (cause, *also))
    tells = next((one for one in every if one and one.partition(",")[0] not in given), "")
    comma = "," if "," in tells else ""
    return f" (as well given by {', '.join(also)}" + (
        f"; {tells}{comma} tells which)" if tells else ")"
    )


@dataclass(frozen=True)
class Mistake:
    """One mistake and the parameters that it gives."""

    cause: str
    says: str
    free: int
    keys: tuple[str, ...]
    parts: tuple[str, ...] = ()  # the sentences of the factors that it joins


FACTORS = ("gradient_factor", "step_factor")
MOST_FACTORS = 3  # that are causes of their own


def fewest_mistakes(judged: Mapping[str, Judgement]) -> list[tuple[Mistake, tuple[str, ...]]]:
    """Return [(mistake with its parameters, other causes that explain the same)].

    The mistakes are as few as explain all parameters, chosen one after the other: the one that
    explains most of the parameters left, and of equal ones the one with fewer fitted numbers.
    """
    left = {key: one for key, one in judged.items() if one.guesses}
    found = []
    while left:
        groups: dict[tuple[str, str], Mistake] = {}
        for key, one in left.items():
            for guess in one.guesses:
                held = groups.get((guess.cause, guess.says))
                keys = (*held.keys, key) if held else (key,)
                made = Mistake(guess.cause, guess.says, guess.free, keys)
                groups[guess.cause, guess.says] = made
        best = max(groups.values(), key=lambda row: (len(row.keys), -row.free))
        also = [
            row.cause
            for row in groups.values()
            if row.keys == best.keys and row.cause != best.cause and row.free <= best.free
        ]
        found.append((best, tuple(dict.fromkeys(also))))
        left = {key: one for key, one in left.items() if key not in best.keys}
    return found


def joined_factor_causes(
    found: Sequence[tuple[Mistake, tuple[str, ...]]], told: Collection[Mistake]
) -> list[tuple[Mistake, tuple[str, ...]]]:
    """Return the mistakes, with many different factors of one cause joined to one mistake.

    So many factors come of one rule that is not known, such as clipping by a norm of elements that
    is not tried here. Mistakes in `told` are known to come of a clipping and are not joined. Each
    is (mistake, other causes that explain the same).
    """
    made = list(found)
    for cause in FACTORS:
        many = [one for one, _ in made if one.cause == cause and one not in told]
        if len(many) <= MOST_FACTORS:
            continue
        first, second = (f"{short_keys(one.keys)}: {one.says}" for one in many[:2])
        joined = Mistake(
            cause,
            f"{len(many)} factors, and what gives them is not known; {first}; {second}; ...",
            sum(one.free for one in many),
            tuple(key for one in many for key in one.keys),
            tuple(one.says for one in many),
        )
        at = next(i for i, (one, _) in enumerate(made) if one == many[0])
        left = [each for each in made[at:] if each[0] not in many]
        made = [*made[:at], (joined, ()), *left]
    return made


def joined_counts(
    found: Sequence[tuple[Mistake, tuple[str, ...]]], judged: Mapping[str, Judgement]
) -> list[tuple[Mistake, tuple[str, ...]]]:
    """Return the mistakes, with unlike step counts of many parameters joined to one mistake.

    A count that grows with every parameter is another for each, and none is above the number of
    parameters. Each is (mistake, other causes that explain the same).
    """
    counts: dict[int, Mistake] = {}
    for one, _ in found:
        guess = next((each for each in judged[one.keys[0]].guesses if each.says == one.says), None)
        if one.cause == "step_count" and isinstance(guess, StepGuess) and guess.recipe is not None:
            if (count := guess.recipe.counted) is not None:
                counts[count] = one
    many = [counts[count] for count in sorted(counts)]
    if len(many) <= MOST_FACTORS or any(len(one.keys) > 1 for one in many):
        return list(found)
    if max(counts) > len(judged):
        return list(found)
    first, last = many[0], many[-1]
    joined = Mistake(
        "step_count",
        f"the moments of {len(many)} parameters are corrected as at {len(many)} unlike steps, from "
        f"{min(counts)} ({short_keys(first.keys)}) to {max(counts)} ({short_keys(last.keys)}), "
        "and this is the first: the count grows with every parameter; it is to grow once a step",
        sum(one.free for one in many),
        tuple(key for one in many for key in one.keys),
        tuple(one.says for one in many),
    )
    at = next(i for i, (one, _) in enumerate(found) if one in many)
    return [*found[:at], (joined, ()), *(each for each in found[at:] if each[0] not in many)]


def unknown_cause(
    step: ExplainedStep,
    rows: Sequence[TensorStep],
    judged: Mapping[str, Judgement],
    stored: Mapping[str, Sequence[str]],
) -> Iterator[NamedCause]:
    """Yield one cause without a name for all updates that differ and that no guess explains.

    Where the rule makes these updates of the given gradients, it is of the gradients alone.
    """
    keys = [
        row.key
        for row in rows
        if (one := judged.get(row.key)) is not None
        and one.verdict == "differs"
        and not one.guesses
        and not (one.nonfinite or (row.update and row.update.nonfinite))
    ]
    moves = [
        row.update.norm / row.norm
        for row in rows
        if row.update is not None and row.norm and len(row.shape) > 1
    ]
    ruled = bool(keys) and all(map(step.follows_wrong_gradient, keys))
    if ruled:
        moves = []  # they are as long as the given gradients make them
    if keys and moves and min(moves) > OTHER:
        says = (
            f"the weights after the step are other ones, {min(moves):.2g} to {max(moves):.2g} of "
            "their norm away: of another checkpoint, or of a run that diverged"
        )
        yield step_cause("", says, keys, stored, None, size=max(moves))
    elif keys:
        what = "what happened to the gradients" if ruled else "what happened"
        says = f"{what} is not known: {judged[keys[0]].why}"
        compared = [row for row in rows if row.distance is not None]
        away = [row.distance for row in compared if row.distance is not None]
        every = {row.key for row in compared} == {*keys} and len(keys) >= SEVERAL
        if ruled and every and min(away) > OTHER:
            says = (
                f"the gradients of all {len(away)} parameters are other ones, {min(away):.2g} to "
                f"{max(away):.2g} of their norm away: of other weights than this checkpoint's, or "
                "of another batch"
            )
        right = [row.key for row in compared if row.verdict == "agrees"]
        if right and len(keys) > 1 and {row.key for row in compared}.issuperset(keys):
            says += f"; backward from the loss it begins {first_place(keys, right)}"
        size = None if ruled else largest_update(rows, keys)
        yield step_cause("", says, keys, stored, None, size=size)


def largest_update(rows: Sequence[TensorStep], keys: Collection[str]) -> float | None:
    """Return the largest update of the parameters `keys`, relative to the weight, or None."""
    sizes = [
        row.update.norm / row.norm for row in rows if row.key in keys and row.update and row.norm
    ]
    return max(sizes, default=None)


FINER_COPY = (
    " (or the trainer keeps a finer copy of the weights, which this checkpoint does not show: "
    "--trained-in float32 says so)"
)
UNSEEN_FACTOR = "; another multiple may be it as well: these elements hardly show its size"
RISING: tuple[Certainty, ...] = tuple(CERTAINTIES)
MOST_COPIES = 64  # of the gradients, in the norm over ranks that hold the same
MOST_SHARED = 4  # mistakes of several parameters that are tried on all that differ


MOST_OWN = 3  # parameters whose own numbers a cause says


def own_texts(own: Mapping[str, str]) -> str:
    """Return what a mistake says of single parameters, {key: text}: the first MOST_OWN of them."""
    shown = [f"{text} in {short_keys([key])}" for key, text in [*own.items()][:MOST_OWN]]
    more = len(own) - len(shown)
    return ", ".join(shown) + (f" and others in {more} more" if more else "")


def mistake_causes(
    step: ExplainedStep,
    rows: list[TensorStep],
    judged: Mapping[str, Judgement],
    stored: Mapping[str, Sequence[str]],
    norm: float | None,
) -> Iterator[NamedCause]:
    """Yield one cause for each mistake that explains differing parameters, with its proof.

    The proof counts the elements in which the mistake's step and the stated one store different
    values. The `why` of the explained `rows` is set. `stored` is {key: names in the file}, `norm`
    that of all given gradients.
    """
    known = {row.key: row for row in step.parameters}
    at = {row.key: number for number, row in enumerate(rows)}
    mistakes = joined_counts(fewest_mistakes(judged), judged)
    told = {one for one, _ in mistakes if _clipped_group(step, one, judged) is not None}
    clipped = any(_is_clipping(each) or each in told for each, _ in mistakes)
    for one, also in joined_factor_causes(mistakes, told):
        given = every = tells = 0.0
        most: Certainty = "located"  # one parameter that shows the mistake is enough
        words: dict[str, str] = {}
        for key in one.keys:
            guess = next(
                each
                for each in judged[key].guesses
                if each.cause == one.cause and each.says in (one.parts or (one.says,))
            )
            share, size = 1.0, float(np.prod(known[key].before.shape))
            telling = size
            if isinstance(guess, StepGuess):
                held, signs = inputs_of(step, known[key], norm), judged[key].signs
                if not judged[key].whole:
                    share = share_reproduced(known[key], guess, held, signs)
                own = recipe_of(step, known[key])
                telling = telling_elements(known[key], guess, own, held, signs)
                known[key].drop()
            given, every, tells = given + share * size, every + size, tells + telling
            most = max(most, guess.most, key=RISING.index)
            if isinstance(guess, StepGuess) and guess.own:
                words[key] = guess.own
            rows[at[key]] = replace(rows[at[key]], why=guess.says)
        share = given / max(1.0, every)
        # An element says one digit at least: whether it moved as the mistake would move it.
        proof = cap_proof(Proof(tells, share, one.free, 1.0), CAUSES[one.cause].most)
        if proof is not None:
            proof = cap_proof(proof, most)
        if one.parts and one.cause in FACTORS and proof is not None:
            proof = cap_proof(proof, "explained")  # what gives the factors is not known
        cause = one.cause
        if (said := _clipped_group(step, one, judged)) is not None:
            cause, one = said[0], replace(one, says=said[1])
            proof = None if proof is None else cap_proof(proof, "explained")
        if cause == "clip_missing" and clipped:
            one = replace(one, says=f"{one.says}; those of other parameters were clipped")
        if words:
            one = replace(one, says=f"{one.says}: {own_texts(words)}")
        unseen = most == "located" and isinstance(guess, StepGuess) and guess.recipe is not None
        text = one.says + (UNSEEN_FACTOR if unseen else "")
        text += rivals_text(cause, also, step.given_options())
        if cause == step.doubted:
            proof = None if proof is None else cap_proof(proof, "explained")
            text += FINER_COPY
        largest = largest_update(rows, one.keys)
        yield step_cause(cause, text, one.keys, stored, proof, size=largest, also=also)


def _is_clipping(one: Mistake) -> bool:
    """Return whether a mistake is one of clipping done wrongly, and not of clipping left out."""
    return one.cause.startswith("clip_") and one.cause != "clip_missing"


def share_guesses(step: ExplainedStep, judged: dict[str, Judgement], norm: float | None) -> None:
    """Add to each differing parameter in `judged` the guesses made for others that explain it too.

    A number fitted to a small parameter is inexact, so the numbers of the MOST_SHARED commonest
    guesses are tried on each. `norm` is that of all given gradients.
    """
    wrong = {key: one for key, one in judged.items() if one.verdict == "differs"}
    fitted = [
        guess
        for one in wrong.values()
        for guess in one.guesses
        if isinstance(guess, StepGuess) and guess.number is not None
    ]
    counts = Counter((guess.cause, guess.says) for guess in fitted)
    numbers = {(guess.cause, guess.says): guess.number for guess in reversed(fitted)}
    often = [said for said, count in counts.most_common(MOST_SHARED) if count > 1]
    for parameter in step.parameters:
        if parameter.key not in wrong:
            continue
        known = {(guess.cause, guess.says) for guess in wrong[parameter.key].guesses}
        new = [said for said in often if said not in known]
        if not new:
            continue
        inputs, recipe = inputs_of(step, parameter, norm), recipe_of(step, parameter)
        for cause, says in new:
            one, number = judged[parameter.key], numbers[cause, says]
            assert number is not None
            held = replace(inputs, others={**inputs.others, number[0]: number[1]})
            found = judge_change(step, parameter, recipe, held)
            same = [each for each in found.guesses if (each.cause, each.says) == (cause, says)]
            judged[parameter.key] = replace(one, guesses=(*one.guesses, *same))
        parameter.drop()


def _clipped_group(
    step: ExplainedStep, one: Mistake, judged: Mapping[str, Judgement]
) -> tuple[str, str] | None:
    """Return (cause, sentence) if a factor on some parameters' steps is of clipping; else None.

    Their gradients were clipped a second time to a usual bound, or to the stated bound by their own
    norm, as by a rank that knows its shard only. If all steps have the factor, it may be that of
    copies of all gradients. None, too, if the step does not depend on the gradients' size.
    """
    recipe = step.recipe
    if one.cause != "step_factor" or recipe is None or recipe.row.sizes:
        return None
    guesses = [each for each in judged[one.keys[0]].guesses if isinstance(each, StepGuess)]
    guess = next((each for each in guesses if each.says == one.says), None)
    norms = [step.gradients[key].norm for key in one.keys if key in step.gradients]
    every = float(np.sqrt(sum(each.norm**2 for each in step.gradients.values())))
    if guess is None or guess.recipe is None or len(norms) < len(one.keys):
        return None
    once = 1.0 if recipe.clip is None else clip_factor(recipe.clip, every)
    alone = float(np.sqrt(sum(each**2 for each in norms)))
    norm = once * alone
    factor = guess.recipe.factor / recipe.factor
    if recipe.clip is not None and every > recipe.clip:
        own = clip_factor(recipe.clip, alone)
        if abs(factor * once - own) <= SLACK * own and own > once:
            return "clip_by_tensor", (
                f"the gradients of these were clipped by the norm {alone:.4g} that they have "
                f"together to {recipe.clip:g}, not by that of all, {every:.4g}"
            )
    # Of all parameters a factor may as well be of the norm that is clipped, or of the rate.
    copies = round(1 / factor**2) if factor < 1 else 1
    if len(norms) == len(step.gradients) and every > (recipe.clip or every) and copies > 1:
        if copies <= MOST_COPIES and abs(factor * copies**0.5 - 1) <= SLACK:
            return "step_factor", (
                f"{one.says}: the rate, or the norm that clips is too large, as of {copies} "
                "copies of all gradients"
            )
    bound = next((each for each in CLIPS if abs(factor * norm - each) <= SLACK * each), None)
    if bound is None or factor >= 1:
        return None
    return "clip_twice", (
        f"the gradients of these were clipped once more, from the norm {norm:.4g} that they "
        f"have together to {bound:g}"
    )


def frozen_factor_causes(
    step: ExplainedStep,
    rows: list[TensorStep],
    judged: Mapping[str, Judgement],
    stored: Mapping[str, Sequence[str]],
) -> Iterator[NamedCause]:
    """Yield a cause for LoRA factors that did not move although others did: A, B, or both.

    Sets their `rows` to "differs". `stored` is {key: names in the file}.
    """
    moved = {row.key: bool(row.update and row.update.moved) for row in rows if row.update}
    moved = {key: moves for key, moves in moved.items() if key in step.pairs}
    some = {end for key, moves in moved.items() if moves for end in [key[-7:]]}
    half, whole = [], []
    for key, moves in moved.items():
        other = step.pairs[key].key
        known = key in judged and judged[key].guesses
        if moves or other not in moved or known:
            continue
        if moved[other]:
            # A next to a B of zero has no gradient. Where no A moves, that may be meant so.
            if not step.is_idle(key) and (key.endswith(".lora_b") or ".lora_a" in some):
                half.append(key)
        elif some:
            whole.append(key)
    of_half = Proof(len(half), 1.0, len(half), 0.0)  # found on the factors that it speaks of
    for cause, keys, says, proof in (
        ("adapter_half_frozen", half, "did not move, and the other factor did", of_half),
        ("adapter_frozen", whole, "neither factor moved, and those of other pairs did", None),
    ):
        if keys:
            at = {row.key: number for number, row in enumerate(rows)}
            for key in keys:
                rows[at[key]] = replace(rows[at[key]], verdict="differs", why=says)
            yield step_cause(cause, says, keys, stored, proof)
