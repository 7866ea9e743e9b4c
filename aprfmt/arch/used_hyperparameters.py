"""Which hyperparameters a model uses; the values of others say that an operation is absent."""

from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.base.protocols import Value

# Values that change nothing, besides None, False, 0 and lists of False.
NEUTRAL: Mapping[str, Value] = {
    "rope_scaling_layers": "all", "embedding_scale": 1.0, "residual_scale": 1.0,
    "logit_scale": 1.0, "routed_scale": 1.0, "n_expert_groups": 1, "n_expert_groups_used": 1,
    "altup_streams": 1, "delta_strength": 1.0,
    "residual_scales": (1.0,) * 6,
}  # fmt: skip
# Lists that say nothing where they are True in every layer.
USUALLY_ALL = ("rope_layers", "attn_norm_layers", "own_kv_layers", "index_layers")
# Means something only if the other hyperparameter, or one of several, is used.
WITH: Mapping[str, str | tuple[str, ...]] = {
    "rope_theta_local": "window_layers", "sliding_window": "window_layers",
    "rope_scaling_layers": "rope_scaling",
    "norm_topk": "n_experts", "router": "n_experts", "n_experts_used": "n_experts",
    "moe_layers": "n_experts", "moe_ffn_size": "n_experts", "shared_ffn_size": "n_experts",
    "routed_scale": "n_experts", "n_expert_groups": "n_experts",
    "n_expert_groups_used": "n_expert_groups",
    "delta_key_heads": "delta_layers", "delta_value_heads": "delta_layers",
    "delta_key_dim": "delta_layers", "delta_value_dim": "delta_layers",
    "altup_scaled": "altup_streams",
    "conv_taps": ("delta_layers", "conv_layers"),
}  # fmt: skip
# Says the same as the other one where both are equal.
LIKE: Mapping[str, str] = {
    "value_head_dim": "head_dim", "rope_dim": "head_dim", "global_head_dim": "head_dim",
    "global_kv_heads": "n_kv_heads", "delta_norm_eps": "norm_eps",
}  # fmt: skip


def used_names(values: Mapping[str, Value]) -> list[str]:
    """Return the names of the hyperparameters that the forward pass uses, in order."""
    return [name for name in values if _is_used(name, values)]


def _is_used(name: str, values: Mapping[str, Value]) -> bool:
    """Return whether a hyperparameter's value changes the forward pass."""
    value: Any = values[name]
    if value is None or value is False or value == 0 or value == NEUTRAL.get(name):
        return False
    if name in LIKE and value == values.get(LIKE[name]):
        return False
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not any(value) or (name in USUALLY_ALL and all(value)):
            return False
    others = WITH.get(name, ())
    others = (others,) if isinstance(others, str) else others
    return not others or any(other in values and _is_used(other, values) for other in others)
