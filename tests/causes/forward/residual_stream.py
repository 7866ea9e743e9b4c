"""Seeded faults of `aprfmt/causes/forward/residual_stream.py`."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.dumps import as_npz, everything, layer_outputs, logits_only
from tests.diagnosis.engine_changes import (
    FIVE,
    LOGITS,
    SEVEN,
    THREE,
    How,
    dumped,
    left_out,
    placed,
    traced,
)
from tests.diagnosis.engines import broken_here
from tests.diagnosis.making import engine
from tests.diagnosis.token_edits import configured, rows
from tests.models import IDS


def factor(points: tuple[str, ...], value: float) -> How:
    """Multiply what a half of each layer adds to the stream."""
    return broken_here(
        add=lambda here, op, a, b: op(
            a, b * np.float32(value) if here.point in points and b.ndim == 2 else b
        )
    )


MLP = ("ffn_out", "ffn_contrib")


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


def in_sequence(norm: str) -> How:
    """Give the MLP of a parallel block the stream after attention, normed as attention's input."""
    held: dict[str, Any] = {}

    def normed(here: Any, op: Any, x: Any, *weights: Any, **how: Any) -> Any:
        held["norm"] = lambda stream: op(stream, *weights, **how)
        return op(x, *weights, **how)

    def add(here: Any, op: Any, a: Any, b: Any) -> Any:
        found = op(a, b)
        if b.ndim > 1 and here.point in ("attn_out", "attn_contrib"):
            held["stream"] = found
        return found

    def linear(here: Any, op: Any, x: Any, w: Any, bias: Any) -> Any:
        into = w.key.endswith((".ffn_up.weight", ".ffn_gate.weight"))
        return op(held["norm"](held["stream"]) if into else x, w, bias)

    return broken_here(**{norm: normed}, add=add, linear=linear)


def layer_scale(how: Callable[[Any, Any, Any], Any]) -> How:
    """Apply gemma4's scale of a layer by how(stream that enters, what leaves, scale)."""
    held: dict[str, Any] = {}

    def add(here: Any, op: Any, a: Any, b: Any) -> Any:
        if here.point in ("attn_out", "attn_contrib"):
            held["stream"] = a
        return op(a, b)

    def mul(here: Any, op: Any, a: Any, b: Any) -> Any:
        if np.size(b) == 1 and here.point == "per_layer_contrib":
            return np.asarray(how(held["stream"], a, b), np.float32)
        return op(a, b)

    return broken_here(add=add, mul=mul)


