"""Runs two models, and B with parts of A: shows which part makes the difference.

Every finding about hyperparameters or tensors is a part of B that can be replaced by A's. With all
parts replaced B must agree with A; with all but one replaced, the effect of that one is seen.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from aprfmt.compare.nonfinite import NonFinite
from aprfmt.compare.traced import weights_between
from aprfmt.compare.traces import Between, PointDiff
from aprfmt.diagnosis.shadow import plain
from aprfmt.diagnosis.world import World
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.engines.collect import weights_of
from aprfmt.inference.rows import Rows, StoredRows
from aprfmt.inference.trace import Trace
from aprfmt.inference.weights import Weights, free_budget
from aprfmt.model import Model

Array = NDArray[Any]


@dataclass(frozen=True)
class Touched:
    """The hyperparameters and role keys of a finding."""

    hyper: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


def world_of(model: Model, ids: Sequence[int], dtype: str, memory: int | None = None) -> World:
    """Return the World of a model: the numpy backend, in float32 or float64."""
    return _world(model, model, (), ids, dtype, memory)


def mixed(
    a: Model, b: Model, parts: Iterable[Touched], ids: Sequence[int], dtype: str, memory: int | None
) -> World:
    """Return B with these parts replaced by A's."""
    return _world(a, b, parts, ids, dtype, memory)


def _world(
    a: Model,
    b: Model,
    parts: Iterable[Touched],
    ids: Sequence[int],
    dtype: str,
    memory: int | None,
) -> World:
    rows: dict[str, Rows] = {key: StoredRows(tensor) for key, tensor in b.roles.items()}
    hp = b.hyper
    for part in parts:
        values = {name: a.hyper[name] for name in part.hyper if name in a.hyper}
        hp = hp.replaced(**values)
        for key in part.keys:
            if key in a.roles:
                rows[key] = StoredRows(a.roles[key])
            else:
                rows.pop(key, None)
    budget = free_budget() if memory is None else memory
    weights = Weights(rows, budget, str(b.path))
    backend = BACKENDS["numpy"]("cpu", dtype)
    return World(b.spec, hp, weights, backend, tuple(ids))


def between(a: Model, b: Model) -> Between:
    """Return the pair of two models' passes, both on numpy."""
    kinds = [{"weights": weights_of(model)} for model in (a, b)]
    moe = any(bool(model.hyper["n_experts"]) for model in (a, b))
    return Between(("numpy", "numpy"), weights_between(*(Trace(run, {}) for run in kinds)), moe)


def compared(
    pair: Between, mine: Mapping[str, Array], theirs: Mapping[str, Array], dtype: str
) -> dict[str, PointDiff]:
    """Compare every point that both passes have, in execution order; other sizes are endless.

    Logits are compared over the ids that both have: a padded vocabulary adds some.
    """
    found: dict[str, PointDiff] = {}
    for key in (key for key in mine if key in theirs):
        x, y, dtypes = mine[key], theirs[key], (dtype, dtype)
        if key == "logits" and x.ndim == y.ndim == 2:  # of the ids that both sides have
            few = min(x.shape[1], y.shape[1])
            x, y = x[:, :few], y[:, :few]
        if x.size == y.size:
            found[key] = pair.compare(key, dtypes, x, y)
        else:
            bound = pair.bound(key, dtypes).rel_l2
            found[key] = PointDiff(key, math.inf, None, None, bound, True)
    return found


@dataclass(frozen=True)
class Share:
    """The effect of one part: residuals with every other part replaced, and with all replaced.

    `odd` locates NaN and infinities in the logits with every other part replaced.
    """

    before: float
    after: float
    first: str
    odd: NonFinite | None = None


@dataclass(frozen=True)
class Mixed:
    """What every part does, and all points with no part taken over."""

    shares: tuple[Share, ...]
    bare: Mapping[str, PointDiff]

    @property
    def rest(self) -> float:
        """The residual at the logits with every part replaced."""
        return self.shares[0].after if self.shares else _end(self.bare)


def shares(
    a: Model,
    b: Model,
    parts: Sequence[Touched],
    ids: Sequence[int],
    dtype: str,
    memory: int | None,
    still: Sequence[int] = (),
) -> Mixed:
    """Return the effect of each part on the logits, with all other parts replaced by A's.

    `still` are parts that do not change the function (a reordering inside a layer, say). They are
    replaced in every pass.
    """
    pair = between(a, b)
    world = world_of(a, ids, dtype, memory)
    reference = plain(world)
    world.weights.close()
    known: dict[tuple[int, ...], dict[str, PointDiff]] = {}

    def away(*chosen: int) -> dict[str, PointDiff]:
        if chosen not in known:
            world = mixed(a, b, [parts[i] for i in chosen], ids, dtype, memory)
            try:
                known[chosen] = compared(pair, reference, plain(world), dtype)
            except (ValueError, IndexError):
                known[chosen] = {}  # these parts alone do not fit together
            finally:
                world.weights.close()
        return known[chosen]

    every = tuple(range(len(parts)))
    found = []
    for i in every:
        others = away(*(j for j in every if j != i))
        first = next((point.key for point in others.values() if point.beyond), "")
        odd = others["logits"].nonfinite if "logits" in others else None
        found.append(Share(_end(others), _end(away(*every)), first, odd))
    return Mixed(tuple(found), away(*still))


def _end(found: Mapping[str, PointDiff]) -> float:
    """Return the distance of the logits: 0 where both are nothing but zeros."""
    return found["logits"].rel_l2 or 0.0 if "logits" in found else math.inf
