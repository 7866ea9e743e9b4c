"""Log-probabilities of a sampler's cut distribution: which top_p, top_k or min_p was applied.

A sampler keeps the likeliest tokens of a distribution and divides by their sum, the *mass*. A
server that answers with such numbers says of every token less log(mass) more than the model does.
The mass of each position follows from the model's own distribution there, so that one number of
the sampler gives all differences. The number is found on every second position and judged on all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprfmt.measure.short_numbers import short_number

Numbers = NDArray[np.float64]
NOISE = 4.0  # root mean squares by which a single position may be off
ROOM = 1e-9  # of a sum of probabilities, by the order of its terms


@dataclass(frozen=True)
class Descending:
    """One position's distribution over the whole vocabulary, the likeliest token first.

    `probabilities` and their running sums `sums` are float64 [tokens]; `sums` ends at 1.
    """

    probabilities: Numbers
    sums: Numbers

    @classmethod
    def of(cls, logprobs: Numbers) -> "Descending":
        """Return the distribution of one row of log-probabilities [vocabulary]."""
        probabilities = np.exp(-np.sort(-logprobs))
        sums = np.cumsum(probabilities)
        return cls(probabilities / sums[-1], sums / sums[-1])

    def count_between(self, low: float, high: float) -> tuple[int, int] | None:
        """Return (fewest, most) first tokens whose sum is from `low` to `high`; None for none."""
        fewest = int(np.searchsorted(self.sums, low, "left")) + 1
        most = int(np.searchsorted(self.sums, high, "right"))
        return (fewest, most) if fewest <= most else None


@dataclass(frozen=True)
class Cut:
    """A rule by which samplers keep tokens, under its usual name.

    `bounds` gives the (lowest, highest) number of the rule with which a distribution keeps from
    `fewest` to `most` tokens; `count` the number of tokens that it keeps with a number.
    """

    name: str
    bounds: Callable[[Descending, int, int], tuple[float, float]]
    count: Callable[[Descending, float], int]


def _reached(one: Descending, share: float) -> int:
    """Return how many tokens are the fewest whose probabilities reach `share` together."""
    return min(int(np.searchsorted(one.sums, share - ROOM)) + 1, len(one.sums))


def _likely(one: Descending, share: float) -> int:
    """Return how many tokens have at least `share` of the likeliest one's probability."""
    return int(np.searchsorted(-one.probabilities, -(share - ROOM) * one.probabilities[0], "right"))


def _relative(one: Descending, at: int) -> float:
    """Return the probability of token number `at` over the likeliest one's; 0 after the last."""
    there = at < len(one.probabilities)
    return float(one.probabilities[at] / one.probabilities[0]) if there else 0.0


CUTS = (
    Cut(
        "top_p",
        lambda one, fewest, most: (
            float(one.sums[fewest - 2]) if fewest > 1 else 0.0,
            float(one.sums[most - 1]),
        ),
        _reached,
    ),
    Cut("top_k", lambda one, fewest, most: (fewest, most), lambda one, count: round(count)),
    Cut(
        "min_p",
        lambda one, fewest, most: (_relative(one, most), _relative(one, fewest - 1)),
        _likely,
    ),
)


@dataclass(frozen=True)
class KeptMass:
    """A rule's name and number that give every difference, and the mass kept at each position."""

    name: str
    number: float
    masses: tuple[float, ...]


@dataclass(frozen=True)
class RaisedRow:
    """One position of a server's answer, against the model's own distribution there.

    `raised` are the nats by which its log-probabilities are above the model's, `noise` the nats by
    which these may be off, `lowest` the model's lowest log-probability of a token in the answer.
    """

    raised: float
    noise: float
    lowest: float
    distribution: Descending

    def fits(self, count: int) -> bool:
        """Return whether the first `count` tokens have the mass, and those of the answer in them.

        The mass is that by which the answer's log-probabilities are raised.
        """
        kept = self.distribution
        last = math.log(max(float(kept.probabilities[count - 1]), 1e-300))
        inside = self.lowest + self.noise >= last
        return inside and abs(self.raised + math.log(kept.sums[count - 1])) <= self.noise


def find_kept_mass(rows: Sequence[RaisedRow]) -> list[KeptMass]:
    """Return the rules, each with its number, that give the differences of all positions `rows`.

    The number is solved on every second position. [] if no rule gives all.
    """
    found = []
    for cut in CUTS:
        number = _solve(cut, rows[::2])
        if number is None:
            continue
        counts = [cut.count(row.distribution, number) for row in rows]
        if all(count and row.fits(count) for row, count in zip(rows, counts, strict=True)):
            masses = [
                float(row.distribution.sums[count - 1])
                for row, count in zip(rows, counts, strict=True)
            ]
            found.append(KeptMass(cut.name, number, tuple(masses)))
    return found


def _solve(cut: Cut, rows: Sequence[RaisedRow]) -> float | None:
    """Return the number of a rule that keeps the observed mass at every position; None for none.

    Of all numbers that do, the one with the fewest digits is returned.
    """
    low, high = 0.0, math.inf
    for row in rows:
        one = row.distribution
        counts = one.count_between(
            math.exp(-row.raised - row.noise), math.exp(-row.raised + row.noise)
        )
        if counts is None:
            return None
        least, most = cut.bounds(one, *counts)
        low, high = max(low, least), min(high, most)
    if low > high or not math.isfinite(high) or not high:
        return None
    return short_number((low + high) / 2, (high - low) / (high + low))
