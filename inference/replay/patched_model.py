"""A model whose hyperparameters, weights, operations or positions are replaced for one pass.

A PatchedModel is a model's architecture, numbers, weights and a backend. A patch never touches
forward.py: it replaces hyperparameters or weights, wraps single operations of the backend, or gives
other positions. Some steps are no operation of a backend (the choice of experts is plain numpy): a
tap changes their value where it is captured. The arguments of every operation of a pass can be
recorded.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.layout_steps import Added
from aprfmt.arch.spec import ArchSpec, HyperParams
from aprfmt.errors import ArchError
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.backends.base import Backend
from aprfmt.inference.capture import POINTS, WHOLE, PointInstance, parse_key, point_instances
from aprfmt.inference.forward import WHOLE_PASS, LogitRows, Span
from aprfmt.inference.replay.served_adapter import ServedAdapter
from aprfmt.inference.session import load_forward
from aprfmt.inference.weights import Weight, Weights, model_weights
from aprfmt.model import Model

# The operations that are recorded; a hypothesis may wrap them.
OPS = (
    "embed", "linear", "router", "add", "add_wide", "mul", "scale", "softcap", "activate",
    "sigmoid", "swiglu_oai", "xielu", "rms_norm", "layer_norm", "rope", "scores", "probs", "mix",
    "add_weighted", "add_rows", "convolve", "decay", "delta", "gated_norm", "time_step",
    "decay_rates", "scan", "gated_scan", "alibi_bias", "tanh", "gaussian_topk", "rescaled",
    "mix_copies", "index_scores", "best_keys", "block_scores", "hyper_weights", "compress",
    "clipped_gates",
    "concat", "stack", "repeat_heads", "take",
)  # fmt: skip
# Operations that only move values.
MOVES = ("concat", "stack", "repeat_heads", "take")
# Fused operations: run as single ones, so that these are recorded.
COMPOSED = ("projections", "ropes", "gated", "add_linear", "chosen_keys")
# Called as override(op, at, *args, **kwargs): `op` is the wrapped operation.
Override = Callable[..., Any]
# Called as tap(patched, layer, x, held), it returns what the pass continues with in place of x.
# `held` are the values of the layer's earlier points, by name, as the pass continued with them.
Tap = Callable[["PatchedModel", int, Any, Mapping[str, Any]], Any]
# What enters the first layer, the last one first.
ENTERED = ("altup_embd", "embd_norm", "embd_scaled", "embd")
STREAM = "stream"  # the name under which `held` has what enters the layer


@dataclass(frozen=True)
class PassLocation:
    """The last point that a pass has reached ("" before the first), and its layer."""

    point: str
    layer: int


_location = cache(PassLocation)  # passes are made by the thousand, and reach the same places


@dataclass(frozen=True)
class OperationCall:
    """One operation of a pass, with its arguments and result."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    location: PassLocation

    @property
    def weights(self) -> list[Weight]:
        """The Weight objects among its arguments; norms and biases are passed as arrays."""
        return [arg for arg in (*self.args, *self.kwargs.values()) if isinstance(arg, Weight)]

    @property
    def vectors(self) -> list[NDArray[Any]]:
        """The one-dimensional arrays among its arguments."""
        values = (*self.args, *self.kwargs.values())
        return [arg for arg in values if isinstance(arg, np.ndarray) and arg.ndim == 1]


