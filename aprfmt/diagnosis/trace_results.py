"""The results of examining a trace: where it diverges, and the change that explains it.

A *point* is a capture point of a pass, a *change* a hypothesis applied to the reference model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.forward.mismatch import Change, Layers, Mismatch, computed_layer
from aprfmt.inference.replay.patched_model import MOVES, PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import ShadowPass, ShadowPoint
from aprfmt.measure.proofs import Proof, unfitted_proof
from aprfmt.measure.tolerances import DISCRETE

Array = NDArray[Any]


FLOAT = 24  # bits of a fitted number
AGREES = 2.0  # times the tolerance of a point, for one of its rows


@dataclass(frozen=True)
class Agreement:
    """What agrees with a change of the reference applied and disagreed without it.

    `rows`: rows of the point at which the change was found. `points`: other points. `bits`: the
    bits of those rows' values that the tolerance leaves.
    """

    rows: int = 0
    bits: float = 0.0
    points: tuple[str, ...] = ()

    def proof(self, change: Change) -> Proof:
        """Return the Proof of a change; proven if more agrees than its numbers could be fitted to.

        A number that was fitted to one row fits that row. So a second row must agree, with twice
        the bits that all numbers take, or another point. A whole number is one of few, so that
        one row is enough. A change without numbers needs no bits.
        """
        numbers = change_numbers(change.values)
        if not numbers or self.points:
            return unfitted_proof(max(1, len(self.points)))
        fitted = any(isinstance(number, float) for number in numbers)
        wanted = sum(FLOAT if isinstance(n, float) else 1 + n.bit_length() for n in numbers)
        enough = self.rows >= (2 if fitted else 1)
        return Proof(self.bits, 1.0, wanted if enough else self.bits, math.inf)


def change_numbers(values: Any) -> list[int | float]:
    """Return all numbers among a change's values, also inside mappings, sequences and arrays.

    Booleans are left out.
    """
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, np.ndarray | np.generic):
        values = values.tolist()
    if isinstance(values, list | tuple | set | frozenset):
        return [number for each in values for number in change_numbers(each)]
    counts = isinstance(values, int | float) and not isinstance(values, bool)
    return [values] if counts else []


def measure_agreement(case: Mismatch, found: ShadowPass, change: Change) -> Agreement:
    """Return how many rows, bits and points agree with a change and disagree without it.

    `found` is the pass with the change. Only points are counted where rows cannot be compared:
    discrete points, points judged from another point, or points that are not in that pass.
    """
    view, then = case.view, found.views.get(case.view.key)
    points = tuple(
        other.key
        for other in case.found.flagged
        if other.key != view.key
        and other.key in found.views
        and found.views[other.key].residual is not None
        and not found.views[other.key].flagged
    )
    based = view.base and change.gives is None  # by what it differs from its base is not known
    if then is None and change.gives is not None:
        then = replace(view, mine=change.gives)
    if then is None or then.residual is None or view.point in DISCRETE or based:
        return Agreement(points=points)
    before, after = case.distances_by_row(view), case.distances_by_row(then)
    if before.shape != after.shape:
        return Agreement(points=points)
    rows = int(((before > view.tolerance) & (after <= AGREES * view.tolerance)).sum())
    values = rows * view.mine.size / max(1, len(before))
    return Agreement(rows, -values * math.log2(min(1.0, view.tolerance)), points)


@dataclass(frozen=True)
class Solution:
    """A change that makes the point agree, and the pass with the change applied.

    `residual` is the point's relative L2 with it, `then` the next divergence or None, `left` the
    number of points that still disagree.
    """

    change: Change
    layers: Layers
    residual: float
    then: ShadowPoint | None
    reach: float  # the number of points up to which the changed pass agrees
    patched: PatchedModel
    recorded: RecordedTrace
    agreement: Agreement = Agreement()
    left: int = 0


@dataclass(frozen=True)
class Divergence:
    """A point that disagrees although computed from the run's own input, and its explanation.

    `answer` is the change that explains it, `others` are changes that explain it equally well.
    `likely` is a suspected cause without one. `inside` are the keys of the weights that the
    unexplained operations read.
    """

    view: ShadowPoint
    answer: Solution | None
    others: tuple[Solution, ...] = ()
    likely: str = ""
    inside: tuple[str, ...] = ()
    tried: int = 0  # passes with usual mistakes that did not explain it either
    joined: bool = False  # one of several changes that only together explain it
    doubtful: bool = False  # a loose fit that leaves the same operations unexplained elsewhere
    faint: bool = False  # no larger than the run's own rounding, but in a direction
    reads: str = ""  # a clause on what the unexplained operations read of earlier passes


@dataclass(frozen=True)
class Examined:
    """The result of examining a trace: its divergences, the pass before any change and the last.

    `unfinished`: more divergences than LIMIT. `supposed` is an arithmetic of the run that nothing
    but the size of its differences shows. `short` are points in a 16-bit type, {key: dtype}, where
    the run is finer.
    """

    divergences: tuple[Divergence, ...]
    before: ShadowPass
    after: ShadowPass
    unfinished: bool = False
    supposed: str = ""
    short: Mapping[str, str] = field(default_factory=dict)


def weights_inside(case: Mismatch) -> tuple[str, ...]:
    """Return the keys of all weights read between the last agreeing points and a divergence."""
    stored = case.patched.stored
    near = [key for key in stored if split_key(key)[0] in (None, case.layer)]
    found: list[str] = []
    for call in case.view.calls:
        found += [weight.key.partition("[")[0] for weight in call.weights]
        for arg in call.vectors if call.op not in MOVES else ():
            found += [
                key
                for key in near
                if stored[key].shape == arg.shape and np.array_equal(stored[key].numpy(), arg)
            ]
    return tuple(dict.fromkeys(found))


def sentence_without_places(text: str) -> str:
    """Return a sentence without the words that are tensor names or layer numbers."""
    kept = (word for word in text.split() if not any(c.isdigit() for c in word))
    return " ".join(word for word in kept if "." not in word.rstrip(".,"))


def layer_scopes(case: Mismatch, change: Change) -> list[Layers]:
    """Return the sets of layers to try a change in, the largest first; None means all layers.

    They are all layers, the layers like the one that the point follows from, and that one. Layers
    are alike if they agree in attention window, rope and experts. [None] for a change that is not
    per layer, or a point that follows from none or several layers.
    """
    here = computed_layer(case)
    if not change.scoped or here < 0:
        return [None]
    hp = case.patched.hp
    lists = ("window_layers", "rope_layers", "moe_layers")
    own = [hp[name][here] for name in lists]
    alike = frozenset(
        layer
        for layer in range(case.patched.n_layers)
        if [hp[name][layer] for name in lists] == own
    )
    found: list[Layers] = [None]
    if 1 < len(alike) < case.patched.n_layers:
        found.append(alike)
    return [*found, frozenset({here})]
