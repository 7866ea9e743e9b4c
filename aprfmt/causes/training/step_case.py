"""The elements of one parameter around a step, and how well a recipe predicts the new values.

A *case* is elements of one parameter before and after the step, with what the optimizer had for
them. A *fit* is how well a recipe predicts the change.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.row import LAST
from aprfmt.causes.training.optimizers import F64, Moments, Recipe, Update, round_to, update_of
from aprfmt.measure.encoding_noise import UNIT, float_spacing
from aprfmt.measure.verdicts import Certainty

Mask = NDArray[np.bool_]
ARITHMETIC = 2.0**-16  # of a step: a root, a quotient and two moments in float32
SUMMED = 2.0**-24  # of each of two numbers that float32 adds
CANCELLED = 2.0**-20  # of a rate: what is left where a gradient takes its moment away
COARSE = ("BF16", "F16")  # types that trainers keep copies in: the weight may be held finer
CONSTANT = 2.0**-24  # of a weight: 1 - lr * wd is a float32, and those below 1 are so far apart
ROUNDED = 4.0  # roundings of a step that is made in the stored type: moments, root, quotient, sum
SIZES = 0.02  # of a step whose sign is read from the change: epsilon makes it a little smaller
EXACT = 0.999  # share of elements that a step in the stored type gives bit for bit
SIGMAS = 6.0  # a factor that is further from 1 than so many deviations is another one
LEAST = 1e-3  # and by at least so much: what float32 sums and constants of a rule may be off
TOP = 0.995  # of elements that moved are not longer than a quantile of the longest
FEWEST, LONG = 8, 0.9  # elements that say how long a step is; that part of them is not longer
ONCE = 0.53  # of a step of the type: how far one rounding puts a number, and arithmetic in it
FAINT = 0.05  # of the stated decay: less is none, as epsilon and weight are not independent
SHORT = 5e-3  # what epsilon takes away from the longest steps
CLEAN = 5e-3  # of the longest step: what those that measure its length may lack
ENOUGH = 64  # rounds of a search that ends exactly, mostly after ten
TELLING = 10.0  # elements of which arithmetic in few bits would have made other ones
KNOWN, NEAR = 16, 0.25  # elements, and of half a spacing: what shows that they were not rounded
SHOWN = 0.25  # of an update: how far its size may be off where it is seen
TENTH = 1.1  # times a factor of the gradient that is another one
USUAL = 0.2  # share of elements whose step has the size of all others, in a first step


@dataclass(frozen=True)
class StepCase:
    """Some elements of one parameter: float64 [n] before and after, and what the optimizer had.

    `gradient` and `moments` are None where they are not known. Then `signs` says that the step is
    one whose elements have one size: their signs are read from the change itself. `noise` is the
    relative error of each number of gradient and moments, `blur` the absolute error of each of the
    gradient. `rows` [n] are the numbers of the rows that the elements are in. `shape` is that of
    the whole parameter where all its elements are here, in order. `others` are numbers that are not
    of these elements: `norm` of all gradients, `own_norm` of this one, `kind_norm` of all matrices
    or all vectors, `rate` and `decay` of its group in the state, `unclipped` where no unstated
    clipping was made, `decoupled` 0.0 where the state has the decay in the gradient, `factor` and
    `decay_factor` that were measured on another parameter. `part_norms` are norms of some of the
    gradients together, by words for which.
    """

    key: str
    vector: bool
    before: F64
    after: F64
    encodings: tuple[str, str]
    rows: NDArray[np.int64]
    gradient: F64 | None = None
    moments: Moments | None = None
    signs: bool = False
    noise: float = 0.0
    shape: tuple[int, int] | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    part_norms: Mapping[str, float] = field(default_factory=dict)
    blur: float = 0.0  # how far each number of the gradient may be off

    @cached_property
    def change(self) -> F64:
        """The weights after the step minus those before it, float64 [n]."""
        return self.after - self.before

    @cached_property
    def rounding(self) -> F64:
        """How far rounding may have moved each element of the change, float64 [n].

        Half a spacing of the stored type after the step, the same before it for BF16 and F16 that
        may be rounded copies, and one spacing of float32 for arithmetic. A whole spacing after the
        step where the weights before and after are BF16 or F16: trainers may round to these at
        random, up or down.
        """
        found: F64 = float_spacing(self.after, self.encodings[1]) / 2
        if self.encodings[0] in COARSE and not self.stepped_as_stored:
            found = found + float_spacing(self.before, self.encodings[0]) / 2
        if self.coarse and self.encodings[0] == self.encodings[1]:  # rounded at random
            found = np.maximum(found, float_spacing(self.after, self.encodings[1]))
        if self.encodings[1] != "F64":
            found = found + float_spacing(
                np.maximum(np.abs(self.before), np.abs(self.after)), "F32"
            )
        return found

    @cached_property
    def stepped_as_stored(self) -> bool:
        """Whether the step was added to the stored BF16 or F16 weights, not to finer copies.

        Where the weights after the step are stored finer, their changes show it: of finer copies
        they include what rounding removed before the step, which is seldom small. False for other
        types and for few elements.
        """
        if self.encodings[0] not in COARSE or self.coarse or self.change.size < KNOWN:
            return False
        most = NEAR * float_spacing(self.before, self.encodings[0]) / 2
        return bool((np.abs(self.change) <= most).mean() >= LONG)

    @property
    def coarse(self) -> bool:
        """Whether the weight after the step is stored in BF16 or F16."""
        return self.encodings[1] in COARSE

    @property
    def narrow(self) -> float:
        """The relative error of a step that may have been computed in BF16 or F16, else 0.0.

        It may have been where the weights before and after are stored in the same one of these
        types.
        """
        same = self.encodings[0] == self.encodings[1]
        return ROUNDED * UNIT[self.encodings[1]] if self.coarse and same else 0.0

    @cached_property
    def edge(self) -> tuple[float, float]:
        """(Length of the longest step, fraction of the weights that decayed), read from the change.

        The fraction is the one with which the longest step is shortest, within rounding. It holds
        for rules whose steps are all of one size: none is longer than the learning rate.
        """
        weight, change, rounding = self.before, self.change, self.rounding
        if not weight.size:
            return 0.0, 0.0
        largest = float(np.abs(weight).max())
        end = 2 * float(np.abs(change).max()) / largest if largest else 0.0

        def line(share: float) -> tuple[float, float]:
            """Return (slope, length) of the longest step, had the weights decayed by `share`.

            `share` is a fraction of the weight. The slope is the change of the length per unit of
            it; rounding is subtracted.
            """
            rest = change + share * weight
            length = np.abs(rest) - rounding
            at = int(np.argmax(length))
            return float(np.sign(rest[at]) * weight[at]), float(length[at])

        left, right = (-end, *line(-end)), (end, *line(end))
        share, length = 0.0, line(0.0)[1]
        for _ in range(ENOUGH):  # two lines meet below the longest step of all: to a lower point
            if not (left[1] < 0 < right[1]):
                break
            share = (left[2] - left[1] * left[0] - right[2] + right[1] * right[0]) / (
                right[1] - left[1]
            )
            meets = left[2] + left[1] * (share - left[0])
            slope, length = line(share)
            if length <= meets + 2.0**-40 * abs(length) or not slope:
                break
            if slope < 0:
                left = (share, slope, length)
            else:
                right = (share, slope, length)
        return max(0.0, length), share

    @cached_property
    def idle_shares(self) -> tuple[float, float] | None:
        """(Least, largest) fraction of the weight that decay removed in rows without a step.

        These are rows that only shrink. None without such rows.
        """
        return _decay_bounds(self, np.zeros_like(self.change), None if self.vector else self.rows)

    def part(self, index: Any) -> "StepCase":
        """Return the elements at `index` (a mask or indices) as a case; it has no `shape`."""
        moments = self.moments
        if moments is not None:
            moments = replace(
                moments,
                first=None if moments.first is None else moments.first[index],
                second=None if moments.second is None else moments.second[index],
            )
        return replace(
            self,
            before=self.before[index],
            after=self.after[index],
            rows=self.rows[index],
            shape=None,
            gradient=None if self.gradient is None else self.gradient[index],
            moments=moments,
        )

    def predict(self, recipe: Recipe) -> Update | None:
        """Return the step and decay that a recipe gives these elements.

        None if an input is unknown. A recipe is an optimizer with its settings. Where only the
        gradient's signs matter, they may be read from the change.
        """
        gradient = self.gradient
        if self.signs:
            gradient = self._implied_gradient_signs(recipe)
        return self.of_rows(
            recipe, update_of(recipe, self.before, gradient, self.moments, self.vector)
        )

    def of_rows(self, recipe: Recipe, update: Update | None) -> Update | None:
        """Return an update with zeros in the rows that a sparse optimizer leaves unchanged.

        It leaves rows unchanged that were not read. A row with a gradient in some element was read.
        A row may also be read and have a zero gradient (padding): if fewer than half of the rows
        without a gradient moved, the moved ones count as read. The update is returned unchanged for
        a dense rule, a vector, or without a gradient. None for None.
        """
        if update is None or not recipe.sparse or self.vector or self.gradient is None:
            return update
        order = np.unique(self.rows, return_inverse=True)[1]
        has = np.bincount(order, self.gradient != 0) > 0
        moved = np.bincount(order, self.change != 0) > 0
        if moved[~has].sum() < (~has).sum() / 2:
            has |= moved
        used = has[order]
        return Update(np.where(used, update.step, 0.0), np.where(used, update.decay, 0.0))

    def _implied_gradient_signs(self, recipe: Recipe) -> F64:
        """Return -1, 0 or 1 for each element: the sign that its unknown gradient must have had.

        It is the sign that moves the element the way it moved under `recipe`. An element that the
        decay alone explains within rounding has 0.
        """
        plain = update_of(recipe, self.before, np.zeros_like(self.before), None, self.vector)
        rest = self.change if plain is None else self.change - plain.whole
        found: F64 = np.where(np.abs(rest) <= self.rounding, 0.0, -np.sign(rest))
        return recipe.sign * (-1.0 if recipe.scale < 0 else 1.0) * found

    def fit(self, recipe: Recipe) -> "Fit | None":
        """Return how a recipe's step compares with the change; None if it cannot be computed.

        A recipe is an optimizer with its settings.
        """
        update = self.predict(recipe)
        return None if update is None else Fit(self, update, recipe)


class Fit:
    """A recipe's predicted update compared with the change of the elements in a case."""

    def __init__(self, case: StepCase, update: Update, recipe: Recipe) -> None:
        """Compare the update that `recipe` predicts with the change of `case`, element by element.

        Sets `near`, the mask [n] of elements within rounding, and `share`, the fraction of them
        (1.0 for no elements). Where only signs are known, `near` also takes shorter steps, and
        `full` is the mask without these.
        """
        self.case, self.update, self.recipe = case, update, recipe
        whole = update.whole
        off = np.abs(case.change - whole)
        noise = SIZES if case.signs else case.noise + ARITHMETIC + case.narrow
        slack = noise * np.abs(update.step) + (CANCELLED * recipe.lr if recipe.row.sizes else 0.0)
        near = off <= case.rounding + slack + self._blurred
        self.full: Mask = near
        if case.signs:  # a gradient of the size of epsilon makes a smaller step
            size = float(np.abs(update.step).max(initial=0.0))
            rest = np.abs(case.change - update.decay)
            usual = float(near.mean()) if near.size else 1.0
            near = near | ((rest <= size + case.rounding) & (usual >= USUAL))
        self.near: Mask = near
        self.share = float(near.mean()) if near.size else 1.0

    @cached_property
    def _blurred(self) -> F64 | float:
        """How much an error of the gradient may change each predicted step, [n]; 0.0 for none.

        The error is `blur`, and what float32 loses where gradient and added decay cancel: Adam
        makes a step of any length of what is left.
        """
        case, gradient, recipe = self.case, self.case.gradient, self.recipe
        if gradient is None or case.signs:
            return 0.0
        blur: F64 | float = case.blur
        if recipe.adds_decay_to_gradient and recipe.decays(case.vector):
            added = recipe.wd * recipe.decay_factor * case.before
            blur = blur + SUMMED * (np.abs(recipe.scale * gradient) + np.abs(added))
        if recipe.second_kept_in:  # a square between two numbers of the type becomes either
            blur = blur + ARITHMETIC * np.abs(gradient)
        if not np.any(blur):
            return 0.0
        found = np.zeros_like(gradient)
        for side in (-blur, blur):
            moved = case.of_rows(
                self.recipe,
                update_of(self.recipe, case.before, gradient + side, case.moments, case.vector),
            )
            assert moved is not None
            found = np.maximum(found, np.abs(moved.step - self.update.step))
        return found

    @property
    def faint(self) -> bool:
        """Whether steps of known size are shorter than stated, each by another factor.

        A lower rate makes all steps shorter by one factor; gradients as small as Adam's epsilon
        make each shorter by another. In the second case the longest steps do not show the rate.
        False where the gradient is known.
        """
        case, size = self.case, self._size
        if not case.signs or case.coarse or not size:
            return False
        rest = np.abs(case.change + self._edge[1] * case.before)
        moved = rest > 2 * case.rounding
        if np.count_nonzero(moved) < FEWEST:
            return False
        top = float(np.quantile(rest[moved], TOP))
        usual = float(np.quantile(rest[moved], LONG))
        blur = 4 * float(np.median(case.rounding[moved]))
        short = size - usual
        return usual < (1 - SHORT) * size - blur and top - usual > min(short, usual) / 8 + blur

    @cached_property
    def exact(self) -> bool:
        """Whether the predicted weights, rounded to the stored type, are the stored bits.

        A fraction EXACT of the elements is enough. False unless the weights before and after are in
        the same type, BF16 or F16, and the gradient or the moments are known.
        """
        case, encoding = self.case, self.case.encodings[1]
        if case.signs or not case.coarse or case.encodings[0] != encoding:
            return False  # signs that are read from the change give it whatever the size is
        return bool((self.stored == case.after).mean() >= EXACT)

    @property
    def told_by_bits(self) -> bool:
        """Whether bits show the step: the weights that it moves are to the bit those predicted.

        False where it moves none in the stored type: no step, or another one, leaves the same.
        """
        moves = self.stored != self.case.before
        if not self.exact or not moves.any():
            return False
        return bool((self.stored == self.case.after)[moves].mean() >= EXACT)

    @cached_property
    def stored(self) -> F64:
        """The predicted weights after the step, rounded once to the stored type, as float64 [n]."""
        return round_to(self.case.before + self.update.whole, self.case.encodings[1])

    @cached_property
    def factors(self) -> tuple[float, float, float, float]:
        """(factor of the step, its deviation, factor of the decay, its deviation) in the change.

        1.0 means that the change has the predicted step, or decay, once. Both are fitted by least
        squares, or read from step sizes where signs are not known. A deviation is infinite where
        the elements do not show the factor.
        """
        case = self.case
        if case.signs and case.coarse:
            return (*self._factor_by_counts, 1.0, float("inf"))
        if case.signs:
            return (*self._longest, *self._decay)
        step, decay = self.update.step, np.broadcast_to(self.update.decay, self.update.step.shape)
        variance = case.rounding**2 / 3 + ((case.noise + ARITHMETIC + case.narrow) * step) ** 2
        variance = variance + self._blurred**2
        weight = 1.0 / np.maximum(variance, 1e-300)
        found = solve_factors(step, decay, case.change, weight)
        if not case.coarse:
            return found
        # A weight that does not leave its spacing loses the decay, or as much as its copy says.
        leaves = np.abs(step + decay) >= float_spacing(case.before, case.encodings[1])
        return found[:2] + solve_factors(step, decay, case.change, weight * leaves)[2:]

    @cached_property
    def _size(self) -> float:
        """The length of the longest predicted step, over all elements."""
        return float(np.abs(self.update.step).max(initial=0.0))

    @cached_property
    def _edge(self) -> tuple[float, float]:
        """(length of the longest step, fraction of decay), where signs are not known.

        The decay is the predicted one if the longest step then has the predicted length: a vector
        of similar elements may show another length and decay as well. Else both are those of
        `StepCase.edge`.
        """
        case, share = self.case, self.share_stated
        length = float((np.abs(case.change + share * case.before) - case.rounding).max(initial=0.0))
        if (1 - SHORT) * self._size <= length <= (1 + ARITHMETIC) * self._size:
            return length, share
        return case.edge

    @cached_property
    def _longest(self) -> tuple[float, float]:
        """(Factor of the step in the change, its deviation), from the elements that moved furthest.

        Epsilon makes a step shorter, but hardly the longest ones. (1.0, infinity) where too few
        elements are as long.
        """
        size = self._size
        length, share = self._edge
        rest = np.abs(self.case.change + share * self.case.before)
        at = rest + self.case.rounding > (1 - CLEAN) * length
        moved = rest > 2 * self.case.rounding
        if not size or np.count_nonzero(at & moved) < FEWEST:
            return 1.0, float("inf")
        return length / size, float(np.median(self.case.rounding[at & moved])) / size

    @cached_property
    def shrunk(self) -> tuple[float, float]:
        """(fraction of the weight that decay removed, its deviation), where signs are not known.

        Rows that only shrink, all by one fraction, show it best. Else it is the middle of the
        interval of fractions with which no element made a step longer than the stated or the
        longest one; SIGMAS deviations are half of the interval. Nothing is averaged, since a
        gradient near epsilon makes a step of any length, perhaps with the weight's sign. (0.0,
        infinity) where the interval has no end.
        """
        case = self.case
        found = case.idle_shares
        if found is None:
            length = max(self._size, self._edge[0]) * (1 + ARITHMETIC)
            found = _decay_bounds(case, np.full_like(case.change, length))
        if found is None:
            return 0.0, float("inf")
        low, high = found
        return (low + high) / 2, (high - low) / 2 / SIGMAS

    @cached_property
    def _decay(self) -> tuple[float, float]:
        """(Factor of the stated weight decay in the change, its deviation), with unknown signs.

        The signs are the gradient's. (1.0, infinity) if no decay is stated.
        """
        wanted = self.share_stated
        found, off = self.shrunk
        return (found / wanted, off / wanted) if wanted else (1.0, float("inf"))

    @cached_property
    def share_stated(self) -> float:
        """The fraction of a weight that the stated decay removes in this step.

        0.0 without decay.
        """
        decay = np.broadcast_to(self.update.decay, self.case.before.shape)
        at = int(np.argmax(np.abs(self.case.before))) if decay.size else 0
        found = float(decay[at]) if decay.size else 0.0
        return -found / float(self.case.before[at]) if found else 0.0

    @cached_property
    def _factor_by_counts(self) -> tuple[float, float]:
        """(Factor of the step in the change, its deviation), for steps below the type's spacing.

        An element whose trainer holds it finer moves by one whole spacing, with a probability of
        step over spacing: the mean change says how large the step is, and its sign does not
        matter. (1.0, infinity) where nothing moved.
        """
        case, size = self.case, self._size
        moved = case.rows[case.change != 0]
        used = np.isin(case.rows, moved)
        count = int(np.count_nonzero(used))
        if not count or not size:
            return 1.0, float("inf")
        width = float_spacing(case.before[used], case.encodings[1])
        total = float(np.abs(case.change[used]).sum())
        off = float(np.sqrt((width * size + size * size / 12).sum()))
        return total / (count * size), off / (count * size)

    @property
    def right(self) -> bool:
        """Whether the recipe explains the elements after the step.

        True where the stored bits are equal, or where every element is within rounding and the
        factors of step and decay are 1 within their deviations.
        """
        if self.exact:
            return True
        if self.share < 1.0:
            return False
        step, step_off, decay, decay_off = self.factors
        if self.case.signs and not self.case.coarse and not self.share_stated:
            share, off = self.shrunk
            if abs(share) > SIGMAS * off + FAINT * self.recipe.lr * self.recipe.wd:
                return False
        short = SHORT if self.case.signs and step < 1 else 0.0
        step_off += self.case.narrow / SIGMAS
        return is_one(min(1.0, step + short), step_off) and is_one(decay, decay_off + self.constant)

    @property
    def shrinks(self) -> bool:
        """Whether the weights shrink by a measurable fraction of the stated decay, or by more.

        In a type of few bits each weight alone hides a decay; all of them together do not.
        """
        decay, off = self.factors[2:]
        return decay > SIGMAS * off

    @property
    def constant(self) -> float:
        """The deviation of the decay's factor that comes from rounding 1 - lr * wd to float32.

        0.0 for F64 weights, and without decay.
        """
        wanted = self.share_stated
        return CONSTANT / wanted / SIGMAS if wanted and self.case.encodings[1] != "F64" else 0.0

    @property
    def direct(self) -> bool:
        """Whether the weights were stepped in the stored type itself, without a finer copy of them.

        Each then is within one rounding of the predicted weight. False unless the weights before
        and after are in the same type, BF16 or F16, and the gradient or the moments are known.
        """
        case, encoding = self.case, self.case.encodings[1]
        if not case.coarse or case.encodings[0] != encoding or case.signs:
            return False
        width = float_spacing(np.maximum(np.abs(case.before), np.abs(case.after)), encoding)
        off = np.abs(case.change - self.update.whole)
        return bool((off <= ONCE * width + 2 * UNIT[encoding] * np.abs(self.update.step)).all())

    @cached_property
    def held_counts(self) -> tuple[int, float, int, int]:
        """Counts that show the type that weights were stepped in: (moved, due, other, far).

        `moved` elements change by the step; arithmetic in the stored type would round `due` of
        these differently, at least. `other` of them differ from the prediction. `far` elements are
        further off than that arithmetic allows. Zeros unless the weights before and after are in
        the same type, BF16 or F16, and the gradient or the moments are known.
        """
        case, encoding = self.case, self.case.encodings[1]
        if not case.coarse or case.encodings[0] != encoding or case.signs:
            return 0, 0.0, 0, 0
        moves = self.stored != case.before
        width = float_spacing(np.maximum(np.abs(case.before), np.abs(case.after)), encoding)
        step = np.abs(self.update.step)
        far = (
            np.abs(case.change - self.update.whole) > ONCE * width + ROUNDED * UNIT[encoding] * step
        )
        due = UNIT[encoding] / 2 * float((step / width)[moves].sum())
        other = moves & (self.stored != case.after)
        return (
            int(np.count_nonzero(moves)), due, int(np.count_nonzero(other)),
            int(np.count_nonzero(far)),
        )  # fmt: skip

    @property
    def shows(self) -> bool:
        """Whether the stored type shows the size of the step to a quarter of it."""
        return self.factors[1] < 0.25


