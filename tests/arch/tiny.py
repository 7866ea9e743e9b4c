"""Tiny configurations of every architecture, for transformers to make models of.

Sizes are chosen to tell axes apart (no two equal where the architecture allows it).
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from aprfmt.arch import ARCHS, find_arch
from aprfmt.arch.binding import BoundNames, bind_names, known_shapes, logical_shapes
from aprfmt.arch.hyperparameters import KeyReport, derived_tensors, read_hyper
from aprfmt.arch.spec import ArchSpec, Facts, HyperParams
from aprfmt.arch.value_checks import nearest_float32
from tests.arch.tiny_sizes import (
    BLOOM,
    DEEPSEEK_V4,
    DELTA,
    EXPERTS_ONLY,
    FALCON,
    GEMMA4,
    GPT2,
    INDEXER,
    KIMI_LINEAR,
    LFM2,
    LFM3,
    LLAMA3,
    MAMBA,
    MAMBA2,
    MINIMAX_M3,
    MLA,
    MOE,
    MPT,
    NEMOTRON,
    OLMO_HYBRID,
    UNGROUPED,
    UNSCALED,
    V4_SIZES,
    YARN,
)
from tests.arch.tiny_sizes import OPT_350M as OPT_350M
from tests.arch.tiny_sizes import SIZES as SIZES
from tests.arch.tiny_sizes import Tiny as Tiny
from tests.arch.tiny_texts import BERTS, FALCONS, SEEING
from tests.text_heads import registered

TINY: tuple[Tiny, ...] = (
    Tiny("llama", "llama"),
    Tiny("llama", "llama", "biases", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    Tiny("llama", "llama", "llama3", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    Tiny("llama", "llama", "yarn", {"rope_parameters": YARN}),
    Tiny("internlm3", "internlm3"),
    Tiny("internlm3", "internlm3", "biases", {"qkv_bias": True, "bias": True, "head_dim": 10}),
    Tiny("mistral", "mistral", "window", {"sliding_window": 7}),
    Tiny("mistral", "mistral", "full", {"sliding_window": None}),
    Tiny("mixtral", "mixtral", "plain", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    Tiny("qwen2", "qwen2"),
    Tiny("qwen2", "qwen2", "window", {
        "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2,
        "tie_word_embeddings": True,
    }),
    Tiny("qwen3", "qwen3", "plain", {"head_dim": 10}),
    Tiny("qwen3", "qwen3", "biases", {"head_dim": 10, "attention_bias": True}),
    Tiny("gemma", "gemma", "plain", {"head_dim": 10}),
    Tiny("gemma2", "gemma2", "plain", {"head_dim": 10, "sliding_window": 9}),
    Tiny("gemma2", "gemma2", "uncapped", {
        "head_dim": 10, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "query_pre_attn_scalar": 7, "layer_types": ["full_attention"] * 4,
    }),
    Tiny("gemma3", "gemma3_text", "plain", {
        "head_dim": 10, "sliding_window": 9, "num_hidden_layers": 7,
    }),
    Tiny("gemma3", "gemma3_text", "scaled", {
        "head_dim": 10, "sliding_window": 9, "num_hidden_layers": 8,
        "query_pre_attn_scalar": 144, "final_logit_softcapping": 20.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    }),
    Tiny("phi2", "phi"),
    Tiny("phi2", "phi", "qk_norm", {"qk_layernorm": True}),
    Tiny("phi3", "phi3", "plain", {"pad_token_id": 0}),
    Tiny("phi3", "phi3", "longrope", {
        "pad_token_id": 0, "sliding_window": 11, "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
            "short_factor": [1.0, 1.25], "long_factor": [1.5, 2.75],
        },
    }),
    Tiny("gpt2", "gpt2", sizes=GPT2),
    Tiny("gpt2", "gpt2", "scaled", {
        "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "n_inner": 32,
    }, GPT2),
    Tiny("gpt_oss", "gpt_oss", "plain", {
        "head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9,
    }),
    Tiny("gpt_oss", "gpt_oss", "yarn", {
        "head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9,
        "attention_bias": False, "rope_parameters": {**YARN, "truncate": False},
    }),
    Tiny("gpt_oss", "gpt_oss", "unscaled", {
        "head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9,
        "rope_parameters": UNSCALED,
    }),
    Tiny("olmo2", "olmo2"),
    Tiny("olmo3", "olmo3", "plain", {"sliding_window": 9}),
    Tiny("olmo3", "olmo3", "yarn", {
        "sliding_window": 9, "num_hidden_layers": 6,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 50000.0},
        },
    }),
    Tiny("stablelm", "stablelm", "plain", {"partial_rotary_factor": 0.5}),
    Tiny("stablelm", "stablelm", "quarter", {"hidden_size": 48}),
    Tiny("stablelm", "stablelm", "parallel", {
        "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
    }),
    Tiny("starcoder2", "starcoder2", "window", {"sliding_window": 9}),
    Tiny("starcoder2", "starcoder2", "unbiased", {"use_bias": False}),
    Tiny("granite", "granite", "scaled", {
        "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.015, "attention_bias": True,
    }),
    Tiny("smollm3", "smollm3", "plain", {"pad_token_id": 0}),
    Tiny("smollm3", "smollm3", "listed", {
        "pad_token_id": 0, "no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True,
        "sliding_window": 9,
    }),
    Tiny("cohere", "cohere"),
    Tiny("cohere", "cohere", "qk_norm", {"use_qk_norm": True, "logit_scale": 0.3}),
    Tiny("qwen2_moe", "qwen2_moe", "plain", {**MOE, "shared_expert_intermediate_size": 28}),
    Tiny("qwen2_moe", "qwen2_moe", "mixed", {
        **MOE, "shared_expert_intermediate_size": 28, "decoder_sparse_step": 2,
        "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2,
        "norm_topk_prob": True,
    }),
    Tiny("qwen3_moe", "qwen3_moe", "plain", {**MOE, "head_dim": 10, "norm_topk_prob": True}),
    Tiny("qwen3_moe", "qwen3_moe", "mixed", {
        **MOE, "head_dim": 10, "mlp_only_layers": [0, 2], "attention_bias": True,
    }),
    Tiny("deepseek_v2", "deepseek_v2", "plain", {
        **MLA, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0,
    }),
    Tiny("deepseek_v2", "deepseek_v2", "lite", {
        **MLA, "q_lora_rank": None, "attention_bias": True, "n_group": None, "topk_group": None,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    }),
    Tiny("deepseek_v2", "deepseek_v2", "greedy", {
        **MLA, "topk_method": "greedy", "topk_group": 1, "num_experts_per_tok": 3,
    }),
    Tiny("deepseek_v3", "deepseek_v3", "plain", MLA),
    Tiny("deepseek_v3", "deepseek_v3", "halves", {
        **MLA, "rope_interleave": False, "norm_topk_prob": False,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    Tiny("glm4_moe_lite", "glm4_moe_lite", "plain", MLA),
    Tiny("glm4_moe_lite", "glm4_moe_lite", "listed", {
        **MLA, "rope_interleave": False, "norm_topk_prob": False, "attention_bias": True,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "first_k_dense_replace": 2,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    Tiny("deepseek_v32", "deepseek_v32", "plain", MLA | INDEXER),
    Tiny("deepseek_v32", "deepseek_v32", "yarn", MLA | INDEXER | {
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "tie_word_embeddings": True, "norm_topk_prob": False,
    }),
    Tiny("glm_moe_dsa", "glm_moe_dsa", "plain", MLA | INDEXER),
    Tiny("glm_moe_dsa", "glm_moe_dsa", "shared", MLA | INDEXER | {
        "indexer_types": ["full", "full", "shared", "shared"],
    }),
    Tiny("deepseek_v4", "deepseek_v4", "plain", DEEPSEEK_V4, V4_SIZES),
    Tiny("deepseek_v4", "deepseek_v4", "listed", DEEPSEEK_V4 | {
        "layer_types": ["sliding_attention", "compressed_sparse_attention"] * 2,
        "compress_rates": {"compressed_sparse_attention": 5, "heavily_compressed_attention": 3},
        "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"], "swiglu_limit": 2.5,
        "rope_parameters": YARN, "compress_rope_theta": 7000.0, "rope_theta": 300.0,
        "tie_word_embeddings": True, "hc_sinkhorn_iters": 3, "hc_eps": 1e-5,
    }, V4_SIZES),
    Tiny("arcee", "arcee"),
    Tiny("arcee", "arcee", "biases", {
        "attention_bias": True, "mlp_bias": True, "head_dim": 10, "tie_word_embeddings": True,
        "rope_parameters": YARN,
    }),
    Tiny("seed_oss", "seed_oss", "plain", {"head_dim": 10}),
    Tiny("seed_oss", "seed_oss", "output", {
        "head_dim": 10, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True,
    }),
    Tiny("exaone4", "exaone4", "plain", {"sliding_window": 9, "num_hidden_layers": 5}),
    Tiny("exaone4", "exaone4", "full", {
        "sliding_window": None, "layer_types": ["full_attention"] * 4, "rope_parameters": LLAMA3,
        "tie_word_embeddings": True,
    }),
    Tiny("exaone_moe", "exaone_moe", "plain", {
        "sliding_window": 9, "num_hidden_layers": 5, "num_experts": 6, "num_experts_per_tok": 2,
        "num_shared_experts": 2, "moe_intermediate_size": 20,
    }),
    Tiny("exaone_moe", "exaone_moe", "groups", {
        "sliding_window": 9, "num_experts": 6, "num_experts_per_tok": 2, "n_group": 3,
        "topk_group": 2, "moe_intermediate_size": 20, "norm_topk_prob": False,
        "tie_word_embeddings": True, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "sliding_attention"] * 2, "first_k_dense_replace": 2,
    }),
    Tiny("cohere2", "cohere2", "plain", {"sliding_window": 9, "num_hidden_layers": 5}),
    Tiny("cohere2", "cohere2", "listed", {
        "sliding_window": 9, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention"] * 2, "logit_scale": 0.5,
    }),
    Tiny("ernie4_5", "ernie4_5", "plain", {"head_dim": 10}),
    Tiny("ernie4_5", "ernie4_5", "biases", {"head_dim": 10, "use_bias": True}),
    Tiny("nemotron", "nemotron", "plain", {"head_dim": 12}),
    Tiny("nemotron", "nemotron", "biases", {
        "head_dim": 12, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    }),
    Tiny("jais2", "jais2"),
    Tiny("jais2", "jais2", "unbiased", {
        "head_dim": 10, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "rope_parameters": YARN,
    }),
    Tiny("glm", "glm", "plain", {"head_dim": 12, "pad_token_id": 0}),
    Tiny("glm", "glm", "bare", {
        "head_dim": 12, "attention_bias": False, "tie_word_embeddings": True, "pad_token_id": 0,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
    }),
    Tiny("glm4", "glm4", "plain", {"head_dim": 12, "pad_token_id": 0}),
    Tiny("glm4", "glm4", "bare", {
        "head_dim": 12, "attention_bias": False, "tie_word_embeddings": True, "pad_token_id": 0,
    }),
    Tiny("hunyuan_v1_dense", "hunyuan_v1_dense", "plain", {"head_dim": 10}),
    Tiny("hunyuan_v1_dense", "hunyuan_v1_dense", "stretched", {
        "head_dim": 10, "attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "alpha": 30.0,
                            "factor": 1.0},
    }),
    Tiny("hunyuan_v1_moe", "hunyuan_v1_moe", "plain", {
        "head_dim": 10, "num_experts": 5, "moe_topk": 3,
    }),
    Tiny("glm4_moe", "glm4_moe", "plain", {
        "head_dim": 12, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 20, "use_qk_norm": True, "routed_scaling_factor": 1.5,
    }),
    Tiny("glm4_moe", "glm4_moe", "groups", {
        "head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3,
        "topk_group": 2, "moe_intermediate_size": 20, "attention_bias": True,
        "first_k_dense_replace": 2, "norm_topk_prob": False, "tie_word_embeddings": True,
    }),
    Tiny("hy_v3", "hy_v3", "plain", {
        "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2,
        "moe_intermediate_size": 20, "router_scaling_factor": 1.5,
    }),
    Tiny("hy_v3", "hy_v3", "biases", {
        "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    }),
    Tiny("solar_open", "solar_open", "plain", {
        "head_dim": 12, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 20, "routed_scaling_factor": 1.5,
    }, EXPERTS_ONLY),
    Tiny("solar_open", "solar_open", "groups", {
        "head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3,
        "topk_group": 2, "moe_intermediate_size": 20, "attention_bias": True,
        "norm_topk_prob": False, "tie_word_embeddings": True,
    }, EXPERTS_ONLY),
    Tiny("kimi_linear", "kimi_linear", "plain", KIMI_LINEAR),
    Tiny("kimi_linear", "kimi_linear", "compressed", KIMI_LINEAR | {
        "q_lora_rank": 12, "attention_bias": True, "n_group": 5, "topk_group": 3,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "moe_renormalize": False,
        "layer_types": ["full_attention", "linear_attention"] * 2,
    }),
    Tiny("minimax", "minimax", "plain", {
        "head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3,
    }),
    Tiny("minimax", "minimax", "scaled", {
        "num_local_experts": 5, "sliding_window": 9, "linear_attn_alpha_factor": 1.5,
        "full_attn_beta_factor": 2, "mlp_alpha_factor": 0.5, "tie_word_embeddings": True,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }),
    Tiny("minimax_m2", "minimax_m2", "plain", {
        "head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0,
                            "partial_rotary_factor": 0.5},
    }),
    Tiny("minimax_m3_vl", "minimax_m3_vl_text", "plain", MINIMAX_M3),
    Tiny("minimax_m3_vl", "minimax_m3_vl_text", "mixed", MINIMAX_M3 | {
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "tie_word_embeddings": True,
        "layer_types": ["minimax_m3_sparse"] * 3 + ["full_attention"], "swiglu_limit": 2.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0,
                            "partial_rotary_factor": 0.4},
        "index_local_blocks": 2, "routed_scaling_factor": 1.3, "swiglu_alpha": 1.1,
    }),
    Tiny("ernie4_5_moe", "ernie4_5_moe", "plain", {
        "moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 20,
    }),
    Tiny("ernie4_5_moe", "ernie4_5_moe", "biases", {
        "moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 20, "use_bias": True,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 0, "moe_layer_interval": 2,
    }),
    Tiny("apertus", "apertus", "plain", {"num_key_value_heads": 2}),
    Tiny("apertus", "apertus", "unscaled", {"rope_parameters": UNSCALED}),
    Tiny("phimoe", "phimoe", "plain", {"num_local_experts": 5, "num_experts_per_tok": 2,
                                       "lm_head_bias": True}),
    Tiny("phimoe", "phimoe", "biased", {
        "num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": True,
    }),
    Tiny("llama4", "llama4_text", "plain", {
        "num_local_experts": 5, "head_dim": 10, "intermediate_size_mlp": 36,
        "interleave_moe_layer_step": 2, "pad_token_id": 0,
    }),
    Tiny("llama4", "llama4_text", "listed", {
        "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 10, "pad_token_id": 0,
        "intermediate_size_mlp": 36, "moe_layers": [0, 3], "no_rope_layers": [0, 1, 1, 0],
        "attention_chunk_size": 9, "use_qk_norm": False, "attention_bias": True,
        "attn_temperature_tuning": False, "rope_parameters": LLAMA3,
    }),
    Tiny("llama4", "llama4_text", "whole", {
        "num_local_experts": 5, "head_dim": 10, "intermediate_size_mlp": 36, "pad_token_id": 0,
        "layer_types": ["full_attention"] * 4, "floor_scale": 32, "attn_scale": 0.25,
        "tie_word_embeddings": True,
    }),
    Tiny("ministral", "ministral", "window", {"head_dim": 4, "sliding_window": 7}),
    Tiny("ministral", "ministral", "listed", {
        "sliding_window": 7, "head_dim": 10, "tie_word_embeddings": True, "rope_parameters": YARN,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    }),
    Tiny("ministral", "ministral", "full", {"head_dim": 10, "sliding_window": None}),
    Tiny("ministral3", "ministral3", "plain", {"head_dim": 10, "rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.2,
    }}),
    Tiny("ministral3", "ministral3", "steady", {
        "head_dim": 10, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "llama_4_scaling_beta": 0.0,
            "original_max_position_embeddings": 128,
    }}),
    Tiny("dots1", "dots1", "plain", {
        "head_dim": 10, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 20, "first_k_dense_replace": 1, "sliding_window": 9,
        "max_window_layers": 2, "attention_bias": True,
    }),
    Tiny("granitemoe", "granitemoe", "plain", {
        "num_local_experts": 5, "num_experts_per_tok": 3, "attention_multiplier": 0.3,
        "embedding_multiplier": 3.5, "residual_multiplier": 0.6, "logits_scaling": 2.5,
    }),
    Tiny("gpt_neox", "gpt_neox", "plain", {"rotary_pct": 0.5}, UNGROUPED),
    Tiny("gpt_neox", "gpt_neox", "serial", {
        "rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False,
        "tie_word_embeddings": True,
    }, UNGROUPED),
    Tiny("gpt_bigcode", "gpt_bigcode", sizes=GPT2),
    Tiny("gpt_bigcode", "gpt_bigcode", "heads", {
        "multi_query": False, "n_inner": 32, "scale_attn_weights": False,
    }, GPT2),
    Tiny("gptj", "gptj", "plain", {"rotary_dim": 4}, GPT2),
    *FALCONS,
    *BERTS,
    Tiny("qwen3_next", "qwen3_next", "plain", {
        **MOE, **DELTA, "shared_expert_intermediate_size": 28,
    }),
    Tiny("qwen3_next", "qwen3_next", "mixed", {
        **MOE, **DELTA, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1],
        "attention_bias": True, "norm_topk_prob": False, "tie_word_embeddings": True,
        "layer_types": ["full_attention", "linear_attention"] * 2,
    }),
    Tiny("qwen3_5", "qwen3_5_text", "plain", DELTA),
    Tiny("qwen3_5", "qwen3_5_text", "sections", {
        **DELTA, "num_hidden_layers": 6, "full_attention_interval": 3, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 0], "mrope_interleaved": True,
        },
    }),
    Tiny("qwen3_5_moe", "qwen3_5_moe_text", "plain", {
        **MOE, **DELTA, "shared_expert_intermediate_size": 28,
    }, {key: value for key, value in SIZES.items() if key != "intermediate_size"}),
    Tiny("olmo_hybrid", "olmo_hybrid", "plain", OLMO_HYBRID),
    Tiny("olmo_hybrid", "olmo_hybrid", "unrotated", OLMO_HYBRID | {
        "linear_allow_neg_eigval": False, "attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": None}, "layer_types": [
            "full_attention", "linear_attention", "full_attention", "linear_attention",
        ],
    }),
    Tiny("lfm2", "lfm2", "plain", LFM2 | {"block_multiple_of": 8}),
    Tiny("lfm2", "lfm2", "biases", LFM2 | {
        "conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False,
    }),
    Tiny("lfm2_moe", "lfm2_moe", "plain", {**MOE, **LFM2, "num_dense_layers": 1}),
    Tiny("lfm2_moe", "lfm2_moe", "unbiased", {
        **MOE, **LFM2, "num_dense_layers": 2, "use_expert_bias": False, "norm_topk_prob": False,
        "routed_scaling_factor": 1.7,
    }),
    Tiny("lfm3", "lfm3", "plain", LFM3),
    Tiny("lfm3", "lfm3", "listed", LFM3 | {
        "layer_types": ["sliding_attention", "conv", "conv", "full_attention", "conv"],
        "attention_bias": True, "conv_bias": True, "tie_word_embeddings": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.75,
            },
        },
    }),
    Tiny("gemma3n", "gemma3n_text", "plain", {
        "head_dim": 10, "sliding_window": 9, "hidden_size_per_layer_input": 14,
        "vocab_size_per_layer_input": 48, "altup_num_inputs": 3, "laurel_rank": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.75, 0.95, 0.0, 0.3],
    }),
    Tiny("gemma3n", "gemma3n_text", "own", {
        "head_dim": 10, "sliding_window": 9, "hidden_size_per_layer_input": 14,
        "num_hidden_layers": 11, "num_kv_shared_layers": 0, "altup_num_inputs": 2,
        "laurel_rank": 5, "vocab_size_per_layer_input": 56, "tie_word_embeddings": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 2e6},
        },
    }),
    Tiny("gemma4", "gemma4_text", "plain", GEMMA4 | {
        "hidden_size_per_layer_input": 14, "vocab_size_per_layer_input": 56,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    }),
    Tiny("gemma4", "gemma4_text", "experts", GEMMA4 | {
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 5,
        "top_k_experts": 3, "moe_intermediate_size": 20, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "final_logit_softcapping": 20.0,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.65,
            },
        },
    }),
    Tiny("gemma4_unified", "gemma4_unified_text", "plain", {
        "head_dim": 6, "global_head_dim": 10, "attention_k_eq_v": True, "num_hidden_layers": 7,
        "num_global_key_value_heads": 1,
    }),
    Tiny("mamba", "mamba", "plain", {"time_step_rank": 3}, MAMBA),
    Tiny("mamba", "mamba", "biases", {
        "use_bias": True, "use_conv_bias": False, "expand": 3, "tie_word_embeddings": False,
        "conv_kernel": 3, "residual_in_fp32": False,
    }, MAMBA),
    Tiny("falcon_mamba", "falcon_mamba", "plain", {
        "time_step_rank": 3, "mixer_rms_eps": 0.01,
    }, MAMBA),
    Tiny("mamba2", "mamba2", "plain", {
        "num_heads": 6, "head_dim": 8, "n_groups": 2,
    }, MAMBA),
    Tiny("mamba2", "mamba2", "limited", {
        "num_heads": 6, "head_dim": 8, "n_groups": 3, "time_step_limit": (0.01, 0.5),
        "use_bias": True, "tie_word_embeddings": True,
    }, MAMBA),
    Tiny("nemotron_h", "nemotron_h", "plain", {
        **NEMOTRON, "layers_block_type": [
            "linear_attention", "full_attention", "mlp", "linear_attention",
        ], "mlp_bias": True,
    }),
    Tiny("nemotron_h_moe", "nemotron_h", "plain", {
        **NEMOTRON, "layers_block_type": ["linear_attention", "full_attention", "moe", "moe"],
        "n_routed_experts": 5, "moe_intermediate_size": 20, "num_experts_per_tok": 3,
        "moe_shared_expert_intermediate_size": 12,
    }),
    Tiny("nemotron_h_moe", "nemotron_h", "latent", {
        **NEMOTRON, "layers_block_type": ["linear_attention", "full_attention", "moe", "moe"],
        "n_routed_experts": 5, "moe_intermediate_size": 20, "num_experts_per_tok": 3,
        "moe_shared_expert_intermediate_size": 12, "moe_latent_size": 14, "use_bias": True,
        "mamba_hidden_act": "gelu", "time_step_min": 0.02,
    }),
    Tiny("bamba", "bamba", "plain", {
        **{key: value for key, value in MAMBA2.items() if key != "layer_types"},
        "attn_layer_indices": [1, 3],
    }),
    Tiny("granite_hybrid", "granitemoehybrid", "plain", {
        **MAMBA2, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 20, "attention_multiplier": 0.015, "logits_scaling": 6.0,
    }),
    Tiny("granite_hybrid_moe", "granitemoehybrid", "plain", {
        **MAMBA2, "num_local_experts": 5, "num_experts_per_tok": 3,
        "shared_intermediate_size": 20, "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0, "position_embedding_type": "rope",
    }),
    Tiny("falcon_h1", "falcon_h1", "plain", {
        **{key: value for key, value in MAMBA2.items() if key != "layer_types"},
        "mamba_d_ssm": 48,
    }),
    Tiny("falcon_h1", "falcon_h1", "scaled", {
        **{key: value for key, value in MAMBA2.items() if key != "layer_types"},
        "mamba_d_ssm": 48, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "mlp_multipliers": [0.7, 1.4], "ssm_multipliers": [0.8, 1.2, 0.7, 1.3, 0.6],
        "key_multiplier": 0.7, "ssm_in_multiplier": 1.2, "projectors_bias": True,
        "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
        "time_step_limit": (0.01, float("inf")),
    }),
    *SEEING,
    Tiny("bloom", "bloom", sizes=BLOOM),
    Tiny("mpt", "mpt", "plain", {"attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3}}, MPT),
    Tiny("opt", "opt", "plain", {"ffn_dim": 40, "word_embed_proj_dim": 24}, FALCON),
    Tiny("opt", "opt", "no-bias", {
        "ffn_dim": 40, "word_embed_proj_dim": 24, "enable_bias": False,
        "activation_function": "gelu", "tie_word_embeddings": False,
    }, FALCON),
    Tiny("opt_350m", "opt", "plain", OPT_350M, FALCON),
    Tiny("opt_350m", "opt", "untied", OPT_350M | {"tie_word_embeddings": False}, FALCON),
    Tiny("olmoe", "olmoe", "plain", {"num_experts": 5, "num_experts_per_tok": 3}),
    Tiny("olmoe", "olmoe", "clipped", {
        "num_experts": 5, "num_experts_per_tok": 3, "clip_qkv": 0.7, "norm_topk_prob": True,
        "attention_bias": True,
    }),
)  # fmt: skip
REFUSED_IN_GGUF = ("falcon-serial",)  # of an architecture that is written otherwise
IN_GGUF = tuple(
    tiny for tiny in TINY if "gguf" in ARCHS[tiny.arch].called and tiny.id not in REFUSED_IN_GGUF
)


@dataclass(frozen=True)
class Made:
    """What transformers made: the config as saved, parameter shapes, and the model itself."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    model: Any

    @property
    def live(self) -> Any:
        """The config object, with transformers' defaults filled in."""
        return self.model.config.get_text_config()