@dataclass(frozen=True)
class PatchedModel:
    """Everything a pass needs: a model, and what is replaced in it.

    `original` are the weights before any was replaced, `replaced` the keys of those that were;
    `stated` are the hyperparameters before any was replaced. `own` has what single layers run with
    in place of `hp` and `spec`. `offset_in_file` is what the file's norm weights hold already of
    the number that the architecture adds to them: 1 in a GGUF of gemma, else 0. `adapter` is what
    was merged into the weights for this pass.
    """

    spec: ArchSpec
    hp: HyperParams
    weights: Weights
    backend: Any
    ids: tuple[int, ...]
    overrides: Mapping[str, tuple[Override, ...]] = field(default_factory=dict)
    positions: tuple[int, ...] | None = None
    original: Weights | None = None
    taps: Mapping[str, tuple[Tap, ...]] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    stated: HyperParams | None = None
    own: Mapping[int, tuple[HyperParams, ArchSpec]] = field(default_factory=dict)
    offset_in_file: int = 0
    adapter: ServedAdapter | None = None
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def unpatched(
        cls, model: Model, ids: Sequence[int], dtype: str, memory: int | None = None
    ) -> "PatchedModel":
        """Return a model as a PatchedModel with nothing replaced, on numpy in float32 or float64.

        `ids` are the tokens of its pass. `memory` bounds the bytes of weights that are held
        decoded; None for the default.
        """
        backend = BACKENDS["numpy"]("cpu", dtype)
        weights = model_weights(model, memory)
        return cls(
            model.spec, model.hyper, weights, backend, tuple(ids),
            offset_in_file=_offset_in_file(model),
        )  # fmt: skip

    @property
    def norm_addend(self) -> int:
        """What a forward pass adds to norm weights as stored in the file: 0, or 1 as in gemma."""
        return self.spec.block.norm_offset - self.offset_in_file

    @property
    def stored(self) -> Weights:
        """The weights that the model stores, not those that a hypothesis replaces them by."""
        return self.weights if self.original is None else self.original

    @property
    def points(self) -> dict[str, PointInstance]:
        """{key: capture point} in execution order; cached for all patches with these numbers."""
        points = self._points_with(self.hp, self.spec)
        if not self.own:
            return points
        # A layer with numbers of its own has their points, in its place.
        parts: dict[int, list[str]] = {}
        for key in points:
            parts.setdefault(parse_key(key)[1], []).append(key)
        last = {keys[-1]: layer for layer, keys in parts.items()}
        found: dict[str, PointInstance] = {}
        for key, instance in points.items():
            if parse_key(key)[1] not in self.own:
                found[key] = instance
            elif key in last:
                layer = last[key]
                theirs = self._points_with(*self.own[layer])
                found |= {k: point for k, point in theirs.items() if parse_key(k)[1] == layer}
        return found

    def _points_with(self, hp: HyperParams, spec: ArchSpec) -> dict[str, PointInstance]:
        """Return {key: capture point} of a pass with these numbers, in execution order."""
        about = (id(hp), spec.block, frozenset(self.weights))
        if about not in self._known:
            found = point_instances(spec.block, hp, self.weights)
            self._known[about] = (hp, found)  # with the numbers held, their id stays theirs
        points: dict[str, PointInstance] = self._known[about][1]
        return points

    @property
    def n_layers(self) -> int:
        """The number of decoder blocks."""
        return int(self.hp["n_layers"])

    def with_hyper(self, layers: frozenset[int] | None = None, /, **values: Any) -> "PatchedModel":
        """Return a copy of the model with hyperparameters replaced, in these layers (None: all).

        Raises ArchError for some layers of an architecture that has another forward pass.
        """
        return self._with_settings(layers, lambda hp, spec: (hp.with_values(**values), spec))

    def with_block(self, layers: frozenset[int] | None = None, /, **fields: Any) -> "PatchedModel":
        """Return a copy of the model with fields of the block's description replaced.

        They are replaced in these layers (None: all). Raises ArchError for some layers of an
        architecture that has another forward pass.
        """
        return self._with_settings(
            layers, lambda hp, spec: (hp, replace(spec, block=replace(spec.block, **fields)))
        )

    def _with_settings(
        self,
        layers: frozenset[int] | None,
        change: Callable[[HyperParams, ArchSpec], tuple[HyperParams, ArchSpec]],
    ) -> "PatchedModel":
        """Return a copy of the model whose numbers and block are changed in `layers` (None: all).

        Layers that shared their numbers and block share the changed ones.
        """
        if layers is not None and self.spec.forward:
            raise ArchError(f"{self.spec.name}: single layers cannot run with other numbers")
        made: dict[tuple[int, int], tuple[HyperParams, ArchSpec]] = {}
        own, stated = dict(self.own), self.stated or self.hp
        for layer in own if layers is None else layers:
            hp, spec = own.get(layer, (self.hp, self.spec))
            about = (id(hp), id(spec))
            if about not in made:
                made[about] = change(hp, spec)
            own[layer] = made[about]
        if layers is not None:
            return replace(self, own=own, stated=stated)
        hp, spec = change(self.hp, self.spec)
        return replace(self, hp=hp, spec=spec, own=own, stated=stated)

    def with_weights(self, arrays: Mapping[str, Any]) -> "PatchedModel":
        """Return a copy of the model with weights replaced by arrays, by role key."""
        return replace(
            self,
            weights=self.weights.with_arrays(arrays),
            original=self.stored,
            replaced=(*self.replaced, *arrays),
        )

    def with_op(
        self,
        op: str,
        override: Override,
        layers: frozenset[int] | None,
        *,
        of_operands: bool = False,
    ) -> "PatchedModel":
        """Return a copy of the model with one operation wrapped, in these layers (None: all).

        `override` is called with the operation, the last capture point passed, and the arguments,
        and returns the operation's new result. With `of_operands` it gets the arguments as the
        overrides that the model already has changed them; otherwise it wraps those overrides, and
        gets the arguments of the unpatched pass.
        """

        def scoped(beneath: Callable[..., Any], at: PassLocation, *args: Any, **kwargs: Any) -> Any:
            """Return the result of `override` in the chosen `layers`, else the operation's own."""
            if layers is not None and at.layer not in layers:
                return beneath(*args, **kwargs)
            return override(beneath, at, *args, **kwargs)

        before = self.overrides.get(op, ())
        after = (scoped, *before) if of_operands else (*before, scoped)
        return replace(self, overrides={**self.overrides, op: after})

    def with_ops(
        self,
        ops: Collection[str],
        override: Override,
        layers: frozenset[int] | None,
        *,
        of_operands: bool = False,
    ) -> "PatchedModel":
        """Return a copy of the model with several operations wrapped, in these layers (None: all).

        `override` is called with the operation, the last capture point passed, and the arguments,
        and returns the operation's new result. With `of_operands` it gets the arguments as earlier
        overrides have changed them, else those of the unpatched pass.
        """
        patched = self
        for op in ops:
            patched = patched.with_op(op, override, layers, of_operands=of_operands)
        return patched

    def with_keys_and_values(
        self,
        read: Callable[[str, int, Any], Any],
        layers: frozenset[int] | None = None,
        since: int = 0,
    ) -> "PatchedModel":
        """Return a copy of the model whose attention reads keys and values that `read` replaces.

        `read("k" or "v", layer, x)` returns what replaces x, the layer's keys or values. Queries of
        tokens before `since` read x itself. `layers` are those changed; None for all.
        """

        def late(changed: Any, own: Callable[[], Any], axis: int) -> Any:
            """Return results [.., queries, ..]: `own()` before query `since`, then `changed`.

            `axis` counts queries in both. `own` is not called where `since` is 0.
            """
            if not since:
                return changed
            before, _ = np.split(own(), [since], axis)
            return np.concatenate([before, np.split(changed, [since], axis)[1]], axis)

        def scores(op: Any, at: PassLocation, q: Any, k: Any, heads: Any) -> Any:
            """Return the scores of q with the replaced keys.

            Queries before `since` have those with `k`.
            """
            return late(op(q, read("k", at.layer, k), heads), lambda: op(q, k, heads), 1)

        def mix(op: Any, at: PassLocation, probs: Any, v: Any) -> Any:
            """Return the sum of the replaced values weighted by `probs`.

            For queries before `since` it is that of `v`.
            """
            return late(op(probs, read("v", at.layer, v)), lambda: op(probs, v), 0)

        return self.with_op("scores", scores, layers).with_op("mix", mix, layers)

    def with_tap(self, point: str, tap: Tap, layers: frozenset[int] | None) -> "PatchedModel":
        """Return a copy of the model with a point's values changed, in these layers (None: all).

        `tap(patched model, layer, x, values held)` returns what replaces the point's value x.
        """

        def scoped(patched: "PatchedModel", layer: int, x: Any, held: Mapping[str, Any]) -> Any:
            """Return what `tap` makes of the point's value x in the chosen `layers`, else x."""
            return x if layers is not None and layer not in layers else tap(patched, layer, x, held)

        return replace(self, taps={**self.taps, point: (*self.taps.get(point, ()), scoped)})

    def with_positions(self, positions: Sequence[int]) -> "PatchedModel":
        """Return a copy of the model with other positions of the tokens."""
        return replace(self, positions=tuple(positions))

    def run(
        self, recorder: "CallRecorder", rows: LogitRows = "all", span: Span | None = None
    ) -> Any:
        """Run the pass, or a span of it, with a recorder; return its logits or stream.

        The logits are of `rows`, by default of all.
        """
        backend, x = self.backend, None
        if self.overrides or recorder.records_calls:
            backend = PatchedBackend(backend, self.overrides, recorder)
        reader = _Tapped(self, recorder, self.taps) if self.taps else recorder
        for part, hp, spec in self._spans(span):
            given = {"span": part if x is None else replace(part, stream=x)} if part else {}
            with np.errstate(all="ignore"):  # a wrong hypothesis may overflow
                x = load_forward(spec)(
                    backend,
                    spec,
                    hp,
                    self.weights,
                    self.ids,
                    recorder=reader,
                    positions=self.positions,
                    logits_rows=rows,
                    **given,
                )
        return x

    def _spans(self, span: Span | None) -> list[tuple[Span | None, HyperParams, ArchSpec]]:
        """Return (span, hyperparameters, architecture) of each stretch of layers of a pass.

        With `span`, of that range of stages alone. Neighbouring layers with the same
        hyperparameters and architecture are one stretch.
        """
        if not self.own:
            return [(None if self.spec.forward else span, self.hp, self.spec)]
        whole = span or WHOLE_PASS
        stop = self.n_layers + 2 if whole.stop is None else whole.stop
        found: list[tuple[Span | None, HyperParams, ArchSpec]] = []
        start = whole.start
        for stage in range(whole.start, stop):  # stage i is layer i - 1
            here = self.own.get(stage - 1, (self.hp, self.spec))
            after = self.own.get(stage, (self.hp, self.spec))
            if stage == stop - 1 or here[0] is not after[0] or here[1] is not after[1]:
                first = whole if start == whole.start else WHOLE_PASS
                found.append((replace(first, start=start, stop=stage + 1), *here))
                start = stage + 1
        return found


