"""A trainer's gradient and the computed one, and mistakes that explain a difference."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from aprfmt.causes.row import LAST
from aprfmt.causes.training.optimizers import F64
from aprfmt.tensors import norms

FINE, COARSE = 1e-3, 5e-2  # relative L2: arithmetic in float32, and in types of few bits
SIDES = 1e-3, 1e-2  # how far the factor of two gradients may be from 1, in these
SURE = 1e-4  # and where what is left without the factor is less than the factor's own deviation


@dataclass(frozen=True)
class GradientCase:
    """Two gradients of one parameter, float64 [rows, columns].

    `coarse`: the trainer computes in a type of few bits. `sizes` are the hyperparameters by which
    rows and columns are cut (heads, experts). `counts` are numbers of the batch and of the run
    that a factor may come of, by what they are.
    """

    key: str
    given: F64
    computed: F64
    coarse: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    tokens: frozenset[int] = frozenset()  # that are in the batch
    repeated: frozenset[int] = frozenset()  # that are in it more than once

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
        """The relative L2 distance up to which two gradients agree: COARSE or FINE."""
        return COARSE if self.coarse else FINE

    def near(self, given: F64, wanted: F64) -> bool:
        """Return whether `given` agrees with `wanted`, in relative L2 distance and in the factor.

        A wanted gradient of zero agrees with zero alone.
        """
        other = replace(self, given=given, computed=wanted)
        if not np.any(wanted):
            return not np.any(given)
        factor, off = other.factor
        side = SIDES[self.coarse]
        if abs(factor - 1) > SURE + 6 * off and not self.coarse:
            # Rounding differs from element to element; a factor holds for all of them.
            rest = distance(given, factor * wanted)
            if rest < abs(factor - 1) / 4:
                return False
        return other.distance <= self.bound and abs(factor - 1) <= side + 6 * off

    @property
    def right(self) -> bool:
        """Whether the given gradient agrees with the computed one, within `bound` (see `near`)."""
        return self.near(self.given, self.computed)

    @property
    def rounded(self) -> bool:
        """Whether the gradients would agree if the trainer had computed in a type of few bits."""
        return replace(self, coarse=True).right

    def half(self, odd: int) -> "GradientCase":
        """Return every second element, from number `odd` (0 or 1) on, as a case [1, n]."""
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
    """A mistake with its numbers filled in: `made` makes the given gradient of the computed one.

    `free` numbers were read from the elements: then `made` is judged on the other half of them.
    """

    cause: str
    says: str
    made: Callable[[GradientCase], F64]
    free: int = 0

    def right(self, case: GradientCase) -> bool:
        """Return whether the guess makes the given gradient of the computed one."""
        return case.near(case.given, self.made(case))


@dataclass(frozen=True, slots=True)
class GradientHypothesis:
    """One row: the causes it can find, and its function; the lowest rank is tried first.

    `whole` rows look at the gradient as it is, others at one half of its elements.
    """

    causes: tuple[str, ...]
    find: Callable[[GradientCase], Iterator[GradientGuess]]
    rank: int = LAST
    because: str = "offered by another package"
    whole: bool = False
