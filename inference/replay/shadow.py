"""A pass of a model in which every operation reads what another run recorded.

At each point the value that the model computes is compared with the recorded one, and the pass goes
on with the recorded one. So every operation gets the run's own input: a wrong operation shows a
difference, a right operation with a wrong input does not, and rounding that earlier operations
amplified is not held against a later one. torch.ao.ns calls such values shadow activations.

`diagnose` looks for a cause in it, `parity` asks whether every operation is right, and `value_at`
runs one operation that was cut out of a model.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.capture import key_name, parse_key, resolve_alias
from aprfmt.inference.replay.patched_model import (
    CallRecorder,
    OperationCall,
    PatchedModel,
    StopPass,
    arrays,
    may_share_memory,
)
from aprfmt.inference.replay.recorded_trace import (
    NO_VALUES,
    RecordedTrace,
    RecordedValue,
    finite_rel_l2,
    token_axis,
)
from aprfmt.inference.routing import choose_experts
from aprfmt.measure.nonfinite import NonFinite, count_nonfinite
from aprfmt.measure.tolerances import (
    DISCRETE,
    SPECIAL_OPERATIONS,
    operation_tolerance,
    run_tolerance,
    weights_class,
)
from aprfmt.measure.trace_view import backend_name

Array = NDArray[Any]
# Points of a routing: compared by a different rule, or following from one that is.
ROUTING = ("experts", "expert_w", "router_margin")
# Called with a point's key; returns what its operation may be off by on equal inputs.
OperationBound = Callable[[str], float]


@dataclass(frozen=True)  # no slots: `nonfinite` is cached
class ShadowPoint:
    """One point of a shadow pass.

    `mine` is the model's value on the trace's input, `recorded` the trace's. `residual` is their
    relative L2 distance, None where the trace has nothing there. `calls` are the operations since
    the last point the trace holds: what the model did to get here. `base` is the point this one is
    compared with where the model has no operation between the two ("" otherwise). `after` are the
    points of the trace that these operations started from: the last good ones.

    `tolerance` is that of one operation. `whole_tolerance` is that of whole passes in these dtypes,
    without what an engine's products may add: that would excuse a wrong operation.
    """

    key: str
    point: str
    layer: int
    mine: Array
    recorded: RecordedValue | None
    residual: float | None
    tolerance: float
    whole_tolerance: float
    calls: tuple[OperationCall, ...]
    base: str = ""
    note: str = ""
    after: tuple[str, ...] = ()

    @property
    def flagged(self) -> bool:
        """Whether the model's value on the trace's input is beyond tolerance from the trace's."""
        return self.residual is not None and not self.residual <= self.tolerance

    @cached_property
    def nonfinite(self) -> NonFinite | None:
        """NaN and infinities in the model's value (as A) and in the trace's (as B).

        None where the trace has no value, or where values are choices.
        """
        if self.recorded is None or self.point in DISCRETE:
            return None
        mine, theirs = self.recorded.comparable_values(self.mine, self.axis)
        return count_nonfinite(mine, theirs) if mine.size == theirs.size else None

    @property
    def one_sided_nonfinite(self) -> bool:
        """Whether one value, the model's or the trace's, has a NaN or infinity the other lacks."""
        return self.nonfinite is not None and self.nonfinite.alone > 0

    @property
    def finite_distance(self) -> float:
        """The relative L2 distance over the elements that are finite in both values."""
        assert self.recorded is not None
        return finite_rel_l2(*self.recorded.comparable_values(self.mine, self.axis))

    @property
    def axis(self) -> int:
        """The axis of the value that counts tokens."""
        return token_axis(self.key)

    def distance(self, other: Array) -> float:
        """Return the relative L2 distance of `other`, in the model's shape, from the trace's."""
        assert self.recorded is not None
        return self.recorded.distance(other, self.axis)

    @property
    def theirs(self) -> Array:
        """The trace's value in the model's shape; the model's on rows that the trace lacks."""
        assert self.recorded is not None
        return self.recorded.fill_into(self.mine, self.axis)