class StopPass(Exception):
    """Ends a pass after the last point that is needed; not an error."""


class CallRecorder:
    """A recorder that knows the last capture point passed, and the operations since then.

    Where `records_calls` is False, operations run as the backend has them, fused ones too. Where
    only `keeps_calls` is False, they run one by one, and `calls` stays empty.
    """

    records_calls = True
    keeps_calls = True

    def __init__(self) -> None:
        """Start before the first point, without calls."""
        self.at = PassLocation("", 0)
        self.calls: list[OperationCall] = []
        self.taken: list[Any] = []  # results of calls that made earlier points of the layer

    def begin(self, facts: Any) -> None:
        """Do nothing: the facts of the pass are not needed."""

    def wants(self, point: str, layer: int) -> bool:
        """Return True: every point is wanted, so fused operations run step by step."""
        return True

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Return the value unchanged; subclasses store or replace it."""
        return x

    def take_calls(self, x: Any) -> tuple[OperationCall, ...]:
        """Return the operations that computed `x` from earlier captured values, in order.

        They are removed, so that later operations start from `x`. If no recorded operation made
        `x`, all operations since the last point are returned; none if `x` is some columns of what
        an earlier point's operation made.
        """
        wanted: set[int] = set()
        front = [x]
        while front:
            value = front.pop()
            for i, call in enumerate(self.calls):
                if i not in wanted and may_share_memory(call.result, value):
                    wanted.add(i)
                    front += arrays(call.args)
                    if call.op == "add_weighted":  # experts chosen by the router
                        front += [c.result for c in self.calls if c.op == "router"]
        if not wanted and any(may_share_memory(result, x) for result in self.taken):
            return ()
        if not wanted:
            wanted = set(range(len(self.calls)))
        found = tuple(call for i, call in enumerate(self.calls) if i in wanted)
        self.taken += [call.result for call in found]
        self.calls = [call for i, call in enumerate(self.calls) if i not in wanted]
        return found

    def set_location(self, point: str, layer: int) -> None:
        """Store that the pass has reached a point; after a layer's last point it is in the next."""
        here = self.at.layer if layer == WHOLE else layer
        last = point == "out" and POINTS[point].layered
        if last:
            self.taken = []
        self.at = _location(point, here + 1 if last else here)


