"""Models of real shapes with random weights, for benchmarks that need no download."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.arch import ARCHS
from aprfmt.arch.hyperparameters import read_hyper
from aprfmt.arch.spec import Facts
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.session import Session
from aprfmt.inference.weights import array_weights

# Qwen2-0.5B's config.
QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936,
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip


_SIZES: dict[str, Any] = {
    "vocab_size": 20480, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 512, "num_experts_per_tok": 4}
# name -> (transformers' prefix, what its configuration and its model are called, sizes): one model
# of every way to mix tokens and to feed them forward, a few layers of usual width each.
MADE: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # A period of Qwen3.5-0.8B: three layers with delta nets and one with attention; fewer tokens.
    "qwen3_5": ("Qwen3_5", "TextConfig", "ForCausalLM", _SIZES | {
        "intermediate_size": 3584, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "tie_word_embeddings": True,
    }),
    "experts": ("Qwen3Moe", "Config", "ForCausalLM", _SIZES | _EXPERTS | {
        "num_key_value_heads": 2, "head_dim": 128, "num_experts": 16,
    }),
    "latent": ("DeepseekV3", "Config", "ForCausalLM", _SIZES | _EXPERTS | {
        "num_key_value_heads": 8, "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "intermediate_size": 2816, "n_routed_experts": 16,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    }),
    "parallel": ("GPTNeoX", "Config", "ForCausalLM", _SIZES | {"intermediate_size": 4096}),
    "slopes": ("Bloom", "Config", "ForCausalLM", {
        "vocab_size": 20480, "hidden_size": 1024, "n_layer": 4, "n_head": 8,
    }),
    "llama4": ("Llama4", "TextConfig", "ForCausalLM", _SIZES | {
        "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1024,
        "intermediate_size_mlp": 2816, "num_local_experts": 8, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 192, "floor_scale": 192, "pad_token_id": 0,
    }),
    "mamba": ("Mamba", "Config", "ForCausalLM", {
        "vocab_size": 20480, "hidden_size": 1024, "num_hidden_layers": 4, "state_size": 16,
    }),
    "mamba2": ("Mamba2", "Config", "ForCausalLM", {
        "vocab_size": 20480, "hidden_size": 1024, "num_hidden_layers": 4, "state_size": 128,
        "num_heads": 32, "head_dim": 64, "n_groups": 1,
    }),
    "per_layer": ("Gemma4", "TextConfig", "ForCausalLM", _SIZES | {
        "num_key_value_heads": 1, "head_dim": 128, "global_head_dim": 256,
        "intermediate_size": 4096, "hidden_size_per_layer_input": 128,
        "vocab_size_per_layer_input": 20480, "num_kv_shared_layers": 1, "sliding_window": 192,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
    }),
    "altup": ("Gemma3n", "TextConfig", "ForCausalLM", _SIZES | {
        "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 4096,
        "hidden_size_per_layer_input": 128, "vocab_size_per_layer_input": 20480,
        "num_kv_shared_layers": 1, "sliding_window": 192, "laurel_rank": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    }),
    # Nemotron-H's kinds of layers, each once: a scan, experts, attention, an MLP.
    "nemotron_h": ("NemotronH", "Config", "ForCausalLM", {
        "vocab_size": 20480, "hidden_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 128,
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "mamba_num_heads": 32, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 1,
        "intermediate_size": 4096, "moe_intermediate_size": 512, "n_routed_experts": 16,
        "num_experts_per_tok": 4, "moe_shared_expert_intermediate_size": 512,
    }),
    "short_conv": ("Lfm2", "Config", "ForCausalLM", _SIZES | {
        "num_key_value_heads": 2, "intermediate_size": 4096,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    }),
    "indexer": ("GlmMoeDsa", "Config", "ForCausalLM", _SIZES | _EXPERTS | {
        "num_key_value_heads": 8, "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "intermediate_size": 2816, "n_routed_experts": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "index_topk": 128,
        "index_n_heads": 8, "index_head_dim": 64, "pad_token_id": 0,
    }),
    # A period of Kimi-Linear-48B-A3B: three layers with KDA and one with latent attention.
    "kimi_linear": ("KimiLinear", "Config", "ForCausalLM", _SIZES | _EXPERTS | {
        "num_key_value_heads": 8, "kv_lora_rank": 256, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 2816, "num_experts": 16,
        "linear_num_heads": 8, "linear_head_dim": 128, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }),
    "lightning": ("MiniMax", "Config", "ForCausalLM", _SIZES | {
        "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 512,
        "num_local_experts": 16, "num_experts_per_tok": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }),
    "encoder": ("Bert", "Config", "Model", _SIZES | {"intermediate_size": 4096}),
}  # fmt: skip


def made_folder(name: str, folder: Path) -> Path:
    """Return a folder of a model of MADE with random float32 weights, made on the first call."""
    if not (folder / "config.json").is_file():
        import torch
        import transformers

        prefix, config, model, values = MADE[name]
        torch.manual_seed(0)
        given = getattr(transformers, prefix + config)(**values)
        getattr(transformers, prefix + model)(given).save_pretrained(folder)
    return folder


def qwen2_arrays() -> dict[str, np.ndarray]:
    """Return float32 weights by role; all layers share one set of random numbers."""
    random = np.random.default_rng(0)
    hidden, ffn, kv = 896, 4864, 128

    def normal(*shape: int) -> np.ndarray:
        scale = np.float32(shape[-1] ** -0.5)
        return random.standard_normal(shape, dtype=np.float32) * scale

    layer = {
        "attn_norm.weight": np.ones(hidden, np.float32),
        "attn_q.weight": normal(hidden, hidden),
        "attn_q.bias": normal(hidden),
        "attn_k.weight": normal(kv, hidden),
        "attn_k.bias": normal(kv),
        "attn_v.weight": normal(kv, hidden),
        "attn_v.bias": normal(kv),
        "attn_output.weight": normal(hidden, hidden),
        "ffn_norm.weight": np.ones(hidden, np.float32),
        "ffn_gate.weight": normal(ffn, hidden),
        "ffn_up.weight": normal(ffn, hidden),
        "ffn_down.weight": normal(hidden, ffn),
    }
    arrays = {f"L{i}.{role}": values for i in range(24) for role, values in layer.items()}
    arrays["token_embd.weight"] = normal(151936, hidden)
    arrays["output_norm.weight"] = np.ones(hidden, np.float32)
    return arrays


@contextmanager
def qwen2_session(backend: str, dtype: str) -> Iterator[tuple[Session, list[int]]]:
    """Yield a session on the GPU and 512 token ids."""
    spec = ARCHS["qwen2"]
    arrays = qwen2_arrays()
    facts = Facts("hf", QWEN2, {key: values.shape for key, values in arrays.items()})
    hp, _ = read_hyper(spec, facts, "qwen2 of 0.5B shape")
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 151936, 512)]
    with Session(spec, hp, array_weights(arrays), BACKENDS[backend]("cuda", dtype)) as session:
        yield session, ids
