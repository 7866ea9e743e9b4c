"""Faults of engines in one place: delta nets, ALiBi, experts, norms, shards, dropout, other ids.

A fault is written on the backend's operations between two points of the pass (`broken_here`), not
with the makers of the hypotheses. Each is tried where engines give most: the ten slots, or logits.

Seen red before the hypotheses: none of these had a name, and ALiBi left out was "residual",
confirmed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.inference.recurrence import delta_rule_by_token
from tests.diagnosis.engines import COARSE, broken_here, tiny_folder, trace
from tests.diagnosis.fault import Fault, Pair
from tests.diagnosis.faults_engine import LOGITS

How = Mapping[str, Any]
DELTA = "qwen3_5"


def _fault(
    name: str, base: str, says: str, cause: str, where: str, how: How, points: Any = COARSE,
    verdict: str = "bug", confidence: str = "confirmed",
) -> Fault:  # fmt: skip
    def make() -> Pair:
        folder = tiny_folder(base)
        return folder, trace(folder, f"engine-{name}", points=points, **how)

    causes = tuple(cause.split())
    return Fault(name, base, says, make, causes, (where,) if where else (), verdict, confidence)


# --- delta nets ----------------------------------------------------------------------------------


def decay(how: Callable[[Any, Any, Any], Any]) -> How:
    """Compute the decay's logarithm otherwise, of the product, A_log and dt_bias."""
    return broken_here(decay=lambda here, op, a, rate, dt: how(a, rate, dt).astype(np.float32))


def softplus(x: Any) -> Any:
    """Return log(1 + exp(x))."""
    return np.log1p(np.exp(x))


def unit(x: Any) -> Any:
    """Return vectors of length one."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def delta(keys: Callable[[Any], Any], each: Callable[[Any, int], Any], *, rule: bool = True) -> How:
    """Run the delta rule with other keys, another mapping of key heads, or without its error."""

    def change(here: Any, op: Any, q: Any, k: Any, v: Any, g: Any, b: Any, state: Any) -> Any:
        n = v.shape[1] // k.shape[1]
        q, k = each(unit(q), n) * np.float32(q.shape[-1] ** -0.5), each(keys(k), n)
        state = np.zeros((v.shape[1], k.shape[2], v.shape[2]), v.dtype)
        if rule:
            read, state = delta_rule_by_token(q, k, v, g, b, state)
            return read.astype(np.float32), state
        reads = []
        for t in range(len(q)):
            state = state * np.exp(g[t])[:, None, None]
            state = state + k[t][:, :, None] * (v[t] * b[t][:, None])[:, None, :]
            reads.append((q[t][:, None, :] @ state)[:, 0])
        return np.stack(reads).astype(np.float32), state

    return broken_here(delta=change)


def in_rows(x: Any, n: int) -> Any:
    """Let each key head serve n value heads in a row."""
    return np.repeat(x, n, axis=1)


def in_turn(x: Any, n: int) -> Any:
    """Let the key heads serve value heads in turn."""
    return np.tile(x, (1, n, 1))


def output_gate(here: Any, op: Any, x: Any, w: Any, gate: Any, kind: str, *, eps: float) -> Any:
    """Take a sigmoid for silu."""
    return op(x, w, gate, kind, eps=eps) / gate


def raw_strength(here: Any, op: Any, x: Any) -> Any:
    """Leave the sigmoid of beta out."""
    return x if here.point == "beta_mm" else op(x)


def conv_linear(here: Any, op: Any, x: Any, kind: str, **how: Any) -> Any:
    """Leave the activation behind the convolution out."""
    return x if here.point == "delta_qkv" else op(x, kind, **how)


NO_DT = decay(lambda a, rate, dt: -np.exp(rate) * softplus(a))
NO_EXP = decay(lambda a, rate, dt: rate * softplus(a + dt))
RAW_KEYS = delta(lambda k: k, in_rows)
KIMI = "kimi_linear"


def sigmoid_left_out(
    here: Any, op: Any, x: Any, w: Any, gate: Any, kind: str, *, eps: float
) -> Any:
    """Take silu for the sigmoid."""
    return op(x, w, gate, kind, eps=eps) * gate


def first_channels(here: Any, op: Any, q: Any, k: Any, v: Any, g: Any, *rest: Any) -> Any:
    """Let every channel of a head decay as its first: a gated delta net's decay by head."""
    return op(q, k, v, np.repeat(g[..., :1], g.shape[-1], axis=-1), *rest)


