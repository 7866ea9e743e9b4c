"""Seeded faults of results cut to 16 bits, not rounded.

Seen red: a cut norm that is a located bug from layers' outputs, and elsewhere only "rounding";
all results cut that were a factor of the residuals, 0.97, which took away half of the difference.
"""

from typing import Any

import numpy as np

from tests.diagnosis.engine_changes import LAYERS, LOGITS, How, placed
from tests.diagnosis.engines import broken_here


def cut(*ops: str, bits: int = 16) -> How:
    """Cut the last bits of the results of operations; 13 of them leave what float16 holds."""

    def change(here: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        y = np.ascontiguousarray(op(*args, **kwargs), np.float32)
        return (y.view(np.uint32) & np.uint32(-1 << bits & 0xFFFFFFFF)).view(np.float32)

    return broken_here(**dict.fromkeys(ops, change))


EVERYTHING = (
    "linear", "add", "rms_norm", "activate", "scores", "mix", "probs", "embed", "scale", "rope",
    "mul",
)  # fmt: skip


CUT = (
    placed("cut-norms", "llama", "norms cut to bfloat16, from layers' outputs", "rounding",
           "rms_norm", cut("rms_norm"), LAYERS, verdict="precision"),
    placed("cut-norms-logits", "gpt_neox", "norms cut to bfloat16, from logits alone", "rounding",
           "layer_norm", cut("layer_norm"), LOGITS, verdict="precision"),
    placed("cut-norms-half", "gemma3", "norms cut to float16, from layers' outputs", "rounding",
           "rms_norm", cut("rms_norm", bits=13), LAYERS, verdict="precision"),
    placed("cut-products", "llama", "products cut to bfloat16", "rounding", "L0.q",
           cut("linear"), None, verdict="precision"),
    placed("cut-everything", "llama", "all results cut to bfloat16, from layers' outputs",
           "rounding", "linear", cut(*EVERYTHING), LAYERS, verdict="precision"),
    placed("cut-everything-scaled", "gemma2", "the same in a model with factors and caps",
           "rounding", "linear", cut(*EVERYTHING), LAYERS, verdict="precision",
           confidence="unconfirmed"),
    placed("cut-sums", "qwen3", "the stream cut to bfloat16, from layers' outputs", "rounding",
           "L0.out", cut("add"), LAYERS, verdict="precision"),
)  # fmt: skip
