"""Seeded faults of engines: coarse traces, stacked faults, other capture points, foreign dumps.

Sizes are odd (five heads of 12, six heads of 10 on three, widths that no block divides); the
points are those that engines give: the ten slots, outputs of layers with logits, logits alone.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.causes.forward.rounding import round_to_type
from tests.diagnosis import dumps
from tests.diagnosis.engines import COARSE, LONG, broken, tiny_folder, trace
from tests.diagnosis.fault import Fault, Pair
from tests.diagnosis.faults import first_tile, recorded_as, without_biases

Values = dict[str, Any]
FIVE: Mapping[str, Any] = {
    "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 12,
    "intermediate_size": 70,
}  # fmt: skip
THREE: Mapping[str, Any] = dict(FIVE) | {
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10,
}  # fmt: skip
HEAD = int(THREE["head_dim"])
LAYERS: frozenset[str] = frozenset({"out", "logits"})
LOGITS: frozenset[str] = frozenset({"logits"})
PRODUCTS = frozenset({"q", "k", "v", "attn_out", "ffn_out", "logits"})


def seeded(
    name: str,
    base: str,
    says: str,
    causes: Sequence[str],
    where: Sequence[str],
    points: frozenset[str] | None,
    sizes: Mapping[str, Any] = FIVE,
    *,
    verdict: str = "bug",
    confidence: str = "confirmed",
    without_model: bool = False,
    **how: Any,
) -> Fault:
    """Return the fault of an engine's trace with these points, against the model.

    `without_model`: against the trace of a right engine, with no weights to compute with.
    """

    def make() -> Pair:
        folder = tiny_folder(base, **sizes)
        taken = None if "rename" in how else points
        found = trace(folder, f"engine-{name}", points=taken, **how)
        if not without_model:
            return folder, found
        return trace(folder, f"engine-{name}-right", points=points), found

    return Fault(name, base, says, make, tuple(causes), tuple(where), verdict, confidence)


def dumped(
    name: str,
    base: str,
    says: str,
    causes: Sequence[str],
    where: Sequence[str],
    keep: dumps.Keep,
    write: Callable[[Mapping[str, Any], str], Path],
    sizes: Mapping[str, Any],
    *,
    wrong: dumps.Break | None = None,
    verdict: str = "bug",
) -> Fault:
    """Return the fault of what transformers' modules gave, against the model."""
    return Fault(
        name,
        base,
        says,
        lambda: dumps.dump(base, name, sizes, wrong, keep, write),
        tuple(causes),
        tuple(where),
        verdict,
    )


def only(points: frozenset[str], change: Callable[[Values], Values]) -> Callable[[Values], Values]:
    """Return a renaming that keeps the values of these points after `change`."""

    def rename(values: Values) -> Values:
        return {
            key: value for key, value in change(values).items() if key.rpartition(".")[2] in points
        }

    return rename


def before_biases(values: Values) -> Values:
    """Record the products under the names of q, k and v."""
    for name in ("q", "k", "v"):
        values = recorded_as(name, f"{name}_mm")(values)
    return values


def heads_first(values: Values) -> Values:
    """Lay q and k out as [heads, tokens, head_dim]."""
    return {
        key: np.ascontiguousarray(value.swapaxes(0, 1)).reshape(value.shape)
        if key.rpartition(".")[2] in ("q", "k")
        else value
        for key, value in values.items()
    }


def with_stream(values: Values) -> Values:
    """Record the stream after attention as attention's output."""
    return recorded_as("attn_out", "mid")(values)


def first_kv_head(op: Any, probs: Any, v: Any) -> Any:
    """Every query head reads value head 0 to the last in turn, not in groups."""
    return op(probs, v[:, np.arange(probs.shape[0]) % v.shape[1]])


def uncentred(op: Any, x: Any, w: Any, bias: Any, *, eps: float) -> Any:
    """A layer norm that does not take the mean away."""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(eps)) * w + bias


