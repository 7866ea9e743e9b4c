"""Seeded faults of `aprfmt/causes/forward/attention_operands.py`."""

from tests.diagnosis.engines import broken_here
from tests.diagnosis.making import engine

ENGINE_FAULTS = (
    engine("attention-gate", "qwen3_5", "the gate of attention left out", "attention_gate",
           "attn_gate", **broken_here(
               mul=lambda here, op, x, g: x if here.point == "attn_mixed" else op(x, g))),
)  # fmt: skip
