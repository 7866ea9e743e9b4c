"""A trainer's gradient and the computed one, and mistakes that explain a difference.

A *case* is the two gradients of one parameter with what is known of them. A *guess* is a mistake
that makes the trainer's gradient of the computed one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from aprfmt.causes.row import LAST
from aprfmt.causes.training.optimizers import F64
from aprfmt.measure.verdicts import Certainty
from aprfmt.tensors import norms

FINE, COARSE = 1e-3, 5e-2  # relative L2: arithmetic in float32, and in types of few bits
RESIDUALS = 1e-3, 4e-3  # what storing and adding in these leave at least
SIDES = 1e-3, 1e-2  # how far the factor of two gradients may be from 1, in these
SURE = 1e-4  # and where what is left without the factor is less than the factor's own deviation
ROUNDINGS = 2.0  # of a trainer's arithmetic: what two passes in it may be apart
PART = 0.25  # of a difference: what a fitted number may leave of it, if it is the reason
SIGMAS = 6.0  # deviations that a measured factor may be off by


@dataclass(frozen=True)
class GradientCase:
    """Two gradients of one parameter, float64 [rows, columns].

    `coarse`: the trainer computes in a type of few bits. `sizes` are the hyperparameters by which
    rows and columns are cut (heads, experts). `counts` are numbers of the batch and of the run
    that a factor may come of, by what they are. `rounding` is the relative L2 distance that the
    trainer's arithmetic alone makes of this gradient, None where it was not measured. `earlier` is
    the gradient of the step before, float64 [rows, columns], where the optimizer's state has it.
    """

    key: str
    given: F64
    computed: F64
    coarse: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    tokens: frozenset[int] = frozenset()  # that are in the batch
    repeated: frozenset[int] = frozenset()  # that are in it more than once
    rounding: float | None = None
    earlier: F64 | None = None

    @cached_property
    def distance(self) -> float:
        """The relative L2 distance |given - computed| / |computed|."""
        return distance(self.given, self.computed)

    @cached_property
    def factor(self) -> tuple[float, float]:
        """(factor of the computed gradient in the given one, by least squares, its deviation).

        (1.0, infinity) where the computed gradient is zero.
        """
        size = float((self.computed * self.computed).sum())
        if not size:
            return 1.0, float("inf")
        found = float((self.given * self.computed).sum()) / size
        rest = norms.exact_norm(self.given - found * self.computed)
        return found, rest / size**0.5 / max(1.0, self.given.size**0.5)

    @property
    def bound(self) -> float:
        """The relative L2 distance up to which the two gradients count as equal: COARSE or FINE."""
        return COARSE if self.coarse else FINE

    @property
    def residual(self) -> float:
        """The relative L2 distance that may remain by rounding alone.

        It is ROUNDINGS times the measured rounding of the trainer's arithmetic, else `bound`.
        """
        if self.rounding is None:
            return self.bound
        return max(RESIDUALS[self.coarse], ROUNDINGS * self.rounding)

    @property
    def factor_room(self) -> float:
        """The largest error of `factor`, the measured ratio of the two gradients, absolute.

        It is SIGMAS deviations, or the whole rounding of the trainer's arithmetic if that is
        larger.
        """
        factor, off = self.factor
        known = SIDES[True] if self.coarse else SURE
        return max(SIGMAS * off, abs(factor) * (known if self.rounding is None else self.rounding))

    def with_rounding(self, rounding: float | None) -> "GradientCase":
        """Return the case with the measured effect of the trainer's arithmetic on this gradient.

        `rounding` is an L2 distance, None for not measured.
        """
        size = norms.exact_norm(self.computed)
        return self if rounding is None or not size else replace(self, rounding=rounding / size)

    def is_made(self, wanted: F64) -> bool:
        """Return whether the given gradient is `wanted`, made by a mistake with a fitted number.

        What is left may be no more than rounding and than a small fraction of the difference of
        both gradients: a fitted number always explains some of a difference.
        """
        left = distance(self.given, wanted)
        size = norms.exact_norm(wanted)
        there = norms.exact_norm(self.given - self.computed)
        return left * size <= PART * there and self.near(self.given, wanted, self.residual)

    def near(self, given: F64, wanted: F64, bound: float | None = None) -> bool:
        """Return whether `given` equals `wanted` within rounding, in relative L2 distance and size.

        A wanted gradient of zero equals zero only. `bound` is the largest relative distance, None
        for the `bound` of the case.
        """
        other = replace(self, given=given, computed=wanted)
        if not np.any(wanted):
            return not np.any(given)
        factor, off = other.factor
        side = SIDES[self.coarse]
        if abs(factor - 1) > SURE + SIGMAS * off and not self.coarse:
            # Rounding differs from element to element; a factor holds for all of them.
            rest = distance(given, factor * wanted)
            if rest < abs(factor - 1) / 4:
                return False
        bound = self.bound if bound is None else bound
        return other.distance <= bound and abs(factor - 1) <= side + SIGMAS * off

    @property
    def right(self) -> bool:
        """Whether the given gradient agrees with the computed one, within `bound` (see `near`)."""
        return self.near(self.given, self.computed)

    @property
    def rounded(self) -> bool:
        """Whether the gradients would agree if the trainer had computed in a type of few bits."""
        return replace(self, coarse=True).right

    def half(self, odd: int) -> "GradientCase":
        """Return the case with every second element of both gradients, as [1, n].

        `odd` (0 or 1) is the number of the first element.
        """
        flat = np.arange(self.given.size) % 2 == odd
        return replace(
            self,
            given=self.given.reshape(-1)[flat][None],
            computed=self.computed.reshape(-1)[flat][None],
        )


def distance(given: F64, computed: F64) -> float:
    """Return |given - computed| / |computed|, L2; where computed is zero, 0.0 or infinity."""
    size = norms.exact_norm(computed)
    rest = norms.exact_norm(given - computed)
    return rest / size if size else (0.0 if not rest else float("inf"))


@dataclass(frozen=True)
class GradientGuess:
    """A mistake with its numbers filled in: `made` turns the computed gradient into the given one.

    `free` numbers were fitted to elements: then `made` is judged on the other half of them.
    `factor` is a factor that was measured, and its largest error. `most` is the most that may be
    said of it: "explained" where other mistakes make the same gradient.
    """

    cause: str
    says: str
    made: Callable[[GradientCase], F64]
    free: int = 0
    factor: tuple[float, float] | None = None
    most: Certainty = "confirmed"

    def right(self, case: GradientCase) -> bool:
        """Return whether the guessed mistake turns the computed gradient into the given one."""
        made = self.made(case)
        return case.is_made(made) if self.free else case.near(case.given, made)


@dataclass(frozen=True, slots=True)
class GradientHypothesis:
    """A row of the table of hypotheses: causes that it can find, and the function that tries them.

    The hypothesis with the lowest rank is tried first. `whole` hypotheses look at all elements of
    the gradient, others at one half of them.
    """

    causes: tuple[str, ...]
    find: Callable[[GradientCase], Iterator[GradientGuess]]
    rank: int = LAST
    because: str = "offered by another package"
    whole: bool = False
