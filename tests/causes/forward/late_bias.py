"""Seeded faults of `aprfmt/causes/forward/late_bias.py`.

Seen red: without the hypothesis these are placed, and not named.
"""

from typing import Any

from tests.diagnosis.engine_changes import LAYERS, LOGITS, How, number, placed
from tests.diagnosis.engines import broken_here


def late(*sides: str) -> How:
    """Rotate queries or keys ("q", "k") without their bias, and add it then."""
    biases: dict[str, Any] = {}
    calls = iter(range(1 << 30))

    def keep(weights: Any) -> dict[str, Any]:
        for side in sides:
            for key in [key for key in weights if key.endswith(f"attn_{side}.bias")]:
                biases[key] = number(weights, key)
        return {}

    def rope(here: Any, op: Any, x: Any, table: Any, **how: Any) -> Any:
        side = "qk"[next(calls) % 2]
        bias = biases.get(f"L{here.layer}.attn_{side}.bias")
        if bias is None:
            return op(x, table, **how)
        return op(x - bias.reshape(x.shape[1:]), table, **how) + bias.reshape(x.shape[1:])

    return {**broken_here(rope=rope), "weights": keep}


ENGINE_FAULTS = (
    placed("late-bias", "qwen2", "the biases of q and k added after rope, outputs of layers",
           "late_bias", "attn_q.bias", late("q", "k"), LAYERS),
    placed("late-bias-logits", "starcoder2", "the bias of q added after rope, from logits alone",
           "late_bias", "attn_q.bias", late("q"), LOGITS),
    placed("late-bias-sinks", "gpt_oss", "the bias of k added after rope, beside sinks",
           "late_bias", "attn_k.bias", late("k"), LAYERS),
    placed("late-bias-points", "phi2", "the bias of q added after a partial rope, every point",
           "late_bias", "attn_q.bias", late("q"), None),
)  # fmt: skip
