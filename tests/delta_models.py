"""Sizes of tiny models with gated delta nets: no two of a layer's are equal."""

from collections.abc import Mapping
from typing import Any

Values = Mapping[str, Any]
_DELTA: Values = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 9,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
# Layers the other way round, a dense one, as many key heads as value heads, biases.
MIXED: Values = {
    "layer_types": ["full_attention", "linear_attention"] * 2,
    "mlp_only_layers": [1],
    "attention_bias": True,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 3,
    "norm_topk_prob": False,
}


def delta_nets(plain: Values, moe: Values) -> dict[str, tuple[str, Values]]:
    """Return the makers: transformers' prefix and config values, of those that all share."""
    shared = {"shared_expert_intermediate_size": 56}
    without = {key: value for key, value in plain.items() if key != "intermediate_size"}
    every_other = {"full_attention_interval": 2}
    return {
        "qwen3_next": (
            "Qwen3Next",
            {**plain, **moe, **_DELTA, **shared, "num_hidden_layers": 4},
        ),
        "qwen3_5": ("Qwen3_5", {**plain, **_DELTA, **every_other}),
        "qwen3_5_moe": ("Qwen3_5Moe", {**without, **moe, **_DELTA, **shared, **every_other}),
    }
