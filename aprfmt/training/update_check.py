"""Whether a recipe gives the weights after a step, and which mistake does where it does not.

A *case* is elements of one parameter before and after the step, with what the optimizer had for
them. A *fit* is how well a recipe predicts them. A *piece* is some rows of a parameter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from aprfmt.base.shapes import matrix_shape
from aprfmt.causes.training.clipped_parts import clipping_by_part
from aprfmt.causes.training.clipping import CLIPS, OTHER_NORMS, VALUES, clip_factor, other_factors
from aprfmt.causes.training.lost_updates import CHANCE, decay_evidence, is_swallowed, share_arrived
from aprfmt.causes.training.optimizers import F64, Moments, Recipe, changed
from aprfmt.causes.training.other_weights import ALONG, share_along
from aprfmt.causes.training.step_case import (
    FEWEST,
    LONG,
    SIGMAS,
    SIZES,
    USUAL,
    Fit,
    StepCase,
    StepGuess,
    number_text_apart,
)
from aprfmt.causes.training.step_size import SLACK, measured_factor, simple_factor
from aprfmt.causes.training.table import UPDATES
from aprfmt.inference.gradients.finite_weights import check_finite_before
from aprfmt.measure.encoding_noise import UNIT, float_spacing
from aprfmt.training.judgement import ENOUGH, Judgement
from aprfmt.training.parameters import Parameter
from aprfmt.training.update import pieces

MOST_WHOLE = 1 << 22  # elements of a matrix of which rules of whole matrices look at all
SAMPLE = 1 << 16  # elements on which rules are tried; the one that fits is held to all


@dataclass(frozen=True)
class RowReader:
    """Reads numbers of one parameter: `rows(start, stop)` of [rows, last axis], float64."""

    rows: Callable[[int, int], F64]
    noise: float = 0.0  # how exact they are, relative to each number
    blur: float = 0.0  # how far each may be off at all


@dataclass(frozen=True)
class StepInputs:
    """What the optimizer had for one parameter: its gradient and its moments, None if unknown.

    `step` is the number of steps that the moments have seen, `after` says that this step is one of
    them. `others` may have `norm` of all gradients, `own_norm` of this one, and `decoupled`, 0.0
    where the state says that decay is added to the gradient.
    """

    gradient: RowReader | None = None
    first: RowReader | None = None
    second: RowReader | None = None
    step: int = 0
    after: bool = True
    others: Mapping[str, float] = field(default_factory=dict)
    part_norms: Mapping[str, float] = field(default_factory=dict)  # of all gradients, by its name
    idle: bool = False  # it has no gradient in this step: A of a pair whose B is zero
    ungiven: bool = False  # gradients of other parameters were given, and none of this one

    @property
    def noise(self) -> float:
        """The relative error of the gradient or the moments, that of the least exact of them."""
        moments = (self.first, self.second)
        found = [row.noise for row in (self.gradient, *moments) if row is not None]
        return max(found, default=0.0)

    def moments(self, start: int, stop: int) -> Moments | None:
        """Return the moments of rows [start, stop), flat; None if the state has neither."""
        if self.first is None and self.second is None:
            return None
        first, second = (
            None if row is None else row.rows(start, stop).reshape(-1)
            for row in (self.first, self.second)
        )
        return Moments(first, second, self.step, self.after)


def judge_update(parameter: Parameter, recipe: Recipe, held: StepInputs) -> Judgement:
    """Return the verdict on one parameter's update: whether a recipe gives it, in every element.

    If it does not, `guesses` has the mistakes that do. "not compared" where an input of the recipe
    is missing, or the stored type is none in which models are trained. Raises UsageError for a
    weight before the step that is NaN or infinite.
    """
    after = parameter.after
    assert after is not None
    for side in (parameter.before, after):
        if side.encoding not in UNIT:
            return Judgement("not compared", f"{side.encoding} is no type that is trained in")
    # Without gradient and moments only a step of one size for all elements can be judged.
    signs = held.gradient is None and held.first is None and held.second is None
    if signs and not _has_one_size(recipe):
        return Judgement("not compared", _missing_input(recipe, held))
    sample = sample_case(parameter, held, signs)
    check_finite_before(parameter.before, sample.before)
    if not np.isfinite(sample.after).all():
        return Judgement("differs", "holds NaN or infinite numbers")
    if not _has_finite_moments(sample):
        return Judgement("differs", NONFINITE, nonfinite=True)
    if held.ungiven and not held.idle:
        found = moved_without_gradient(parameter, recipe, held)
        if found is not None:
            return found
    still = signs and not held.idle and not sample.coarse and not sample.change.any()
    if still and _is_unmoved(parameter):
        return Judgement("not compared", "did not move, and no gradient says whether it should")
    recipe = _with_clipping(recipe, held)
    if signs and (fit := sample.fit(recipe)) is not None and fit.faint and not held.idle:
        return Judgement("not compared", FAINT_STEPS)
    fits = [
        (one, fit)
        for one in possible_recipes(recipe, sample)
        if (fit := sample.fit(one)) is not None
    ]
    if not fits:
        return Judgement("not compared", _missing_input(recipe, held))
    if signs and recipe.step is None and not recipe.row.sizes == "every step":
        if sample.coarse or not _has_common_size(sample, fits[0][1]):
            return Judgement("not compared", _missing_input(recipe, held))
    if signs and not _makes_step(sample, fits) and not held.idle:
        return Judgement("not compared", "makes no step, and no gradient says whether it should")
    # A recipe that fits the sample is then tried on all elements.
    right = [(one, fit) for one, fit in fits if fit.right]
    tried = [] if right else [each for one, _ in fits for each in _fit_clippings(one, held, sample)]
    for one, fit, clipped in (*((*each, None) for each in right), *tried):
        if is_swallowed(sample, fit.update.whole):
            return _explain_difference(parameter, one, held, sample, fit)
        found = _judge_all(parameter, one, held, signs, fit)
        every = _decays_all(recipe, one, fits)
        return replace(found, decays_all=every, clipped=clipped, signs=signs)
    found = _explain_difference(parameter, fits[0][0], held, sample, fits[0][1])
    for one, fit in fits[1:]:  # another meaning of what was stated
        if all(guess.most == "located" for guess in found.guesses):
            other = _explain_difference(parameter, one, held, sample, fit)
            if other.guesses:
                known = {(guess.cause, guess.says) for guess in other.guesses}
                more = [one for one in found.guesses if (one.cause, one.says) not in known]
                found = replace(other, guesses=(*more, *other.guesses))
    return found


def _has_finite_moments(case: StepCase) -> bool:
    """Return whether all moments that a case has are finite."""
    kept = () if case.moments is None else (case.moments.first, case.moments.second)
    return all(each is None or bool(np.isfinite(each).all()) for each in kept)


SEEN = 0.5  # of the elements: those whose step without a gradient has to show

NONFINITE = "its moments in the optimizer's state are NaN or infinite"
UNMOVED = "did not move, and no element's step is larger than what its type rounds away"
FAINT_STEPS = (
    "its steps are shorter than the rate and of many sizes, as where gradients are as small as "
    "epsilon; --grads, --batch or --optimizer-state says what they were"
)


def moved_without_gradient(
    parameter: Parameter, recipe: Recipe, held: StepInputs
) -> Judgement | None:
    """Return the verdict on a parameter that moved as if its gradient were zero; None for others.

    It moved by its weight decay, by its old moments, or by both, in every element. Moments saved
    after the step can show it only if they are zero.
    """
    columns = matrix_shape(parameter.before.shape)[1]
    none = RowReader(lambda start, stop: np.zeros((stop - start, columns)))
    zero = replace(held, gradient=none)
    case = sample_case(parameter, zero, False)
    kept = None if case.moments is None else case.moments.first
    if held.after and kept is not None and kept.any():
        return None
    for one in possible_recipes(recipe, case):
        fit = case.fit(one)
        if fit is None or not fit.right:
            continue
        seen = np.abs(fit.update.whole) > 2 * case.rounding
        if seen.mean() < SEEN or _judge_all(parameter, one, zero, False, fit).verdict != "agrees":
            continue
        by_moments = bool(fit.update.step.any())
        decays = bool(np.any(fit.update.decay))
        words = ["its old moments"] * by_moments + ["its weight decay"] * decays
        says = f"no gradient of it was given, and it moved by {' and '.join(words)} alone"
        guess = StepGuess("moved_without_gradient", says, holds=lambda part: True)
        return Judgement("differs", says, (guess,), whole=True)
    return None


def judge_moments(parameter: Parameter, recipe: Recipe, held: StepInputs) -> Judgement | None:
    """Return the verdict whether a given gradient is in the moments of after the step.

    Moments of one step are that gradient, perhaps clipped or times another factor. Moments of
    more steps can only contradict it: where its squares exceed the second moment, or what is left
    without it cannot be moments of earlier steps. They are judged only with a stated clipping.
    None where nothing is decided or given, and for a rule whose step uses the gradient in
    addition to the moments.
    """
    if held.gradient is None or held.first is None or not held.after or held.step < 1:
        return None
    if recipe.nesterov or recipe.name not in AVERAGED:
        return None
    if held.step == 1:
        return _first_moment(parameter, recipe, held)
    if held.second is None:
        return None
    norm = held.others.get("norm")
    if recipe.clip is None or norm is None:
        return None  # it may have been clipped to any bound
    stated = recipe.scale * clip_factor(recipe.clip, norm)
    wrong, excluded = _contradicted_factors(parameter, recipe, held, [stated])[stated]
    if not excluded:
        return None
    why = f"its gradient is not in the optimizer's moments: {wrong} elements leave none for before"
    ways = [
        (cause, says, recipe.scale * factor)
        for cause, says, factor in other_factors(recipe, held.others, parameter.vector)
    ]
    tried = [each for *_, scale in ways for each in (scale, scale * ABOVE)]
    found = _contradicted_factors(parameter, recipe, held, tried)
    guesses = tuple(
        StepGuess(cause, says, changed(recipe, scale=scale), most="explained")
        for cause, says, scale in ways
        if not found[scale][1] and found[scale * ABOVE][1]
    )
    return Judgement("differs", why, guesses, whole=True)


def is_idle(parameter: Parameter, held: StepInputs) -> bool:
    """Return whether a parameter was left out of a step: it did not move and has no given gradient.

    False for one that is known to have no gradient in this step (`held.idle`).
    """
    return held.gradient is None and not held.idle and _is_unmoved(parameter)


FORGOTTEN = 0.01  # of the first gradient in a moment: a count is told while more of it is there


def judge_count(parameter: Parameter, recipe: Recipe, held: StepInputs) -> Judgement | None:
    """Return "differs" where Adam's moments cannot come from as few steps as the state counts.

    `parameter` moved by a step that was corrected for that count. None where the moments can come
    from so few steps, where they are not known, and for a count at which the bias correction does
    not limit them.
    """
    first, second, count = held.first, held.second, held.step
    if first is None or second is None or recipe.name not in AVERAGED or not recipe.row.second:
        return None
    if count < 1 or recipe.b1**count < FORGOTTEN:
        return None
    wrong = every = 0
    for case in _all_cases(parameter, held, False):
        assert case.moments is not None
        m, v = case.moments.first, case.moments.second
        assert m is not None and v is not None
        most = np.sqrt(_squares_ratio(recipe, count) * np.maximum(v, 0.0))
        room = MOMENT + 4 * held.noise
        off = np.abs(m) > most * (1 + room)
        if count == 1:  # one gradient is in both
            off |= np.abs(m) < most * (1 - room)
        off &= most > TINY
        wrong, every = wrong + int(np.count_nonzero(off)), every + m.size
    if wrong < max(FEWEST, CONTRADICTED * every):
        return None
    says = f"the step is corrected for a count of {count}, and the moments are of more steps"
    return Judgement("differs", says, (StepGuess("step_count", says),), whole=True)


TINY = 1e-18  # a moment whose square is below what float32 holds


def _squares_ratio(recipe: Recipe, steps: int) -> float:
    """Return the largest ratio of Adam's squared first moment to its second moment after `steps`.

    Cauchy and Schwarz give it: both are means of the same gradients, weighted by their rates.
    """
    ratio = recipe.b1 * recipe.b1 / recipe.b2
    total = sum(ratio**k for k in range(min(steps, 1000)))
    return (1 - recipe.b1) ** 2 / (1 - recipe.b2) * total


AVERAGED = ("adam", "adamw", "sgd")  # rules whose stored moments alone make the step
CONTRADICTED = 1e-3  # of the elements: fewer are what other roundings leave
# Times a factor of the gradient. Moments exclude all factors above the one that is in them, and few
# below it: the right one is the largest that they admit.
ABOVE = 1.05
MOMENT = 2.0**-18  # of a moment: what float32 loses of it in a few steps


def _first_moment(parameter: Parameter, recipe: Recipe, held: StepInputs) -> Judgement:
    """Return the verdict whether the first moment after one step is the given gradient.

    Clipped to a usual bound, it agrees as well. Any other multiple of the gradient differs, and
    the verdict has a guess at the mistake.
    """
    whole = 1 - recipe.b1 if recipe.row.second else 1.0

    def pairs() -> Iterator[tuple[F64, F64, F64]]:
        """Yield (given gradient, gradient that the first moment contains, its rounding) by pieces.

        Each is flat, float64.
        """
        for case in _all_cases(parameter, held, False):
            assert case.gradient is not None and case.moments is not None
            assert case.moments.first is not None
            there, room = case.moments.first / whole, MOMENT * np.abs(case.moments.first / whole)
            if recipe.adds_decay_to_gradient and recipe.decays(case.vector):
                added = recipe.wd * case.before
                there, room = there - added, room + MOMENT * np.abs(added)
            yield case.gradient, there, room

    squares = products = 0.0
    for given, there, _ in pairs():
        squares += float(given @ given)
        products += float(given @ there)
    factor = products / squares if squares else 1.0
    wrong = apart = size = 0.0
    for given, there, room in pairs():
        off = np.abs(there - factor * given)
        near = off <= room + (2 * held.noise + MOMENT) * np.abs(factor * given)
        wrong += float(np.count_nonzero(~near))
        apart, size = apart + float(off @ off), size + float(there @ there)
    if wrong:
        share = (apart / size) ** 0.5 if size else float("inf")
        why = f"its gradient is {share:.3g} from the one in the optimizer's moments"
        return Judgement("differs", why, whole=True)
    if abs(factor - 1) <= SLACK + held.noise:
        return Judgement("agrees", whole=True)
    bounds = (*CLIPS, *(() if recipe.clip is None else (recipe.clip,)))
    for by in ("norm", *OTHER_NORMS) if 0 < factor < 1 else ():
        size = held.others.get(by, 0.0)
        for bound in bounds:
            if size and abs(factor - clip_factor(bound, size)) <= SLACK * factor:
                return Judgement("agrees", whole=True, clipped=(by, bound))
    norm = held.others.get("norm")
    if recipe.clip is not None and norm is not None:
        part = clipping_by_part(held.part_norms, factor, norm, (recipe.clip,))
        if part is not None:
            says, alone = part
            guess = StepGuess("clip_by_part", says, most="confirmed" if alone else "explained")
            return Judgement("differs", says, (guess,), whole=True)
    times = simple_factor(factor, SLACK * abs(factor)) or f"{number_text_apart(factor, 1.0)} times"
    says = f"the optimizer had {times} the gradient that was given"
    return Judgement("differs", says, (StepGuess("gradient_scaled", says),), whole=True)


def _contradicted_factors(
    parameter: Parameter, recipe: Recipe, held: StepInputs, scales: Sequence[float]
) -> dict[float, tuple[int, bool]]:
    """Return {factor of the gradient: (elements that contradict it, whether it is excluded)}.

    `scales` are the factors to try. The moments of an element contradict a factor if no earlier
    gradients can have made them; many such elements exclude it.
    """
    wrong = dict.fromkeys(scales, 0)
    every = 0
    for case in _all_cases(parameter, held, False) if scales else ():
        every += case.before.size
        for scale in wrong:
            wrong[scale] += _count_contradicted(case, changed(recipe, scale=scale))
    least = max(FEWEST, CONTRADICTED * every)
    return {scale: (count, count >= least) for scale, count in wrong.items()}


def _count_contradicted(case: StepCase, recipe: Recipe) -> int:
    """Return the number of elements whose moments no earlier gradients can have made."""
    assert case.gradient is not None and case.moments is not None
    first, second = case.moments.first, case.moments.second
    assert first is not None and second is not None
    g = recipe.scale * case.gradient
    if recipe.adds_decay_to_gradient and recipe.decays(case.vector):
        g = g + recipe.wd * case.before
    room = MOMENT + 2 * case.noise
    left = (second * (1 + room) - (1 - recipe.b2) * g * g * (1 - room)) / recipe.b2
    before = np.abs(first - (1 - recipe.b1) * g) - room * (np.abs(first) + np.abs(g))
    most = _squares_ratio(recipe, case.moments.step - 1)
    bound = recipe.b1 * np.sqrt(np.maximum(left, 0.0) * most)
    return int(np.count_nonzero((left < 0) | (before > bound * (1 + room))))


def _is_unmoved(parameter: Parameter) -> bool:
    """Return whether no element of a parameter changed, not even by decay, as if it were frozen."""
    sides = pieces(parameter.before, parameter.after)
    return all(w1 is not None and bool(np.array_equal(w0, w1)) for _, _, w0, w1 in sides)


def _makes_step(case: StepCase, fits: Sequence[tuple[Recipe, Fit]]) -> bool:
    """Return whether the weight moved besides its decay, or is too coarse to show it.

    `fits` are (recipe, its fit) of what the recipe may mean.
    """
    if case.coarse:
        width = float_spacing(case.before, case.encodings[1])
        if float((fits[0][0].lr / width).sum()) < CHANCE:
            return True
    return all(
        bool((np.abs(case.change - fit.update.decay) > case.rounding).any()) for _, fit in fits
    )


def _has_one_size(recipe: Recipe) -> bool:
    """Return whether a recipe's step has one size in all elements, whatever the gradient."""
    sizes = recipe.row.sizes
    return sizes == "every step" or (sizes == "first step" and recipe.step in (None, 1))


