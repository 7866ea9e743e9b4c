"""Tiny random models of every architecture, made by transformers, for all suites.

`tiny("llama")` returns a float32 transformers model in eval mode whose weights are large enough
that a wrong eps, pairing, bias, mask, window, softcap or scale shows in the logits; `VARIANTS`
are the same with one thing changed. Sizes are odd where an architecture allows it (vocabulary,
head_dim unlike hidden/heads), windows are shorter than `IDS`, eps is far from every default.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from tests.berts import BERTS
from tests.drawn import fill
from tests.falcons import FALCONS, FORMS
from tests.model_values import (
    DEEPSEEK_V4,
    DELTA,
    GEMMA4,
    INDEXER,
    KIMI_LINEAR,
    LAYER_NORM,
    LFM2,
    LFM3,
    LLAMA,
    LLAMA3,
    LONGROPE,
    MAMBA,
    MAMBA2,
    MINIMAX_M3,
    MLA,
    MOE,
    NEMOTRON,
    OLMO_HYBRID,
    YARN,
)
from tests.model_values import EPS as EPS

# 29 tokens: longer than every window and than the trained context of the scaled ropes.
from tests.model_values import IDS as IDS
from tests.model_values import VOCAB as VOCAB
from tests.model_values import WINDOW as WINDOW
from tests.text_heads import HEADLESS, causal

MAKERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", LLAMA | {"head_dim": 16}),
    "mistral": ("Mistral", LLAMA | {"head_dim": 16, "sliding_window": WINDOW}),
    "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 6, "sliding_window": None}),
    "qwen2": (
        "Qwen2",
        LLAMA | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16}),
    "gemma": ("Gemma", LLAMA | {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        LLAMA | {
            "head_dim": 16, "num_hidden_layers": 4, "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24, "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        LLAMA | {
            "head_dim": 16, "num_hidden_layers": 7, "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24, "rope_theta": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 8.0},
            },
        },
    ),
    "phi2": ("Phi", LAYER_NORM | {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi3": (
        "Phi3",
        LLAMA | {
            "hidden_size": 64, "sliding_window": 12, "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75, "rope_theta": None, "rope_parameters": LONGROPE,
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64,
            "layer_norm_epsilon": EPS, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "gpt_oss": (
        "GptOss",
        LLAMA | {
            "num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW,
            "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40,
            "swiglu_limit": 1.5, "rope_theta": None,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "olmo2": ("Olmo2", LLAMA),
    "olmo3": (
        "Olmo3",
        LLAMA | {
            "num_hidden_layers": 5, "sliding_window": WINDOW, "rope_theta": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": YARN,
            },
        },
    ),
    "stablelm": ("StableLm", LAYER_NORM | {"hidden_size": 64, "partial_rotary_factor": 0.25}),
    "starcoder2": (
        "Starcoder2",
        LLAMA | {"rms_norm_eps": None, "norm_epsilon": EPS, "sliding_window": WINDOW},
    ),
    "granite": (
        "Granite",
        LLAMA | {
            "attention_multiplier": 0.4, "embedding_multiplier": 3.5, "residual_multiplier": 0.6,
            "logits_scaling": 2.5,
        },
    ),
    "smollm3": ("SmolLM3", LLAMA | {"num_hidden_layers": 5}),
    "cohere": ("Cohere", LAYER_NORM | {"logit_scale": 0.3}),
    "qwen2_moe": (
        "Qwen2Moe",
        LLAMA | MOE | {"shared_expert_intermediate_size": 56},
    ),
    "qwen3_moe": ("Qwen3Moe", LLAMA | MOE | {"head_dim": 16, "norm_topk_prob": True}),
    "deepseek_v2": ("DeepseekV2", LLAMA | MLA | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", LLAMA | MLA | {"norm_topk_prob": True}),
    "glm4_moe_lite": ("Glm4MoeLite", LLAMA | MLA | {"norm_topk_prob": True}),
    "deepseek_v32": ("DeepseekV32", LLAMA | MLA | INDEXER),
    "glm_moe_dsa": ("GlmMoeDsa", LLAMA | MLA | INDEXER | {
        "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"],
    }),
    "deepseek_v4": ("DeepseekV4", DEEPSEEK_V4),
    "internlm3": ("InternLM3", LLAMA | {"head_dim": 10}),
    "arcee": ("Arcee", LLAMA | {"head_dim": 16}),
    "seed_oss": ("SeedOss", LLAMA | {"head_dim": 16, "attention_out_bias": True}),
    "exaone4": ("Exaone4", LLAMA | {"num_hidden_layers": 5, "sliding_window": WINDOW}),
    "exaone_moe": ("ExaoneMoe", LLAMA | {
        "num_hidden_layers": 5, "sliding_window": WINDOW, "num_experts": 8,
        "num_experts_per_tok": 3, "num_shared_experts": 2, "moe_intermediate_size": 24,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
    }),
    "cohere2": (
        "Cohere2",
        LAYER_NORM | {"logit_scale": 0.3, "num_hidden_layers": 5, "sliding_window": WINDOW},
    ),
    "ernie4_5": ("Ernie4_5", LLAMA | {"head_dim": 16}),
    "nemotron": ("Nemotron", {k: v for k, v in LLAMA.items() if k != "rms_norm_eps"} | {
        "norm_eps": EPS, "head_dim": 16, "partial_rotary_factor": 0.5,
    }),
    "jais2": ("Jais2", LAYER_NORM | {"head_dim": 16}),
    "glm": ("Glm", LLAMA | {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4", LLAMA | {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", LLAMA | {"head_dim": 16}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", LLAMA | {
        "head_dim": 16, "num_experts": 6, "moe_topk": 2, "intermediate_size": 40,
    }),
    "glm4_moe": ("Glm4Moe", LLAMA | {
        "head_dim": 16, "partial_rotary_factor": 0.5, "use_qk_norm": True,
        "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.7,
    }),
    "solar_open": ("SolarOpen", {k: v for k, v in LLAMA.items() if k != "intermediate_size"} | {
        "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
    }),
    "hy_v3": ("HYV3", LLAMA | {
        "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2,
        "moe_intermediate_size": 24, "router_scaling_factor": 1.7,
    }),
    "dots1": ("Dots1", LLAMA | {
        "head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.7, "norm_topk_prob": True, "sliding_window": WINDOW,
        "max_window_layers": 1,
    }),
    "granitemoe": ("GraniteMoe", LLAMA | {
        "attention_multiplier": 0.4, "embedding_multiplier": 3.5, "residual_multiplier": 0.6,
        "logits_scaling": 2.5, "num_local_experts": 6, "num_experts_per_tok": 2,
        "intermediate_size": 40,
    }),
    "minimax_m2": ("MiniMaxM2", LLAMA | {
        "head_dim": 16, "partial_rotary_factor": 0.5, "num_local_experts": 6,
        "num_experts_per_tok": 2, "intermediate_size": 40,
    }),
    "minimax_m3_vl": ("MiniMaxM3VL", MINIMAX_M3),
    "ernie4_5_moe": ("Ernie4_5_Moe", LLAMA | {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40,
        "moe_num_shared_experts": 2,
    }),
    "apertus": ("Apertus", LLAMA | {
        "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }),
    "phimoe": ("Phimoe", LLAMA | {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40,
        "router_jitter_noise": 0.2, "lm_head_bias": True, "sliding_window": None,
        "tie_word_embeddings": False,
    }),
    "llama4": ("Llama4", LLAMA | {
        "num_hidden_layers": 5, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
        "intermediate_size": 40, "intermediate_size_mlp": 72, "interleave_moe_layer_step": 2,
        "attention_chunk_size": WINDOW, "floor_scale": 5, "attn_scale": 0.4,
    }),
    "ministral": ("Ministral", LLAMA | {
        "head_dim": 16, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "ministral3": ("Ministral3", LLAMA | {
        "head_dim": 16, "rope_theta": None,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0,
                                    "llama_4_scaling_beta": 0.3},
    }),
    "gpt_neox": (
        "GPTNeoX",
        {k: v for k, v in LAYER_NORM.items() if k not in ("num_key_value_heads", "rope_theta")}
        | {"rotary_pct": 0.5, "rotary_emb_base": 5000.0},
    ),
    "gpt_bigcode": ("GPTBigCode", {
        "vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64,
        "layer_norm_epsilon": EPS, "bos_token_id": 1, "eos_token_id": 2,
    }),
    "gptj": ("GPTJ", {
        "vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64,
        "layer_norm_epsilon": EPS, "bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 8,
    }),
    **FALCONS,
    **BERTS,
    "qwen3_next": ("Qwen3Next", LLAMA | MOE | DELTA | {
        "num_hidden_layers": 4, "shared_expert_intermediate_size": 56,
    }),
    "qwen3_5": ("Qwen3_5", LLAMA | DELTA | {"full_attention_interval": 2}),
    "olmo_hybrid": ("OlmoHybrid", LLAMA | OLMO_HYBRID),
    "kimi_linear": ("KimiLinear", {k: v for k, v in LLAMA.items() if k != "rope_theta"}
        | {k: v for k, v in MLA.items() if k != "n_routed_experts"} | KIMI_LINEAR),
    "minimax": ("MiniMax", LLAMA | {
        "num_hidden_layers": 4, "head_dim": 10, "num_local_experts": 4, "intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention", "linear_attention",
                        "linear_attention"],
        "block_size": 11, "full_attn_alpha_factor": 1.3, "full_attn_beta_factor": 0.7,
        "linear_attn_alpha_factor": 1.2, "linear_attn_beta_factor": 0.8, "mlp_alpha_factor": 0.9,
        "mlp_beta_factor": 1.1,
    }),
    "lfm2": ("Lfm2", LFM2 | {"block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3}),
    "lfm2_moe": ("Lfm2Moe", LFM2 | MOE | {"num_dense_layers": 1, "routed_scaling_factor": 1.7}),
    "lfm3": ("Lfm3", LFM3),
    "gemma3n": ("Gemma3n", {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {
        "head_dim": 10, "num_hidden_layers": 6, "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": WINDOW,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {"rope_type": "default", "rope_theta": 9000.0},
        },
        "hidden_size_per_layer_input": 7, "vocab_size_per_layer_input": 89,
        "num_kv_shared_layers": 3, "altup_num_inputs": 3, "laurel_rank": 5,
        "activation_sparsity_pattern": [0.7, 0.95, 0.0, 0.3, 0.0, 0.5],
        "final_logit_softcapping": 6.0,
    }),
    "gemma4": ("Gemma4", GEMMA4 | {
        "num_key_value_heads": 1, "hidden_size_per_layer_input": 7,
        "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    }),
    "gemma4_unified": ("Gemma4Unified", GEMMA4 | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    }),
    "mamba": ("Mamba", MAMBA | {"state_size": 7, "time_step_rank": 4, "conv_kernel": 3}),
    "falcon_mamba": ("FalconMamba", MAMBA | {
        "state_size": 7, "time_step_rank": 4, "mixer_rms_eps": 0.01,
    }),
    "mamba2": ("Mamba2", MAMBA | {
        "state_size": 7, "num_heads": 6, "head_dim": 15, "n_groups": 3, "chunk_size": 11,
        "time_step_limit": (0.3, 1.1),
    }),
    "nemotron_h": ("NemotronH", NEMOTRON | {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention",
                              "mlp"],
    }),
    "nemotron_h_moe": ("NemotronH", NEMOTRON | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 36, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.7,
    }),
    "bamba": ("Bamba", LLAMA | MAMBA2 | {
        "attn_layer_indices": [1],
    }),
    "granite_hybrid": ("GraniteMoeHybrid", LLAMA | MAMBA2 | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0, "shared_intermediate_size": 40, "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0,
    }),
    "granite_hybrid_moe": ("GraniteMoeHybrid", LLAMA | MAMBA2 | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 40,
        "position_embedding_type": "rope", "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4, "time_step_limit": (0.3, 1.1),
    }),
    "falcon_h1": ("FalconH1", LLAMA | MAMBA2 | {
        "mamba_d_ssm": 54, "mamba_rms_norm": True, "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.6, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.9,
        "mlp_multipliers": [0.7, 1.4], "ssm_multipliers": [0.8, 1.2, 0.7, 1.3, 0.6],
    }),
    "qwen3_5_moe": ("Qwen3_5Moe", {
        key: value for key, value in (LLAMA | MOE | DELTA).items() if key != "intermediate_size"
    } | {"shared_expert_intermediate_size": 56, "full_attention_interval": 2}),
    "qwen2_vl": ("Qwen2VL", LLAMA | {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
    }),
    "qwen2_5_vl": ("Qwen2_5_VL", LLAMA),
    "qwen3_vl": ("Qwen3VL", LLAMA | {"head_dim": 16}),
    "qwen3_vl_moe": ("Qwen3VLMoe", LLAMA | MOE | {"head_dim": 16, "tie_word_embeddings": False}),
    "bloom": ("Bloom", {
        "vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6,
        "layer_norm_epsilon": EPS, "bos_token_id": 1, "eos_token_id": 2,
    }),
    "mpt": ("Mpt", {
        "vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 64,
        "layer_norm_epsilon": EPS, "bos_token_id": 1, "eos_token_id": 2,
    }),
    "opt": ("OPT", {
        "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "ffn_dim": 72, "max_position_embeddings": 64,
        "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    }),
    "opt_350m": ("OPT", {
        "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "ffn_dim": 72, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
        "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    }),
    "olmoe": ("Olmoe", LLAMA | {
        "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40,
    }),
}  # fmt: skip

# name -> (architecture, changed config values)
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-square": ("llama", {"head_dim": 12, "num_key_value_heads": 4}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}},
    ),
    "llama-dynamic": (
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 3.0},
        },
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mixtral-window": ("mixtral", {"sliding_window": WINDOW}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN, "use_sliding_window": False}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "gemma3-softcap": ("gemma3", {"final_logit_softcapping": 6.0}),
    "phi2-qk-norm": ("phi2", {"qk_layernorm": True}),
    "phi3-short": ("phi3", {"original_max_position_embeddings": 48}),
    "phi3-long": ("phi3", {"original_max_position_embeddings": 16}),
    "phi3-plain": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "sliding_window": None},
    ),
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-erf": ("gpt2", {"activation_function": "gelu"}),
    "stablelm-qk-norm": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2-no-window": ("starcoder2", {"sliding_window": None}),
    "smollm3-layers": ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 0]}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True}),
    "qwen2_moe-norm": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen3_moe-dense": (
        "qwen3_moe",
        {"norm_topk_prob": False, "mlp_only_layers": [1], "intermediate_size": 72},
    ),
    "deepseek_v2-lite": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3-half": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2}},
    ),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 5}),
    "ernie4_5-bias": ("ernie4_5", {"use_bias": True}),
    "nemotron-bias": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "hunyuan_v1_dense-alpha": (
        "hunyuan_v1_dense",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 500.0,
                "alpha": 30.0,
                "factor": 1.0,
            },
            "attention_bias": True,
        },
    ),
    "glm4_moe-bare": (
        "glm4_moe",
        {
            "use_qk_norm": False,
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
    ),
    "ernie4_5_moe-bias": (
        "ernie4_5_moe",
        {"use_bias": True, "moe_layer_interval": 2, "moe_num_shared_experts": 0},
    ),
    "gpt_neox-serial": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_bigcode-heads": ("gpt_bigcode", {"multi_query": False}),
    **FORMS,
    "qwen3_next-mixed": (
        "qwen3_next",
        {
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "norm_topk_prob": False,
        },
    ),
    "lfm2-bias": (
        "lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 7,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
        },
    ),
    "lfm2_moe-unbiased": (
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "conv_L_cache": 2},
    ),
    "gemma4-experts": (
        "gemma4",
        {
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 18,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma4-narrow": ("gemma4", {"use_double_wide_mlp": False, "num_kv_shared_layers": 0}),
    "gemma3n-own": (
        "gemma3n",
        {"num_kv_shared_layers": 0, "altup_num_inputs": 4, "vocab_size_per_layer_input": VOCAB},
    ),
    "lfm3-listed": (
        "lfm3",
        {
            "conv_bias": True,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "conv", "full_attention", "conv", "conv"],
        },
    ),
    "mamba-biases": ("mamba", {"use_bias": True, "use_conv_bias": False, "hidden_act": "gelu"}),
    "mamba2-biases": (
        "mamba2",
        {
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_limit": (0.0, float("inf")),
            "num_hidden_layers": 2,
        },
    ),
    "nemotron_h-biases": (
        "nemotron_h",
        {
            "use_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
            "mamba_hidden_act": "gelu",
            "mlp_hidden_act": "silu",
        },
    ),
    "nemotron_h_moe-latent": ("nemotron_h_moe", {"moe_latent_size": 20, "norm_topk_prob": False}),
    "granite_hybrid-biases": (
        "granite_hybrid",
        {"mamba_proj_bias": True, "attention_bias": True, "position_embedding_type": "rope"},
    ),
    "falcon_h1-unnormed": ("falcon_h1", {"mamba_rms_norm": False, "mamba_proj_bias": True}),
    "falcon_h1-late": ("falcon_h1", {"mamba_norm_before_gate": False, "projectors_bias": True}),
    "kimi_linear-heads": (
        "kimi_linear",
        {
            "linear_num_heads": 3,
            "q_lora_rank": 28,
            "attention_bias": True,
            "num_experts": 6,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "linear_head_dim": 11,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
        },
    ),
    "olmo_hybrid-unrotated": (
        "olmo_hybrid",
        {"rope_parameters": {"rope_theta": None}, "linear_allow_neg_eigval": False},
    ),
    "minimax-unscaled": (
        "minimax",
        {
            "sliding_window": WINDOW,
            **{
                f"{part}_{kind}_factor": 1.0
                for part in ("full_attn", "linear_attn", "mlp")
                for kind in ("alpha", "beta")
            },
        },
    ),
    "mpt-clip": ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.2}}),
    "opt-no-bias": ("opt", {"enable_bias": False, "activation_function": "gelu"}),
    "llama4-listed": (
        "llama4",
        {
            "no_rope_layers": [1, 0, 1, 1, 0],
            "num_experts_per_tok": 1,
            "moe_layers": [0, 3],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
    ),
    "olmoe-clip": ("olmoe", {"clip_qkv": 0.5, "norm_topk_prob": True}),
}

EVERY: tuple[str, ...] = (*MAKERS, *VARIANTS)
# llama.cpp has none.
WITHOUT_GGUF = (
    "lfm3",
    "ministral",
    "olmo_hybrid",
    "opt",
    "opt_350m",
    "apertus",
    "falcon_rw",
    "falcon_rw_40b",
    *BERTS,
)
IN_GGUF: tuple[str, ...] = tuple(name for name in MAKERS if name not in WITHOUT_GGUF)
NO_ROPE = (
    "gpt2", "gpt_bigcode", "bloom", "mpt", "opt", "opt_350m", "falcon_rw", "falcon_rw_40b",
    "mamba", "falcon_mamba", "mamba2", "nemotron_h", "nemotron_h_moe", "granite_hybrid",
    "kimi_linear", *BERTS,
)  # fmt: skip
# transformers' eager attention adds their distances to the scores twice.
FUSED = ("falcon_rw", "falcon_rw_40b")


def attends(name: str) -> str:
    """Return the implementation of transformers' attention that an architecture is judged by."""
    return "sdpa" if name in FUSED else "eager"


