"""Faults of what llama4 alone has: chunks, experts weighed before, norms and factors by layer.

Seen red: chunks taken for windows named a window of their size, experts weighed behind named
nothing.
"""

from tests.diagnosis.making import engine

LLAMA4_FAULTS = (
    engine("chunks-dropped", "llama4", "no chunks", "sliding_window", "sliding_window",
           hp={"sliding_window": None}),
    engine("chunks-5", "llama4", "chunks of 5 for 8", "sliding_window", "sliding_window",
           fine=True, hp={"sliding_window": 5}),
    engine("chunks-windows", "llama4", "the last 8 positions seen for those of the chunk",
           "sliding_window", "sliding_window", fine=True, block={"window": "sliding"}),
    engine("experts-behind", "llama4", "experts' weights multiply what comes out of them",
           "moe_routing", "expert_weights", fine=True, block={"expert_weights": "output"}),
    engine("experts-softmax", "llama4", "experts weighed by a softmax", "moe_routing", "router",
           hp={"router": "softmax"}),
    engine("queries-steady", "llama4", "no factor on the queries", "attention_scale",
           "temperature_scale", fine=True, hp={"temperature_scale": None}),
    engine("queries-length", "llama4", "their factor grows by 7 positions for 5",
           "attention_scale", "temperature_length", fine=True, hp={"temperature_length": 7}),
    engine("norms-missing", "llama4", "q and k not normalised", "qk_norm", "qk_norm", fine=True,
           hp={"qk_norm": False}),
    engine("norms-everywhere", "llama4", "q and k normalised in layers that do not rotate too",
           "qk_norm", "qk_norm", fine=True, block={"qk_norm_place": "after_rope"}),
    engine("rotated-fourth", "llama4", "the fourth layer rotates too", "rope_layers",
           "L3.rope_layers", fine=True, hp={"rope_layers": (True,) * 5}),
)  # fmt: skip
