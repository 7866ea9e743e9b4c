"""Seeded faults of `aprfmt/causes/forward/rank_shares.py`."""

from typing import Any

import numpy as np

from tests.causes.forward.shards import columns
from tests.diagnosis.engine_changes import LOGITS, How, placed


def repeated(w: Any, half: int) -> None:
    """Give the second device the first one's columns."""
    w[:, half:] = w[:, :half].copy()


def rows(*roles: str) -> How:
    """Give the second device the first one's rows of some products."""
    return {
        "weights": lambda held: {
            key: np.tile(w[: len(w) // 2], (2, 1))
            for key in held
            if key.split(".")[-2] in roles
            for w in [np.array(held[key].numpy(), np.float32)]
        }
    }


ENGINE_FAULTS = (
    placed("shard-columns", "qwen2", "one device has the other's columns of the MLP's last product",
           "shard_order", "ffn_down", columns("ffn_down", repeated)),
    placed("shard-columns-logits", "llama", "one device has the other's columns, from logits alone",
           "shard_order", "attn_output", columns("attn_output", repeated), LOGITS),
    placed("shard-rows-logits", "qwen3", "gate and up of one device are the other's",
           "shard_order", "ffn_gate", rows("ffn_gate", "ffn_up"), LOGITS),
)  # fmt: skip