@dataclass
class ShadowPass:
    """The points of one pass, in execution order."""

    views: dict[str, ShadowPoint] = field(default_factory=dict)

    def add(self, view: ShadowPoint) -> None:
        """Store a point that the pass has reached."""
        self.views[view.key] = view

    @property
    def flagged(self) -> list[ShadowPoint]:
        """The points beyond their tolerance, in execution order."""
        return [view for view in self.views.values() if view.flagged]

    @property
    def first(self) -> ShadowPoint | None:
        """The first point beyond its tolerance; None if all are within."""
        return next(iter(self.flagged), None)

    @property
    def compared_count(self) -> int:
        """The number of points that the trace has a value for."""
        return sum(view.residual is not None for view in self.views.values())


@dataclass
class OperationResiduals:
    """How far each operation was off on the run's inputs, without the values.

    `found` has (relative L2 distance, bound) by key, in execution order. Points that are choices
    or differences of near values are left out: a rounding may flip them.
    """

    found: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, view: ShadowPoint) -> None:
        """Store the distance and bound of a point, if the run recorded it and it is no choice."""
        if view.residual is not None and view.point not in DISCRETE:
            self.found[view.key] = view.residual, view.tolerance

    @property
    def wrong_keys(self) -> list[str]:
        """The keys of points whose operation is beyond its bound, in execution order."""
        return [key for key, (residual, bound) in self.found.items() if not residual <= bound]

    @property
    def all_right(self) -> bool:
        """Whether operations were compared, and none is beyond its bound."""
        return bool(self.found) and not self.wrong_keys

    @property
    def worst_key(self) -> str:
        """The key of the point that comes nearest to its bound, or is furthest beyond it."""
        return max(self.found, key=lambda key: self.found[key][0] / self.found[key][1])


class PointRecorder(CallRecorder):
    """A recorder that stores every point's value."""

    def __init__(self, patched: PatchedModel) -> None:
        """Take the model of the pass; no value is stored yet."""
        super().__init__()
        self._patched = patched
        self.values: dict[str, Array] = {}

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Store a copy of the value, and return it unchanged for the pass."""
        self.values[key_name(point, layer)] = np.array(self._patched.backend.to_numpy(x))
        self.calls = []
        self.set_location(point, layer)
        return x


def record_points(patched: PatchedModel) -> dict[str, Array]:
    """Return {key: value} of every point of a pass, in execution order."""
    recorder = PointRecorder(patched)
    patched.run(recorder)
    return recorder.values


def run_shadow_pass(patched: PatchedModel, recorded: RecordedTrace, until: str = "") -> ShadowPass:
    """Return the points of a pass whose operations read the trace's inputs.

    It ends at the key `until`, if any. The backend is numpy's: which operations made a point is
    found by the memory of its arrays.
    """
    found = ShadowPass()
    with contextlib.suppress(StopPass):
        patched.run(_ShadowRecorder(patched, recorded, found, until))
    return found


def run_shadow_point(
    patched: PatchedModel, recorded: RecordedTrace, wanted: str
) -> ShadowPoint | None:
    """Return one point of a shadow pass, None where the pass has no such point.

    Nothing else is compared and no operation is stored (the point has no `calls`): many times
    quicker than `run_shadow_pass` where the trace holds few points.
    """
    found = ShadowPass()
    with contextlib.suppress(StopPass):
        patched.run(_OnePoint(patched, recorded, found, until=wanted))
    return found.views.get(wanted)


def measure_operation_residuals(
    patched: PatchedModel, recorded: RecordedTrace, bound: OperationBound
) -> OperationResiduals:
    """Return how far each operation of a run is off on the run's inputs, on any backend.

    Operations run as the backend has them, fused ones too. Of each only the distance and the bound
    are stored. `bound` gives each point's tolerance by key.
    """
    found = OperationResiduals()
    patched.run(_ShadowRecorder(patched, recorded, found, bound=bound, records_calls=False))
    return found


def value_at(patched: PatchedModel, points: Mapping[str, Array], wanted: str) -> Array | None:
    """Return the value of the point `wanted` in a pass whose other points are set to `points`.

    `points` are values by key; points not among them are computed. None where the pass has no
    such point; nothing after it is computed.
    """
    recorder = _ValueAt(patched, points, wanted)
    with contextlib.suppress(StopPass):
        patched.run(recorder)
    return recorder.found


class _Collector(Protocol):
    """What stores the points of a shadow pass: ShadowPass, or OperationResiduals."""

    def add(self, view: ShadowPoint) -> None:
        """Store a point that the pass has reached."""


def _like_array(x: Any, values: Array, patched: PatchedModel) -> Any:
    """Return values in the shape and array type of `x`, an array of the pass."""
    shaped = np.ascontiguousarray(values).reshape(tuple(int(size) for size in x.shape))
    if isinstance(x, np.ndarray):
        return np.asarray(shaped, x.dtype)
    return patched.backend.array(shaped)


class _ValueAt(CallRecorder):
    """A recorder that replaces points by given values, and stores the wanted one."""

    records_calls = False

    def __init__(self, patched: PatchedModel, given: Mapping[str, Array], wanted: str) -> None:
        """Take the given values by key, and the wanted key; `found` is None until it is reached."""
        super().__init__()
        self._patched, self._given, self._wanted = patched, given, wanted
        self.found: Array | None = None

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Return the given value of a point, or end the pass (StopPass) at the wanted one."""
        key = key_name(point, layer)
        if key == self._wanted:
            self.found = np.array(self._patched.backend.to_numpy(x))
            raise StopPass
        given = self._given.get(key)
        return x if given is None else _like_array(x, given, self._patched)


