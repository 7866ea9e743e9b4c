"""The numbers that tiny models are filled with."""

import math
from typing import Any


def fill(model: Any, seed: int) -> None:
    """Set every weight and buffer that matters from one seeded generator, in module order."""
    import torch

    generator = torch.Generator().manual_seed(seed + 1)
    # The norms of these store weight - 1.
    kind = type(model).__name__
    centred = kind.startswith(("Gemma", "NemotronF", "Qwen3Next", "Qwen3_5", "MiniMaxM3"))
    centred = centred and not kind.startswith(("Gemma3n", "Gemma4"))
    with torch.no_grad():
        for path, module in model.named_modules():
            if hasattr(module, "tid2eid"):  # the experts of each token of the vocabulary
                drawn = torch.rand(len(module.tid2eid), module.num_experts, generator=generator)
                module.tid2eid.copy_(drawn.argsort(-1)[:, : module.top_k])
            # Conv1D and gpt-oss's experts store [in, out], everything else [out, in].
            axis = -2 if type(module).__name__ in ("Conv1D", "GptOssExperts") else -1
            tensors = dict(module.named_parameters(recurse=False))
            tensors |= {
                k: v
                for k, v in module.named_buffers(recurse=False)
                if k.endswith(("_bias", "layer_scalar"))
            }
            for key, tensor in tensors.items():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(
                    _drawn(
                        f"{path}.{key}", noise, noise.shape[axis] if noise.ndim > 1 else 1, centred
                    )
                )


def _drawn(name: str, noise: Any, fan_in: int, centred: bool) -> Any:
    """Scale standard normal noise to the part the tensor plays."""
    if name.endswith("linear_attn.norm.weight"):
        return 0.4 * noise + 1.0
    if name.endswith(("A_log", "conv1d.weight")):
        return 0.7 * noise
    if any(word in name for word in ("norm", ".ln_")) and "word_embeddings." not in name:
        bias = name.endswith("bias")
        return 0.3 * noise if bias else 0.4 * noise + (0.0 if centred else 1.0)
    if name.endswith(("_scale", "router.scale", "layer_scalar")):  # gemma3n's and gemma4's factors
        return 0.2 * noise + 1.0
    if name.endswith("sinks"):
        return noise
    if name.endswith("bias"):
        return (0.2 if "e_score" in name else 0.4) * noise
    if any(word in name for word in ("embed_tokens", "wte", "wpe", "embed_in", "word_embed")):
        return 0.08 * noise
    gain = 1.0
    if any(word in name for word in ("q_proj", "k_proj", "q_b_proj", "qkv_proj", "kv_b_proj")):
        gain = 1.2
    elif any(word in name for word in ("mlp.gate.", "router", "lm_head")):
        gain = 2.0
    return gain * noise / math.sqrt(fan_in)
