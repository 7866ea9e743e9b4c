"""Shadowing: at every point of one pass, the reference's operation runs on the trace's input.

The recorder stores the value that the reference computes at a point, then replaces it by the
trace's value for the rest of the pass. So every operation gets the trace's own input: a wrong
operation shows a difference, a right operation with a wrong input does not.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.compare.nonfinite import NonFinite, census
from aprfmt.compare.thresholds import DISCRETE, one_operation, tolerance, weights_class
from aprfmt.compare.traced import backend_name
from aprfmt.diagnosis.measure import NO_VALUES, Recorded, Seen, apart, axis_of
from aprfmt.diagnosis.world import Call, Recording, Stop, World, arrays, same_memory
from aprfmt.inference.capture import key_name, parse_key, resolve
from aprfmt.inference.routing import route

Array = NDArray[Any]
# Points that are compared by a different rule, or that follow from such a point.
_APART = ("experts", "expert_w", "router_margin")


@dataclass(frozen=True)  # no slots: `odd` is cached
class ShadowView:
    """One point of a shadowed pass.

    `mine` is the reference's value on the trace's input, `seen` the trace's. `residual` is their
    relative L2 distance, None where the trace has nothing there. `calls` are the operations since
    the last point the trace holds: what the reference did to get here. `base` is the point a view
    is compared with where the reference has no operation between the two ("" otherwise). `after`
    are the points of the trace that these operations started from: the last good ones.
    `tolerance` is that of one operation. `whole_tolerance` is that of whole passes in these dtypes,
    without what an engine's own products may add: that would excuse a wrong operation.
    """

    key: str
    point: str
    layer: int
    mine: Array
    seen: Seen | None
    residual: float | None
    tolerance: float
    whole_tolerance: float
    calls: tuple[Call, ...]
    base: str = ""
    note: str = ""
    after: tuple[str, ...] = ()

    @property
    def flagged(self) -> bool:
        """True if the reference's value on the trace's input differs from the trace's value."""
        return self.residual is not None and not self.residual <= self.tolerance

    @cached_property
    def odd(self) -> NonFinite | None:
        """NaN and infinities in the reference's value (as A) and in the trace's (as B)."""
        if self.seen is None or self.point in DISCRETE:
            return None
        mine, theirs = self.seen.both(self.mine, self.axis)
        return census(mine, theirs) if mine.size == theirs.size else None

    @property
    def alone(self) -> bool:
        """True if one side is not finite where the other side has another value."""
        return self.odd is not None and self.odd.alone > 0

    @property
    def rest(self) -> float:
        """The distance over the values that are finite on both sides."""
        assert self.seen is not None
        return apart(*self.seen.both(self.mine, self.axis))

    @property
    def axis(self) -> int:
        """The axis that counts tokens."""
        return axis_of(self.key)

    def distance(self, other: Array) -> float:
        """Return the distance of another value, in the reference's shape, from the trace's."""
        assert self.seen is not None
        return self.seen.distance(other, self.axis)

    @property
    def theirs(self) -> Array:
        """The trace's value; the reference's on rows and entries that the trace lacks."""
        assert self.seen is not None
        return self.seen.into(self.mine, self.axis)


@dataclass
class Pass:
    """The views of one pass, in execution order."""

    views: dict[str, ShadowView] = field(default_factory=dict)

    @property
    def flagged(self) -> list[ShadowView]:
        """The views beyond their tolerance, in execution order."""
        return [view for view in self.views.values() if view.flagged]

    @property
    def first(self) -> ShadowView | None:
        """The first view beyond its tolerance."""
        return next(iter(self.flagged), None)

    @property
    def compared(self) -> int:
        """How many points the trace has."""
        return sum(view.residual is not None for view in self.views.values())


class Plain(Recording):
    """A recorder that keeps every point's value."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.values: dict[str, Array] = {}

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Copy the value."""
        self.values[key_name(point, layer)] = np.array(self._world.backend.to_numpy(x))
        self.calls = []
        self.passed(point, layer)
        return x


def plain(world: World) -> dict[str, Array]:
    """Return every point's value of a pass, by key, in execution order."""
    recorder = Plain(world)
    world.run(recorder)
    return recorder.values


def shadow(world: World, recorded: Recorded, until: str = "") -> Pass:
    """Run a pass on the trace's own inputs; stop after the key `until`."""
    recorder = _Shadow(world, recorded, until)
    with contextlib.suppress(Stop):
        world.run(recorder)
    return recorder.found


