"""Hypotheses about gated delta nets: their decay, keys, beta, state, gate and norm.

The rule itself is in inference/recurrence.py. What is tried here is that rule with one operation or
operand of it exchanged, as ports of the model have had it: transformers' modeling_qwen3_next, the
kernels of flash-linear-attention and llama.cpp's graphs differ in who normalises the keys, who
takes the exponential of A_log and where dt_bias is added.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from aprfmt.causes.forward.convolution import mixer_kinds, starts_to_try
from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Layers,
    Mismatch,
    Patch,
    hyper_change,
)
from aprfmt.causes.forward.product import scale_weights_change, zero_weights_change
from aprfmt.causes.forward.state_restarts import restart_rule
from aprfmt.causes.row import Cause
from aprfmt.inference.backends.numpy_backend import silu
from aprfmt.inference.point_placement import mixer_of_layer
from aprfmt.inference.recurrence import by_channel, delta_rule_by_token, softplus, unit_length
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "recurrence", "forward", "bug",
        "A gated delta net computes its decay, its strength, its keys, its state or its output "
        "gate by another rule: A_log without exp, keys that are not normalised, no dt_bias.",
        "What the layer reads from its state differs more from token to token; its products are "
        "equal.",
        "The rule with the named part exchanged is equal.",
        keys=("delta_strength",),
    ),
)  # fmt: skip

POINTS = ("conv", "beta", "decay", "delta", "delta_norm", "attn_out", "mid", "out")


# What is said -> the decay's logarithm of the product, A_log and dt_bias.
DECAYS: Mapping[str, Callable[[Array, Array, Array], Array]] = {
    "dt_bias is subtracted": lambda a, rate, shift: -np.exp(rate) * softplus(a - shift),
    "dt_bias is added after the softplus": lambda a, rate, shift: (
        -np.exp(rate) * (softplus(a) + shift)
    ),
    "A_log is taken as it is stored, without exp": lambda a, rate, shift: (
        rate * softplus(a + shift)
    ),
    "minus A_log is taken, without exp": lambda a, rate, shift: -rate * softplus(a + shift),
    "exp is taken twice of A_log": lambda a, rate, shift: (
        -np.exp(np.exp(rate)) * softplus(a + shift)
    ),
    "exp is taken of minus exp(A_log)": lambda a, rate, shift: (
        -np.exp(-np.exp(rate)) * softplus(a + shift)
    ),
    "the softplus is left out": lambda a, rate, shift: -np.exp(rate) * (a + shift),
    "a sigmoid stands for the softplus": lambda a, rate, shift: (
        -np.exp(rate) / (1 + np.exp(-(a + shift)))
    ),
    "A_log is left out": lambda a, rate, shift: -softplus(a + shift),
    "nothing decays": lambda a, rate, shift: 0 * a,
    "the heads of the decay's product are reversed": lambda a, rate, shift: (
        -np.exp(rate) * softplus(a[:, ::-1] + shift)
    ),
    "the heads of A_log and dt_bias are reversed": lambda a, rate, shift: (
        -np.exp(rate[::-1]) * softplus(a + shift[::-1])
    ),
    "the decay is applied twice": lambda a, rate, shift: -2 * np.exp(rate) * softplus(a + shift),
}


def _delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, *, unit_q: bool = True,
    unit_k: bool = True, scaled: bool = True, in_turn: bool = False, corrects: bool = True,
    early: bool = False, forgets: bool = False, late_decay: bool = False,
) -> Array:  # fmt: skip
    """Return what tokens read by the gated delta rule, with the chosen mistakes in it.

    `q` and `k` are [tokens, key heads, width], `v` and the result [tokens, value heads, width],
    `g` (log of the decay; by channel [tokens, value heads, width]) and `beta` [tokens, value
    heads]. `in_turn`: value head h reads key head h modulo their number. `corrects`: a token
    writes the error of its value, not the value. `early`: a token reads before it writes.
    `forgets`: every token begins with an empty state. `late_decay`: the state decays after a
    token has written. `unit_q`, `unit_k`: divided by their length. `scaled`: queries are divided
    by the root of their width.
    """
    each = v.shape[1] // k.shape[1]
    q, k = unit_length(q) if unit_q else q, unit_length(k) if unit_k else k
    q, k = (np.tile(x, (1, each, 1)) if in_turn else np.repeat(x, each, axis=1) for x in (q, k))
    q = q * q.dtype.type(q.shape[-1] ** -0.5) if scaled else q
    state = np.zeros((v.shape[1], k.shape[2], v.shape[2]), v.dtype)
    if corrects and not (early or forgets or late_decay):
        return np.asarray(delta_rule_by_token(q, k, v, g, beta, state)[0], v.dtype)
    reads, decays = [], by_channel(np.exp(g))[..., None]
    for t in range(len(q)):
        row, query = k[t][:, None, :], q[t][:, None, :]
        state = state * 0 if forgets else state if late_decay else state * decays[t]
        before = state
        error = v[t] - (row @ state)[:, 0] if corrects else v[t]
        state = state + row.swapaxes(1, 2) * (error * beta[t][:, None])[:, None, :]
        state = state * decays[t] if late_decay else state
        reads.append((query @ (before if early else state))[:, 0])
    return np.stack(reads).astype(v.dtype)


# What is said -> what of the rule is exchanged.
RULES: Mapping[str, Mapping[str, bool]] = {
    "keys are not normalised": {"unit_k": False},
    "queries are not normalised": {"unit_q": False},
    "neither queries nor keys are normalised": {"unit_q": False, "unit_k": False},
    "queries are not divided by the root of their width": {"scaled": False},
    "queries are neither normalised nor divided by the root of their width": {
        "unit_q": False, "scaled": False,
    },
    "value heads read the key heads in turn": {"in_turn": True},
    "a token writes its value, not the value's error: no delta rule": {"corrects": False},
    "a token reads the state before it writes": {"early": True},
    "no state is carried: a token reads what it wrote alone": {"forgets": True},
    "the state decays after a token has written": {"late_decay": True},
}  # fmt: skip

# What is said -> the strength, of the product before its sigmoid.
STRENGTHS: Mapping[str, Callable[[Any, Array], Array]] = {
    "beta has no sigmoid": lambda op, x: x,
    "beta is twice its sigmoid": lambda op, x: 2 * op(x),
    "beta is 1: left out": lambda op, x: 0 * x + 1,
    "beta's heads are reversed": lambda op, x: op(x)[:, ::-1],
}


def _rms_norm(x: Array, w: Array, eps: float) -> Array:
    """Return the RMS norm over the last axis, times the weight `w`."""
    square = np.mean(x * x, axis=-1, keepdims=True)
    found: Array = x / np.sqrt(square + x.dtype.type(eps)) * w
    return found


# What is said -> the result of the norm after the state, of values, weight, gate and epsilon.
GATES: Mapping[str, Callable[[Array, Array, Array, float], Array]] = {
    "the output gate is left out": lambda x, w, gate, eps: _rms_norm(x, w, eps),
    "the output gate is a sigmoid, not silu": lambda x, w, gate, eps: (
        _rms_norm(x, w, eps) / (1 + np.exp(-gate))
    ),
    "the output gate has no activation": lambda x, w, gate, eps: _rms_norm(x, w, eps) * gate,
    "the output gate multiplies before the norm": lambda x, w, gate, eps: _rms_norm(
        x * silu(gate), w, eps
    ),
    "the norm after the state is left out": lambda x, w, gate, eps: x * silu(gate),
    "the norm after the state has no weight: it is taken as ones": lambda x, w, gate, eps: (
        _rms_norm(x, np.ones_like(w), eps) * silu(gate)
    ),
    "the norm after the state multiplies by its weight plus 1": lambda x, w, gate, eps: (
        _rms_norm(x, w + 1, eps) * silu(gate)
    ),
}


# The same, of a gate that is a sigmoid (Kimi delta attention).
SIGMOID_GATES: Mapping[str, Callable[[Array, Array, Array, float], Array]] = {
    "the output gate is left out": GATES["the output gate is left out"],
    "the output gate is silu, not a sigmoid": lambda x, w, gate, eps: (
        _rms_norm(x, w, eps) * silu(gate)
    ),
    "the output gate has no activation": GATES["the output gate has no activation"],
    "the output gate multiplies before the norm": lambda x, w, gate, eps: _rms_norm(
        x / (1 + np.exp(-gate)), w, eps
    ),
    "the norm after the state is left out": lambda x, w, gate, eps: x / (1 + np.exp(-gate)),
    "the norm after the state has no weight: it is taken as ones": lambda x, w, gate, eps: (
        _rms_norm(x, np.ones_like(w), eps) / (1 + np.exp(-gate))
    ),
}
# What is said -> the decay's logarithm [tokens, heads, channels], of the model's.
CHANNELS: Mapping[str, Callable[[Array], Array]] = {
    "every channel of a head decays as its first": lambda g: g * 0 + g[..., :1],
    "every channel of a head decays as its mean": lambda g: g * 0 + g.mean(axis=-1, keepdims=True),
    "channels decay in the reverse order": lambda g: g[..., ::-1],
}


def usual_delta_net_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes of gated delta nets; none for models without them."""
    kinds = mixer_kinds(patched) & {"gated_delta", "kimi_delta"}
    if not kinds:
        return
    channels = "kimi_delta" in kinds
    shifts = [key for key in patched.weights if key.endswith(".ssm_dt.bias")]
    # The bias of the decay.
    if shifts:
        says = "no dt_bias is added before the decay's softplus"
        yield zero_weights_change("missing_bias", says, shifts, patched)
        says = "dt_bias is added twice before the decay's softplus"
        yield scale_weights_change("repeated_bias", says, shifts, patched, 2.0)
    # Each part of the rule in turn: decay, rule, strength, norm, gate.
    for decay, decays in DECAYS.items():
        yield _recurrence_change(decay, "decay", _patch_decay(decays))
    for says, parts in RULES.items():
        yield _recurrence_change(says, "delta", _patch_rule(parts))
    yield _recurrence_change("queries and keys are exchanged", "delta", _exchange_queries_and_keys)
    for says, strength in STRENGTHS.items():
        yield _recurrence_change(says, "beta", _patch_strength(strength))
    configured = float(patched.hp["delta_strength"])
    if configured != 1:
        says = f"in the delta net beta is its sigmoid, not {configured:g} times that"
        yield hyper_change("recurrence", says, delta_strength=1.0)
    eps, own = float(patched.hp["norm_eps"]), float(patched.hp["delta_norm_eps"])
    if eps != own:
        says = (
            f"the norm after the state adds {eps:g}, the model's epsilon; it has its own, {own:g}"
        )
        yield hyper_change("norm_eps", says, delta_norm_eps=eps)
    if channels:
        for says, decayed in CHANNELS.items():
            yield _recurrence_change(says, "decay", _patch_channels(decayed))
    for says, gated in (SIGMOID_GATES if channels else GATES).items():
        yield _recurrence_change(says, "delta_norm", _patch_output_gate(gated))
    yield _recurrence_change(
        "the activation after the convolution is left out", "conv", _without_activation
    )