def _decay_bounds(
    case: StepCase, length: F64, rows: NDArray[np.int64] | None = None
) -> tuple[float, float] | None:
    """Return (least, largest) fraction of decay with which no step is longer than `length` [n].

    With `rows` [n] only rows that have such a fraction count, and the interval is wider by their
    rounding. None where no fraction will do.
    """
    some = case.before != 0
    if not some.any():
        return None
    weight, room = case.before[some], (length + case.rounding)[some]
    ends = np.sort(np.stack([(-case.change[some] - room), (-case.change[some] + room)]) / weight, 0)
    low, high = ends[0], ends[1]
    if rows is not None:
        order = np.unique(rows[some], return_inverse=True)[1]
        count = int(order.max()) + 1
        lows, highs = np.full(count, -np.inf), np.full(count, np.inf)
        np.maximum.at(lows, order, low)
        np.minimum.at(highs, order, high)
        idle = (lows <= highs) & (np.bincount(order) >= FEWEST)
        if not idle.any():
            return None
        room_left = np.full(count, np.inf)
        np.minimum.at(room_left, order, (case.rounding[some] / np.abs(weight)))
        low, high = (lows - room_left)[idle], (highs + room_left)[idle]
    least, most = float(low.max()), float(high.min())
    return (least, most) if least <= most else None