def late_taps(op: Any, window: Any, kernel: Any) -> Any:
    """Let the last tap be the next token's, of which the last token has none."""
    return op(np.concatenate([window[1:], 0 * window[:1]]), kernel)


def no_gate(op: Any, x: Any) -> Any:
    """A gate that is always open."""
    return np.ones_like(op(x))


def head_norms_left_out(op: Any, x: Any, w: Any, **how: Any) -> Any:
    """Leave out norms over a head."""
    return x if w.size == HEAD else op(x, w, **how)


def post_norms_left_out() -> Callable[..., Any]:
    """Leave out the norms right behind attention and the MLP: of four in a layer (olmo2)."""
    calls = iter(range(1 << 30))
    layers = 3

    def change(op: Any, x: Any, w: Any, **how: Any) -> Any:
        at = next(calls)
        return x if at < 4 * layers and at % 4 >= 2 else op(x, w, **how)

    return change


ENGINE_FAULTS: tuple[Fault, ...] = (
    # coarse points
    seeded("layers-theta", "llama", "base 10000 for 5000, from outputs of layers",
           ["rope_theta"], ["rope_theta"], LAYERS, hp={"rope_theta": 1e4}),
    seeded("logits-theta", "qwen2", "base 7345 for 5000, from logits alone", ["rope_theta"],
           ["rope_theta"], LOGITS, THREE, hp={"rope_theta": 7345.0}),
    seeded("logits-pairing", "llama", "adjacent pairs, from logits alone", ["rope_pairing"],
           ["rope_style"], LOGITS, hp={"rope_style": "interleaved"}),
    seeded("logits-window", "mistral", "a window of 9 for 8, from logits alone",
           ["sliding_window"], ["sliding_window"], LOGITS, THREE, hp={"sliding_window": 9}),
    seeded("logits-every-window", "gemma3", "every layer has the window, from logits alone",
           ["sliding_window"], ["window_layers"], LOGITS, {},
           hp=lambda hp: {"window_layers": (True,) * len(hp["window_layers"])}),
    seeded("logits-tiles", "llama", "a softmax over its first 32 keys, from logits alone",
           ["softmax_reduction"], ["softmax"], LOGITS, THREE, ids=LONG,
           backend=lambda: broken("probs", first_tile)),
    seeded("logits-gqa", "llama", "value heads in turn for groups, from logits alone",
           ["gqa_mapping"], ["n_kv_heads"], LOGITS, THREE,
           backend=lambda: broken("mix", first_kv_head)),
    seeded("logits-qk-norm", "qwen3", "q and k not normalised, from logits alone", ["qk_norm"],
           ["qk_norm"], LOGITS, THREE, backend=lambda: broken("rms_norm", head_norms_left_out)),
    seeded("layers-norm-kind", "phi2", "layer norms keep the mean, from outputs of layers",
           ["norm_kind"], ["norm"], LAYERS, {}, backend=lambda: broken("layer_norm", uncentred)),
    seeded("logits-post-norms", "olmo2", "norms behind the sublayers left out, logits alone",
           ["norm_skipped"], ["post_attention_norm"], LOGITS, {},
           backend=lambda: broken("rms_norm", post_norms_left_out())),
    seeded("logits-parallel", "llama", "attention and MLP read one input, from logits alone",
           ["residual"], ["parallel_residual"], LOGITS, hp={"parallel_residual": True}),
    seeded("logits-gate", "qwen2_moe", "the shared expert's gate left out, from logits alone",
           ["moe_routing"], ["ffn_gate_inp_shexp"], LOGITS, {},
           backend=lambda: broken("sigmoid", no_gate)),
    seeded("logits-taps", "lfm2", "taps one position late, from logits alone", ["convolution"],
           ["shortconv"], LOGITS, {}, backend=lambda: broken("convolve", late_taps)),
    seeded("logits-cap", "gemma2", "logits not capped, from logits alone", ["softcap"],
           ["final_softcap"], LOGITS, {}, confidence="ambiguous", hp={"final_softcap": None}),
    # stacked, from coarse points
    seeded("stacked-numbers", "llama", "eps and base, from logits alone",
           ["rope_theta", "norm_eps"], ["rope_theta"], LOGITS,
           hp={"norm_eps": 1e-6, "rope_theta": 1e4}),
    seeded("stacked-scores", "llama", "base and scale of the scores, from outputs of layers",
           ["attention_scale", "rope_theta"], ["attn_scale"], LAYERS, THREE,
           hp=lambda hp: {"rope_theta": 1e4, "attn_scale": 1 / hp["head_dim"]}),
    seeded("stacked-three", "qwen2", "biases, activation and window, from logits alone",
           ["missing_bias", "activation", "sliding_window"], ["L0.attn_q.bias"], LOGITS, THREE,
           hp={"activation": "gelu", "sliding_window": None}, weights=without_biases),
    seeded("stacked-caps", "gemma2", "cap, scale and activation, from outputs of layers",
           ["attention_scale", "softcap", "activation"], ["attn_scale"], LAYERS, {},
           hp=lambda hp: {"attn_softcap": None, "attn_scale": hp["head_dim"] ** -0.5,
                          "activation": "gelu"}),
    # captures at another point
    seeded("before-biases", "qwen2", "q, k and v recorded before their biases",
           ["capture_point"], ["L0.q", "L0.k", "L0.v"], COARSE, THREE, verdict="same",
           rename=only(COARSE, before_biases)),
    seeded("before-biases-blind", "qwen2", "the same, without the weights", ["capture_point"],
           ["L0.q", "L0.k", "L0.v"], PRODUCTS, THREE, verdict="same", without_model=True,
           rename=only(PRODUCTS, before_biases)),
    seeded("heads-first", "llama", "q and k laid out by heads", ["capture_point"],
           ["L0.q", "L0.k"], PRODUCTS, verdict="same", rename=only(PRODUCTS, heads_first)),
    seeded("after-rope-blind", "llama", "q recorded after rope, without the weights",
           ["capture_point"], ["L0.q"], PRODUCTS, verdict="same", without_model=True,
           rename=only(PRODUCTS, recorded_as("q", "q_rope"))),
    seeded("with-stream", "llama", "the stream recorded as attention's output",
           ["capture_point"], ["L0.attn_out"], PRODUCTS, verdict="same",
           rename=only(PRODUCTS, with_stream)),
    # operations in 16 bits
    seeded("logits-softmax-bf16", "llama", "probabilities rounded to bfloat16, from logits alone",
           ["rounding"], ["probs"], LOGITS, verdict="precision",
           backend=lambda: broken("probs", lambda op, *a: round_to_type(op(*a), "bfloat16"))),
    # dumps of transformers
    dumped("hf-pairing", "llama", "adjacent pairs, every module's output as .npy",
           ["rope_pairing"], ["rope_style"], dumps.everything, dumps.as_npy, FIVE,
           wrong=dumps.adjacent_pairs),
    dumped("hf-gqa", "llama", "key heads in turn, layers and logits as .npz", ["gqa_mapping"],
           ["n_kv_heads"], dumps.layer_outputs, dumps.as_npz, THREE, wrong=dumps.heads_in_turn),
    dumped("hf-eps", "qwen2", "eps 1e-6, raw .bin files with a mapping", ["norm_eps"],
           ["norm_eps"], dumps.everything, dumps.as_raw, THREE, wrong=dumps.eps),
    dumped("hf-two", "qwen2", "no biases and gelu, logits as .npy", ["missing_bias", "activation"],
           ["L0.attn_q.bias"], dumps.logits_only, dumps.as_npy, THREE,
           wrong=dumps.gelu_and_no_biases),
    dumped("hf-clean", "gemma2", "nothing, every module's output as .npy", ["rounding"], [],
           dumps.everything, dumps.as_npy, {}, verdict="precision"),
)  # fmt: skip
