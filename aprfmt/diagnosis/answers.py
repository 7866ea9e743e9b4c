"""What examining a trace gives: divergences, and the change that explains each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.forward.mismatch import Change, Layers, Mismatch
from aprfmt.inference.replay.patched_model import MOVES, PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import ShadowPass, ShadowPoint

Array = NDArray[Any]


@dataclass(frozen=True)
class Solution:
    """A change that makes the point agree. `then` is the next divergence with it, or None."""

    change: Change
    layers: Layers
    residual: float
    then: ShadowPoint | None
    reach: float  # the number of points up to which the changed pass agrees
    patched: PatchedModel
    recorded: RecordedTrace


@dataclass(frozen=True)
class Divergence:
    """One explained (or unexplained) divergence. `others` are equally good explanations.

    `inside` are the weights that the unexplained operations read, by key.
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


@dataclass(frozen=True)
class Examined:
    """The result of examining a trace: divergences in order, the first pass and the last one.

    `supposed` is an arithmetic of the run that nothing but the size of its differences shows.
    """

    divergences: tuple[Divergence, ...]
    before: ShadowPass
    after: ShadowPass
    plain: Mapping[str, Array]
    unfinished: bool = False
    supposed: str = ""


def weights_inside(case: Mismatch) -> tuple[str, ...]:
    """Return the keys of all weights that the operations up to the divergence read, in order."""
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


def scopes_of(case: Mismatch, change: Change) -> list[Layers]:
    """Return the layers to try a change in: all, those of this kind, this one."""
    if not change.scoped or case.layer < 0:
        return [None]
    hp = case.patched.hp
    lists = ("window_layers", "rope_layers", "moe_layers")
    own = [hp[name][case.layer] for name in lists]
    alike = frozenset(
        layer
        for layer in range(case.patched.n_layers)
        if [hp[name][layer] for name in lists] == own
    )
    found: list[Layers] = [None]
    if 1 < len(alike) < case.patched.n_layers:
        found.append(alike)
    return [*found, frozenset({case.layer})]
