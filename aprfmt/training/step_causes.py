"""The causes that an answer about a step names, from the mistakes of its parameters."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aprfmt.causes import CAUSES
from aprfmt.causes.training.backward_case import first_place
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import NamedCause, short_keys
from aprfmt.measure.proofs import Proof
from aprfmt.measure.verdicts import Level
from aprfmt.training.judgement import Judgement
from aprfmt.training.report import TensorStep

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
    for what, keys in (
        ("the weight after the step", [r.key for r in rows if r.update and r.update.nonfinite]),
        ("the gradient", [r.key for r in rows if r.gradient and r.gradient.nonfinite]),
        ("a moment in the optimizer's state", [k for k, one in judged.items() if one.nonfinite]),
    ):
        if keys:
            yield step_cause(
                "nonfinite", f"{what} holds NaN or infinite numbers", keys, stored, None
            )


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
    """Return the mistakes, with many factors of one kind as one: no factor holds for all of them.

    So many are what one rule leaves that is not known, such as a clipping by units. Those in `told`
    are known to come of a clipping, and stay.
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


def unknown_cause(
    rows: Sequence[TensorStep], judged: Mapping[str, Judgement], stored: Mapping[str, Sequence[str]]
) -> Iterator[NamedCause]:
    """Yield one cause without a name for all updates that differ and that no guess explains."""
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
    if keys and moves and min(moves) > OTHER:
        says = (
            f"the weights after the step are other ones, {min(moves):.2g} to {max(moves):.2g} of "
            "their norm away: of another checkpoint, or of a run that diverged"
        )
        yield step_cause("", says, keys, stored, None, size=max(moves))
    elif keys:
        says = f"what happened is not known: {judged[keys[0]].why}"
        compared = [row for row in rows if row.distance is not None]
        right = [row.key for row in compared if row.verdict == "agrees"]
        if right and len(keys) > 1 and {row.key for row in compared}.issuperset(keys):
            says += f"; backward from the loss it begins {first_place(keys, right)}"
        yield step_cause("", says, keys, stored, None, size=largest_update(rows, keys))


def largest_update(rows: Sequence[TensorStep], keys: Collection[str]) -> float | None:
    """Return the largest update of the parameters `keys`, relative to the weight, or None."""
    sizes = [
        row.update.norm / row.norm for row in rows if row.key in keys and row.update and row.norm
    ]
    return max(sizes, default=None)
