"""Updates that the stored type rounds away."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import F64, Recipe, Update, cut_to, round_to
from aprfmt.causes.training.step_case import EXACT, SIGMAS, StepCase, StepGuess, StepHypothesis
from aprfmt.measure.encoding_noise import float_spacing
from aprfmt.measure.verdicts import Certainty

CAUSE_ROWS = (
    Cause(
        "update_rounded_away",
        "update",
        "bug",
        "The weights are stepped in a type of few bits, and most of the step is rounded away: less "
        "than half of it arrives.",
        "No element moves whose step is below half a step of the type, and all others do.",
        "The step added in that type gives every weight, to the bit.",
    ),
    Cause(
        "decay_rounded_away",
        "update",
        "bug",
        "The decay is made in a type of few bits, which rounds all of it away; the step arrives.",
        "Weights of the type are the ones without any decay, and not those with a part of it.",
        "The decay rounded to the type, then the step, gives every weight, to the bit. So does no "
        "decay at all: the decay in the optimizer's state tells which.",
        told_by="--optimizer-state, whose groups have the decay",
    ),
    Cause(
        "update_cut_off",
        "update",
        "bug",
        "The stepped weights were cut to a type of few bits, toward zero, not rounded to the "
        "nearest number of it: they shrink by half of its spacing in each step.",
        "Weights are the expected ones or one spacing nearer to zero, as often as not.",
        "The expected weights cut to the type give every weight, to the bit.",
    ),
)
ROOM, NOISE = 0.1, 2.0**-6  # of a step of the type, and of the step: arithmetic in 8 bits
OFTEN = 9  # times as many elements without a decay as with it: it is not there
DEVIATIONS = 2.0  # of a decay that is measured; one is that of roundings at random, up or down
PARTS = (0.25, 0.5, 0.75, 1.0)  # of the stated decay, that weights may have instead
# Times the stated decay, whose bits are compared.
MULTIPLES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0, 16.0)
STATED = MULTIPLES.index(1.0)
CHANCE = 20.0  # elements that would have moved: that none does has a chance of e to the minus 20


def guess_rounded_away(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that the step was added in BF16 or F16, which rounded most of it away.

    Nothing unless the weights before and after the step are stored in the same one of these types.
    """
    if not case.coarse or case.encodings[0] != case.encodings[1]:
        return
    update = case.predict(recipe)
    if update is None:
        return
    encoding = case.encodings[1]
    if case.signs:
        yield from _guess_by_sizes(case, recipe, encoding)
        return
    if not is_swallowed(case, update.whole):
        return
    says = f"{encoding} rounds most of the step away"
    yield StepGuess("update_rounded_away", says, holds=partial(_adds_step, recipe))


def _adds_step(recipe: Recipe, case: StepCase) -> bool:
    """Return whether the new weights are the old ones plus the recipe's step, rounded once.

    The step has no weight decay. False where the recipe predicts none.
    """
    update = case.predict(recipe)
    return update is not None and is_rounded_once(case, update.step)


def is_rounded_once(case: StepCase, step: F64) -> bool:
    """Return whether the weights moved by `step` [n], added in the stored type and rounded once.

    Elements whose step is too small for the type must not have moved.
    """
    encoding = case.encodings[1]
    width = float_spacing(case.before, encoding)
    small = np.abs(step) < (1 - ROOM) * width / 4  # below a power of two the steps are half as wide
    wide = float_spacing(np.maximum(np.abs(case.before), np.abs(case.after)), encoding)
    off = np.abs(case.change - step)
    moved = case.change != 0
    return not moved[small].any() and bool(
        (off <= (1 + ROOM) * wide / 2 + NOISE * np.abs(step)).all()
    )


def is_swallowed(case: StepCase, whole: F64) -> bool:
    """Return whether rounding to the stored type lost more than half of the update `whole` [n].

    False where too few steps are below the type's spacing: only a finer copy of the weights could
    then have shown more. False unless the weights before and after are in the same type, BF16 or
    F16.
    """
    if not case.coarse or case.signs or case.encodings[0] != case.encodings[1]:
        return False
    width = float_spacing(case.before, case.encodings[1])
    small = np.abs(whole) < width / 2
    due = float((np.abs(whole) / width)[small].sum())
    return due > CHANCE and share_arrived(case, whole) < 0.5


