"""Seeded faults of transformers' own modules: all they gave, outputs of layers, or logits alone."""

from typing import Any

from tests.diagnosis import dumps
from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.fault import Fault
from tests.diagnosis.faults_engine import FIVE, THREE, dumped

ALL, LAYERS, LOGITS = dumps.everything, dumps.layer_outputs, dumps.logits_only
NPZ = dumps.as_npz
SEVEN: dict[str, Any] = dict(FIVE) | {
    "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 6,
}  # fmt: skip


def rope(make: Any) -> dumps.Break:
    """Replace the rotation of q and k."""
    return wrong.function("apply_rotary_pos_emb", make)


def chunks(i: Any, j: Any) -> Any:
    """See keys of the query's own nine only."""
    return (j <= i) & (i // 9 == j // 9)


MODULE_FAULTS: tuple[Fault, ...] = (
    dumped("hf-keys-unrotated", "llama", "keys are not rotated, outputs of layers",
           ["rope_layers"], ["rope_layers"], LAYERS, NPZ, SEVEN, wrong=rope(wrong.queries_only)),
    dumped("hf-rotated-twice", "qwen3", "q and k are rotated twice, logits alone",
           ["rope_layers"], ["rope_layers"], LOGITS, NPZ, THREE, wrong=rope(wrong.rotated_twice)),
    dumped("hf-rope-backwards", "llama", "the sine has the other sign", ["rope_pairing"],
           ["rope_style"], ALL, NPZ, FIVE, wrong=rope(wrong.other_sign)),
    dumped("hf-values-rotated", "llama", "values are rotated too", ["rope_layers"],
           ["rope_layers"], ALL, NPZ, THREE, wrong=wrong.turned_values()),
    dumped("hf-positions-jump", "qwen3", "positions jump by 5 at token 11, logits alone",
           ["positions"], ["positions"], LOGITS, NPZ, THREE, wrong=wrong.jump(11, 5)),
    dumped("hf-prefix", "llama", "the first 7 tokens see each other, logits alone", ["mask"],
           ["mask"], LOGITS, NPZ, FIVE,
           wrong=wrong.seen(lambda i, j: (j <= i) | (i < 7) & (j < 7))),
    dumped("hf-chunks", "llama", "attention within nine tokens", ["mask"], ["mask"], ALL, NPZ,
           THREE, wrong=wrong.seen(chunks)),
    dumped("hf-hidden-as-zero", "qwen3", "hidden keys have a score of zero, logits alone",
           ["mask"], ["mask"], LOGITS, NPZ, THREE, wrong=wrong.hidden_as_zero()),
    dumped("hf-window-in-one", "mistral", "a window of 9 for 8 in layer 1, logits alone",
           ["sliding_window"], ["L1.sliding_window"], LOGITS, NPZ, THREE,
           wrong=wrong.seen(lambda i, j: (j <= i) & (j > i - 9), 1)),
    dumped("hf-first-cache", "llama", "all layers read the first one's keys and values",
           ["kv_cache"], ["kv_cache"], LAYERS, NPZ, THREE, wrong=wrong.first_layers_cache()),
    dumped("hf-never-written", "qwen2", "five rows of a layer's cache are zero, outputs of layers",
           ["kv_cache"], ["L1.kv_cache"], LAYERS, NPZ, THREE, wrong=wrong.never_written(1, 4, 9)),
    dumped("hf-eps-outside", "llama", "epsilon is added to the root", ["norm_eps"], ["norm_eps"],
           ALL, NPZ, FIVE, wrong=wrong.forwards("RMSNorm", wrong.eps_outside)),
    dumped("hf-row-length", "qwen2", "rows are divided by their length, logits alone",
           ["norm_kind"], ["norm"], LOGITS, NPZ, THREE,
           wrong=wrong.forwards("RMSNorm", wrong.by_length)),
    dumped("hf-quick-gelu", "llama", "x sigmoid(1.702 x) for silu", ["activation"],
           ["activation"], ALL, NPZ, FIVE, wrong=wrong.forwards("SiLUActivation",
                                                               wrong.quick_gelu)),
    dumped("hf-added-twice", "qwen2", "attention is added twice, logits alone", ["residual"],
           ["residual"], LOGITS, NPZ, THREE, wrong=wrong.layer_of(wrong.twice_added)),
    dumped("hf-added-to-itself", "llama", "the stream is added to itself", ["residual"],
           ["residual"], ALL, NPZ, SEVEN, wrong=wrong.layer_of(wrong.itself_added)),
    dumped("hf-beside", "llama", "both norms read the layer's input, outputs of layers",
           ["residual"], ["residual"], LAYERS, NPZ, FIVE,
           wrong=wrong.layer_of(wrong.beside_each_other)),
    dumped("hf-one-bias", "qwen2", "one bias of layer 1 is zero, logits alone", ["missing_bias"],
           ["L1.attn_v.bias"], LOGITS, NPZ, THREE,
           wrong=wrong.without_bias("model.layers.1.self_attn.v_proj.bias")),
    dumped("hf-softmax-twice", "qwen3_moe", "a softmax of the chosen experts' scores",
           ["moe_routing"], ["router"], ALL, NPZ, {},
           wrong=wrong.weighted(lambda logits, probs: probs.softmax(-1))),
    dumped("hf-logits-as-weights", "qwen2_moe", "logits weight the experts, logits alone",
           ["moe_routing"], ["router"], LOGITS, NPZ, {},
           wrong=wrong.weighted(lambda logits, probs: logits)),
    dumped("hf-one-norm-eps", "llama", "another epsilon in one norm of layer 1", ["norm_eps"],
           ["L1.norm_eps"], ALL, NPZ, FIVE,
           wrong=wrong.one_eps("model.layers.1.input_layernorm", 1e-2)),
    dumped("hf-norm-of-sum", "olmo2", "norms behind sublayers read the sum with the stream",
           ["residual"], ["residual"], ALL, NPZ, {}, wrong=wrong.layer_of(wrong.sum_normed)),
    dumped("hf-shared-lost", "qwen2_moe", "the shared expert is left out", ["moe_routing"],
           ["moe_out"], ALL, NPZ, {}, wrong=wrong.nothing_from("shared_expert")),
    dumped("hf-factor-bf16", "gemma2", "the embedding's factor in bfloat16, outputs of layers",
           ["multiplier"], ["embedding_scale"], LAYERS, NPZ, {}, wrong=wrong.short_factor),
    # stacked
    dumped("hf-three", "qwen3", "keys not rotated, their norm left out, another epsilon",
           ["norm_eps", "qk_norm", "rope_layers"], ["norm_eps"], ALL, NPZ, THREE,
           wrong=wrong.both(rope(wrong.queries_only), wrong.left_out("k_norm"), dumps.eps)),
    dumped("hf-twice-and-chunks", "llama", "attention added twice, within nine tokens",
           ["mask", "residual"], ["mask"], ALL, NPZ, THREE,
           wrong=wrong.both(wrong.layer_of(wrong.twice_added), wrong.seen(chunks))),
)  # fmt: skip
