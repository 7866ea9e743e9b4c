"""Tiny configurations with gated delta nets."""

from typing import Any

Values = dict[str, Any]
_DELTA: Values = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}


def delta_nets(sizes: Values, moe: Values) -> tuple[tuple[str, str, str, Values, Values], ...]:
    """Return architecture, transformers' model type, label, configuration and sizes of each."""
    shared = {**_DELTA, **moe, "shared_expert_intermediate_size": 28}
    without = {key: value for key, value in sizes.items() if key != "intermediate_size"}
    return (
        ("qwen3_next", "qwen3_next", "plain", shared, sizes),
        ("qwen3_next", "qwen3_next", "mixed", {
            **shared, "mlp_only_layers": [1], "attention_bias": True, "norm_topk_prob": False,
            "tie_word_embeddings": True, "layer_types": ["full_attention", "linear_attention"] * 2,
        }, sizes),
        ("qwen3_5", "qwen3_5_text", "plain", _DELTA, sizes),
        ("qwen3_5", "qwen3_5_text", "sections", {
            **_DELTA, "num_hidden_layers": 6, "full_attention_interval": 3,
            "tie_word_embeddings": True, "rope_parameters": {
                "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 0], "mrope_interleaved": True,
            },
        }, sizes),
        ("qwen3_5_moe", "qwen3_5_moe_text", "plain", shared, without),
    )  # fmt: skip