def _missing_input(recipe: Recipe, held: StepInputs) -> str:
    """Return a sentence on the input that is missing to compute a recipe's step.

    `held` is what was given of it.
    """
    if recipe.row.sizes == "first step":
        return (
            "the step of a later number needs the optimizer's state (--optimizer-state), or it is "
            "the first: step=1"
        )
    if held.gradient is not None and (held.second is None or not held.after):
        return (
            f"a step of {recipe.name} needs, next to the gradient, the state of after the step: "
            "--optimizer-state"
        )
    return "the step needs the gradient (--grads) or the optimizer's state (--optimizer-state)"


def _with_clipping(recipe: Recipe, held: StepInputs) -> Recipe:
    """Return the recipe with its clipping factor in `scale`.

    Unchanged if it does not clip, or the gradients' norm is not known.
    """
    norm = held.others.get("norm")
    if recipe.clip is None or norm is None or held.gradient is None:
        return recipe
    return changed(recipe, scale=recipe.scale * clip_factor(recipe.clip, norm))


def _fit_clippings(
    recipe: Recipe, held: StepInputs, case: StepCase
) -> list[tuple[Recipe, Fit, tuple[str, float]]]:
    """Return (recipe, fit, (by what, bound)) for each usual clipping that explains the step.

    Gradients may be clipped by their norm, by another number of all gradients, or by value. [] if a
    norm was stated, no gradient is known, or the whole step is known not to be clipped.
    """
    norm = held.others.get("norm")
    stated = recipe.clip is not None or "unclipped" in held.others
    if stated or norm is None or held.gradient is None:
        return []
    tried = []
    for by in ("norm", *OTHER_NORMS):
        size = held.others.get(by, 0.0)
        for bound in CLIPS:
            if bound < size:
                scale = recipe.scale * clip_factor(bound, size)
                tried.append(((by, bound), changed(recipe, clip=bound, scale=scale)))
    largest = 0.0 if case.gradient is None else float(np.abs(case.gradient).max(initial=0.0))
    if recipe.clip_value is None and not recipe.row.sizes:
        # The bound is the longest step over the rate, if it is one that somebody wrote.
        longest = float(np.abs(case.change).max(initial=0.0)) / recipe.lr if recipe.lr else 0.0
        written = float(f"{longest:.2g}")
        bounds = dict.fromkeys((written, *VALUES))
        for bound in bounds:
            if 0 < bound < largest:
                tried.append((("value", bound), changed(recipe, clip_value=bound)))
    fits = ((one, case.fit(one), clipped) for clipped, one in tried)
    return [(one, fit, clipped) for one, fit, clipped in fits if fit is not None and fit.right]