def share_arrived(case: StepCase, whole: F64) -> float:
    """Return the fraction of the update `whole` [n] by which the weights moved; 1.0 for none."""
    size = float((whole * whole).sum())
    return float((whole * case.change).sum()) / size if size else 1.0


def _guess_by_sizes(case: StepCase, recipe: Recipe, encoding: str) -> Iterator[StepGuess]:
    """Yield the guess that `encoding` rounded the step away, where only the step's size is known.

    That size is the learning rate: weights whose spacing is far above it must not have moved.
    """
    used = np.isin(case.rows, case.rows[case.change != 0])
    width = float_spacing(case.before, encoding)

    def holds(part: StepCase) -> bool:
        """Return whether steps too small for the type moved no weight of `part`, large ones most.

        The step's size is the learning rate; it is compared with the spacing of the type's
        numbers.
        """
        width = float_spacing(part.before, encoding)
        small, large = width > 4.2 * recipe.lr, width < 1.8 * recipe.lr
        inside = np.isin(part.rows, part.rows[part.change != 0])
        moved = part.change != 0
        return not moved[small].any() and bool(moved[large & inside].mean() > 0.9)

    small = used & (width > 4.2 * recipe.lr)
    due = float((recipe.lr / width)[small].sum())
    if due > CHANCE and small.sum() > used.sum() / 4:
        says = f"{encoding} rounds most of the step away"
        yield StepGuess("update_rounded_away", says, holds=holds)


