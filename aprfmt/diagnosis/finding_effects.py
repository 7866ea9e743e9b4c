"""Measures the effect of each finding by passes of B with other parts replaced by A's.

A *part* of B is the weights and hyperparameters that one finding is about; parts are numbered as
findings. To *replace* a part is to take A's in its place.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aprfmt.diagnosis.paired_pass import SAME, PairedPass, PassResult, Probe
from aprfmt.diagnosis.records import Touched as Touched
from aprfmt.inference.trace import Trace
from aprfmt.measure.nonfinite import NonFinite
from aprfmt.measure.tolerances import weights_class_of
from aprfmt.measure.trace_view import finer_weights_class
from aprfmt.measure.traces import PointDiff, RunPair
from aprfmt.model import Model

BUDGET = 4e11  # multiplications and additions: some seconds on two cores
LEAST = 3  # parts that are taken away alone whatever a pass takes


def make_run_pair(a: Model, b: Model) -> RunPair:
    """Return the RunPair, which gives the tolerances, for two models that both run on numpy."""
    kinds = [{"weights": weights_class_of(model)} for model in (a, b)]
    moe = any(bool(model.hyper["n_experts"]) for model in (a, b))
    return RunPair(("numpy", "numpy"), finer_weights_class(*(Trace(run, {}) for run in kinds)), moe)


@dataclass(frozen=True)
class Share:
    """The effect of one finding on the logits, as relative L2 from A's.

    `before`: with the parts of all other findings replaced by A's; `after`: with all parts
    replaced. `first` is the first point beyond its tolerance. `odd` locates NaN and infinities in
    the logits with every other part replaced. `kl_before` and `kl_after` are in nats. `exact`: with
    it alone the logits are A's to the bit. `alone` is False where no pass was spent on this part.
    """

    before: float
    after: float
    first: str
    odd: NonFinite | None = None
    kl_before: float | None = None
    kl_after: float | None = None
    exact: bool = False
    alone: bool = True


@dataclass(frozen=True)
class MixedResult:
    """The effect of every finding on the logits, and the difference left with all replaced.

    `shares` are in the order of the parts, `rest` is the relative L2 that is left with all parts
    replaced, `points` are those of the pass with no part replaced.
    """

    shares: tuple[Share, ...]
    rest: float
    points: Mapping[str, PointDiff] = field(default_factory=dict)


class PartMeasurement:
    """Passes of B with some findings' parts replaced by A's; each combination is run once."""

    def __init__(
        self, passes: PairedPass, parts: Sequence[Touched], probes: Sequence[Probe]
    ) -> None:
        """Store the passes, the parts of B that findings are about, and the probes.

        `live` are the numbers of the parts that a pass reads, `known` the results by replaced
        parts.
        """
        self.passes, self.parts, self.probes = passes, parts, probes
        self.live = [i for i, part in enumerate(parts) if part.hyper or part.keys]
        self.known: dict[frozenset[int], PassResult] = {}

    def without(self, chosen: Sequence[int]) -> PassResult:
        """Return the worst pass result over all probes with B's parts `chosen` replaced by A's.

        A part is what one finding is about; `chosen` are numbers of findings. Parts that no pass
        reads are ignored. Each set is run once.
        """
        which = frozenset(chosen) & frozenset(self.live)
        if which not in self.known:
            blend = self.passes.blend([self.parts[i] for i in sorted(which)])
            found = [self.passes.run_from_first_difference(blend, probe) for probe in self.probes]
            self.known[which] = max(found, key=_distance_order, default=SAME)
        return self.known[which]

    def with_only(self, neutral: Sequence[int]) -> PassResult:
        """Return the first probe's result, at all points, with only the parts `neutral` replaced.

        `neutral` are numbers of parts of B that A's replace. The worst result over all probes is
        stored in `known`.
        """
        which = frozenset(neutral) & frozenset(self.live)
        blend = self.passes.blend([self.parts[i] for i in sorted(which)])
        first = self.passes.run_and_compare_points(blend, self.probes[0])
        others = [self.passes.run_from_first_difference(blend, probe) for probe in self.probes[1:]]
        self.known[which] = max([first, *others], key=_distance_order)
        return first

    def is_affordable(self) -> bool:
        """Return whether another pass is within the budget of multiplications."""
        return self.has_room_for(self.passes.flops + sum(map(self.passes.pass_flops, self.probes)))

    def has_room_for(self, flops: float) -> bool:
        """Return whether so many multiplications and additions in all are within the budget."""
        return flops <= BUDGET

    def measure_shares(self, neutral: Sequence[int]) -> MixedResult:
        """Return how much each finding's part of B changes the logits, the other parts being A's.

        `neutral` are parts that do not change the function, such as a reordering inside a layer:
        they are replaced in every pass. The result's points are those with only these replaced. A
        part is not measured alone (`alone` is False) where passes take too long.
        """
        only_neutral = self.with_only(neutral)
        rest, found = self.without(self.live), []
        spent = 0
        for i in range(len(self.parts)):
            if i not in self.live:
                found.append(Share(0.0, 0.0, "", kl_before=0.0, kl_after=0.0, exact=True))
                continue
            others = frozenset(self.live) - {i}
            if others not in self.known:
                spent += 1
                if spent > LEAST and not self.is_affordable():
                    found.append(Share(0.0, rest.distance, "", alone=False))
                    continue
            one = self.without(sorted(others))
            found.append(
                Share(one.distance, rest.distance, one.first, one.odd, one.kl, rest.kl, one.exact)
            )
        return MixedResult(tuple(found), rest.distance, only_neutral.points)

    def measure_removals(
        self, neutral: Sequence[int], order: Sequence[int]
    ) -> list[tuple[int, PassResult]]:
        """Return (part, pass result) with the parts in `order` replaced by A's one after the other.

        Each pass replaces one part more; the parts `neutral` are replaced in all. Passes between
        the first and the last are left out where they take too long.
        """
        steps: list[tuple[int, PassResult]] = []
        for at, i in enumerate(order):
            which = [*neutral, *order[: at + 1]]
            made = frozenset(which) & frozenset(self.live) in self.known
            if made or at == len(order) - 1 or self.is_affordable():
                steps.append((i, self.without(which)))
        return steps


def _distance_order(found: PassResult) -> tuple[bool, float]:
    """Return a sort key by a pass's distance from A's logits; infinite and NaN come last."""
    endless = not math.isfinite(found.distance)
    return endless, 0.0 if endless else found.distance
