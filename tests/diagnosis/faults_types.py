"""Faults of model types that nothing else in the table is tried on: each of what the type has.

Seen red: norms of q and k before rope left a cause unnamed, and so did ALiBi's slopes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.inference.kv_cache import KVCache
from aprfmt.inference.lightning import decay_slopes
from tests.diagnosis.engines import broken
from tests.diagnosis.making import engine
from tests.model_values import IDS, LFM2


def taps(change: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """Return a backend whose convolutions take another window or kernel."""
    return lambda: broken("convolve", lambda op, window, kernel: op(*change(window, kernel)))


def undecayed(op: Any, x: Any, step: Any, rate: Any, *rest: Any) -> Any:
    """Keep the whole state."""
    return op(x, step, 0 * rate, *rest)


def decays_of_layer_0(op: Any, x: Any, step: Any, rate: Any, *rest: Any) -> Any:
    """Leave the layer out of the slopes."""
    return op(x, step, -decay_slopes(len(rate), 0, 4).astype(rate.dtype), *rest)


def without_gate() -> Any:
    """Return what alters a pass so that lightning attention has no gate."""
    held: dict[str, Any] = {}

    def alter(point: str, layer: int, x: Any) -> Any:
        if point == "lightning_norm":
            held["x"] = x
        return held["x"] if point == "lightning_gated" else x

    return alter


def early(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Let each token's taps begin one position before."""
    return np.concatenate([0 * window[:1], window[:-1]]), kernel


