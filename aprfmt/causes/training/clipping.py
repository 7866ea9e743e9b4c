"""Gradients that were clipped otherwise than stated."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.row import Cause
from aprfmt.causes.training.gradient_case import SIDES, SIGMAS, GradientCase
from aprfmt.causes.training.optimizers import F64, Recipe, changed, round_to
from aprfmt.causes.training.step_case import StepCase, StepGuess, StepHypothesis
from aprfmt.causes.training.step_size import SLACK, measured_factor
from aprfmt.measure.verdicts import Certainty
from aprfmt.tensors.norms import exact_norm

OtherNorm = Literal["largest", "sum"]

CAUSE_ROWS = (
    Cause(
        "clip_missing",
        "update",
        "bug",
        "The gradients were not clipped, and their norm is above the bound.",
        "The step is that of the gradient as it is.",
        "The step of the whole gradient gives every weight.",
    ),
    Cause(
        "clip_by_tensor",
        "update",
        "bug",
        "The gradient of each tensor, each shard or each row (adaptive clipping, AGC) was clipped "
        "by its own norm, not by the norm of all.",
        "The factor of each tensor or shard is the bound over its own norm, and that of each row a "
        "share of its weights' norm over its own.",
        "The step clipped by that norm gives every weight, or the computed gradient every element.",
    ),
    Cause(
        "clip_twice",
        "update",
        "bug",
        "The gradient was scaled down twice by the factor that clips it once.",
        "The step has the square of the factor.",
        "The step clipped twice gives every weight.",
    ),
    Cause(
        "clip_by_value",
        "update",
        "bug",
        "Each element of the gradients was clipped, and not the norm of all of them.",
        "Elements up to a bound are as they were, and larger ones are the bound.",
        "The step of the elements clipped to the bound gives every weight.",
    ),
    Cause(
        "clip_other_norm",
        "update",
        "bug",
        "The gradients were clipped by their largest element, or by the sum of the sizes of all "
        "elements, and not by the L2 norm that the bound is of.",
        "The factor of all gradients is the bound over that number.",
        "The step of the gradients clipped so, or the computed gradients, give every element.",
    ),
    Cause(
        "clip_before_unscale",
        "gradient",
        "bug",
        "The gradients were clipped while the loss scale was on: the bound is divided by it.",
        "The norm of all gradients, or the largest of all elements, is a usual bound over a power "
        "of two.",
        "The computed gradients clipped to it are the given ones; nothing else says the scale.",
        most="explained",
    ),
)
CLIPS = (0.1, 0.25, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)  # norms that trainers clip to
VALUES = (1e-3, 3e-3, 5e-3, 0.01, 0.03, 0.05, *CLIPS)  # and values of elements
SCALES = tuple(float(1 << power) for power in range(7, 25))  # of a loss, in float16
SAME = 1e-5  # how far a bound over a loss scale may be off
# The numbers, besides the L2 norm, by which torch's clip_grad_norm_ clips: norm types inf and 1.
OTHER_NORMS: tuple[OtherNorm, ...] = "largest", "sum"
CLIPPED_BY: Mapping[str, str] = {
    "norm": "the norm of all gradients",
    "largest": "the largest element",
    "sum": "the sum of the sizes of all elements",
}
# Adaptive gradient clipping (AGC), by its authors and timm: the least norm of a row of weights.
LEAST_WEIGHT = 1e-3
ROWS = 8  # at least that have to show one share
OWN_NORMS = 3  # gradients at least that have one norm, where each was clipped by its own
AT_BOUND = 8  # elements at least that have to be at the bound of a clipping by value


@dataclass(frozen=True)
class Clipping:
    """How gradients were clipped: by a norm of all of them (`by`), or each element by value.

    `bound` is the limit. `scale` is a loss scale that was still in the gradients, else 1.
    """

    by: Literal["norm", "value"] | OtherNorm
    bound: float
    scale: float = 1.0

    @property
    def says(self) -> str:
        """Sentence on what was clipped, and to what bound."""
        what = CLIPPED_BY.get(self.by, "each element")
        over = f" while a loss scale of {self.scale:g} was on" if self.scale != 1 else ""
        return f"{what} was clipped to {self.bound:g}{over}"


def scaled_bound(bound: float, usual: Collection[float]) -> tuple[float, float] | None:
    """Return (usual bound, loss scale) whose quotient is the measured bound; None for no such pair.

    Where several bounds and scales have the same quotient, the bound 1 is taken.
    """
    for each in sorted(usual, key=lambda one: one != 1.0):
        for scale in SCALES:
            if abs(bound * scale - each) <= SAME * each:
                return each, scale
    return None


def value_clipping(cases: Mapping[str, GradientCase]) -> Clipping | None:
    """Return the clipping by value that turns all computed gradients into the given ones, or None.

    `cases` are all parameters' gradients by key. None where an element is above the bound, too
    few are at it, or a gradient is not the computed one clipped.
    """
    if not cases:
        return None
    bound = max(float(np.abs(each.given).max(initial=0.0)) for each in cases.values())
    if not bound or not np.isfinite(bound):
        return None
    there = sum(int((np.abs(each.given) >= bound * (1 - SAME)).sum()) for each in cases.values())
    if there < AT_BOUND:
        return None
    for each in cases.values():
        if not each.near(each.given, np.clip(each.computed, -bound, bound)):
            return None
    # A bound is a number that somebody wrote; in types of few bits any is near one of two digits.
    for kind, digits in (("F32", 2), ("BF16", 1), ("F16", 1)):
        written = float(f"{bound:.{digits}g}")
        if abs(bound - float(round_to(np.array([written]), kind)[0])) <= 1e-9 * bound:
            return Clipping("value", written)
    found = scaled_bound(bound, VALUES)
    return None if found is None else Clipping("value", *found)


def other_norm_clipping(
    sizes: Mapping[OtherNorm, float], factor: float, bounds: Collection[float]
) -> Clipping | None:
    """Return the clipping by another number than the L2 norm that gradients show; None for none.

    `sizes` are such numbers of the given gradients, by kind. `factor` is given over computed
    gradient, `bounds` are the usual bounds. A number with one digit counts as a bound, too:
    somebody wrote it.
    """
    for by, size in sizes.items():
        room = SAME + 1e-6 * factor / size if size else 0.0  # what clip_factor adds to the norm
        for bound in (*bounds, float(f"{size:.1g}")):
            if size and abs(size - bound) <= room * bound:
                return Clipping(by, bound)
    return None


def tensor_clipping(cases: Mapping[str, GradientCase]) -> tuple[str, tuple[str, ...]] | None:
    """Return (sentence, keys) of gradients that were clipped each by its own norm; None if not.

    `cases` are all parameters' gradients by key. Every gradient whose norm is above one common
    bound must be scaled down to it; the others are unchanged, or all scaled up to it.
    """
    given = {key: exact_norm(each.given) for key, each in cases.items()}
    right = {key: exact_norm(each.computed) for key, each in cases.items()}
    off = {key for key, each in cases.items() if not each.right}
    bound = max(given.values(), default=0.0)
    if not bound or not np.isfinite(bound) or len(off) < OWN_NORMS:
        return None
    scaled_up = any(given[key] > right[key] for key in off)
    for key, each in cases.items():
        if not right[key]:
            factor = 1.0
        else:
            factor = bound / right[key] if scaled_up else clip_factor(bound, right[key])
        room = SIDES[True] if each.coarse else SLACK / 10
        if key in off and abs(given[key] - bound) > room * bound:
            return None
        if not each.near(each.given, factor * each.computed):
            return None
    says = f"each gradient was clipped by its own norm to {bound:.4g}"
    if scaled_up:
        says = f"each gradient was scaled to the norm {bound:.4g} by its own, smaller ones too"
    return says, tuple(key for key in cases if key in off)


def _row_norms(values: F64, rows: NDArray[np.int64] | None = None) -> F64:
    """Return the L2 norm of each row, [rows], of `values`: [rows, columns], or flat elements.

    For flat elements `rows` gives the row number of each element.
    """
    if rows is None:
        return np.asarray(np.sqrt(np.square(values).sum(axis=1)))
    return np.asarray(np.sqrt(np.bincount(rows, np.square(values))))


def row_factors(share: float, gradients: F64, weights: F64) -> F64:
    """Return the factors, [rows], at most 1.0, by which adaptive clipping scales gradient rows.

    `gradients` and `weights` are the norms of the rows; a gradient's may be `share` times the
    weight's. Source: Brock et al. 2021, equation 3; timm's adaptive_clip_grad.
    """
    bound = share * np.maximum(weights, LEAST_WEIGHT)
    return np.asarray(np.minimum(1.0, bound / np.maximum(gradients, 1e-6)))


def _common_ratio(factors: F64, gradients: F64, weights: F64) -> float | None:
    """Return the ratio of gradient norm to weight norm to which all clipped rows were clipped.

    `factors`, `gradients` and `weights` are [rows]: the factor of each row, and the norms before.
    None where fewer than ROWS rows were clipped, or their ratios differ.
    """
    below = factors < 1 - SLACK
    if np.count_nonzero(below) < ROWS:
        return None
    shares = (factors * gradients / np.maximum(weights, LEAST_WEIGHT))[below]
    share = float(np.median(shares))
    return share if share > 0 and np.abs(shares - share).max() <= SLACK * share else None


def row_clipping(
    cases: Mapping[str, GradientCase], weights: Callable[[str], F64]
) -> tuple[str, tuple[str, ...]] | None:
    """Return (sentence, keys) of gradients whose rows were clipped by their own norms, or None.

    `cases` are all parameters' gradients by key, `weights(key)` the parameter's weights, [rows,
    columns]; a vector is one row. One ratio of gradient norm to weight norm must explain every
    element.
    """
    off = tuple(key for key, each in cases.items() if not each.right)
    sides, every = {}, []
    for key, each in cases.items():
        held = weights(key)
        given, right = (_row_norms(x.reshape(held.shape)) for x in (each.given, each.computed))
        sides[key] = right, _row_norms(held)
        factors = np.divide(given, right, out=np.ones_like(given), where=right > 0)
        every.append((factors, *sides[key]))
    factors, right, held = (np.concatenate(part) for part in zip(*every, strict=True))
    share = _common_ratio(factors, right, held)
    if share is None:
        return None
    for key, each in cases.items():
        rows = row_factors(share, *sides[key])[:, None]
        wanted = (rows * each.computed.reshape(len(rows), -1)).reshape(each.given.shape)
        if not each.near(each.given, wanted):
            return None
    return _row_clipping_sentence(share), off


def _row_clipping_sentence(share: float) -> str:
    """Return the sentence on adaptive clipping to `share` of each row's weight norm."""
    return (
        f"each row of a gradient was clipped by its own norm to {share:.4g} of that of its weights "
        "(adaptive clipping, AGC)"
    )