def try_delta_net_mistakes(case: Mismatch) -> Iterator[Change]:
    """Yield changes for the usual mistakes of a delta net, if the layer is one."""
    if case.layer >= 0 and case.view.point in POINTS:
        kind = mixer_of_layer(case.patched.spec.block, case.patched.hp, case.layer)
        if kind in ("gated_delta", "kimi_delta"):
            yield from usual_delta_net_mistakes(case.patched)
            for first in starts_to_try(case):
                says = f"no state is carried to token {first}: the delta rule begins anew there"
                make, values = restart_rule([first]), {"restarted": first}
                yield Change("ssm_state", says, ("delta",), make, values)


def _recurrence_change(says: str, point: str, make: Patch) -> Change:
    """Return the change that patch `make` makes to the delta net.

    `point` is the capture point that changes, such as "decay". `says` completes the sentence "in
    the delta net ...".
    """
    return Change("recurrence", f"in the delta net {says}", (point,), make, {point: says})


def _patch_decay(how: Callable[[Array, Array, Array], Array]) -> Patch:
    """Return a patch: the log of the decay is how(product, A_log, dt_bias)."""

    def override(op: Any, at: Any, a: Any, rate: Any, shift: Any) -> Any:
        """Return the log of a delta net's decay by the mistaken formula `how`, in the dtype of `a`.

        `a` is the decay's product, `rate` is A_log and `shift` is dt_bias.
        """
        return np.asarray(how(a, rate, shift), a.dtype)

    return lambda patched, layers: patched.with_op("decay", override, layers)


