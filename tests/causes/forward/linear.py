"""Seeded faults of `aprfmt/causes/forward/linear.py`."""

import numpy as np

from tests.diagnosis.engine_changes import LOGITS, How, placed


def biases(times: int, *roles: str) -> How:
    """Add biases several times."""
    return {
        "weights": lambda held: {
            key: times * np.array(held[key].numpy(), np.float32)
            for key in held
            if key.endswith(".bias") and key.split(".")[-2] in roles
        }
    }


ENGINE_FAULTS = (
    placed("bias-twice", "qwen2", "q, k and v have their biases twice", "repeated_bias",
           "L0.attn_q.bias", biases(2, "attn_q", "attn_k", "attn_v")),
    placed("bias-four-times", "gpt2", "each of four devices adds the biases, from logits alone",
           "repeated_bias", "L0.attn_output.bias", biases(4, "attn_output", "ffn_down"), LOGITS),
)  # fmt: skip
