"""Seeded faults of `aprfmt/causes/forward/linear.py`.

Seen red: a dt_bias added twice that is "multiplied by 2" as well, and so only explained.
"""

import numpy as np

from tests.diagnosis.engine_changes import DELTA, LOGITS, How, decay, placed, softplus, steps


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
    placed("delta-dt-twice", DELTA, "dt_bias twice", "repeated_bias", "L0.ssm_dt.bias",
           decay(lambda a, rate, dt: -np.exp(rate) * softplus(a + 2 * dt))),
    placed("scan-dt-twice", "granite_hybrid", "dt_bias twice", "repeated_bias", "",
           steps(lambda raw, dt: softplus(raw + 2 * dt))),
)  # fmt: skip