def held_in(moved: int, due: float, other: int, far: int) -> str:
    """Return what weights were stepped in: "finer" than they are stored, "stored", or "" (open).

    The arguments are sums of `Fit.held_counts` over tensors: elements that the step moves, how
    many of them arithmetic in the stored type would round differently, how many differ from the
    prediction, and elements further off than that arithmetic allows. Those that are far off show
    finer copies.
    """
    if far >= max(FEWEST, (1 - EXACT) * moved):
        return "finer"
    if due < TELLING:
        return ""
    return "finer" if other <= due / 8 else "stored"


def number_text_apart(value: float, stated: float) -> str:
    """Return a number as text of three digits, or of as many as tell it from the stated number.

    "" where no digits tell them apart.
    """
    for digits in range(3, 18):
        if (text := f"{value:.{digits}g}") != f"{stated:.{digits}g}":
            return text
    return ""


def is_one(factor: float, deviation: float) -> bool:
    """Return whether a measured factor is 1, within SIGMAS deviations and LEAST."""
    return abs(factor - 1) <= SIGMAS * deviation + LEAST


def solve_factors(
    step: F64, decay: F64, change: F64, weight: F64
) -> tuple[float, float, float, float]:
    """Return (a, its deviation, b, its deviation) of the fit change = a * step + b * decay.

    Least squares; `weight` is one over each element's variance. A factor that cannot be
    determined is 1.0, and its deviation infinite.
    """
    ss, dd = float((weight * step * step).sum()), float((weight * decay * decay).sum())
    sd = float((weight * step * decay).sum())
    sy, dy = float((weight * step * change).sum()), float((weight * decay * change).sum())
    infinite = float("inf")
    if not ss and not dd:
        return 1.0, infinite, 1.0, infinite
    if not dd:
        return sy / ss, ss**-0.5, 1.0, infinite
    if not ss:
        return 1.0, infinite, dy / dd, dd**-0.5
    size = ss * dd - sd * sd
    if size <= 1e-9 * ss * dd:  # they cannot be told apart
        return 1.0, infinite, 1.0, infinite
    return (
        (sy * dd - dy * sd) / size,
        (dd / size) ** 0.5,
        (dy * ss - sy * sd) / size,
        (ss / size) ** 0.5,
    )


