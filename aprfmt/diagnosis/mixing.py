"""Runs two models, and B with parts of A: shows which part makes the difference.

Every finding about hyperparameters or tensors is a part of B that can be replaced by A's. With all
parts replaced B must agree with A; with all but one replaced, the effect of that one is seen.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from aprfmt.compare.nonfinite import NonFinite, census
from aprfmt.compare.thresholds import DISCRETE, tolerance
from aprfmt.diagnosis.measure import rel
from aprfmt.diagnosis.shadow import plain
from aprfmt.diagnosis.world import World
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.rows import Rows, StoredRows
from aprfmt.inference.weights import Weights, free_budget
from aprfmt.model import Model

Array = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """The hyperparameters and role keys of a finding."""

    hyper: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


def world_of(model: Model, ids: Sequence[int], dtype: str, memory: int | None = None) -> World:
    """Return the World of a model: the numpy backend, in float32 or float64."""
    return _world(model, model, (), ids, dtype, memory)


def mixed(
    a: Model, b: Model, parts: Iterable[Part], ids: Sequence[int], dtype: str, memory: int | None
) -> World:
    """Return B with these parts replaced by A's."""
    return _world(a, b, parts, ids, dtype, memory)


def _world(
    a: Model,
    b: Model,
    parts: Iterable[Part],
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


def distances(mine: Mapping[str, Array], theirs: Mapping[str, Array]) -> dict[str, float]:
    """Return the relative distance at every point both passes have, in execution order."""
    return {key: rel(mine[key], theirs[key]) for key in mine if key in theirs}


def odd_ones(mine: Mapping[str, Array], theirs: Mapping[str, Array]) -> dict[str, NonFinite]:
    """Return NaN and infinities at points of both passes, by key; discrete points are left out."""
    found = {
        key: census(mine[key], theirs[key].reshape(mine[key].shape)) for key in mine
        if key in theirs and mine[key].size == theirs[key].size
        and key.rpartition(".")[2] not in DISCRETE
    }  # fmt: skip
    return {key: odd for key, odd in found.items() if odd is not None}


def first_beyond(found: Mapping[str, float], dtypes: tuple[str, str], moe: bool) -> str:
    """Return the first point beyond its tolerance, "" if there is none."""
    bound = tolerance(*dtypes, moe=moe).rel_l2
    return next(
        (
            key
            for key, value in found.items()
            if not value <= bound and key.rpartition(".")[2] not in DISCRETE
        ),
        "",
    )


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
    """The effect of every part, and the distances of all points with no part replaced.

    `odd` locates NaN and infinities at these points.
    """

    shares: tuple[Share, ...]
    bare: Mapping[str, float]
    odd: Mapping[str, NonFinite] = field(default_factory=dict)

    @property
    def rest(self) -> float:
        """The residual at the logits with every part replaced."""
        return self.shares[0].after if self.shares else _end(self.bare)


def shares(
    a: Model,
    b: Model,
    parts: Sequence[Part],
    ids: Sequence[int],
    dtype: str,
    memory: int | None,
    still: Sequence[int] = (),
) -> Mixed:
    """Return the effect of each part on the logits, with all other parts replaced by A's.

    `still` are parts that do not change the function (a reordering inside a layer, say). They are
    replaced in every pass.
    """
    moe = bool(a.hyper["n_experts"])
    world = world_of(a, ids, dtype, memory)
    reference = plain(world)
    world.weights.close()
    known: dict[tuple[int, ...], dict[str, float]] = {}
    broken: dict[tuple[int, ...], dict[str, NonFinite]] = {}

    def away(*chosen: int) -> dict[str, float]:
        if chosen not in known:
            world = mixed(a, b, [parts[i] for i in chosen], ids, dtype, memory)
            broken[chosen] = {}
            try:
                values = plain(world)
                known[chosen] = distances(reference, values)
                broken[chosen] = odd_ones(reference, values)
            except (ValueError, IndexError):
                known[chosen] = {}  # these parts alone do not fit together
            finally:
                world.weights.close()
        return known[chosen]

    every = tuple(range(len(parts)))
    found = []
    for i in every:
        left = tuple(j for j in every if j != i)
        others = away(*left)
        first = first_beyond(others, (dtype, dtype), moe)
        odd = broken[left].get("logits")
        found.append(Share(_end(others), _end(away(*every)), first, odd))
    bare = away(*still)
    return Mixed(tuple(found), bare, broken[tuple(still)])


def _end(found: Mapping[str, float]) -> float:
    return found.get("logits", math.inf)
