"""Models of real shapes with random weights, for benchmarks that need no download."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.arch import ARCHS
from aprfmt.arch.hyper import read_hyper
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


# A period of Qwen3.5-0.8B: three layers with delta nets and one with attention; fewer tokens.
QWEN3_5: dict[str, Any] = {
    "vocab_size": 20480, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def qwen3_5_folder(folder: Path) -> Path:
    """Return a folder of random float32 weights, made by transformers on the first call."""
    if not (folder / "config.json").is_file():
        import torch
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        torch.manual_seed(0)
        Qwen3_5ForCausalLM(Qwen3_5TextConfig(**QWEN3_5)).save_pretrained(folder)
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