def guess_row_clipping(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that each row of the gradient was clipped by its own norm.

    Nothing where the step does not depend on the size of the gradient, or the case lacks elements
    of a row.
    """
    if case.gradient is None or case.signs or recipe.row.sizes:
        return
    if case.vector and case.shape is None:
        return
    plain = changed(recipe, scale=1.0)
    update = case.predict(plain)
    if update is None:
        return

    def norms(part: StepCase) -> tuple[NDArray[np.int64], F64, F64]:
        """Return (each element's row from 0 on, gradient norm by row, weight norm by row).

        A vector counts as one row. `part` has some elements of one parameter before and after the
        step.
        """
        rows = np.zeros(part.before.size, np.int64)
        if not part.vector:
            rows = np.unique(part.rows, return_inverse=True)[1].reshape(-1)
        assert part.gradient is not None
        return rows, _row_norms(part.gradient, rows), _row_norms(part.before, rows)

    rows, gradients, weights = norms(case)
    known = np.bincount(rows, np.square(update.step))
    made = np.bincount(rows, (case.change - update.decay) * update.step)
    factors = np.divide(made, known, out=np.ones_like(known), where=known > 0)
    share = case.others.get("row_share") or _common_ratio(factors, gradients, weights)
    if share is None:
        return

    def holds(part: StepCase) -> bool:
        """Return whether the recipe predicts `part` with each gradient row clipped by its own norm.

        `part` has some elements of one parameter before and after the step.
        """
        rows, gradients, weights = norms(part)
        assert part.gradient is not None
        clipped = part.gradient * row_factors(share, gradients, weights)[rows]
        fit = replace(part, gradient=clipped).fit(plain)
        return fit is not None and fit.right

    says = _row_clipping_sentence(share)
    most: Certainty = "confirmed"
    if recipe.clip is None:
        says, most = says + ON_PURPOSE, "explained"
    yield StepGuess("clip_by_tensor", says, None, 1, holds, number=("row_share", share), most=most)


ON_PURPOSE = ", which some trainers do on purpose, and no clip=BOUND states otherwise"


def clip_factor(bound: float, norm: float) -> float:
    """Return the factor, at most 1.0, that torch's clip_grad_norm_ multiplies all gradients by.

    `norm` is the norm of all gradients together, `bound` the largest allowed.
    """
    return min(1.0, bound / (norm + 1e-6))


def guess_clipping(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield guesses that gradients were not clipped, clipped twice, or by another norm than all's.

    In place of that norm: each by its own norm, matrices and vectors each by the norm of their
    kind, or all by another number than the L2 norm. Nothing where the recipe does not clip, a norm
    is not known, or the step does not depend on the size of the gradient, as Lion's. Adam's first
    step shows it where the gradient is as small as epsilon.
    """
    norm, own = case.others.get("norm"), case.others.get("own_norm")
    if recipe.clip_value is not None and case.gradient is not None and not case.signs:
        largest = float(np.abs(case.gradient).max(initial=0.0))
        if largest > recipe.clip_value * (1 + SLACK):
            says = f"no element was clipped, and some are above the bound {recipe.clip_value:g}"
            yield StepGuess("clip_missing", says, changed(recipe, clip_value=None))
    if recipe.clip is None or norm is None or own is None or case.gradient is None:
        return
    moments_before = case.moments is not None and not case.moments.after and case.moments.step > 0
    if case.signs or (recipe.row.sizes and not moments_before and "eps" not in recipe.row.settings):
        return  # the size of the gradient is not in the step
    largest = float(np.abs(case.gradient).max(initial=0.0))
    for bound in dict.fromkeys((recipe.clip, *VALUES)):
        if bound < largest and not recipe.row.sizes:
            says = f"each element was clipped to {bound:g}, not the norm of all"
            yield StepGuess("clip_by_value", says, changed(recipe, scale=1.0, clip_value=bound))
    right = clip_factor(recipe.clip, norm)
    factor, off = None, 0.0
    if not recipe.row.sizes:
        factor, off = measured_factor(case, changed(recipe, scale=1.0))
    for cause, says, scale in other_factors(recipe, case.others, case.vector):
        measured = factor is None or abs(factor - scale) <= max(SLACK * scale, SIGMAS * off)
        if measured and abs(scale - right) > SLACK * right:
            yield StepGuess(cause, says, changed(recipe, scale=scale))


def other_factors(
    recipe: Recipe, others: Mapping[str, float], vector: bool
) -> Iterator[tuple[str, str, float]]:
    """Yield (cause, sentence, factor) of usual mistakes in clipping by the norm of all gradients.

    `factor` (at most 1.0) is what one multiplies a parameter's gradient by; `vector`: that is no
    matrix. `others` is {name: norm}: "norm" of all gradients, "own_norm" of this one. Nothing if
    one of these two is unknown.
    """
    norm, own = others.get("norm"), others.get("own_norm")
    if recipe.clip is None or norm is None or own is None:
        return
    right = clip_factor(recipe.clip, norm)
    if right < 1 - SLACK:
        says = (
            f"the gradients were not clipped; the norm of all is {norm:.4g}, the bound "
            f"{recipe.clip:g}"
        )
        yield "clip_missing", says, 1.0
        yield "clip_twice", f"the gradients were clipped twice, by {right:.4g} each time", right**2
    kind, what = others.get("kind_norm", norm), "vectors" if vector else "matrices"
    says = f"each gradient was clipped by its own norm to {recipe.clip:g}"
    yield "clip_by_tensor", says, clip_factor(recipe.clip, own)
    says = (
        f"the gradients of {what} were clipped by the norm {kind:.4g} that they have together to "
        f"{recipe.clip:g}, not by that of all, {norm:.4g}"
    )
    yield "clip_by_tensor", says, clip_factor(recipe.clip, kind)
    for name in OTHER_NORMS:
        size = others.get(name, 0.0)
        if size > recipe.clip:
            text = f"{CLIPPED_BY[name]}, {size:.4g}, was clipped to {recipe.clip:g}, not "
            says = f"{text}the norm of all, {norm:.4g}"
            yield "clip_other_norm", says, clip_factor(recipe.clip, size)


HYPOTHESES = (
    StepHypothesis(
        ("clip_missing", "clip_by_tensor", "clip_twice", "clip_by_value", "clip_other_norm"),
        guess_clipping,
        40,
        "factors that follow from norms, before a fitted one",
    ),
    StepHypothesis(
        ("clip_by_tensor",), guess_row_clipping, 41, "one share of all rows, before a factor", True
    ),
)
