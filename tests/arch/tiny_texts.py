"""Tiny configurations of the texts of models that see."""

from tests.arch.tiny_sizes import MOE, YARN, Tiny

SECTIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 1, 0]},
}  # of heads with two pairs
SEEING: tuple[Tiny, ...] = (
    Tiny("qwen2_vl", "qwen2_vl_text", "plain", SECTIONS),
    Tiny("qwen2_vl", "qwen2_vl_text", "window", {
        "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2,
        "tie_word_embeddings": True, "rope_parameters": {
            **YARN, "mrope_section": [0, 1, 1],
    }}),
    Tiny("qwen2_5_vl", "qwen2_5_vl_text", "plain", SECTIONS),
    Tiny("qwen3_vl", "qwen3_vl_text", "plain", {"head_dim": 10}),
    Tiny("qwen3_vl", "qwen3_vl_text", "sections", {
        "head_dim": 10, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [3, 1, 1],
            "mrope_interleaved": True,
    }}),
    Tiny("qwen3_vl_moe", "qwen3_vl_moe_text", "plain", {
        **MOE, "head_dim": 10, "tie_word_embeddings": False,
    }),
    Tiny("qwen3_vl_moe", "qwen3_vl_moe_text", "mixed", {
        **MOE, "head_dim": 10, "mlp_only_layers": [0, 2], "attention_bias": True,
    }),
)  # fmt: skip
