"""Seeded faults of `aprfmt/causes/forward/row_strides.py`.

Seen red: "no cause of the table fits", with every operation of the MLP.
"""

from typing import Any

import numpy as np

from tests.diagnosis.engine_changes import LAYERS, How, placed
from tests.diagnosis.engines import broken_here

POINTS = frozenset({"mid", "ffn_norm", "ffn_out", "out", "logits"})


def strided(order: str, *read: str) -> How:
    """Read parts of joined rows, such as [gate | up], with the stride of one part."""
    held: dict[str, Any] = {}
    names = order.split()

    def linear(here: Any, op: Any, x: Any, w: Any, bias: Any) -> Any:
        made = op(x, w, bias)
        held.update({name: made for name in names if w.key.endswith(f".ffn_{name}.weight")})
        return made

    def activate(here: Any, op: Any, x: Any, kind: str, **how: Any) -> Any:
        held["act"] = lambda gate: op(gate, kind, **how)
        return op(x, kind, **how)

    def mul(here: Any, op: Any, a: Any, b: Any) -> Any:
        if "act" not in held or b is not held.get("up"):
            return op(a, b)
        shape = held["up"].shape
        memory = np.concatenate([held[name] for name in names], 1).reshape(-1)
        for at, name in enumerate(names):
            if name in read:
                held[name] = np.resize(memory[at * shape[1] :], shape)
        return op(held.pop("act")(held["gate"]), held["up"])

    return broken_here(linear=linear, activate=activate, mul=mul)


ENGINE_FAULTS = (
    placed("stride-gate", "phi3", "gate is read from the joined rows as if contiguous",
           "row_stride", "ffn_gate", strided("gate up", "gate"), POINTS),
    placed("stride-up", "llama", "up is read from the joined rows as if contiguous",
           "row_stride", "ffn_up", strided("gate up", "up"), LAYERS),
    placed("stride-both", "qwen3", "up and gate are read as if each were contiguous",
           "row_stride", "ffn_up", strided("up gate", "up", "gate"), POINTS),
)  # fmt: skip