def glance(world: World, recorded: Recorded, wanted: str) -> ShadowView | None:
    """Return the view of one point of a shadowed pass, None where the pass has no such point.

    Nothing else is compared and no operation is remembered (the view has no `calls`): many times
    quicker than `shadow` where the trace holds few points.
    """
    recorder = _Glance(world, recorded, wanted)
    with contextlib.suppress(Stop):
        world.run(recorder)
    return recorder.found.views.get(wanted)


class _Shadow(Recording):
    def __init__(self, world: World, recorded: Recorded, until: str) -> None:
        super().__init__()
        self._world = world
        self._recorded = recorded
        self._until = until
        self._extras = _extras(world, recorded)
        self._moe = bool(world.hp["n_experts"])
        self._engine = backend_name(recorded.trace)
        self._logits: Array | None = None
        self._experts: tuple[Array, Array] | None = None
        self._held: dict[str, Array] = {}  # values the pass continued with, of the last two layers
        self.found = Pass()

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Compare the reference's value with the trace's; continue with the trace's."""
        key = key_name(point, layer)
        backend = self._world.backend
        mine = np.asarray(backend.to_numpy(x))
        self._recorded.shapes.setdefault(key, mine.shape)
        seen = self._recorded.at(key)
        calls, goes_on = () if seen is None else self.behind(x, True), x
        if point in _APART:
            goes_on = self._routing(key, mine, seen, calls, x)
        else:
            view = self._view(key, mine, seen, calls, x=x)
            if seen is not None:
                mine = view.theirs
                goes_on = backend.array(mine)
            for extra in self._extras.get(key, ()):
                goes_on, mine = self._extra(extra, key, mine, goes_on)
        if point == "router":
            self._logits = mine
        if seen is not None:
            self._hold(key, layer, goes_on)
        self.passed(point, layer)
        if key == self._until:
            raise Stop
        return goes_on

    def _view(
        self, key: str, mine: Array, seen: Seen | None, calls: tuple[Call, ...], base: str = "",
        x: Any = None,
    ) -> ShadowView:  # fmt: skip
        """Compare a point with the trace; `base` is the point it differs from there only."""
        dtype = self._world.backend.dtype
        other = dtype if seen is None else seen.dtype
        empty = seen is not None and bool(mine.size) and not (mine.any() or seen.values.any())
        one = one_operation(dtype, other, self._engine, _kinds(calls, self._world)).rel_l2
        grown = self._recorded.bounds.get(key)
        view = ShadowView(
            key,
            *parse_key(key),
            mine,
            seen,
            None if seen is None or empty else seen.distance(mine, axis_of(key)),
            one if grown is None else grown,
            tolerance(dtype, other, moe=self._moe).rel_l2 if grown is None else grown,
            calls,
            base,
            NO_VALUES if empty else "",
            (base,) if base else self._sources(calls, x),
        )
        self.found.views[key] = view
        return view

    def _hold(self, key: str, layer: int, x: Any) -> None:
        """Remember a point's array; those of layers before the last one are dropped."""
        self._held = {
            name: array
            for name, array in self._held.items()
            if not 0 <= parse_key(name)[1] < layer - 1
        }
        self._held[key] = x

    def _sources(self, calls: Sequence[Call], x: Any) -> tuple[str, ...]:
        """Return the points of the trace that were inputs of these operations."""
        read = [x, *(array for call in calls for array in arrays(call.args))]
        return tuple(
            key
            for key, held in self._held.items()
            if any(same_memory(held, array) for array in read)
        )

    def _extra(self, key: str, base: str, mine: Array, x: Any) -> tuple[Any, Array]:
        """Compare a point that differs from `base` in the trace only."""
        self._recorded.shapes.setdefault(key, mine.shape)
        seen = self._recorded.at(key)
        if seen is None:
            return x, mine
        view = self._view(key, mine, seen, (), base)
        return self._world.backend.array(view.theirs), view.theirs

    def _routing(
        self, key: str, mine: Array, seen: Seen | None, calls: tuple[Call, ...], x: Any
    ) -> Any:
        """Compare the chosen experts as sets, and their weights expert by expert."""
        point, layer = parse_key(key)
        partial = seen is None or seen.rows is not None or seen.values.shape != mine.shape
        if seen is None or partial or point == "router_margin":
            if point == "experts":
                self._experts = (mine, mine)
            return x
        dtype = self._world.backend.dtype
        whole = tolerance(dtype, seen.dtype, moe=True).rel_l2
        bound = one_operation(dtype, seen.dtype).rel_l2
        if point == "experts":
            theirs = np.asarray(np.rint(seen.values), np.int64)
            self._experts = (mine, theirs)
            wrong, close = self._flips(layer, mine, theirs, bound)
            note = (
                f"{close} tokens chose otherwise by a margin inside the rounding" if close else ""
            )
            self.found.views[key] = ShadowView(
                key, point, layer, mine, seen, wrong / len(mine), bound, whole, calls, "", note
            )
            return theirs if f"L{layer}.expert_w" in self._recorded.trace.records else x
        assert self._experts is not None
        ours, chosen = self._experts
        size = int(self._world.hp["n_experts"])
        same = (np.sort(ours, -1) == np.sort(chosen, -1)).all(-1)
        theirs = np.asarray(seen.values, np.float64)
        residual = (
            seen.distance(mine, 0)
            if ours is chosen
            else Seen(_spread(chosen, theirs, size)[same], None, seen.dtype).distance(
                _spread(ours, mine, size)[same], 0
            )
        )
        self.found.views[key] = ShadowView(
            key, point, layer, mine, seen, residual if same.any() else None, bound, whole, calls
        )
        return self._world.backend.array(theirs.astype(mine.dtype))

    def _flips(self, layer: int, mine: Array, theirs: Array, bound: float) -> tuple[int, int]:
        """Count tokens whose experts differ: by more than the margin allows, and within it."""
        differ = (np.sort(mine, -1) != np.sort(theirs, -1)).any(-1)
        if not differ.any() or self._logits is None:
            return int(differ.sum()), 0
        correction = self._world.weights.get_role(layer, "exp_probs_b.bias")
        bias = None if correction is None else correction.numpy().astype(self._logits.dtype)
        margin = route(self._logits, bias, self._world.hp).margin
        slack = bound * max(1.0, float(np.abs(self._logits).max()))
        close = differ & (margin <= slack)
        return int((differ & ~close).sum()), int(close.sum())


