"""Values that the tiny models of models.py share: ids, sizes, and parts of configurations."""

from typing import Any

IDS: tuple[int, ...] = (
    3, 17, 96, 5, 5, 41, 8, 77, 2, 60, 31, 12, 88, 19, 4,
    73, 50, 9, 66, 21, 35, 90, 1, 14, 58, 27, 83, 6, 45,
)  # fmt: skip
VOCAB = 97
EPS = 3e-4  # no architecture's default
WINDOW = 8

LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
    "rope_theta": 5000.0,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYER_NORM = {k: v for k, v in LLAMA.items() if k != "rms_norm_eps"} | {"layer_norm_eps": EPS}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_experts": 6}
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 9,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
OLMO_HYBRID: dict[str, Any] = {k: v for k, v in DELTA.items() if k.startswith("linear")} | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
KIMI_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 9,
    "linear_conv_kernel_dim": 3,
    "q_lora_rank": None,
    "num_experts": 8,
}
LFM2: dict[str, Any] = {k: v for k, v in LLAMA.items() if k != "rms_norm_eps"} | {
    "norm_eps": EPS,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_L_cache": 4,
}
LFM3: dict[str, Any] = {k: v for k, v in LFM2.items() if k not in ("rope_theta", "layer_types")} | {
    "norm_eps": EPS,
    "head_dim": 14,
    "num_hidden_layers": 5,
    "sliding_window": WINDOW,
    "conv_L_cache": 4,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 9000.0, "partial_rotary_factor": 0.6,
        },
    },
}  # fmt: skip
GEMMA4: dict[str, Any] = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {
    "head_dim": 10,
    "global_head_dim": 14,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 9000.0, "partial_rotary_factor": 0.5,
        },
    },
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 7,
    "mamba_chunk_size": 11,
}
NEMOTRON: dict[str, Any] = {k: v for k, v in LLAMA.items() if k not in (
    "rms_norm_eps", "rope_theta", "num_hidden_layers")} | {
    "layer_norm_epsilon": EPS,
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 9,
    "n_groups": 3,
    "ssm_state_size": 7,
    "chunk_size": 11,
    "time_step_min": 0.3,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 45,
    "num_hidden_layers": 3,
    "layer_norm_epsilon": EPS,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
INDEXER = {"index_n_heads": 9, "index_head_dim": 14, "index_topk": 5}
MINIMAX_M3: dict[str, Any] = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 24,
    "dense_intermediate_size": 40,
    "shared_intermediate_size": 28,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 1.5,
    "swiglu_alpha": 1.3,
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "index_n_heads": 3,
    "index_head_dim": 10,
    "index_block_size": 3,
    "index_topk_blocks": 4,
    "index_local_blocks": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}
DEEPSEEK_V4: dict[str, Any] = {
    k: v
    for k, v in LLAMA.items()
    if k not in ("rope_theta", "intermediate_size", "num_key_value_heads")
} | {
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "head_dim": 20,
    "qk_rope_head_dim": 6,
    "q_lora_rank": 28,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 1.1,
    "sliding_window": WINDOW,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5},
    "num_hash_layers": 2,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-4,
    "o_groups": 3,
    "o_lora_rank": 5,
    "index_n_heads": 9,
    "index_head_dim": 10,
    "index_topk": 3,
    "rope_theta": 300.0,
    "compress_rope_theta": 5000.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.1, 2.9],
    "long_factor": [1.0, 1.6, 2.4, 3.5, 4.4, 6.0],
}

# name -> (transformers prefix, config values); None drops an inherited value.
