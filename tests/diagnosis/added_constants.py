"""Seeded faults of constants that a pass adds.

Seen red: a constant in the stream, in keys or behind a norm that is only located.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.diagnosis.engine_changes import LAYERS, How, number, placed


def added(point: str, make: Callable[[int], Any]) -> How:
    """Add a constant at a point of all layers, made for its count of columns."""

    def alter(name: str, layer: int, x: Any) -> Any:
        if name != point:
            return x
        rows = x.reshape(len(x), -1)
        return (rows + np.float32(make(rows.shape[1]))).reshape(x.shape)

    return {"alter": lambda: alter}


def vector(columns: int) -> Any:
    """Return a vector that is no multiple of another."""
    return 0.3 * np.sin(np.arange(columns) ** 2)


ADDED = (
    placed("added-stream", "llama", "a vector added to the stream, from layers' outputs",
           "missing_bias", "L0.out", added("out", vector), LAYERS),
    placed("added-keys", "gemma3", "a vector added to keys", "missing_bias", "L0.k",
           added("k", vector), None),
    placed("added-embedding", "qwen3", "a vector added to the embedding", "missing_bias", "embd",
           added("embd", vector)),
    placed("added-number", "qwen3", "0.3 added behind the norm before attention", "missing_bias",
           "attn_norm", added("attn_norm", lambda columns: 0.3), None),
    placed("added-other-bias", "gpt_neox", "the MLP's bias of another layer, from layers' outputs",
           "swapped_tensors", "L1.ffn_down.bias",
           {"weights": lambda w: {"L1.ffn_down.bias": number(w, "L0.ffn_down.bias")}}, LAYERS),
    placed("added-lost-bias", "gpt2", "one MLP without its bias, from layers' outputs",
           "missing_bias", "L1.ffn_down.bias",
           {"weights": lambda w: {"L1.ffn_down.bias": 0 * number(w, "L1.ffn_down.bias")}}, LAYERS),
)  # fmt: skip