def guess_cut_off(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that the stepped weights were truncated to BF16 or F16, not rounded.

    Nothing unless the weights before and after are stored in the same one of these types, and the
    gradient's signs are known.
    """
    if case.signs or not case.coarse or case.encodings[0] != case.encodings[1]:
        return
    encoding = case.encodings[1]

    def holds(part: StepCase) -> bool:
        """Return whether the weights of `part` are the expected ones truncated, bit by bit.

        `part` has some elements of one parameter before and after the step.
        """
        inner = part.predict(recipe)
        if inner is None:
            return False
        return bool((cut_to(part.before + inner.whole, encoding) == part.after).mean() >= EXACT)

    says = (
        f"the stepped weights were cut to {encoding}, toward zero, and not rounded to the nearest"
    )
    yield StepGuess("update_cut_off", says, holds=holds)


def guess_lost_decay(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that BF16 or F16 rounded the weight decay away before the step was added.

    Nothing where the decay is part of the gradient or would have changed a stored weight, and
    where the weights do shrink.
    """
    fit = case.fit(recipe)
    if fit is None or not _loses_decay(case, recipe, fit.update.decay) or fit.shrinks:
        return
    update = fit.update
    width = float_spacing(case.before, case.encodings[1])
    due = float((np.abs(np.broadcast_to(update.decay, width.shape)) / width).sum())
    if due < CHANCE:
        return

    decay = case.others.get("decay")
    if decay == 0:
        return  # none was made
    stated = decay == recipe.wd
    holds = partial(_adds_step, recipe)
    yield lost_decay_guess(recipe, case.encodings[1], holds, stated=stated)


def lost_decay_guess(
    recipe: Recipe,
    encoding: str,
    holds: Callable[[StepCase], bool] | None = None,
    *,
    stated: bool = False,
) -> StepGuess:
    """Return the guess that `encoding` rounded all of the weight decay away.

    `stated`: the optimizer's state says that there was a decay, so that it may be confirmed. Else
    a step without decay gives the same weights, and the guess is at most explained. `holds` says
    whether the guess applies to a parameter, None for all.
    """
    says = f"{encoding} rounds the decay away: {recipe.lr * recipe.wd:g} of a weight is too little"
    most: Certainty = "confirmed" if stated else "explained"
    return StepGuess("decay_rounded_away", says, holds=holds, most=most)


@dataclass(frozen=True)
class DecayEvidence:
    """What weights show of their decay; those of several tensors are added.

    One element shows little where the type's spacing is wider than the decay. PARTS are fractions
    of the stated decay. `counts` are of the elements whose bits tell such a fraction from no decay:
    (elements with that decay, elements without) for each of PARTS, twice: decay added with the
    step, and rounded before it. `weight` and `moment` are the least squares of its factor: one over
    the variance, and the factor times that. `lost`: the type rounds all of it away. `matches` are
    the counts of the weights that are, to the bit, those with each of MULTIPLES, twice as `counts`,
    and `total` is the count of all. `constant` is how far rounding 1 - lr * wd to a float32 may
    move the factor of all elements alike. `coarse`: the weights are in BF16 or F16, and counted.
    """

    counts: tuple[tuple[int, int], ...] = ((0, 0),) * (2 * len(PARTS))
    weight: float = 0.0
    moment: float = 0.0
    lost: bool = False
    matches: tuple[int, ...] = (0,) * (2 * len(MULTIPLES))
    total: int = 0
    constant: float = 0.0
    coarse: bool = False

    def __add__(self, other: "DecayEvidence") -> "DecayEvidence":
        """Return the evidence of two sets of elements together."""
        counts = tuple(
            (a + c, b + d) for (a, b), (c, d) in zip(self.counts, other.counts, strict=True)
        )
        return DecayEvidence(
            counts,
            self.weight + other.weight,
            self.moment + other.moment,
            self.lost or other.lost,
            tuple(a + b for a, b in zip(self.matches, other.matches, strict=True)),
            self.total + other.total,
            max(self.constant, other.constant),
            self.coarse or other.coarse,
        )

    @property
    def size(self) -> tuple[float, float]:
        """(Measured factor of the stated decay, its largest error); (nan, infinity) if unknown.

        The error includes that of rounding the decay's constant.
        """
        if not self.weight:
            return np.nan, np.inf
        return self.moment / self.weight, DEVIATIONS * self.weight**-0.5 + self.constant

    @property
    def allowed(self) -> tuple[bool, ...]:
        """Whether the weights' stored bits allow a decay, for each of MULTIPLES of the stated one.

        A multiple is excluded where it gives fewer weights' bits than the best one does, by more
        than chance. () where no multiple gives the bits.
        """
        size = len(MULTIPLES)
        ways = self.matches[:size], self.matches[size:]
        best = max(ways, key=max)
        if not self.total or max(best) < EXACT * self.total:
            return ()
        return tuple(max(best) - count < CHANCE for count in best)

    @property
    def interval(self) -> tuple[float, float]:
        """(Lower, upper) bound on the weight decay, as multiples of the stated one.

        They are the multiple below the smallest that the weights' bits allow, and the one above
        the largest. (0.0, infinity) where the bits allow no multiple.
        """
        found = [at for at, one in enumerate(self.allowed) if one]
        if not found:
            return 0.0, np.inf
        least, largest = found[0], found[-1] + 1
        above = MULTIPLES[largest] if largest < len(MULTIPLES) else np.inf
        return MULTIPLES[max(0, least - 1)], above

    @property
    def stated(self) -> bool:
        """Whether the weights show the stated decay, within PARTS[0] of it.

        If some multiple of the decay gives the weights' bits, the bits judge it, else the measured
        factor does.
        """
        if self.allowed:
            least, largest = self.interval
            return self.allowed[STATED] and largest - 1 <= PARTS[0] >= 1 - least
        factor, room = self.size
        seen = self.telling or not self.coarse
        return seen and bool(abs(factor - 1) + room < PARTS[0])

    @property
    def telling(self) -> bool:
        """Whether the stated decay would change enough weights to be told from none."""
        return any(has >= CHANCE for has, _ in self.counts[-2:])

    @property
    def other(self) -> bool:
        """Whether the weights show a decay that is not the stated one."""
        if self.allowed:
            return not self.allowed[STATED]
        factor, room = self.size
        return bool(room < PARTS[0] <= abs(factor - 1) - room)

    @property
    def told(self) -> bool:
        """Whether single elements show that there is no decay, not even the least of PARTS."""
        shown = any(lacks >= CHANCE for _, lacks in self.counts)
        return shown and all(has <= lacks / OFTEN for has, lacks in self.counts)

    @property
    def none(self) -> bool:
        """Whether there is no decay: by single elements, or by the factor where they hide it."""
        if self.told:
            return True
        if any(has >= CHANCE and has > OFTEN * lacks for has, lacks in self.counts):
            return False
        factor, room = self.size
        return bool(abs(factor) + room < PARTS[0])


def decay_evidence(case: StepCase, recipe: Recipe) -> DecayEvidence | None:
    """Return the evidence of decay in the weights of a case; None where it cannot be measured.

    None unless the weights before and after are in the same type, BF16, F16 or F32, the decay is
    decoupled and the gradient is known. In F32 single elements are not counted.
    """
    update = case.predict(recipe)
    if update is None or not _decays_alone(case, recipe):
        return None
    fit = case.fit(recipe)
    _, _, factor, off = (1.0, 0.0, 1.0, np.inf) if fit is None else fit.factors
    weight = off**-2 if np.isfinite(off) else 0.0
    constant = 0.0 if fit is None else fit.constant * SIGMAS
    measured = DecayEvidence(weight=weight, moment=factor * weight, constant=constant)
    if not case.coarse:
        return measured
    without = _weights_with(case, 0.0, update)
    counts = []
    for part in PARTS:
        each = zip(_weights_with(case, part, update), without, strict=True)
        counts += [_count_equal(case, having, other) for having, other in each]
    made = [_weights_with(case, times, update) for times in MULTIPLES]
    matches = [int(np.count_nonzero(pair[way] == case.after)) for way in (0, 1) for pair in made]
    return replace(
        measured,
        counts=tuple(counts),
        lost=_loses_decay(case, recipe, update.decay),
        matches=tuple(matches),
        total=case.after.size,
        coarse=True,
    )


def _weights_with(case: StepCase, part: float, update: Update) -> tuple[F64, F64]:
    """Return (weights with step and decay added at once, weights with decay rounded first), [n].

    Both are in the stored type, after an update with the fraction `part` of its decay.
    """
    encoding = case.encodings[1]
    decayed = case.before + part * update.decay
    together, apart = (each + update.step for each in (decayed, round_to(decayed, encoding)))
    return round_to(together, encoding), round_to(apart, encoding)


def _count_equal(case: StepCase, first: F64, second: F64) -> tuple[int, int]:
    """Return how many weights equal `first` and how many equal `second`, where these two differ."""
    tells = first != second
    return (
        int(np.count_nonzero(tells & (case.after == first))),
        int(np.count_nonzero(tells & (case.after == second))),
    )


def _decays_alone(case: StepCase, recipe: Recipe) -> bool:
    """Return whether a case can show decoupled weight decay.

    It can where the weights before and after are in one type of at most 32 bits, the recipe decays
    this parameter outside the gradient, and more than the step's sizes are known.
    """
    same = case.encodings[0] == case.encodings[1] != "F64"
    decays = recipe.decays(case.vector) and not recipe.adds_decay_to_gradient
    return same and decays and not case.signs


def _decays_in_type(case: StepCase, recipe: Recipe) -> bool:
    """Return whether a case can show decoupled weight decay, with weights in BF16 or in F16."""
    return case.coarse and _decays_alone(case, recipe)


def _loses_decay(case: StepCase, recipe: Recipe, decay: F64 | float) -> bool:
    """Return whether rounding to BF16 or F16, as stored, leaves every weight as before its decay.

    `decay` is what is added to the weights, [n].
    """
    rounded = round_to(case.before + decay, case.encodings[1])
    return _decays_in_type(case, recipe) and np.array_equal(rounded, case.before)


HYPOTHESES = (
    StepHypothesis(("update_cut_off",), guess_cut_off, 7, "exact to the bit, nothing is fitted"),
    StepHypothesis(
        ("update_rounded_away",), guess_rounded_away, 4, "of the type, before any rule", whole=True
    ),
    StepHypothesis(
        ("decay_rounded_away",), guess_lost_decay, 6, "of the type, before any rule", whole=True
    ),
)