def possible_recipes(recipe: Recipe, case: StepCase) -> list[Recipe]:
    """Return the recipes that a stated one may mean; two of a vector: with decay and without it.

    Only one if the recipe says which parameters decay.
    """
    if case.vector and recipe.wd and not recipe.decay_on:
        return [changed(recipe, decay_on="matrices"), changed(recipe, decay_on="all")]
    return [recipe]


def _decays_all(recipe: Recipe, one: Recipe, fits: Sequence[tuple[Recipe, Fit]]) -> bool:
    """Return whether a vector decays though the recipe does not say that vectors do.

    `one` is the recipe that fits, `fits` those that were tried, the one without decay first.
    """
    return not recipe.decay_on and one.decay_on == "all" and not fits[0][1].right


def _has_common_size(case: StepCase, fit: Fit) -> bool:
    """Return whether most elements that moved moved by one size, as they do in a first step.

    Most are the fraction USUAL. True also where too few moved to tell.
    """
    rest = np.abs(case.change - fit.update.decay)
    moved = rest > 2 * case.rounding
    if np.count_nonzero(moved) < FEWEST:
        return True  # nothing to see: the decay alone
    size = float(np.quantile(rest[moved], LONG))
    slack = 2 * case.rounding[moved] + SIZES * size
    return bool((np.abs(rest[moved] - size) <= slack).mean() >= USUAL)


