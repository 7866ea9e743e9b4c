"""What a tiny model is, and the sizes and parts of configurations that those of tiny.py share."""

from dataclasses import dataclass, field
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 56,
    "max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
UNSCALED = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
MOE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}
OLMO_HYBRID = {key: value for key, value in DELTA.items() if key.startswith("linear")} | {
    "pad_token_id": 0
}
KIMI_LINEAR: dict[str, Any] = {
    k: v
    for k, v in MLA.items()
    if k not in ("n_routed_experts", "first_k_dense_replace", "n_group")
} | {
    "q_lora_rank": None,
    "num_experts": 5,
    "n_group": 1,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 7,
    "linear_conv_kernel_dim": 3,
    "pad_token_id": 0,
}
LFM2: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_L_cache": 5,
}
LFM3: dict[str, Any] = {
    "pad_token_id": 0,
    "head_dim": 10,
    "num_hidden_layers": 5,
    "sliding_window": 9,
    "conv_L_cache": 5,
}
GEMMA4: dict[str, Any] = {
    "head_dim": 6,
    "global_head_dim": 10,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
MAMBA: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 3, "vocab_size": 56, "state_size": 5,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "head_dim": 10, "mamba_num_heads": 6, "mamba_head_dim": 7, "n_groups": 2, "ssm_state_size": 5,
}  # fmt: skip
INDEXER: dict[str, Any] = {"index_n_heads": 5, "index_head_dim": 9, "index_topk": 7}
DEEPSEEK_V4: dict[str, Any] = {
    "head_dim": 10,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 14,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "num_hash_layers": 1,
    "o_groups": 3,
    "o_lora_rank": 7,
    "hc_mult": 3,
    **INDEXER,
}
MINIMAX_M3: dict[str, Any] = {
    "head_dim": 10,
    "dense_intermediate_size": 28,
    "shared_intermediate_size": 12,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    "index_n_heads": 2,
    "index_head_dim": 14,
    "index_block_size": 5,
    "index_topk_blocks": 3,
}
GPT2: dict[str, Any] = {
    "n_embd": 24, "n_layer": 3, "n_head": 6, "vocab_size": 56, "n_positions": 128,
}  # fmt: skip

# deepseek_v4 has no dense MLP, and one key head.
# Of models whose configuration knows no dense MLP.
EXPERTS_ONLY = {key: size for key, size in SIZES.items() if key != "intermediate_size"}
V4_SIZES = {
    key: value
    for key, value in SIZES.items()
    if key not in ("intermediate_size", "num_key_value_heads")
}
# What older decoders do not know: grouped heads; falcon's width of the MLP has a name of its own.
UNGROUPED = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
BLOOM = {"hidden_size": 24, "n_layer": 3, "n_head": 6, "vocab_size": 56}
MPT = {"d_model": 24, "n_layers": 3, "n_heads": 6, "vocab_size": 56, "max_seq_len": 128}
OPT_350M = {"ffn_dim": 40, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
FALCON = {key: value for key, value in UNGROUPED.items() if key != "intermediate_size"}


@dataclass(frozen=True)
class Tiny:
    """One configuration: our architecture, transformers' model type, keyword arguments."""

    arch: str
    model_type: str
    label: str = "plain"
    config: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)

    @property
    def id(self) -> str:
        return f"{self.arch}-{self.label}"