@dataclass(frozen=True)
class StepGuess:
    """A mistake with its numbers filled in: the recipe that would have made this step.

    `recipe` None: the statement is not about the rule, and `holds` says whether it is true of some
    elements. `free` numbers were read from the elements: others have to judge them. `number` is
    (what was measured, its value), None if nothing was: other parameters may be held to it. `most`
    is the most that may be said of it. `own` is what it says of this parameter alone, in words that
    are put before "in" and the parameter's name.
    """

    cause: str
    says: str
    recipe: Recipe | None = None
    free: int = 0
    holds: Callable[[StepCase], bool] | None = None
    number: tuple[str, float] | None = None
    most: Certainty = "confirmed"
    own: str = ""

    def right(self, case: StepCase) -> bool:
        """Return whether the guess explains a case's elements: by `holds`, else by its recipe."""
        if self.holds is not None:
            return self.holds(case)
        assert self.recipe is not None
        fit = case.fit(self.recipe)
        return fit is not None and fit.right

    def shows_scale(self, case: StepCase) -> bool:
        """Return whether a case's elements tell the recipe's factor of the gradient from others.

        Others are a tenth larger or smaller. An optimizer that divides by the gradient's size
        shows the factor only where the gradient is as small as epsilon. True for other optimizers
        and for a guess without a recipe.
        """
        if self.recipe is None or "eps" not in self.recipe.row.settings:
            return True
        fits = (
            case.fit(replace(self.recipe, scale=self.recipe.scale * times))
            for times in (TENTH, 1 / TENTH)
        )
        return not any(fit is not None and fit.right for fit in fits)

    def seen(self, case: StepCase) -> bool:
        """Return whether the change of a case's elements shows the guessed update itself.

        An update that hides in the rounding of BF16 or F16 also fits weights that did not move,
        or moved by chance. It is seen if the elements show its size within SHOWN, and it leaves
        less of the change than no update would, in squares of roundings. True without a test
        where the weight after the step is stored finer, the recipe makes no update, only signs
        are known, or the guess has no recipe.
        """
        if self.recipe is None or case.signs or not case.coarse:
            return True
        update = case.predict(self.recipe)
        if update is None or not update.whole.any():
            return True
        room = np.maximum(case.rounding, 1e-300)
        wanted, moved = update.whole / room, case.change / room
        if 3 * float(wanted @ wanted) * SHOWN * SHOWN < 1:
            return False
        left = moved - wanted
        return bool(left @ left < moved @ moved)


@dataclass(frozen=True, slots=True)
class StepHypothesis:
    """A row of the table of hypotheses: causes that it can find, and the function that tries them.

    The hypothesis with the lowest rank is tried first. `whole` hypotheses look at all elements in
    their order, others at one half of them.
    """

    causes: tuple[str, ...]
    find: Callable[[StepCase, Recipe], Iterator[StepGuess]]
    rank: int = LAST
    because: str = "offered by another package"
    whole: bool = False