def sample_case(parameter: Parameter, held: StepInputs, signs: bool) -> StepCase:
    """Return a case of all elements of a parameter, or of about SAMPLE, spread over its rows.

    `signs` says that only the signs of the gradient are known, from the change.
    """
    size = int(np.prod(parameter.before.shape, dtype=np.int64))
    columns = max(1, parameter.before.shape[-1] if parameter.before.shape else 1)
    rows = size // columns
    if size <= SAMPLE:
        case = _case_of_rows(parameter, held, signs, 0, rows)
        return replace(case, shape=(rows, columns))
    block = max(1, min(64, SAMPLE // columns // 16))
    starts = np.linspace(0, rows - block, max(2, SAMPLE // columns // block)).astype(int)
    parts = [
        _case_of_rows(parameter, held, signs, int(at), int(at) + block) for at in np.unique(starts)
    ]
    return _join_cases(parts)


def whole_case(parameter: Parameter, held: StepInputs, signs: bool) -> StepCase | None:
    """Return a case of all elements of a matrix that `sample_case` takes only some rows of.

    `signs` says that only the signs of the gradient are known. None for a vector, for a matrix that
    a sample has whole, and for one above MOST_WHOLE.
    """
    size = int(np.prod(parameter.before.shape, dtype=np.int64))
    if parameter.vector or not SAMPLE < size <= MOST_WHOLE:
        return None
    columns = parameter.before.shape[-1]
    case = _case_of_rows(parameter, held, signs, 0, size // columns)
    return replace(case, shape=(size // columns, columns))


def _case_of_rows(
    parameter: Parameter, held: StepInputs, signs: bool, start: int, stop: int
) -> StepCase:
    """Return the elements of rows [start, stop) as a case.

    `signs` says that only the signs of the gradient are known, from the change.
    """
    before, after = parameter.before, parameter.after
    assert after is not None
    w0 = before.rows(start, stop).astype(np.float64)
    w1 = after.rows(start, stop).astype(np.float64)
    return _case_of_weights(parameter, held, signs, start, w0, w1)


def _case_of_weights(
    parameter: Parameter, held: StepInputs, signs: bool, start: int, w0: F64, w1: F64
) -> StepCase:
    """Return a case of the weights `w0` before and `w1` after the step, from row `start` on.

    The gradient and the moments of these rows are added.
    """
    stop = start + len(w0)
    numbers = np.repeat(np.arange(start, stop), w0.shape[1])
    if parameter.vector:
        numbers = np.arange(w0.size)
    gradient = None if held.gradient is None else held.gradient.rows(start, stop).reshape(-1)
    assert parameter.after is not None
    return StepCase(
        parameter.key,
        parameter.vector,
        w0.reshape(-1),
        w1.reshape(-1),
        (parameter.before.encoding, parameter.after.encoding),
        numbers,
        gradient,
        held.moments(start, stop),
        signs,
        held.noise,
        others=held.others,
        part_norms=held.part_norms,
        blur=0.0 if held.gradient is None else held.gradient.blur,
    )


def _join_cases(parts: list[StepCase]) -> StepCase:
    """Return one case of the rows of several cases of one parameter, joined in order.

    A gradient or moment that only some of the cases have is joined from these alone.
    """

    def joined(values: list[F64 | None]) -> F64 | None:
        """Return the arrays joined in order, without those that are None; None if all are."""
        known = [each for each in values if each is not None]
        return np.concatenate(known) if known else None

    moments = parts[0].moments
    if moments is not None:
        held = [each.moments for each in parts if each.moments is not None]
        moments = replace(
            moments,
            first=joined([each.first for each in held]),
            second=joined([each.second for each in held]),
        )
    return replace(
        parts[0],
        before=np.concatenate([each.before for each in parts]),
        after=np.concatenate([each.after for each in parts]),
        rows=np.concatenate([each.rows for each in parts]),
        gradient=joined([each.gradient for each in parts]),
        moments=moments,
    )


def _all_cases(parameter: Parameter, held: StepInputs, signs: bool) -> Iterator[StepCase]:
    """Yield cases of all elements of a parameter, piece by piece.

    `signs` says that only the signs of the gradient are known, from the change.
    """
    for start, _, w0, w1 in pieces(parameter.before, parameter.after):
        assert w1 is not None
        yield _case_of_weights(parameter, held, signs, start, w0, w1)


def _judge_all(
    parameter: Parameter, recipe: Recipe, held: StepInputs, signs: bool, sample: Fit
) -> Judgement:
    """Return the verdict on all elements of a parameter whose sample is right.

    "differs" where an element outside the sample is not what the recipe gives, or is not finite.
    """
    size, rate = _measure_step_and_decay(sample, recipe)
    share = None if signs else share_arrived(sample.case, sample.update.whole)
    found = Judgement(
        "agrees",
        step=size,
        decay=rate,
        arrived=share,
        shows=sample.shows or sample.told_by_bits,
        exact=sample.exact,
        decay_shown=decay_evidence(sample.case, recipe),
        held_counts=sample.held_counts,
    )
    if sample.case.shape is not None:
        return found
    wrong: list[int] = []
    count = 0
    for case in _all_cases(parameter, held, signs):
        if not np.isfinite(case.after).all():
            return replace(found, verdict="differs", why="holds NaN or infinite numbers")
        if not _has_finite_moments(case):
            return replace(found, verdict="differs", why=NONFINITE, nonfinite=True)
        fit = case.fit(recipe)
        assert fit is not None
        if found.exact and not fit.exact:
            found = replace(found, exact=False, shows=sample.shows)
        if fit.share < 1 and not fit.exact:
            count += int(np.count_nonzero(~fit.near))
            wrong += np.unique(case.rows[~fit.near])[:4].tolist()
    if not wrong:
        return found
    why = f"{count} elements are not what the step gives, in rows {', '.join(map(str, wrong[:4]))}"
    return replace(found, verdict="differs", why=why)


def _measure_step_and_decay(fit: Fit, recipe: Recipe) -> tuple[float | None, float | None]:
    """Return (median size of the elements' step, share of itself that each weight decayed by).

    Each is None where its deviation over the elements is a quarter or more.
    """
    case = fit.case
    factor, off, decay, decay_off = fit.factors
    size = float(np.median(np.abs(fit.update.step))) if off < 0.25 else None
    rate = recipe.lr * recipe.wd * recipe.decay_factor * decay
    known = (SIGMAS if case.signs else 1.0) * decay_off < 0.25 and recipe.decays(case.vector)
    return None if size is None else factor * size, rate if known else None


def _explain_difference(
    parameter: Parameter, recipe: Recipe, held: StepInputs, sample: StepCase, fit: Fit
) -> Judgement:
    """Return the verdict "differs", with every mistake that gives the weights after the step.

    A mistake with a fitted number is found on half of the elements and judged on the other half.
    A factor of the gradient that these elements do not show is only "located".
    """
    size, rate = _measure_step_and_decay(fit, recipe)
    share = None if sample.signs else share_arrived(sample, fit.update.whole)
    half = np.arange(sample.before.size)
    first, second = sample.part(half % 2 == 0), sample.part(half % 2 == 1)
    found: list[StepGuess] = []
    stated = fit.right  # the rule is the stated one: what is wrong is not in it
    for row in UPDATES:
        for guess in row.find(sample if row.whole else first, recipe):
            if stated and guess.recipe is not None:
                continue
            if guess.free and second.before.size < ENOUGH * guess.free:
                continue
            if not guess.seen(sample):
                continue
            if guess.right(sample) and (row.whole or guess.right(second)):
                scaled = guess.recipe is not None and guess.recipe.scale != recipe.scale
                blind = scaled and not guess.shows_scale(sample)
                found.append(replace(guess, most="located") if blind else guess)
    whole = None if found or stated else whole_case(parameter, held, sample.signs)
    if whole is not None and sample.change.any():
        # Rules of whole matrices, such as Muon's, say nothing of some of their rows.
        tried = [guess for row in UPDATES if row.whole for guess in row.find(whole, recipe)]
        found = [
            one for one in tried if one.recipe is None and one.seen(whole) and one.right(whole)
        ]
    if not found and not stated and not sample.change.any() and sample.coarse:
        return Judgement("not compared", UNMOVED, shows=False)
    times, off = measured_factor(sample, recipe)
    why = "the change is no step of this optimizer"
    back = times < 0 and share_along(sample.change, (fit.update.whole,)) < ALONG
    if np.isfinite(times) and off < 0.2 * max(abs(times), 1e-9) and not back:
        why = (
            f"{fit.share:.0%} of its elements are as expected; it moved {times:.3g} times the step"
        )
    return Judgement(
        "differs",
        why,
        tuple(found),
        sample.shape is not None or bool(found and whole is not None),
        size,
        rate,
        share,
        sample.signs,
        exact=fit.told_by_bits and _is_exact(parameter, recipe, held, fit),
        decay_shown=decay_evidence(sample, recipe),
        held_counts=fit.held_counts,
    )


def _is_exact(parameter: Parameter, recipe: Recipe, held: StepInputs, fit: Fit) -> bool:
    """Return whether all weights are to the bit what rounding a recipe's step gives.

    `fit` is that of the sample.
    """
    if not fit.exact or fit.case.shape is not None:
        return fit.exact
    fits = (case.fit(recipe) for case in _all_cases(parameter, held, False))
    return all(each is not None and each.exact for each in fits)


def share_reproduced(
    parameter: Parameter, guess: StepGuess, held: StepInputs, signs: bool
) -> float:
    """Return the fraction of a parameter's elements that change as a guess predicts.

    All elements are looked at. `signs` says that only the signs of the gradient are known.
    """
    near = every = 0
    for case in _all_cases(parameter, held, signs):
        every += case.before.size
        if guess.recipe is None:
            near += case.before.size if guess.right(case) else 0
            continue
        fit = case.fit(guess.recipe)
        if fit is not None:
            near += case.before.size if fit.exact else int(np.count_nonzero(fit.near))
    return near / max(1, every)


def telling_elements(
    parameter: Parameter, guess: StepGuess, recipe: Recipe, held: StepInputs, signs: bool
) -> int:
    """Return how many elements of a parameter distinguish a guessed mistake from the stated recipe.

    They are those that the two steps would store as different values. If none do, or the guess has
    no recipe, all elements count. `signs`: only the signs of the gradient are known.
    """
    count = 0
    for case in _all_cases(parameter, held, signs):
        fits = None
        if guess.recipe is not None:
            fits = case.fit(guess.recipe), case.fit(_with_clipping(recipe, held))
        if fits is None or fits[0] is None or fits[1] is None:
            count += case.before.size
        else:
            count += int(np.count_nonzero(fits[0].stored != fits[1].stored))
    return count or int(np.prod(parameter.before.shape))
