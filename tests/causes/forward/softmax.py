"""Seeded faults of `aprfmt/causes/forward/softmax.py`."""

from typing import Any

import numpy as np

from tests.diagnosis.engine_changes import LAYERS, LOGITS, THREE, How, heads, placed, traced
from tests.diagnosis.engines import LONG, broken, broken_here
from tests.diagnosis.head_changes import exchanged_sinks, sinks_by_row
from tests.diagnosis.making import engine


def first_tile(op: Any, scores: Any, own: Any) -> Any:
    """Divide by the sum of the first 32 keys only."""
    masked = np.where(own.mask, scores, -np.inf)
    e = np.exp(masked - masked.max(-1, keepdims=True))
    return e / e[..., :32].sum(-1, keepdims=True)


def one_more(op: Any, scores: Any, own: Any) -> Any:
    """Divide by the sum plus 1."""
    masked = np.where(own.mask, scores, -np.inf)
    highest = masked.max(-1, keepdims=True)
    e = np.exp(masked - highest)
    return (e / (e.sum(-1, keepdims=True) + np.exp(-highest))).astype(scores.dtype)


def one_added() -> How:
    """Divide by the sum plus 1 in every softmax of attention."""
    return {"backend": lambda: broken("probs", one_more)}


ENGINE_FAULTS = (
    engine("tiles", "llama", "softmax sums over the first 32 keys", "softmax_reduction",
           "softmax", upstream=(25,), ids=LONG, backend=lambda: broken("probs", first_tile)),
    engine("sinks", "gpt_oss", "sinks left out of the softmax", "softmax_reduction", "softmax",
           fine=True, backend=lambda: broken("probs", heads(sinks=None))),
    placed("softmax-one", "llama", "1 added to the softmax's sum, outputs of layers",
           "softmax_reduction", "softmax", one_added(), LAYERS),
    placed("softmax-one-logits", "gemma2", "the same of capped scores, from logits alone",
           "softmax_reduction", "softmax", one_added(), LOGITS),
    placed("softmax-one-latent", "deepseek_v2", "the same of latent attention",
           "softmax_reduction", "softmax", one_added()),
    traced("logits-tiles", "llama", "a softmax over its first 32 keys, from logits alone",
           ["softmax_reduction"], ["softmax"], LOGITS, THREE, ids=LONG,
           backend=lambda: broken("probs", first_tile)),
    engine("sinks-exchanged", "gpt_oss", "sinks of heads 1 and 2 exchanged", "softmax_reduction",
           "softmax", backend=exchanged_sinks([0, 2, 1, 3])),
    engine("sinks-one", "gpt_oss", "head 3 has the sink of head 0", "softmax_reduction",
           "softmax", backend=exchanged_sinks([0, 1, 2, 0])),
    placed("sinks-by-row", "gpt_oss", "the sink of the row's number", "softmax_reduction",
           "softmax", broken_here(probs=sinks_by_row)),
)  # fmt: skip