def _patch_channels(how: Callable[[Array], Array]) -> Patch:
    """Return a patch that replaces the log of the decay, given by channel, by how(that log)."""

    def override(op: Any, at: Any, q: Any, k: Any, v: Any, decay: Any, *rest: Any) -> Any:
        """Return the delta rule's result with the mistaken how(decay) for the log of the decay."""
        return op(q, k, v, np.ascontiguousarray(how(decay)), *rest)

    return lambda patched, layers: patched.with_op("delta", override, layers)


def _patch_rule(parts: Mapping[str, bool]) -> Patch:
    """Return a patch: the delta rule runs with these options of `_delta_rule`."""
    ruled: Callable[..., Array] = partial(_delta_rule, **dict[str, Any](parts))

    def override(
        op: Any, at: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any
    ) -> Any:
        """Return (values read, None) of the delta rule with the patch's options.

        The model's own rule where it continues from a `state`.
        """
        return (ruled(q, k, v, decay, beta), None) if state is None else op(
            q, k, v, decay, beta, state
        )  # fmt: skip

    return lambda patched, layers: patched.with_op("delta", override, layers)


def _exchange_queries_and_keys(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose delta nets use queries as keys and keys as queries in `layers`."""

    def override(op: Any, at: Any, q: Any, k: Any, *rest: Any) -> Any:
        """Return the delta rule's result with queries `q` and keys `k` exchanged."""
        return op(k, q, *rest)

    return patched.with_op("delta", override, layers)


def _patch_strength(how: Callable[[Any, Array], Array]) -> Patch:
    """Return a patch that computes beta, the strength of each write, as how(sigmoid, product)."""

    def override(op: Any, at: Any, x: Any) -> Any:
        """Return a delta net's beta, the strength of a write, by the mistaken how(sigmoid, x).

        At other capture points it is the sigmoid of x.
        """
        return how(op, x) if at.point == "beta_mm" else op(x)

    return lambda patched, layers: patched.with_op("sigmoid", override, layers)


def _patch_output_gate(how: Callable[[Array, Array, Array, float], Array]) -> Patch:
    """Return a patch: the gated norm's result is how(values, weight, gate, epsilon)."""

    def override(op: Any, at: Any, x: Any, w: Any, gate: Any, kind: str, *, eps: float) -> Any:
        """Return a delta net's gated norm of `x` by the mistaken formula `how`.

        It is in the dtype of `x`; `kind`, the gate's function, is not used.
        """
        return np.asarray(how(x, w, gate, eps), x.dtype)

    return lambda patched, layers: patched.with_op("gated_norm", override, layers)


def _without_activation(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model without the activation after a delta net's convolution."""

    def override(op: Any, at: Any, x: Any, kind: str, **kwargs: Any) -> Any:
        """Return `x` unchanged after a delta net's convolution, the activation of `x` elsewhere."""
        return x if at.point in ("delta_qkv", "delta_v") else op(x, kind, **kwargs)

    return patched.with_op("activate", override, layers)


HYPOTHESES = (
    Hypothesis(
        "recurrence",
        try_delta_net_mistakes,
        343,
        "the rule of a state, once keys and values are right",
    ),
)
