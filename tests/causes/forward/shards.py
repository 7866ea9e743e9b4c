"""Seeded faults of `aprfmt/causes/forward/shards.py`."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.diagnosis.engine_changes import LOGITS, How, placed


def columns(role: str, change: Callable[[Any, int], None], layer: str = "") -> How:
    """Change the columns of a product's weight, which the second device has from `half` on."""

    def weights(held: Any) -> Mapping[str, Any]:
        found = {}
        for key in held:
            if key.endswith(f".{role}.weight") and key.startswith(layer):
                w = np.array(held[key].numpy(), np.float32)
                change(w, w.shape[1] // 2)
                found[key] = w
        return found

    return {"weights": weights}


def lost(w: Any, half: int) -> None:
    """Lose the second device's part."""
    w[:, half:] = 0


def halved(*roles: str) -> How:
    """Divide what products give by two, as a mean over two devices does."""
    return {
        "weights": lambda held: {
            key: np.array(held[key].numpy(), np.float32) / 2
            for key in held
            if key.split(".")[-2] in roles
        }
    }


def doubled(role: str) -> How:
    """Give the second device the first one's shard of everything around an MLP's last product."""

    def weights(held: Any) -> Mapping[str, Any]:
        found = {}
        for key in held:
            if key.split(".")[-2] in ("ffn_gate", "ffn_up", role):
                w = np.array(held[key].numpy(), np.float32)
                w = w.T if key.split(".")[-2] == role else w
                w[len(w) // 2 :] = w[: len(w) // 2].copy()
                found[key] = w.T if key.split(".")[-2] == role else w
        return found

    return {"weights": weights}


ENGINE_FAULTS = (
    placed("shards-attention", "llama", "attention's sum lacks half of it", "tensor_parallel",
           "attn_output", columns("attn_output", lost)),
    placed("shards-mlp-logits", "qwen2", "the MLP's sum lacks half of it, from logits alone",
           "tensor_parallel", "ffn_down", columns("ffn_down", lost), LOGITS),
    placed("shards-one-layer", "llama", "in layer 1 alone", "tensor_parallel", "L1.ffn_down",
           columns("ffn_down", lost, "L1.")),
    placed("shards-twice", "llama", "one device has the other's shard, from logits alone",
           "tensor_parallel", "ffn_down", doubled("ffn_down"), LOGITS),
    placed("sums-divided", "mistral", "each sum over two devices is their mean, logits alone",
           "tensor_parallel", "ffn_down", halved("attn_output", "ffn_down"), LOGITS),
)  # fmt: skip