def arrays(args: Sequence[Any]) -> list[Any]:
    """Return the numpy arrays among an operation's arguments, also those inside lists."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, (tuple, list)):
            found += arrays(arg)
        elif isinstance(arg, np.ndarray):
            found.append(arg)
    return found


def may_share_memory(a: Any, b: Any) -> bool:
    """Return whether two arrays may share memory."""
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.may_share_memory(a, b)


class PatchedBackend:
    """A backend whose operations are recorded and can be overridden; its state is the base's."""

    def __init__(
        self, base: Any, overrides: Mapping[str, tuple[Override, ...]], recording: CallRecorder
    ) -> None:
        """Take the backend, the overrides by operation, and the recorder of the calls."""
        self._base = base
        self._overrides = overrides
        self._recording = recording

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is the backend that this one wraps, or wraps the same backend."""
        return other is self._base or (
            isinstance(other, PatchedBackend) and other._base is self._base
        )

    def __hash__(self) -> int:
        """Return the base's hash, so that weights placed by the base are found."""
        return hash(self._base)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the base, operations wrapped so that their calls are recorded.

        A fused operation is replaced by Backend's version of it, which calls single operations.
        """
        if name in COMPOSED:
            return partial(getattr(Backend, name), self)
        value = getattr(self._base, name)
        if name not in OPS:
            return value
        found = self.__dict__[name] = partial(self._call, name, value)  # the next time it is found
        return found

    def _call(self, name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of the operation `name` with its overrides, and record the call.

        `op` is the base's function.
        """
        at = self._recording.at
        for override in self._overrides.get(name, ()):
            op = partial(override, op, at)
        result = op(*args, **kwargs)
        if self._recording.keeps_calls:
            made = result[0] if isinstance(result, tuple) else result  # the rest is a state
            self._recording.calls.append(OperationCall(name, args, kwargs, made, at))
        return result


