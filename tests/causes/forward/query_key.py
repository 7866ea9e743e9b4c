"""Seeded faults of `aprfmt/causes/forward/query_key.py`.

Seen red: norms of q and k before rope left a cause unnamed.
"""

from typing import Any

from tests.diagnosis.engine_changes import LOGITS, THREE, traced
from tests.diagnosis.engines import broken
from tests.diagnosis.making import engine

HEAD = int(THREE["head_dim"])


def head_norms_left_out(op: Any, x: Any, w: Any, **how: Any) -> Any:
    """Leave out norms over a head."""
    return x if w.size == HEAD else op(x, w, **how)


ENGINE_FAULTS = (
    traced("logits-qk-norm", "qwen3", "q and k not normalised, from logits alone", ["qk_norm"],
           ["qk_norm"], LOGITS, THREE, backend=lambda: broken("rms_norm", head_norms_left_out)),
    engine("norms-missing", "llama4", "q and k not normalised", "qk_norm", "qk_norm", fine=True,
           hp={"qk_norm": False}),
    engine("norms-everywhere", "llama4", "q and k normalised in layers that do not rotate too",
           "qk_norm", "qk_norm", fine=True, block={"qk_norm_place": "after_rope"}),
    engine("hunyuan-order", "hunyuan_v1_dense", "q and k normalised before rope", "qk_norm",
           "qk_norm", fine=True, block={"qk_norm_place": "before_rope"}),
)  # fmt: skip
