"""Faults of sparse attention: the keys that an indexer chooses.

Seen red: without their hypotheses these are placed, and not named.
"""

from typing import Any

import numpy as np

from tests.diagnosis.engines import broken
from tests.diagnosis.making import engine


def shifted(op: Any, scores: Any, mask: Any, count: int) -> Any:
    """Choose the key before each."""
    kept = np.roll(op(scores, mask, count), -1, axis=-1) & mask
    kept[:, 0] |= ~kept.any(axis=-1)
    return kept


def unrotated(point: str, layer: int, x: Any, held: dict[str, Any]) -> Any:
    """Score what stood before rope."""
    if point in ("index_q", "index_k"):
        held[point] = x
    return held[point[:7]].reshape(x.shape) if point in ("index_q_rope", "index_k_rope") else x


def before_rope() -> Any:
    """Return what alters a pass so."""
    held: dict[str, Any] = {}
    return lambda point, layer, x: unrotated(point, layer, x, held)


INDEXER_FAULTS = (
    engine("lite-scale", "glm4_moe_lite", "experts' factor left out", "moe_routing",
           "routed_scale", hp={"routed_scale": 1.0}),
    engine("index-four", "deepseek_v32", "four keys chosen for five", "key_choice", "index_topk",
           fine=True, hp={"index_topk": 4}),
    engine("index-every", "glm_moe_dsa", "every key read", "key_choice", "index_topk",
           backend=lambda: broken("best_keys", lambda op, scores, mask, count: mask)),
    engine("index-shifted", "deepseek_v32", "the key before each that is chosen", "key_choice",
           "index_topk", backend=lambda: broken("best_keys", shifted)),
    engine("index-unrotated", "deepseek_v32", "an indexer's queries and keys not rotated",
           "key_choice", "indexer", fine=True, alter=before_rope),
    engine("index-pairs", "glm_moe_dsa", "an indexer's halves rotated for its pairs",
           "key_choice", "indexer", block={"indexer": "half"}),
)  # fmt: skip