class _Tapped:
    """A recorder that changes values at some points before another recorder gets them."""

    def __init__(
        self, patched: PatchedModel, inner: Any, taps: Mapping[str, tuple[Tap, ...]]
    ) -> None:
        """Take the model, the inner recorder, and the functions that change values, by point."""
        self._patched = patched
        self._inner = inner
        self._taps = taps
        self._layer = WHOLE
        self._held: dict[str, Any] = {}

    def begin(self, facts: Any) -> None:
        """Start a pass of the inner recorder."""
        self._inner.begin(facts)

    def wants(self, point: str, layer: int) -> bool:
        """Return whether the point is changed here, or wanted by the inner recorder."""
        return point in self._taps or bool(self._inner.wants(point, layer))

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Change the value, and return what the inner recorder returns for it."""
        if layer != self._layer:
            last = [self._held.get(name) for name in ("out", *ENTERED, STREAM)]
            entering = next((value for value in last if value is not None), None)
            self._layer, self._held = layer, {STREAM: entering}
        for tap in self._taps.get(point, ()):
            x = tap(self._patched, layer, x, self._held)
        self._held[point] = self._inner.capture(point, layer, x)
        return self._held[point]


def _offset_in_file(model: Model) -> int:
    """Return how much of the norm offset a file's norm weights include already: 0 or 1."""
    norms = (view for key, view in model.roles.items() if key.endswith("norm.weight"))
    amounts = (step.amount for view in norms for step in view.layout if isinstance(step, Added))
    return int(max(amounts, default=0))