def ready() -> None:
    """Let transformers build every tiny model, and not log about unusually small sizes."""
    import transformers

    logging: Any = transformers.logging
    logging.set_verbosity_error()
    registered()


@cache
def _make(tiny_id: str) -> Made:
    import json

    import transformers

    auto: Any = transformers
    ready()
    tiny = next(t for t in TINY if t.id == tiny_id)
    config = auto.AutoConfig.for_model(tiny.model_type, **{**tiny.sizes, **tiny.config})
    model = auto.AutoModelForCausalLM.from_config(config)
    saved = json.loads(model.config.to_json_string(use_diff=False))
    return Made(saved, parameter_shapes(model), model)


def parameter_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a state dict, without the head where it is the embedding."""
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if model.config.get_text_config().tie_word_embeddings:
        for name in ("lm_head.weight", *(model._tied_weights_keys or ())):
            shapes.pop(name, None)  # safetensors files keep one of the two
    return shapes


def make(tiny: Tiny) -> Made:
    """Build the model, once."""
    return _make(tiny.id)


@dataclass(frozen=True)
class Read:
    """A tiny model through our tables: names bound, hyperparameters read from its config.json."""

    spec: ArchSpec
    bound: BoundNames
    hp: HyperParams
    report: KeyReport
    known: dict[str, tuple[int, ...]]  # logical, as far as they follow from the file alone
    shapes: dict[str, tuple[int, ...]]  # logical


@cache
def _read(tiny_id: str) -> Read:
    made = _make(tiny_id)
    spec = find_arch("hf", made.config["model_type"], list(made.shapes), made.config)
    bound = bind_names(spec, "hf", made.shapes)
    known = known_shapes(bound, made.shapes)
    facts = Facts("hf", made.config, known, names="hf")
    hp, report = read_hyper(spec, facts, tiny_id)
    shapes: dict[str, tuple[int, ...]] = {}
    for group in bound.groups:
        stored = [made.shapes[name] for name in group.stored]
        shapes.update(zip(group.roles, logical_shapes(group.binding, stored, hp), strict=True))
    return Read(spec, bound, hp, report, known, shapes)


def read(tiny: Tiny) -> Read:
    """Read the model's config and names, once."""
    return _read(tiny.id)


@dataclass(frozen=True)
class Vector:
    """A stored tensor of float32 values, as Facts expects it."""

    values: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.values),)

    def numpy(self) -> Any:
        import numpy as np

        return np.array(self.values, np.float32)


def as_file(read: Read, style: str, written: dict[str, Any]) -> Facts:
    """Return the Facts of a file with these keys, with numbers rounded to float32."""
    tensors = {
        name: Vector(values) for name, values in derived_tensors(read.spec, read.hp, style).items()
    }
    if style != "hf":
        written = {
            key: nearest_float32(v) if isinstance(v, float) else v for key, v in written.items()
        }
    return Facts(style, written, read.known, tensors=tensors)