def tiny(arch: str, tied: bool | None = None, seed: int = 0, **overrides: Any) -> Any:
    """Return a float32 transformers model; `arch` is a key of MAKERS or VARIANTS.

    `tied` None keeps the architecture's own default. Keyword arguments replace config values.
    """
    import torch
    import transformers

    name = arch.replace("-", "_") if arch.replace("-", "_") in MAKERS else arch
    changed: Mapping[str, Any] = {}
    if name in VARIANTS:
        name, changed = VARIANTS[name]
    prefix, values = MAKERS[name]
    values = dict(values) | dict(changed) | overrides
    if "rope_parameters" in changed or "rope_parameters" in overrides:
        values.pop("rope_theta", None)
    nullable = {"sliding_window", "q_lora_rank", "pad_token_id"}
    values = {key: v for key, v in values.items() if v is not None or key in nullable}
    if tied is not None:
        values["tie_word_embeddings"] = tied
    of_texts = (
        "Gemma3",
        "Gemma3n",
        "Gemma4",
        "Gemma4Unified",
        "Llama4",
        "MiniMaxM3VL",
        "Qwen3_5",
        "Qwen3_5Moe",
        *HEADLESS,
    )
    config_name = f"{prefix}TextConfig" if prefix in of_texts else f"{prefix}Config"
    model_name = f"{prefix}LMHeadModel" if prefix in ("GPT2", "Bert") else f"{prefix}ForCausalLM"
    config = getattr(transformers, config_name)(**deepcopy(values))  # it writes into what it gets
    config._attn_implementation = attends(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if hasattr(transformers, model_name):
            model = getattr(transformers, model_name)(config)
        elif prefix in HEADLESS:
            model = causal(prefix)(config)
        else:  # its configuration belongs to another type's class
            auto: Any = transformers.AutoModelForCausalLM
            model = auto.from_config(config)
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")
    fill(model, seed)
    return model.float().eval()


def save_tiny(arch: str, folder: Path, dtype: str = "float32", **options: Any) -> Any:
    """Write a tiny model as a Hugging Face folder in `dtype`; return it, rounded, in float32."""
    import torch

    model = tiny(arch, **options).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return model.float().eval()