class _ShadowRecorder(CallRecorder):
    """Compares each point with the trace, and continues the pass with the trace's value."""

    def __init__(
        self,
        patched: PatchedModel,
        recorded: RecordedTrace,
        found: _Collector,
        until: str = "",
        bound: OperationBound | None = None,
        records_calls: bool = True,
    ) -> None:
        """Take the model, the trace and the store of compared points; nothing is compared yet.

        The pass ends after the key `until`, if any. `bound` gives tolerances in place of the
        table's. `records_calls`: which operations made a point is recorded.
        """
        super().__init__()
        self.records_calls = records_calls
        self._patched = patched
        self._recorded = recorded
        self._until = until
        self._own_bound = bound
        self._extras = _equal_points(patched, recorded)
        self._moe = bool(patched.hp["n_experts"])
        self._engine = backend_name(recorded.trace)
        self._logits: Array | None = None
        self._experts: tuple[Array, Array] | None = None
        self._tied: tuple[int, Array] | None = None  # layer, whether each row's choice is a tie
        self._held: dict[str, Array] = {}  # values the pass continued with, of the last two layers
        self._found = found

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Compare the model's value with the trace's; return the trace's for the pass.

        Raises StopPass after the last point that is wanted, which ends the pass.
        """
        key = key_name(point, layer)
        mine = np.asarray(self._patched.backend.to_numpy(x))
        self._recorded.shapes.setdefault(key, mine.shape)
        value = self._recorded.value_of(key)
        calls, goes_on = () if value is None else self.take_calls(x), x
        if point in ROUTING:
            goes_on = self._compare_routing(key, mine, value, calls, x)
            if point == "experts":  # their weights follow from the same operations
                self.calls.extend(calls)
        else:
            judged = None if value is None else self._without_ties(key, value)
            view = self._compare_point(key, mine, judged, calls, x=x)
            if value is not None:
                own = judged is value
                mine = view.theirs if own else value.fill_into(mine, token_axis(key))
                goes_on = _like_array(x, mine, self._patched)
            for extra in self._extras.get(key, ()):
                goes_on, mine = self._compare_equal_point(extra, key, mine, goes_on)
        if point == "router":
            self._logits = mine
        if value is not None and self.records_calls:
            self._store_input(key, layer, goes_on)
        self.set_location(point, layer)
        if not self.records_calls:
            self._recorded.forget(key)
        if key == self._until:
            raise StopPass
        return goes_on

    def _without_ties(self, key: str, value: RecordedValue) -> RecordedValue:
        """Return a value with those rows masked in which the last choice of experts was a tie.

        16-bit logits often give two experts equal scores, and another run may choose the other one.
        """
        layer, tied = self._tied or (-1, np.zeros(0, np.bool_))
        self._tied = None
        rows = tied if value.rows is None or not len(tied) else tied[value.rows]
        if parse_key(key)[1] != layer or len(rows) != len(value.values) or rows.all():
            return value
        if not rows.any():
            return value
        mask = np.zeros(value.values.shape, np.bool_)
        mask[~rows] = True if value.mask is None else value.mask[~rows]
        return replace(value, mask=mask)

    def _operation_bound(self, key: str, dtype: str, calls: Sequence[OperationCall] = ()) -> float:
        """Return the relative L2 tolerance of the operations `calls` that made a point.

        It is the caller's bound where one was given. `dtype` is the other run's.
        """
        if self._own_bound is not None:
            return self._own_bound(key)
        kinds = _operation_kinds(calls, self._patched)
        return operation_tolerance(self._patched.backend.dtype, dtype, self._engine, kinds).rel_l2

    def _compare_point(
        self,
        key: str,
        mine: Array,
        value: RecordedValue | None,
        calls: tuple[OperationCall, ...],
        base: str = "",
        x: Any = None,
    ) -> ShadowPoint:
        """Return and store the comparison of a point with the trace.

        `mine` is the model's value, `value` the trace's, None without one; `calls` are the
        operations between. `base` is the point that it equals in the model, "" if none; `x` is the
        pass's array.
        """
        dtype = self._patched.backend.dtype
        other = dtype if value is None else value.dtype
        empty = value is not None and bool(mine.size) and not (mine.any() or value.values.any())
        grown = self._recorded.bounds.get(key)
        view = ShadowPoint(
            key,
            *parse_key(key),
            mine,
            value,
            None if value is None or empty else value.distance(mine, token_axis(key)),
            self._operation_bound(key, other, calls) if grown is None else grown,
            run_tolerance(dtype, other, moe=self._moe).rel_l2 if grown is None else grown,
            calls,
            base,
            NO_VALUES if empty else "",
            (base,) if base else self._sources(calls, x),
        )
        self._found.add(view)
        return view

    def _store_input(self, key: str, layer: int, x: Any) -> None:
        """Store a point's array as a possible input; drop those of layers before the last one."""
        self._held = {
            name: array
            for name, array in self._held.items()
            if not 0 <= parse_key(name)[1] < layer - 1
        }
        self._held[key] = x

    def _sources(self, calls: Sequence[OperationCall], x: Any) -> tuple[str, ...]:
        """Return the keys of the trace's points that were inputs of these operations."""
        read = [x, *(array for call in calls for array in arrays(call.args))]
        return tuple(
            key
            for key, held in self._held.items()
            if any(may_share_memory(held, array) for array in read)
        )

    def _compare_equal_point(self, key: str, base: str, mine: Array, x: Any) -> tuple[Any, Array]:
        """Return (array to continue with, trace's value) after comparing an equal point.

        The point `key` equals `base` in the model but was recorded separately. `mine` and x are the
        value so far, as numpy's and the pass's array: both are returned where the trace has no
        value.
        """
        self._recorded.shapes.setdefault(key, mine.shape)
        value = self._recorded.value_of(key)
        if value is None:
            return x, mine
        view = self._compare_point(key, mine, value, (), base)
        return _like_array(x, view.theirs, self._patched), view.theirs

    def _compare_routing(
        self,
        key: str,
        mine: Array,
        value: RecordedValue | None,
        calls: tuple[OperationCall, ...],
        x: Any,
    ) -> Any:
        """Return the array to continue with, after comparing a point of the routing.

        `mine` is the model's value, `value` the trace's, None without one. Chosen experts are
        compared as sets, their weights expert by expert. The trace's choice and weights are
        returned if they are complete, else x.
        """
        # A choice that was recorded for some rows only is not compared.
        point, layer = parse_key(key)
        if point == "router_margin":
            weighted = f"L{layer}.expert_w" in self._recorded.trace.records
            self._tied = None if weighted else (layer, mine.reshape(-1) == 0)
        partial = value is None or value.rows is not None or value.values.shape != mine.shape
        if value is None or partial or point == "router_margin":
            if point == "experts":
                self._experts = (mine, mine)
            return x
        # Experts: the share of tokens whose sets differ by more than rounding explains.
        whole = run_tolerance(self._patched.backend.dtype, value.dtype, moe=True).rel_l2
        bound = self._operation_bound(key, value.dtype)
        if point == "experts":
            theirs = np.asarray(np.rint(value.values), np.int64)
            self._experts = (mine, theirs)
            wrong, close = self._count_expert_flips(layer, mine, theirs, bound)
            note = (
                f"{close} tokens chose otherwise by a margin inside the rounding" if close else ""
            )
            self._found.add(
                ShadowPoint(
                    key,
                    point,
                    layer,
                    mine,
                    value,
                    wrong / len(mine),
                    bound,
                    whole,
                    calls,
                    "",
                    note,
                    self._sources(calls, x),
                )
            )
            return theirs if f"L{layer}.expert_w" in self._recorded.trace.records else x
        # Weights: expert by expert, on the tokens where both chose the same set.
        assert self._experts is not None
        ours, chosen = self._experts
        size = int(self._patched.hp["n_experts"])
        same = (np.sort(ours, -1) == np.sort(chosen, -1)).all(-1)
        theirs = np.asarray(value.values, np.float64)
        residual = (
            value.distance(mine, 0)
            if ours is chosen
            else RecordedValue(
                _spread_expert_weights(chosen, theirs, size)[same], None, value.dtype
            ).distance(_spread_expert_weights(ours, mine, size)[same], 0)
        )
        self._found.add(
            ShadowPoint(
                key,
                point,
                layer,
                mine,
                value,
                residual if same.any() else None,
                bound,
                whole,
                calls,
                after=self._sources(calls, x),
            )
        )
        return _like_array(x, theirs, self._patched)

    def _count_expert_flips(
        self, layer: int, mine: Array, theirs: Array, bound: float
    ) -> tuple[int, int]:
        """Return the counts of tokens whose experts differ: (by more than rounding, within it).

        `mine` and `theirs` are the model's choice and the trace's, [tokens, used]. It is within
        rounding if the router's margin is below `bound` times its largest logit.
        """
        differ = (np.sort(mine, -1) != np.sort(theirs, -1)).any(-1)
        if not differ.any() or self._logits is None:
            return int(differ.sum()), 0
        correction = self._patched.weights.get_role(layer, "exp_probs_b.bias")
        bias = None if correction is None else correction.numpy().astype(self._logits.dtype)
        margin = choose_experts(self._logits, bias, self._patched.hp).margin
        slack = bound * max(1.0, float(np.abs(self._logits).max()))
        close = differ & (margin <= slack)
        return int((differ & ~close).sum()), int(close.sum())