ENGINE_FAULTS = (
    placed("layer-scale-added", "gemma4", "the layer's scale multiplies what the layer adds",
           "multiplier", "layer_output_scale.weight", layer_scale(lambda x, y, s: x + (y - x) * s)),
    placed("layer-scale-stream", "gemma4", "the layer's scale multiplies what enters, alone",
           "multiplier", "layer_output_scale.weight", layer_scale(lambda x, y, s: y + x * (s - 1)),
           frozenset({"out", "logits"})),
    placed("layer-scale-twice", "gemma4", "the layer's scale twice", "multiplier",
           "layer_output_scale.weight", layer_scale(lambda x, y, s: y * s * s)),
    engine("falcon-in-sequence", "falcon", "the MLP reads the norm of what attention has added to",
           "residual", "ffn_up", **in_sequence("layer_norm")),
    engine("cohere-in-sequence", "cohere", "the MLP reads the norm of what attention has added to",
           "residual", ("ffn_gate", "ffn_up"), **in_sequence("layer_norm")),
    engine("residual-attention", "llama", "attention replaces the stream", "residual", "residual",
           alter=left_out("attn_out", "mid")),
    engine("residual-mlp", "qwen3", "the MLP is not added", "residual", "residual",
           alter=left_out("mid", "out")),
    engine("embedding-scale", "gemma", "embedding not multiplied", "multiplier",
           "embedding_scale", hp={"embedding_scale": 1.0}),
    engine("residual-scale", "granite", "what is added is not multiplied", "multiplier",
           "residual_scale", hp={"residual_scale": 1.0}),
    engine("logit-scale", "cohere", "logits multiplied by 1 for 0.3", "multiplier", "logit_scale",
           fine=True, hp={"logit_scale": 1.0}),
    traced("logits-parallel", "llama", "attention and MLP read one input, from logits alone",
           ["residual"], ["parallel_residual"], LOGITS, hp={"parallel_residual": True}),
    engine("granitemoe-scale", "granitemoe", "what is added is not multiplied", "multiplier",
           "residual_scale", hp={"residual_scale": 1.0}),
    engine("neox-serial", "gpt_neox", "the MLP reads what attention has added", "residual",
           "parallel_residual", hp={"parallel_residual": False}),
    engine("falcon-rw-beside", "falcon_rw", "the MLP reads what attention reads", "residual",
           "parallel_residual", hp={"parallel_residual": True}),
    engine("minimax-factors", "minimax", "no factors on the stream", "multiplier",
           "residual_scales", fine=True, hp={"residual_scales": (1.0,) * 6}),
    engine("granite-hybrid-scale", "granite_hybrid", "what is added is not multiplied",
           "multiplier", "residual_scale", hp={"residual_scale": 1.0}),
    engine("falcon-h1-key", "falcon_h1", "keys without their factor", "multiplier", "key_scale",
           fine=True, hp={"key_scale": 1.0}),
    engine("falcon-h1-mixers", "falcon_h1", "the mixers' output without its factor", "multiplier",
           "ssm_out_scale", hp={"ssm_out_scale": 1.0}),
    dumped("hf-added-twice", "qwen2", "attention is added twice, logits alone", ["residual"],
           ["residual"], logits_only, as_npz, THREE, wrong=wrong.layer_of(wrong.twice_added)),
    dumped("hf-added-to-itself", "llama", "the stream is added to itself", ["residual"],
           ["residual"], everything, as_npz, SEVEN, wrong=wrong.layer_of(wrong.itself_added)),
    dumped("hf-beside", "llama", "both norms read the layer's input, outputs of layers",
           ["residual"], ["residual"], layer_outputs, as_npz, FIVE,
           wrong=wrong.layer_of(wrong.beside_each_other)),
    dumped("hf-norm-of-sum", "olmo2", "norms behind sublayers read the sum with the stream",
           ["residual"], ["residual"], everything, as_npz, {},
           wrong=wrong.layer_of(wrong.sum_normed)),
    dumped("hf-factor-bf16", "gemma2", "the embedding's factor in bfloat16, outputs of layers",
           ["multiplier"], ["embedding_scale"], layer_outputs, as_npz, {},
           wrong=wrong.short_factor),
    placed("factor-one-half", "granite", "no factor on what the MLP adds", "multiplier",
           "residual_scale", factor(MLP, 1 / 0.6)),
    placed("factor-attention", "granite", "no factor on what attention adds, from logits alone",
           "multiplier", "residual_scale", factor(("attn_out", "attn_contrib"), 1 / 0.6), LOGITS),
    placed("factor-mlp", "llama", "half of what the MLP computed is added", "multiplier",
           "residual_scale", factor(MLP, 0.5)),
    placed("factor-mlp-logits", "llama", "half of what the MLP computed, from logits alone",
           "multiplier", "residual_scale", factor(MLP, 0.5), LOGITS),
    placed("other-id", "llama", "another token than recorded", "token_ids", "input_ids",
           reading({5: 33})),
    placed("other-ids-logits", "gemma", "two other tokens, from logits alone", "token_ids",
           "input_ids", reading({4: 11, 20: 9}), LOGITS),
    placed("ids-early", "llama", "the recorded ids lack the first token that was read",
           "token_ids", "input_ids", reading({0: 77, **dict(enumerate(IDS[:-1], 1))})),
    placed("ids-late-logits", "qwen3", "the recorded ids begin with one that was not read",
           "token_ids", "input_ids",
           reading({**dict(enumerate(IDS[1:])), len(IDS) - 1: 77}), LOGITS),
    placed("types-one", "bert_causal", "every token has type 1", "token_type_ids",
           "token_types.weight", types(lambda x: np.roll(x, -1, 0))),
    placed("types-none", "bert_causal", "no token types, from logits alone", "token_type_ids",
           "token_types.weight", types(lambda x: 0 * x), LOGITS),
    placed("dropout", "gpt2", "dropout behind every layer's MLP", "dropout", "L0.out",
           dropping(0.1, ("ffn_out",)), None),
    placed("dropout-parallel", "phi2", "dropout behind attention and MLP that are added at once",
           "dropout", "L0.out", dropping(0.1, ("attn_out", "ffn_out")), None),
)  # fmt: skip


FILE_FAULTS = rows({
    "flag-parallel": ("use_parallel_residual beside a second norm",
                      configured("stablelm", {"use_parallel_residual": True}), "residual",
                      "use_parallel_residual"),
}, "bug")  # fmt: skip
