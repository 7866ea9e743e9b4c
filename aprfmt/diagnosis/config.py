"""Level two: hyperparameters that change the forward pass, and the cause that each one means."""

from collections.abc import Iterator, Mapping

from aprfmt.compare.diffs import FieldDiff, TensorDiff
from aprfmt.model import Model

# Hyperparameter -> cause; "" for sizes: models of different sizes are different models.
HYPER_CAUSES: Mapping[str, str] = {
    "hidden_size": "", "embedding_width": "",
    "n_layers": "", "n_heads": "gqa_mapping", "n_kv_heads": "gqa_mapping",
    "head_dim": "gqa_mapping", "value_head_dim": "gqa_mapping", "ffn_size": "", "vocab_size": "",
    "context_length": "rope_scaling", "norm_eps": "norm_eps", "lora_norm_eps": "norm_eps",
    "activation": "activation", "tied_embeddings": "tied_embedding",
    "attention_bias": "missing_bias", "attention_out_bias": "missing_bias",
    "mlp_bias": "missing_bias", "qkv_clip": "attention_scale", "qk_norm": "",
    "parallel_residual": "residual", "token_types": "", "position_buckets": "",
    "temperature_scale": "attention_scale", "temperature_length": "attention_scale",
    "delta_layers": "", "delta_key_heads": "gqa_mapping", "delta_value_heads": "gqa_mapping",
    "delta_key_dim": "", "delta_value_dim": "", "conv_layers": "", "conv_taps": "",
    "rope_sections": "",
    "deepstack_layers": "",
    "rope_theta": "rope_theta", "rope_theta_local": "rope_theta", "rope_dim": "partial_rotary",
    "rope_style": "rope_pairing", "rope_scaling": "rope_scaling",
    "rope_scaling_layers": "rope_layers", "rope_layers": "rope_layers",
    "sliding_window": "sliding_window", "window_layers": "sliding_window",
    "attn_scale": "attention_scale", "attn_scale_by_layer": "attention_scale",
    "attn_softcap": "softcap", "final_softcap": "softcap", "embedding_scale": "multiplier",
    "residual_scale": "multiplier", "logit_scale": "multiplier", "n_experts": "",
    "n_experts_used": "moe_routing", "moe_ffn_size": "", "shared_ffn_size": "", "moe_layers": "",
    "norm_topk": "moe_routing", "routed_scale": "moe_routing", "n_expert_groups": "moe_routing",
    "n_expert_groups_used": "moe_routing", "router": "moe_routing", "q_lora_rank": "",
    "kv_lora_rank": "", "qk_nope_head_dim": "", "qk_rope_head_dim": "",
    "swiglu_limit": "activation", "swiglu_alpha": "activation",
    "position_offset": "positions", "alibi_max_bias": "positions", "pooling": "",
    "attn_norm_layers": "", "router_jitter": "moe_routing", "head_bias": "missing_bias",
    "global_head_dim": "gqa_mapping", "global_kv_heads": "gqa_mapping",
    "own_kv_layers": "kv_sharing", "value_is_key": "kv_sharing", "per_layer_size": "",
    "altup_streams": "", "altup_scaled": "multiplier", "ffn_sparsity": "activation",
    "attention_layers": "", "conv_bias": "missing_bias", "expert_bias": "moe_routing",
}  # fmt: skip

# Hyperparameters read from the presence of tensors -> the roles that show them.
SHOWN_BY: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "attention_out_bias": ("attn_output.bias",),
    "mlp_bias": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
    "tied_embeddings": ("output.weight",),
}


# Parts of a scaling in normal form -> keys of config.json, where they are spelled otherwise.
_SPELLED: Mapping[str, str] = {
    "original_context_length": "original_max_position_embeddings",
    "type": "rope_type",
}


def said(row: FieldDiff, a: Model | None = None, b: Model | None = None) -> str:
    """Return a sentence about one differing hyperparameter, with both origins.

    For a dictionary (rope scaling) it names only the sub-keys that differ, and says which of them
    B's configuration lacks.
    """
    if isinstance(row.a, Mapping) and isinstance(row.b, Mapping):
        parts = [
            f"{key}: A has {_value(row.a.get(name))}, B {_value(row.b.get(name))}"
            + f" ({key} is missing from B's configuration; a default stands in)"
            * (_dropped(b, row.origin_b, name) and not _dropped(a, row.origin_a, name))
            for name, key in _apart(row)
        ]
        return f"{row.name}: {', '.join(parts)}"
    return (
        f"{row.name}: A has {_value(row.a)} ({row.origin_a or 'not there'}), "
        f"B {_value(row.b)} ({row.origin_b or 'not there'})"
    )


def sub_keys(row: FieldDiff) -> tuple[str, ...]:
    """Return `NAME.KEY` of each sub-key of a scaling that differs; () for any other value."""
    if not isinstance(row.a, Mapping) or not isinstance(row.b, Mapping):
        return ()
    return tuple(f"{row.name}.{key}" for _, key in _apart(row))


def _apart(row: FieldDiff) -> list[tuple[str, str]]:
    """Return the differing parts of two scalings: name in normal form, key of config.json."""
    assert isinstance(row.a, Mapping) and isinstance(row.b, Mapping)
    names = dict.fromkeys((*row.a, *row.b))
    return [(n, _SPELLED.get(n, n)) for n in names if row.a.get(n) != row.b.get(n)]


def _dropped(model: Model | None, origin: str, name: str) -> bool:
    """Say whether a configuration has the scaling, and no key for this part of it."""
    if model is None:
        return False
    found: object = model.config or {}
    for key in origin.rpartition(" ")[2].split(".")[:-1]:
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not found:
        return False
    return not {name, _SPELLED.get(name, name)} & {*found, *(model.config or {})}


def _value(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def shown_tensors(name: str, tensors: Mapping[str, TensorDiff]) -> tuple[str, ...]:
    """Return the keys of tensors that exist on one side only because of a hyperparameter."""
    roles = SHOWN_BY.get(name, ())
    return tuple(
        key
        for key, row in tensors.items()
        if row.verdict in ("ONLY_IN_A", "ONLY_IN_B")
        and (key in roles or key.partition(".")[2] in roles)
    )


def tensors_say(model: Model, label: str) -> Iterator[str]:
    """Yield a sentence for each hyperparameter whose tensors contradict the model's keys."""
    for conflict in model.resolution.report.conflicts:
        yield f"{label}: {conflict}"