class _OnePoint(_ShadowRecorder):
    """Compares one point only, and routing, whose comparison needs the points before it."""

    keeps_calls = False

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Return the trace's value for the pass; compare it at the wanted point and at routing."""
        key = key_name(point, layer)
        if key == self._until or point in (*ROUTING, "router") or key in self._extras:
            return super().capture(point, layer, x)
        self.set_location(point, layer)
        if key not in self._recorded.shapes:
            self._recorded.shapes[key] = tuple(int(size) for size in x.shape)
        value = self._recorded.value_of(key)
        if value is None:
            return x
        mine = np.asarray(self._patched.backend.to_numpy(x))
        return _like_array(x, value.fill_into(mine, token_axis(key)), self._patched)


def _operation_kinds(calls: Sequence[OperationCall], patched: PatchedModel) -> list[str]:
    """Return the names by which a tolerance is looked up for what these operations do.

    That is the name of each operation that some engine computes in its own way, then for each
    weight that is multiplied the class of its stored encoding, as `weights_class` names it. Other
    operations give none. A weight that a hypothesis replaced has its file's encoding: the engine
    read the file.
    """
    read = [call.args[1] for call in calls if call.op in ("linear", "router")]
    stored = patched.stored
    weights = [stored.get(w.key, w).encoding for w in read]
    found = [call.op for call in calls if call.op in SPECIAL_OPERATIONS]
    return [*found, *(weights_class([encoding]) for encoding in weights)]


def _spread_expert_weights(ids: Array, weights: Array, size: int) -> Array:
    """Return [tokens, size]: each chosen expert's weight at its id, 0 elsewhere."""
    out = np.zeros((len(ids), size))
    np.put_along_axis(out, np.clip(ids, 0, size - 1), weights, -1)
    return out


def _equal_points(patched: PatchedModel, recorded: RecordedTrace) -> Mapping[str, list[str]]:
    """Return {key: later keys} of points that equal it in the model but were recorded.

    The pass compares these where the earlier point is computed.
    """
    known = patched.points
    order = {key: i for i, key in enumerate(known)}
    found: dict[str, list[str]] = {}
    for key, instance in known.items():
        if not instance.alias_of or not recorded.has_record(key):
            continue
        target = resolve_alias(key, known)
        if target is not None and order[target.key] < order[key]:
            found.setdefault(target.key, []).append(key)
    for layer in range(patched.n_layers):  # a decoding step reads the cache that all tokens wrote
        for written, read in (("k_attn", "k_cache"), ("v", "v_cache")):
            target = resolve_alias(key_name(written, layer), known)
            key = key_name(read, layer)
            if target is not None and recorded.has_record(key):
                found.setdefault(target.key, []).append(key)
    return found