class _Forgetful(list[Call]):
    """A list of calls that records none."""

    def append(self, call: Call) -> None:
        """Forget it."""


class _Glance(_Shadow):
    """Looks at one point only, and at routing, which depends on what was looked at before."""

    def __init__(self, world: World, recorded: Recorded, wanted: str) -> None:
        super().__init__(world, recorded, wanted)
        self.calls = _Forgetful()

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Continue with the trace's value; compare it at the wanted point alone."""
        key = key_name(point, layer)
        if key == self._until or point in (*_APART, "router") or key in self._extras:
            return super().capture(point, layer, x)
        mine = np.asarray(self._world.backend.to_numpy(x))
        self._recorded.shapes.setdefault(key, mine.shape)
        seen = self._recorded.at(key)
        self.passed(point, layer)
        return x if seen is None else self._world.backend.array(seen.into(mine, axis_of(key)))

    def behind(self, x: Any, take: bool) -> tuple[Call, ...]:
        """Remember nothing."""
        return ()


def _kinds(calls: Sequence[Call], world: World) -> list[str]:
    """Return the kinds of these operations, as the tolerances of engines name them.

    A weight counts with its stored encoding, also if a hypothesis replaced it: the engine read the
    file.
    """
    read = [call.args[1] for call in calls if call.op in ("linear", "router")]
    stored = world.stored
    weights = [stored.get(w.key, w).encoding for w in read]
    found = [call.op for call in calls if call.op == "activate"]
    return [*found, *(weights_class([encoding]) for encoding in weights)]


def _spread(ids: Array, weights: Array, size: int) -> Array:
    """Return [tokens, n_experts] with each chosen expert's weight in its place."""
    out = np.zeros((len(ids), size))
    np.put_along_axis(out, np.clip(ids, 0, size - 1), weights, -1)
    return out


def _extras(world: World, recorded: Recorded) -> Mapping[str, list[str]]:
    """Return, by key, later points that are equal in the reference but recorded on their own."""
    known = world.points
    order = {key: i for i, key in enumerate(known)}
    found: dict[str, list[str]] = {}
    for key, instance in known.items():
        if not instance.alias_of or not recorded.has(key):
            continue
        target = resolve(key, known)
        if target is not None and order[target.key] < order[key]:
            found.setdefault(target.key, []).append(key)
    for layer in range(world.n_layers):  # a decoding step reads the cache that all tokens wrote
        for written, read in (("k_attn", "k_cache"), ("v", "v_cache")):
            target = resolve(key_name(written, layer), known)
            key = key_name(read, layer)
            if target is not None and recorded.has(key):
                found.setdefault(target.key, []).append(key)
    return found
