"""Seeded faults of `aprfmt/causes/forward/product_inputs.py`.

Seen red: without the usual mistakes of this file they are placed, and not named.
"""

from typing import Any

from tests.diagnosis.engine_changes import How
from tests.diagnosis.engines import broken_here
from tests.diagnosis.making import engine


def in_sequence(norm: str) -> How:
    """Give the MLP of a parallel block the stream after attention, normed as attention's input."""
    held: dict[str, Any] = {}

    def normed(here: Any, op: Any, x: Any, *weights: Any, **how: Any) -> Any:
        held["norm"] = lambda stream: op(stream, *weights, **how)
        return op(x, *weights, **how)

    def add(here: Any, op: Any, a: Any, b: Any) -> Any:
        found = op(a, b)
        if b.ndim > 1 and here.point in ("attn_out", "attn_contrib"):
            held["stream"] = found
        return found

    def linear(here: Any, op: Any, x: Any, w: Any, bias: Any) -> Any:
        into = w.key.endswith((".ffn_up.weight", ".ffn_gate.weight"))
        return op(held["norm"](held["stream"]) if into else x, w, bias)

    return broken_here(**{norm: normed}, add=add, linear=linear)


ENGINE_FAULTS = (
    engine("falcon-in-sequence", "falcon", "the MLP reads the norm of what attention has added to",
           "residual", "ffn_up", **in_sequence("layer_norm")),
    engine("cohere-in-sequence", "cohere", "the MLP reads the norm of what attention has added to",
           "residual", ("ffn_gate", "ffn_up"), **in_sequence("layer_norm")),
)  # fmt: skip