def unreset(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Begin with rows of another sequence."""
    back = kernel.shape[1] - 1
    other = np.random.default_rng(5).standard_normal((back, window.shape[1]))
    return np.concatenate([other.astype(window.dtype), window[back:]]), kernel


def alone(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Let each token see itself only, as steps without a state do."""
    return window, kernel * (np.arange(kernel.shape[1]) == kernel.shape[1] - 1)


def restarted(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Begin a pass with zeros, behind a cache too."""
    back = kernel.shape[1] - 1
    return np.concatenate([0 * window[:back], window[back:]]), kernel


def ungated(which: int) -> Any:
    """Return a backend that leaves out the first or the second gate of every convolution."""

    def make() -> Any:
        calls = iter(range(1 << 30))

        def change(op: Any, a: Any, b: Any) -> Any:
            gates = a.shape == b.shape and a.shape[-1] == LFM2["hidden_size"]
            return b if gates and next(calls) % 2 == which else op(a, b)

        return broken("mul", change)

    return make


def other_owner(reader: int, owner: int, layers: int) -> Any:
    """Return a backend in which a layer reads the keys and values that another one wrote."""

    def make() -> Any:
        held: dict[str, Any] = {}
        turns = {"k": iter(range(1 << 30)), "v": iter(range(1 << 30))}

        def read(what: str, own: Any) -> Any:
            layer = next(turns[what]) % layers
            if layer == owner:
                held[what] = own
            return held[what] if layer == reader else own

        made = broken("scores", lambda op, q, k, heads: op(q, read("k", k), heads))
        mix = type(made).mix
        type(made).mix = lambda self, probs, v: mix(self, probs, read("v", v))  # type: ignore
        return made

    return make


def sampled(op: Any, x: Any, factor: float) -> Any:
    """Cut by a standard deviation over one less than the values."""
    return op(x, factor * (x.shape[-1] / (x.shape[-1] - 1)) ** 0.5)


def turned(op: Any, x: Any, coefs: Any) -> Any:
    """Mix copies by coefficients whose rows and columns are exchanged."""
    n = round(coefs.shape[-1] ** 0.5)
    return op(x, coefs.reshape(-1, n, n).swapaxes(1, 2).reshape(coefs.shape))


def windowed_too() -> Any:
    """Return a backend in which the third of six layers has the others' window of 8."""
    turns = iter(range(1 << 30))

    def probs(op: Any, scores: Any, heads: Any) -> Any:
        if next(turns) % 6 != 2:
            return op(scores, heads)
        at = np.arange(scores.shape[-1])
        near = heads.mask & (at > at[-scores.shape[1] :, None] - 8)
        return op(scores, replace(heads, mask=near, causal=None))

    return broken("probs", probs)


def altered(point: str, change: Callable[[Any], Any]) -> Any:
    """Return what alters a point's values in every layer."""
    return lambda: lambda at, layer, x: change(x) if at == point else x


def unpredicted() -> Any:
    """Return what gives a layer the copies as they entered it, not predicted ones."""
    held: dict[str, Any] = {}

    def alter(point: str, layer: int, x: Any) -> Any:
        if point in ("altup_embd", "out"):
            held["entered"] = x
        return held["entered"] if point == "altup_predicted" else x

    return alter


def nothing(role: str) -> Any:
    """Return an overlay with zeros for the biases of a role."""
    return lambda weights: {
        key: 0 * weights[key].numpy() for key in weights if key.endswith(f".{role}.bias")
    }


def scanned(change: Callable[..., Any]) -> Any:
    """Return a backend whose scans take other operands."""
    return lambda: broken("scan", lambda op, *given: op(*change(*given)))


def rated(change: Callable[[Any], Any]) -> Any:
    """Return a backend whose scans have other rates."""
    return lambda: broken("decay_rates", lambda op, logs: change(logs))


def dealt(x: Any, step: Any, rate: Any, b: Any, c: Any, skip: Any, state: Any) -> Any:
    """Deal the groups' B and C to the heads in turn."""
    order = np.arange(x.shape[1]) % b.shape[1]
    return x, step, rate, b[:, order], c[:, order], skip, state


def other_state() -> Any:
    """Return a backend whose first layer begins with the state of another sequence."""
    calls = iter(range(1 << 30))

    def change(op: Any, x: Any, step: Any, rate: Any, b: Any, *rest: Any) -> Any:
        shape = (x.shape[1], x.shape[2], b.shape[2])
        other = np.random.default_rng(5).standard_normal(shape).astype(x.dtype)
        state = rest[-1] if next(calls) else other
        return op(x, step, rate, b, *rest[:-1], state)

    return broken("scan", change)


def alone_scanned(op: Any, x: Any, step: Any, rate: Any, b: Any, c: Any, *rest: Any) -> Any:
    """Scan every token by itself, as steps without a state do."""
    found = [op(x[t:][:1], step[t:][:1], rate, b[t:][:1], c[t:][:1], rest[0], None)
             for t in range(len(x))]  # fmt: skip
    return np.concatenate([read for read, _ in found]), found[-1][1]


def unbiased(op: Any, raw: Any, bias: Any, low: float, high: float) -> Any:
    """Leave out the bias of time steps."""
    return op(raw, None, low, high)


def unlimited(op: Any, raw: Any, bias: Any, low: float, high: float) -> Any:
    """Take time steps as they are."""
    return op(raw, bias, 0.0, np.inf)


def gated(**changed: Any) -> Any:
    """Return a backend whose gates and norms are applied otherwise."""
    return lambda: broken("gated_scan", lambda op, x, gate, weight, **how: op(
        x, gate, weight, **{**how, **changed}))  # fmt: skip


def late(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Let each token's taps end one position behind."""
    return np.concatenate([window[1:], 0 * window[:1]]), kernel


def biased_taps(change: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """Return a backend whose convolutions, which have biases, take another window or kernel."""
    return lambda: broken(
        "convolve", lambda op, window, kernel, *bias: op(*change(window, kernel), *bias)
    )


TYPE_FAULTS = (
    engine("internlm3-gelu", "internlm3", "gelu for silu", "activation", "activation",
           hp={"activation": "gelu"}),
    engine("solar-open-weights", "solar_open", "experts' weights not renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": False}),
    engine("exaone-moe-scale", "exaone_moe", "experts' factor left out", "moe_routing",
           "routed_scale", hp={"routed_scale": 1.0}),
    engine("hy-v3-scale", "hy_v3", "experts' factor left out", "moe_routing", "routed_scale",
           hp={"routed_scale": 1.0}),
    engine("olmo3-window", "olmo3", "no sliding window", "sliding_window", "sliding_window",
           hp={"sliding_window": None}),
    engine("starcoder2-erf", "starcoder2", "gelu with erf for tanh", "activation", "activation",
           hp={"activation": "gelu"}),
    engine("seed-oss-bias", "seed_oss", "attention's output has no bias", "missing_bias",
           "L0.attn_output.bias", fine=True, weights=nothing("attn_output")),
    engine("exaone4-rotates", "exaone4", "the layer without a window rotates", "rope_layers",
           "L3.rope_layers", fine=True, hp={"rope_layers": (True,) * 5}),
    engine("ernie-halves", "ernie4_5", "split halves for adjacent pairs", "rope_pairing",
           "rope_style", fine=True, hp={"rope_style": "half"}),
    engine("jais2-relu", "jais2", "relu for its square", "activation", "activation",
           hp={"activation": "relu"}),
    engine("glm-halves", "glm", "split halves for adjacent pairs", "rope_pairing", "rope_style",
           fine=True, hp={"rope_style": "half"}),
    engine("glm4-whole", "glm4", "whole heads rotated for half of them", "partial_rotary",
           "rope_dim", hp=lambda hp: {"rope_dim": hp["head_dim"]}),
    engine("olmoe-weights", "olmoe", "experts' weights renormalised", "moe_routing", "norm_topk",
           hp={"norm_topk": True}),
    engine("hunyuan-order", "hunyuan_v1_dense", "q and k normalised before rope", "qk_norm",
           "qk_norm", fine=True, block={"qk_norm_place": "before_rope"}),
    engine("hunyuan-weights", "hunyuan_v1_moe", "experts' weights not renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": False}),
    engine("glm4-moe-scale", "glm4_moe", "experts' factor left out", "moe_routing",
           "routed_scale", fine=True, hp={"routed_scale": 1.0}),
    engine("minimax-softmax", "minimax_m2", "experts chosen by a softmax", "moe_routing", "router",
           hp={"router": "softmax"}),
    engine("granitemoe-scale", "granitemoe", "what is added is not multiplied", "multiplier",
           "residual_scale", hp={"residual_scale": 1.0}),
    engine("dots1-groups", "dots1", "groups of experts ignored", "moe_routing",
           "n_expert_groups_used", hp={"n_expert_groups_used": 4}),
    engine("neox-serial", "gpt_neox", "the MLP reads what attention has added", "residual",
           "parallel_residual", hp={"parallel_residual": False}),
    engine("bigcode-positions", "gpt_bigcode", "learned positions two rows on", "positions",
           "positions", positions=range(2, 31)),
    engine("gptj-halves", "gptj", "split halves for adjacent pairs", "rope_pairing", "rope_style",
           fine=True, hp={"rope_style": "half"}),
    engine("falcon-theta", "falcon", "base 1e6 for 5000", "rope_theta", "rope_theta",
           hp={"rope_theta": 1e6}),
    engine("falcon-40b-tanh", "falcon_40b", "the tanh form of gelu", "activation", "activation",
           hp={"activation": "gelu_tanh"}),
    engine("falcon-rw-slopes", "falcon_rw", "slopes that end at 4 for 8", "positions",
           "alibi_max_bias", fine=True, hp={"alibi_max_bias": 4.0}),
    engine("falcon-rw-beside", "falcon_rw", "the MLP reads what attention reads", "residual",
           "parallel_residual", hp={"parallel_residual": True}),
    engine("falcon-rw-40b-none", "falcon_rw_40b", "nothing is added for the distance",
           "positions", "scores", fine=True, block={"score_bias": "none"}),
    engine("bert-causal-tanh", "bert_causal", "the tanh form of gelu", "activation", "activation",
           fine=True, hp={"activation": "gelu_tanh"}),
    engine("roberta-causal-row", "roberta_causal", "positions begin at the padding's row",
           "positions", "position_offset", fine=True, hp={"position_offset": 0}),
    engine("bloom-slopes", "bloom", "slopes that end at 4 for 8", "positions", "alibi_max_bias",
           fine=True, hp={"alibi_max_bias": 4.0}),
    engine("mpt-scale", "mpt", "scores not scaled", "attention_scale", "attn_scale", fine=True,
           hp={"attn_scale": 1.0}),
    engine("opt-row", "opt", "positions begin at the table's first row", "positions",
           "position_offset", fine=True, hp={"position_offset": 0}),
    engine("opt-350m-gelu", "opt_350m", "gelu for relu", "activation", "activation", fine=True,
           hp={"activation": "gelu"}),
    engine("next-weights", "qwen3_next", "experts' weights not renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": False}),
    engine("qwen3-5-moe-one", "qwen3_5_moe", "one expert for two", "moe_routing",
           "n_experts_used", hp={"n_experts_used": 1}),
    engine("olmo-hybrid-strength", "olmo_hybrid", "a delta net's strength up to 1, not 2",
           "recurrence", "delta_strength", fine=True, hp={"delta_strength": 1.0}),
    engine("olmo-hybrid-coarse", "olmo_hybrid", "the same, outputs recorded", "recurrence",
           "delta_strength", hp={"delta_strength": 1.0}),
    engine("olmo-hybrid-eps", "olmo_hybrid", "the model's epsilon behind a delta net", "norm_eps",
           "delta_norm_eps", fine=True, hp=lambda hp: {"delta_norm_eps": hp["norm_eps"]}),
    engine("minimax-undecayed", "minimax", "no head of lightning attention decays", "ssm_decay",
           "lightning", fine=True, backend=lambda: broken("scan", undecayed)),
    engine("minimax-first", "minimax", "every layer decays as the first", "ssm_decay", "lightning",
           backend=lambda: broken("scan", decays_of_layer_0)),
    engine("minimax-ungated", "minimax", "the gate left out", "ssm_gate", "lightning_gated",
           fine=True, alter=without_gate),
    engine("minimax-factors", "minimax", "no factors on the stream", "multiplier",
           "residual_scales", fine=True, hp={"residual_scales": (1.0,) * 6}),
    engine("deepseek-v2-weights", "deepseek_v2", "experts' weights renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": True}),
    engine("ministral-window", "ministral", "no sliding window", "sliding_window",
           "sliding_window", hp={"sliding_window": None}),
    engine("ministral-steady", "ministral3", "no factor on the queries", "attention_scale",
           "temperature_scale", fine=True, hp={"temperature_scale": None}),
    engine("qwen2-vl-section", "qwen2_vl", "half of each head rotated, as if by one section",
           "partial_rotary", "rope_dim", hp=lambda hp: {"rope_dim": hp["head_dim"] // 2}),
    engine("qwen2-5-vl-bias", "qwen2_5_vl", "q has no bias", "missing_bias", "L0.attn_q.bias",
           fine=True, weights=nothing("attn_q")),
    engine("qwen3-vl-theta", "qwen3_vl", "transformers' own base for 5000", "rope_theta",
           "rope_theta", hp={"rope_theta": 5e5}),
    engine("qwen3-vl-moe-weights", "qwen3_vl_moe", "experts' weights not renormalised",
           "moe_routing", "norm_topk", hp={"norm_topk": False}),
    engine("lfm2-early", "lfm2", "taps one position early", "convolution", "shortconv",
           backend=taps(early)),
    engine("lfm2-early-fine", "lfm2", "the same, every point recorded", "convolution",
           "shortconv", fine=True, backend=taps(early)),
    engine("lfm2-reversed", "lfm2", "taps reversed", "convolution", "shortconv", fine=True,
           backend=taps(lambda window, kernel: (window, kernel[:, ::-1].copy()))),
    engine("lfm2-unreset", "lfm2", "state of another sequence", "conv_state", "shortconv",
           fine=True, backend=taps(unreset)),
    engine("lfm2-alone", "lfm2", "no state carried from step to step", "conv_state",
           "shortconv", backend=taps(alone)),
    engine("lfm2-gate-before", "lfm2", "the gate before the convolution left out", "convolution",
           "shortconv", fine=True, backend=ungated(0)),
    engine("lfm2-gate-after", "lfm2", "the gate after the convolution left out", "convolution",
           "shortconv", backend=ungated(1)),
    engine("lfm2-restarted", "lfm2", "no state carried to the recorded tokens",
           ("conv_state", "capture_rows"), "shortconv", fine=True, cached=20,
           backend=taps(restarted), cache=KVCache),
    engine("mamba-plus", "mamba", "A not negated", "ssm_decay", "ssm_a", backend=rated(np.exp),
           ids=IDS[:6]),
    engine("mamba-bare", "mamba", "A as it is stored, negated", "ssm_decay", "ssm_a", fine=True,
           backend=rated(np.negative), ids=IDS[:6]),
    engine("mamba-unbiased", "mamba", "time steps without bias", "missing_bias", "L0.ssm_dt.bias",
           backend=lambda: broken("time_step", unbiased)),
    engine("mamba-taps", "mamba", "taps one position late", "convolution", "ssm_conv1d",
           fine=True, backend=biased_taps(late)),
    engine("mamba-skip", "mamba", "no skip D x", "ssm_scan", "ssm_d", fine=True,
           backend=scanned(lambda *given: (*given[:5], 0 * given[5], given[6]))),
    engine("falcon-mamba-exchanged", "falcon_mamba", "B and C exchanged", "ssm_scan", "ssm_scan",
           fine=True, backend=scanned(
               lambda x, step, rate, b, c, *rest: (x, step, rate, c, b, *rest))),
    engine("mamba2-twice", "mamba2", "A of a GGUF taken for its logarithm", "ssm_decay", "ssm_a",
           backend=rated(lambda logs: -np.exp(-np.exp(logs)))),
    engine("mamba2-unlimited", "mamba2", "time steps without limits", "ssm_step", "ssm_step",
           fine=True, backend=lambda: broken("time_step", unlimited)),
    engine("mamba2-groups", "mamba2", "groups dealt to heads in turn", "ssm_scan", "ssm_scan",
           backend=scanned(dealt)),
    engine("mamba2-norm-of-all", "mamba2", "the gate's norm over all groups", "ssm_gate",
           "ssm_gated",
           fine=True, backend=gated(groups=1)),
    engine("mamba2-unreset", "mamba2", "the state of another sequence", "ssm_state",
           "L0.ssm_state",
           fine=True, backend=other_state),
    engine("mamba2-alone", "mamba2", "no state carried from step to step", "ssm_state", "ssm_state",
           backend=lambda: broken("scan", alone_scanned)),
    engine("mamba2-restarted", "mamba2", "no state carried to the recorded tokens",
           ("ssm_state", "capture_rows"), "ssm_state", fine=True, cached=20,
           cache=KVCache, backend=scanned(lambda *given: (*given[:6], None))),
    engine("nemotron-h-silu", "nemotron_h", "silu for the square of relu", "activation",
           "activation", hp={"activation": "silu"}),
    engine("nemotron-h-norm-first", "nemotron_h", "the norm before the gate", "ssm_gate",
           "ssm_gated",
           fine=True, backend=gated(first=True)),
    engine("nemotron-h-moe-weights", "nemotron_h_moe", "experts' weights not renormalised",
           "moe_routing", "norm_topk", hp={"norm_topk": False}),
    engine("bamba-whole", "bamba", "whole heads rotated for half of them", "partial_rotary",
           "rope_dim", hp=lambda hp: {"rope_dim": hp["head_dim"]}),
    engine("bamba-undecayed", "bamba", "no state decays", "ssm_decay", "ssm_a", fine=True,
           backend=rated(lambda logs: 0 * logs)),
    engine("granite-hybrid-scale", "granite_hybrid", "what is added is not multiplied",
           "multiplier", "residual_scale", hp={"residual_scale": 1.0}),
    engine("granite-hybrid-moe-softmax", "granite_hybrid_moe", "no skip D x in a mixture",
           "ssm_scan", "ssm_d", fine=True,
           backend=scanned(lambda *given: (*given[:5], 0 * given[5], given[6]))),
    engine("falcon-h1-late", "falcon_h1", "the norm behind the gate", "ssm_gate", "ssm_gated",
           fine=True, backend=gated(first=False)),
    engine("falcon-h1-key", "falcon_h1", "keys without their factor", "multiplier", "key_scale",
           fine=True, hp={"key_scale": 1.0}),
    engine("falcon-h1-mixers", "falcon_h1", "the mixers' output without its factor", "multiplier",
           "ssm_out_scale", hp={"ssm_out_scale": 1.0}),
    engine("gemma3n-shared", "gemma3n", "a layer reads the first one's keys, not the third's",
           "kv_sharing", "L4.own_kv_layers", fine=True, backend=other_owner(4, 0, 6)),
    engine("gemma3n-shared-coarse", "gemma3n", "the same, outputs recorded", "kv_sharing",
           "L4.own_kv_layers", backend=other_owner(4, 0, 6)),
    engine("gemma3n-unpredicted", "gemma3n", "the copies are not predicted", "altup",
           "altup_streams", fine=True, alter=unpredicted),
    engine("gemma3n-whole-gate", "gemma3n", "gates are not cut", "activation", "ffn_sparsity",
           fine=True, backend=lambda: broken("gaussian_topk", lambda op, x, factor: x)),
    engine("gemma3n-sample", "gemma3n", "gates cut by the variance of a sample", "activation",
           "ffn_sparsity", fine=True, backend=lambda: broken("gaussian_topk", sampled)),
    engine("gemma3n-transposed", "gemma3n", "copies mixed by transposed coefficients", "altup",
           "altup_streams", fine=True, backend=lambda: broken("mix_copies", turned)),
    engine("gemma4-dropped", "gemma4", "the layers' inputs are dropped", "per_layer_input",
           "per_layer_size", alter=altered("per_layer_contrib", lambda x: 0 * x)),
    engine("gemma4-next-input", "gemma4", "every layer takes the next one's input",
           "per_layer_input", "per_layer_size", fine=True,
           alter=altered("per_layer", lambda x: np.roll(x, -7, axis=-1))),
    engine("gemma4-shared", "gemma4", "a layer reads the first one's keys, not the second's",
           "kv_sharing", "L3.own_kv_layers", backend=other_owner(3, 0, 6)),
    engine("gemma4-window", "gemma4", "a window of 9 for 8", "sliding_window", "L0.sliding_window",
           fine=True, hp={"sliding_window": 9}),
    engine("gemma4-wrong-window", "gemma4", "a window in a layer that has none", "sliding_window",
           "L2.sliding_window", fine=True,
           backend=windowed_too),
    engine("gemma4-unified-theta", "gemma4_unified", "10000 for the base 9000", "rope_theta",
           "L2.rope_theta", hp={"rope_theta": 10000.0}),
    engine("lfm3-theta", "lfm3", "5000 for the base 9000", "rope_theta", "L2.rope_theta",
           hp={"rope_theta": 5000.0}),
    engine("lfm2-moe-weights", "lfm2_moe", "experts' weights not renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": False}),
)  # fmt: skip