def forgetful(here: Any, op: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    """Begin with an empty state in every token."""
    parts = [op(*(x[t : t + 1] for x in (q, k, v, *rest[:-1])), None) for t in range(len(q))]
    return np.concatenate([part[0] for part in parts]), parts[-1][1]


_DELTA = (
    _fault("kimi-channels", KIMI, "every channel decays as its head's first", "recurrence",
           "decay", broken_here(delta=first_channels)),
    _fault("kimi-keeps", KIMI, "nothing decays", "recurrence", "decay",
           decay(lambda a, rate, dt: 0 * a)),
    _fault("kimi-silu", KIMI, "the output gate is silu", "recurrence", "delta_norm",
           broken_here(gated_norm=sigmoid_left_out)),
    _fault("kimi-state", KIMI, "no state carried", "recurrence", "delta",
           broken_here(delta=forgetful)),
    _fault("kimi-taps", KIMI, "kernels reversed", "convolution", "ssm_conv1d",
           broken_here(convolve=lambda here, op, x, k: op(x, k[:, ::-1].copy()))),
    _fault("delta-dt", DELTA, "no dt_bias", "missing_bias", "L0.ssm_dt.bias", NO_DT),
    _fault("delta-dt-logits", "qwen3_next", "no dt_bias, from logits alone", "missing_bias",
           "L0.ssm_dt.bias", NO_DT, LOGITS),
    _fault("delta-dt-subtracted", DELTA, "dt_bias subtracted", "recurrence", "decay",
           decay(lambda a, rate, dt: -np.exp(rate) * softplus(a - dt))),
    _fault("delta-rates", DELTA, "A_log without exp", "recurrence", "decay", NO_EXP),
    _fault("delta-rates-logits", DELTA, "A_log without exp, from logits alone", "recurrence",
           "decay", NO_EXP, LOGITS),
    _fault("delta-softplus", DELTA, "no softplus", "recurrence", "decay",
           decay(lambda a, rate, dt: -np.exp(rate) * (a + dt)), None),
    _fault("delta-keeps", DELTA, "nothing decays", "recurrence", "decay",
           decay(lambda a, rate, dt: 0 * a), None),
    _fault("delta-keys", DELTA, "keys not normalised", "recurrence", "delta", RAW_KEYS),
    _fault("delta-keys-logits", DELTA, "keys not normalised, from logits alone", "recurrence",
           "delta", RAW_KEYS, LOGITS),
    _fault("delta-key-heads", DELTA, "value heads read key heads in turn", "recurrence", "delta",
           delta(unit, in_turn), None),
    _fault("delta-no-rule", DELTA, "values written, not their errors", "recurrence", "delta",
           delta(unit, in_rows, rule=False)),
    _fault("delta-beta", DELTA, "beta without its sigmoid", "recurrence", "beta",
           broken_here(sigmoid=raw_strength)),
    _fault("delta-gate", DELTA, "the output gate is a sigmoid", "recurrence", "delta_norm",
           broken_here(gated_norm=output_gate)),
    _fault("delta-conv-linear", DELTA, "no activation behind the convolution", "recurrence",
           "conv", broken_here(activate=conv_linear)),
    _fault("delta-taps", DELTA, "kernels reversed, from logits alone", "convolution",
           "ssm_conv1d", broken_here(convolve=lambda here, op, x, k: op(x, k[:, ::-1].copy())),
           LOGITS),
)  # fmt: skip

# --- state space scans ---------------------------------------------------------------------------


def rates(how: Callable[[Any], Any]) -> How:
    """Take other rates, of A_log."""
    return broken_here(decay_rates=lambda here, op, logs: np.asarray(how(logs), np.float32))


def skip(how: Callable[[Any], Any]) -> How:
    """Take another skip."""
    return broken_here(scan=lambda here, op, *args: op(*args[:5], how(args[5]), *args[6:]))


def steps(how: Callable[[Any, Any], Any]) -> How:
    """Take another time step, of the product and its bias."""

    def change(here: Any, op: Any, raw: Any, bias: Any, low: float, high: float) -> Any:
        return np.asarray(np.clip(how(raw, 0 if bias is None else bias), low, high), np.float32)

    return broken_here(time_step=change)


def norm_elsewhere(here: Any, op: Any, *args: Any, first: bool, **how: Any) -> Any:
    """Put the norm on the other side of the gate."""
    return op(*args, first=not first, **how)


_SCANS = (
    _fault("scan-rates", "mamba", "exp taken twice of A_log", "ssm_decay", "ssm_a",
           rates(lambda logs: -np.exp(np.exp(logs)))),
    _fault("scan-rates-logits", "mamba2", "the same, from logits alone", "ssm_decay",
           "ssm_a", rates(lambda logs: -np.exp(np.exp(logs))), LOGITS),
    _fault("scan-skip", "falcon_mamba", "no skip", "ssm_scan", "ssm_d", skip(lambda d: 0 * d)),
    _fault("scan-skip-ones", "nemotron_h", "a skip of ones, from logits alone", "ssm_scan",
           "ssm_d", skip(lambda d: 0 * d + 1), LOGITS),
    _fault("scan-dt", "granite_hybrid", "no dt_bias", "missing_bias", "",
           steps(lambda raw, dt: softplus(raw))),
    _fault("scan-softplus", "nemotron_h_moe", "no softplus", "ssm_step", "ssm_step",
           steps(lambda raw, dt: raw + dt), None),
    _fault("scan-softplus-twice", "mamba", "softplus twice", "ssm_step", "ssm_step",
           steps(lambda raw, dt: softplus(softplus(raw + dt)))),
    _fault("scan-first-limits", "mamba2", "limits of the first time steps, from logits alone",
           "ssm_step", "ssm_step",
           broken_here(time_step=lambda here, op, raw, dt, *limits: op(raw, dt, 0.001, 0.1)),
           LOGITS),
    _fault("scan-norm", "falcon_h1", "the norm on the other side of the gate", "ssm_gate",
           "ssm_gated", broken_here(gated_scan=norm_elsewhere)),
    _fault("scan-bamba", "bamba", "no skip, beside attention", "ssm_scan", "ssm_d",
           skip(lambda d: 0 * d)),
    _fault("scan-hybrid-moe", "granite_hybrid_moe", "nothing decays", "ssm_decay", "ssm_a",
           rates(lambda logs: 0 * logs)),
)  # fmt: skip

# --- ALiBi ---------------------------------------------------------------------------------------


def slopes(change: Callable[[Any], Any]) -> How:
    """Take other slopes."""
    return broken_here(alibi_bias=lambda here, op, own, *rest: op(change(np.asarray(own)), *rest))


NONE: How = {"block": {"score_bias": "none"}}
EVEN = slopes(lambda own: np.array([2.0 ** (-8 * (i + 1) / len(own)) for i in range(len(own))]))
_ALIBI = (
    _fault("alibi-none", "bloom", "no ALiBi", "positions", "scores", NONE),
    _fault("alibi-none-logits", "mpt", "no ALiBi, from logits alone", "positions", "scores", NONE,
           LOGITS),
    _fault("alibi-none-keys", "falcon_rw", "no ALiBi, of keys in bfloat16", "positions", "scores",
           NONE),
    _fault("alibi-even", "mpt", "slopes of a power of two for six heads", "positions",
           "alibi_slopes", EVEN),
    _fault("alibi-even-logits", "bloom", "the same, from logits alone", "positions",
           "alibi_slopes", EVEN, LOGITS),
    _fault("alibi-sign", "bloom", "slopes of the other sign", "positions", "alibi_slopes",
           slopes(lambda own: -own)),
    _fault("alibi-solved", "bloom", "slopes that no formula gives, from the scores", "positions",
           "alibi_slopes", slopes(lambda own: own * np.linspace(1.1, 1.7, len(own))), None),
)  # fmt: skip

# --- experts -------------------------------------------------------------------------------------
INSIDE = ("router", "experts", "expert_w", "router_margin")


def shared(change: Callable[[Any], Any]) -> How:
    """Add another thing than the shared expert's output."""

    def add(here: Any, op: Any, a: Any, b: Any) -> Any:
        return op(a, change(b) if here.point in INSIDE and b.ndim == 2 else b)

    return broken_here(add=add)


def shared_gate(change: Callable[[Any, Any], Any]) -> How:
    """Take another gate of the shared expert."""
    return broken_here(sigmoid=lambda here, op, x: change(op, x) if here.point in INSIDE else op(x))


def full(capacity: int, *, heaviest: bool = False) -> How:
    """Let an expert take so many tokens only: the first ones, or the heaviest."""

    def fresh() -> Callable[[str, int, Any], Any]:
        held: dict[str, Any] = {}

        def alter(point: str, layer: int, x: Any) -> Any:
            held[point] = np.array(x)
            if point != "expert_w":
                return x
            for expert in range(held["experts"].max() + 1):
                at = np.argwhere(held["experts"] == expert)
                if heaviest:
                    at = at[np.argsort(-x[at[:, 0], at[:, 1]], kind="stable")]
                held[point][at[capacity:, 0], at[capacity:, 1]] = 0
            return held[point]

        return alter

    return {"alter": fresh}


def whole_bias() -> How:
    """Add the bias of an expert's output whole, not times the expert's weight."""
    held: dict[str, Any] = {}

    def add(here: Any, op: Any, a: Any, b: Any) -> Any:
        held["last"] = b
        return op(a, b)

    def add_weighted(here: Any, op: Any, total: Any, rows: Any, y: Any, weights: Any) -> Any:
        made = op(total, rows, y - held["last"], weights)
        made[rows] += held["last"]
        return made

    return broken_here(add=add, add_weighted=add_weighted)


TWICE = shared(lambda b: 2 * b)
_EXPERTS = (
    _fault("shared-twice", "qwen2_moe", "the shared expert added twice", "moe_routing",
           "shared_expert", TWICE),
    _fault("shared-twice-logits", "qwen2_moe", "the same, from logits alone", "moe_routing",
           "shared_expert", TWICE, LOGITS),
    _fault("shared-twice-plain", "glm4_moe", "a shared expert without a gate added twice",
           "moe_routing", "shared_expert", TWICE),
    _fault("shared-factor", "deepseek_v3", "the shared expert times the routed ones' factor",
           "moe_routing", "shared_expert", shared(lambda b: b * np.float32(1.7))),
    _fault("shared-silu", "qwen2_moe", "silu for the sigmoid of the shared expert's gate",
           "moe_routing", "ffn_gate_inp_shexp", shared_gate(lambda op, x: x * op(x))),
    _fault("shared-ungated", "qwen3_next", "no gate of the shared expert, beside gated attention",
           "moe_routing", "ffn_gate_inp_shexp", shared_gate(lambda op, x: 0 * x + 1), LOGITS),
    _fault("capacity", "mixtral", "experts take 8 tokens", "moe_routing", "expert_capacity",
           full(8)),
    _fault("capacity-logits", "qwen3_moe", "experts take 11 tokens, from logits alone",
           "moe_routing", "expert_capacity", full(11), LOGITS),
    _fault("capacity-heaviest", "mixtral", "experts take their 8 heaviest tokens", "moe_routing",
           "expert_capacity", full(8, heaviest=True)),
    _fault("weights-first", "mixtral", "experts' weights multiply inputs, from logits alone",
           "moe_routing", "expert_weights", {"block": {"expert_weights": "input"}}, LOGITS),
    _fault("bias-whole", "gpt_oss", "output biases of experts are not weighted", "moe_routing",
           "ffn_down_exps.bias", whole_bias()),
    _fault("bias-whole-logits", "gpt_oss", "the same, from logits alone", "moe_routing",
           "ffn_down_exps.bias", whole_bias(), LOGITS),
)  # fmt: skip

# --- activations ---------------------------------------------------------------------------------


def act(change: Callable[[Any, Any], Any]) -> How:
    """Take another function than the activation."""
    return broken_here(
        activate=lambda here, op, x, kind, **how: np.asarray(
            change(lambda y: op(y, kind, **how), x), np.float32
        )
    )


def up(change: Callable[[Any], Any]) -> How:
    """Multiply by another thing than up."""
    return broken_here(
        mul=lambda here, op, a, b: op(a, change(b) if here.point == "ffn_act" else b)
    )


def without_one(here: Any, op: Any, gate: Any, u: Any, limit: float, alpha: float) -> Any:
    """Leave gpt-oss's 1 + up out."""
    gate = np.minimum(gate, limit)
    return (gate / (1 + np.exp(-alpha * gate)) * np.clip(u, -limit, limit)).astype(np.float32)


_ACTIVATIONS = tuple(
    _fault(f"act-{name}", base, says, "activation", "activation", how, points)
    for name, base, says, how, points in (
        ("clamped", "llama", "the activation's input clamped at 1",
         act(lambda op, x: op(np.clip(x, -1, 1))), COARSE),
        ("clamped-odd", "llama", "the activation's input clamped at 0.7 from above",
         act(lambda op, x: op(np.minimum(x, 0.7))), COARSE),
        ("result", "gpt2", "the activation's result clamped at 0.5, from logits alone",
         act(lambda op, x: np.minimum(op(x), 0.5)), LOGITS),
        ("offset", "nemotron", "0.1 added to the activation's result",
         act(lambda op, x: op(x) + np.float32(0.1)), COARSE),
        ("gain", "llama", "silu of 1.3 x", act(lambda op, x: op(x * np.float32(1.3)) / 1.3), None),
        ("up", "qwen3", "1 added to up, from logits alone", up(lambda b: b + 1), LOGITS),
        ("up-clamped", "llama", "up clamped at 0.8", up(lambda b: np.clip(b, -0.8, 0.8)), COARSE),
        ("oss", "gpt_oss", "up without its 1", broken_here(swiglu_oai=without_one), COARSE),
    )
)  # fmt: skip

# --- norms ---------------------------------------------------------------------------------------
Here = Callable[[Any], bool]


def keeping_mean(here_only: Here) -> How:
    """Divide by the root mean square in some layer norms, and keep the mean."""

    def change(here: Any, op: Any, x: Any, w: Any, bias: Any, *, eps: float) -> Any:
        if not here_only(here):
            return op(x, w, bias, eps=eps)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * w
        return (y if bias is None else y + bias).astype(np.float32)

    return broken_here(layer_norm=change)


def centring(here_only: Here) -> How:
    """Take the mean away in some RMS norms."""

    def change(here: Any, op: Any, x: Any, *rest: Any, **how: Any) -> Any:
        return op(x - x.mean(-1, keepdims=True) if here_only(here) else x, *rest, **how)

    return broken_here(rms_norm=change)


def without_offset(here_only: Here) -> How:
    """Multiply by the weight alone in some norms of 1 + weight."""

    def change(here: Any, op: Any, x: Any, w: Any, *, offset: int, **how: Any) -> Any:
        return op(x, w, offset=0 if here_only(here) else offset, **how)

    return broken_here(rms_norm=change)


def unbiased(here: Any, op: Any, x: Any, w: Any, bias: Any, *, eps: float) -> Any:
    """Divide by the deviation of n - 1 values."""
    y = x - x.mean(-1, keepdims=True)
    y = y / np.sqrt(x.var(-1, ddof=1, keepdims=True) + np.float32(eps)) * w
    return (y if bias is None else y + bias).astype(np.float32)


def last(here: Any) -> bool:
    """Stand before the head of a model of three layers."""
    return bool(here.point == "out" and here.layer == 3)


def before_mlp(here: Any) -> bool:
    """Stand before the MLP."""
    return bool(here.point == "mid")


def of_q(here: Any) -> bool:
    """Stand behind q."""
    return bool(here.point == "v")


_NORMS = tuple(
    _fault(f"norm-{name}", base, says, cause, where, how, points)
    for name, base, says, cause, where, how, points in (
        ("mean-last", "gpt2", "the last norm keeps the mean, from logits alone", "norm_kind",
         "norm", keeping_mean(last), LOGITS),
        ("mean-mid", "bloom", "the norms before the MLP keep the mean", "norm_kind", "norm",
         keeping_mean(before_mlp), COARSE),
        ("centred-last", "llama", "the last norm takes the mean away", "norm_kind", "norm",
         centring(last), COARSE),
        ("unbiased", "gpt2", "norms divide by the deviation of n - 1 values", "norm_kind", "norm",
         broken_here(layer_norm=unbiased), COARSE),
        ("one-last", "gemma", "the last norm lacks its 1, from logits alone", "norm_offset",
         "norm_offset", without_offset(last), LOGITS),
        ("one-mid", "gemma", "the norms before the MLP lack their 1", "norm_offset",
         "norm_offset", without_offset(before_mlp), COARSE),
        ("one-q", "gemma3", "the norms of q lack their 1", "norm_offset", "norm_offset",
         without_offset(of_q), None),
    )
)  # fmt: skip

# --- devices that share products -----------------------------------------------------------------


def columns(role: str, change: Callable[[Any, int], None], layer: str = "") -> How:
    """Change the columns of a product's weight, which the second device has from `half` on."""

    def weights(held: Any) -> Mapping[str, Any]:
        found = {}
        for key in held:
            if key.endswith(f".{role}.weight") and key.startswith(layer):
                w = np.array(held[key].numpy(), np.float32)
                change(w, w.shape[1] // 2)
                found[key] = w
        return found

    return {"weights": weights}


def lost(w: Any, half: int) -> None:
    """Lose the second device's part."""
    w[:, half:] = 0


def doubled(role: str) -> How:
    """Give the second device the first one's shard of everything around an MLP's last product."""

    def weights(held: Any) -> Mapping[str, Any]:
        found = {}
        for key in held:
            if key.split(".")[-2] in ("ffn_gate", "ffn_up", role):
                w = np.array(held[key].numpy(), np.float32)
                w = w.T if key.split(".")[-2] == role else w
                w[len(w) // 2 :] = w[: len(w) // 2].copy()
                found[key] = w.T if key.split(".")[-2] == role else w
        return found

    return {"weights": weights}


def biases(times: int, *roles: str) -> How:
    """Add biases several times."""
    return {
        "weights": lambda held: {
            key: times * np.array(held[key].numpy(), np.float32)
            for key in held
            if key.endswith(".bias") and key.split(".")[-2] in roles
        }
    }


def factor(points: tuple[str, ...], value: float) -> How:
    """Multiply what a half of each layer adds to the stream."""
    return broken_here(
        add=lambda here, op, a, b: op(
            a, b * np.float32(value) if here.point in points and b.ndim == 2 else b
        )
    )


MLP = ("ffn_out", "ffn_contrib")
_SHARDS = (
    _fault("shards-attention", "llama", "attention's sum lacks half of it", "tensor_parallel",
           "attn_output", columns("attn_output", lost)),
    _fault("shards-mlp-logits", "qwen2", "the MLP's sum lacks half of it, from logits alone",
           "tensor_parallel", "ffn_down", columns("ffn_down", lost), LOGITS),
    _fault("shards-one-layer", "llama", "in layer 1 alone", "tensor_parallel", "L1.ffn_down",
           columns("ffn_down", lost, "L1.")),
    _fault("shards-twice", "llama", "one device has the other's shard, from logits alone",
           "tensor_parallel", "ffn_down", doubled("ffn_down"), LOGITS),
    _fault("bias-twice", "qwen2", "q, k and v have their biases twice", "missing_bias",
           "L0.attn_q.bias", biases(2, "attn_q", "attn_k", "attn_v")),
    _fault("bias-four-times", "gpt2", "each of four devices adds the biases, from logits alone",
           "missing_bias", "L0.attn_output.bias", biases(4, "attn_output", "ffn_down"), LOGITS),
    _fault("factor-one-half", "granite", "no factor on what the MLP adds", "multiplier",
           "residual_scale", factor(MLP, 1 / 0.6)),
    _fault("factor-attention", "granite", "no factor on what attention adds, from logits alone",
           "multiplier", "residual_scale", factor(("attn_out", "attn_contrib"), 1 / 0.6), LOGITS),
    _fault("factor-mlp", "llama", "half of what the MLP computed is added", "multiplier",
           "residual_scale", factor(MLP, 0.5)),
)  # fmt: skip

# --- positions, masks, tokens --------------------------------------------------------------------


def last_elements(here: Any, op: Any, x: Any, table: Any, **how: Any) -> Any:
    """Rotate the last elements of a head."""
    still = x.shape[-1] - 2 * table[0].shape[-1]
    turned = op(np.ascontiguousarray(x[..., still:]), table, **how)
    return np.concatenate([x[..., :still], turned], -1)


def half_of_pairs(here: Any, op: Any, x: Any, table: Any, **how: Any) -> Any:
    """Rotate half of the elements, by the first of the whole head's frequencies."""
    few = table[0].shape[-1] // 2
    return op(x, tuple(np.ascontiguousarray(part[:, :few]) for part in table), **how)


def head_frequencies(here: Any, op: Any, x: Any, table: Any, **how: Any) -> Any:
    """Rotate the model's elements by the frequencies that a rotation of the whole head has."""
    cos, sin = (np.asarray(part, np.float64) for part in table)
    own = np.arctan2(sin[1], cos[1]) ** (2 * cos.shape[-1] / x.shape[-1])
    angles = np.arange(len(cos))[:, None] * own
    return op(x, (np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)), **how)


def gone(key: int, token: int) -> How:
    """Let keys before one be gone from a token on."""

    def probs(here: Any, op: Any, scores: Any, own: Any) -> Any:
        at = np.arange(own.mask.shape[-1])
        mask = own.mask & ((at[None] >= key) | (at[: len(own.mask), None] < token))
        return op(scores, replace(own, mask=mask, causal=None))

    return broken_here(probs=probs)


def ring(first: int, last: int) -> How:
    """Let only the first keys of a full cache and the last ones be seen."""

    def probs(here: Any, op: Any, scores: Any, own: Any) -> Any:
        key = np.arange(own.mask.shape[-1])[None]
        query = np.arange(len(own.mask))[:, None]
        mask = own.mask & ((key < first) | (key > query - last))
        return op(scores, replace(own, mask=mask, causal=None))

    return broken_here(probs=probs)


def reading(ids: Mapping[int, int]) -> How:
    """Read other tokens at some places."""

    def embed(here: Any, op: Any, table: Any, own: Any) -> Any:
        read = np.array(own)
        if table.key == "token_embd.weight":
            read[list(ids)] = list(ids.values())
        return op(table, read)

    return broken_here(embed=embed)


def dropping(share: float, points: tuple[str, ...]) -> How:
    """Drop a share of what is added behind some points."""
    draws = np.random.default_rng(3)

    def add(here: Any, op: Any, a: Any, b: Any) -> Any:
        if here.point in points and b.ndim == 2:
            b = (b * (draws.random(b.shape) >= share) / (1 - share)).astype(np.float32)
        return op(a, b)

    return broken_here(add=add)


def types(change: Callable[[Any], Any]) -> How:
    """Change the table of token types."""
    key = "token_types.weight"
    return {"weights": lambda held: {key: change(np.array(held[key].numpy(), np.float32))}}


def cache_rounded(kind: Any) -> How:
    """Keep keys and values in 16 bits."""

    def short(x: Any) -> Any:
        return x.astype(kind).astype(np.float32)

    return broken_here(
        scores=lambda here, op, q, k, *rest: op(q, short(k), *rest),
        mix=lambda here, op, probs, v: op(probs, short(v)),
    )


ROTATED = broken_here(rope=last_elements)
_OTHERS = (
    _fault("rotary-end", "phi2", "the last elements of heads rotate", "partial_rotary", "rope_dim",
           ROTATED),
    _fault("rotary-end-logits", "gpt_neox", "the same, from logits alone", "partial_rotary",
           "rope_dim", ROTATED, LOGITS),
    _fault("rotary-half", "llama", "half of each head rotates, by the first frequencies",
           "partial_rotary", "rope_dim", broken_here(rope=half_of_pairs)),
    # https://github.com/pie-project/pie/pull/603
    _fault("rotary-head-angles", "phi2", "a part of each head rotates, by a whole head's angles",
           "partial_rotary", "rope_dim", broken_here(rope=head_frequencies)),
    _fault("evicted", "llama", "the first key is gone from token 12 on", "mask", "mask",
           gone(1, 12)),
    _fault("evicted-logits", "qwen2_5_vl", "the first 4 keys are gone from token 16 on",
           "mask", "mask", gone(4, 16), LOGITS),
    _fault("ring", "llama", "the first 2 keys and the last 10 are seen", "mask", "mask",
           ring(2, 10)),
    _fault("ring-logits", "qwen2_5_vl", "the first key and the last 15 are seen", "mask", "mask",
           ring(1, 15), LOGITS),
    _fault("other-id", "llama", "another token than recorded", "token_ids", "input_ids",
           reading({5: 33})),
    _fault("other-ids-logits", "gemma", "two other tokens, from logits alone", "token_ids",
           "input_ids", reading({4: 11, 20: 9}), LOGITS),
    _fault("types-one", "bert_causal", "every token has type 1", "token_type_ids",
           "token_types.weight", types(lambda x: np.roll(x, -1, 0))),
    _fault("types-none", "bert_causal", "no token types, from logits alone", "token_type_ids",
           "token_types.weight", types(lambda x: 0 * x), LOGITS),
    _fault("dropout", "gpt2", "dropout behind every layer's MLP", "dropout", "L0.out",
           dropping(0.1, ("ffn_out",)), None),
    _fault("cache-f16", "qwen2", "keys and values kept in float16", "rounding", "",
           cache_rounded(np.float16), COARSE, "precision"),
    _fault("cache-f16-logits", "llama", "the same, from logits alone", "rounding", "",
           cache_rounded(np.float16), LOGITS, "precision"),
    _fault("two-places", "gemma", "the last norm lacks its 1 and the base is another",
           "rope_theta norm_offset", "rope_theta",
           {**without_offset(last), "hp": {"rope_theta": 1e4}}),
    _fault("two-of-delta", DELTA, "no dt_bias and reversed kernels", "convolution missing_bias",
           "ssm_conv1d", {**broken_here(
               decay=lambda here, op, a, rate, dt: op(a, rate, 0 * dt),
               convolve=lambda here, op, x, k: op(x, k[:, ::-1].copy()))}, None),
    _fault("two-of-experts", "qwen2_moe", "the shared expert twice, weights renormalised",
           "moe_routing", "", {**TWICE, "hp": {"norm_topk": True}}, None),
)  # fmt: skip

PLACE_FAULTS: tuple[Fault, ...] = (
    *_DELTA, *_SCANS, *_ALIBI, *_EXPERTS, *_ACTIVATIONS, *_NORMS, *_SHARDS, *_OTHERS,
)  # fmt: skip
