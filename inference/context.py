"""The context of one forward pass: backend, weights, hyperparameters, recorder, rope."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.spec import BlockSpec
from aprfmt.base.protocols import Value
from aprfmt.inference.backends.base import Array, Backend
from aprfmt.inference.kv_cache import KVCache
from aprfmt.inference.masks import Mask
from aprfmt.inference.rope import RopeKind
from aprfmt.inference.weights import Weights

Ids = NDArray[np.int64]
XIELU = ("alpha_p", "alpha_n", "beta", "eps")  # the activation's numbers, as they are stored


@dataclass(frozen=True)
class PassFacts:
    """The facts a recorder gets before a pass: the token and position of each row."""

    ids: Ids  # of this pass
    positions: Ids  # of `ids`
    cached: int  # positions in the cache before the pass
    logit_rows: tuple[int, ...]  # rows of `ids` whose logits are computed


class Recorder(Protocol):
    """An object that reads, or replaces, values at the named points of a pass."""

    def begin(self, facts: PassFacts) -> None:
        """Start a pass; called once with its facts, before any point."""
        ...

    def wants(self, point: str, layer: int) -> bool:
        """Return whether `capture` is to be called for a point of a layer.

        True for a point inside a fused operation makes the pass run its steps one by one.
        """
        ...

    def capture(self, point: str, layer: int, x: Array) -> Array:
        """Return the value to continue the pass with, given a point's value x.

        Both are arrays of the backend. A recorder that only reads returns x.
        """
        ...


@dataclass
class PassState:
    """What later layers of a pass read besides the residual stream.

    `per_layer` [tokens, n_layers * per_layer_size] are per-layer embeddings, None without; `shared`
    are {layer: (keys, values)} that later layers use. `chosen` [tokens, keys] is the mask of keys
    that the last indexer chose, on the host or the device; None where attention reads every key.
    """

    per_layer: Array | None = None
    shared: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    chosen: Mask | Array | None = None

    def copy(self) -> "PassState":
        """Return a copy that later layers may change; the arrays are the same."""
        return PassState(self.per_layer, dict(self.shared), self.chosen)

    def __bool__(self) -> bool:
        """Return whether any field is set: embeddings, shared keys and values, or chosen keys."""
        return self.per_layer is not None or bool(self.shared) or self.chosen is not None


@dataclass(frozen=True)
class Context:
    """Everything the code of a pass needs; `ropes` has (cos, sin) by kind of layer."""

    backend: Backend
    block: BlockSpec
    hp: Mapping[str, Value]
    weights: Weights
    recorder: Recorder | None
    facts: PassFacts
    cache: KVCache | None
    ropes: Mapping[RopeKind, tuple[Array, Array]] = field(default_factory=dict)
    state: PassState = field(default_factory=PassState)

    def wants(self, point: str, layer: int) -> bool:
        """Return whether the recorder wants a point of a layer; False without a recorder."""
        return self.recorder is not None and self.recorder.wants(point, layer)

    def tap(self, point: str, layer: int, x: Array) -> Array:
        """Return the value to continue with at a point: the recorder's result, else x.

        The recorder gets x if it wants the point.
        """
        if self.recorder is None or not self.recorder.wants(point, layer):
            return x
        return self.recorder.capture(point, layer, x)

    def vector(self, layer: int | None, role: str) -> Array:
        """Return the weight of a role (a norm's, say) decoded as the backend's array."""
        return self.weights.role(layer, role).array(self.backend)

    def bias(self, layer: int | None, role: str) -> Array | None:
        """Return the bias of a role as the backend's array; None if the model has none."""
        weight = self.weights.get_role(layer, f"{role}.bias")
        return None if weight is None else weight.array(self.backend)

    def linear(self, layer: int | None, role: str, x: Array) -> Array:
        """Return x times the transposed weight of a role, plus its bias if there is one."""
        w = self.weights.role(layer, f"{role}.weight")
        return self.backend.linear(x, w, self.bias(layer, role))

    def norm(self, layer: int | None, role: str, x: Array) -> Array:
        """Return x [tokens, hidden] after the block's norm with the weight of a role."""
        weight = self.vector(layer, f"{role}.weight")
        eps = float(self.hp["norm_eps"])
        if self.block.norm == "layer":
            if self.block.norm_offset:
                weight = self.backend.shift(weight, self.block.norm_offset)
            return self.backend.layer_norm(x, weight, self.bias(layer, role), eps=eps)
        return self.rms_norm(x, weight, eps)

    def plain_norm(self, x: Array) -> Array:
        """Return x after RMSNorm over the last axis, without a weight."""
        ones = self.backend.shift(self.backend.zeros((x.shape[-1],)), 1)
        return self.backend.rms_norm(
            x, ones, eps=float(self.hp["norm_eps"]), offset=0, cast=self.block.norm_cast
        )

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Return x after RMSNorm over the last axis, with the block's offset and rounding."""
        block = self.block
        return self.backend.rms_norm(
            x, weight, eps=eps, offset=block.norm_offset, cast=block.norm_cast
        )

    def gate(self, gate: Array, up: Array) -> Array:
        """Return act(gate) * up, both clamped where the model has a limit.

        With `swiglu_alpha` too it is gpt-oss's form, which adds 1 to up.
        """
        limit, alpha = self.hp["swiglu_limit"], self.hp["swiglu_alpha"]
        if limit is not None and alpha is not None:
            return self.backend.swiglu_oai(gate, up, float(limit), float(alpha))
        if limit is not None:
            gate, up = self.backend.clipped_gates(gate, up, float(limit))
        return self.backend.mul(self.activate(gate), up)

    def gated(self, layer: int, x: Array) -> Array:
        """Return a layer's act(x @ gate) * (x @ up) [tokens, ffn_size], as one operation."""
        gate, up = (
            (self.weights.role(layer, f"{role}.weight"), self.bias(layer, role))
            for role in ("ffn_gate", "ffn_up")
        )
        steps = self.block.activation_cast == "steps"
        kind = str(self.hp["activation"])
        return self.backend.gated(x, gate, up, kind, steps=steps)

    def activate(self, x: Array, layer: int | None = None) -> Array:
        """Return the MLP's activation of x; xIELU needs the layer, which stores its numbers."""
        steps = self.block.activation_cast == "steps"
        if self.block.activation == "xielu":
            stored = [self.weights.role(layer, f"ffn_act.{name}") for name in XIELU]
            return self.backend.xielu(x, *self.backend.xielu_numbers(stored))
        return self.backend.activate(x, str(self.hp["activation"]), steps=steps)
