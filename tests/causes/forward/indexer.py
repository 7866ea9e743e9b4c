"""Seeded faults of `aprfmt/causes/forward/indexer.py`.

Seen red: without their hypotheses these are placed, and not named.
"""

from typing import Any

import numpy as np

from tests.diagnosis.engine_changes import M3, V4
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


def first_group(point: str, layer: int, x: Any) -> Any:
    """Let every group of heads read the first one's blocks."""
    return np.broadcast_to(x[:1], x.shape).copy() if point == "index_blocks" else x


ENGINE_FAULTS = (
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
    engine(
        "v4-two",
        V4,
        "two windows chosen for three",
        "key_choice",
        "index_topk",
        fine=True,
        hp={"index_topk": 2},
    ),
    engine(
        "m3-blocks",
        M3,
        "three blocks chosen for four",
        "key_choice",
        "index_topk",
        fine=True,
        hp={"index_topk": 3},
    ),
    engine(
        "m3-local",
        M3,
        "the query's own block not read first",
        "key_choice",
        "index_local_blocks",
        fine=True,
        hp={"index_local_blocks": 1},
    ),
    engine(
        "m3-group",
        M3,
        "every group reads the first one's blocks",
        "key_choice",
        "index_blocks",
        fine=True,
        alter=lambda: first_group,
    ),
)  # fmt: skip
