"""Seeded faults of `aprfmt/causes/forward/cached_rotations.py`.

Seen red: without the hypothesis, and without its place in the search, these are placed alone.
"""

from typing import Any

from tests.diagnosis.engine_changes import LAYERS, LOGITS, How, placed
from tests.diagnosis.engines import broken_here


def cached(first: int, times: int, each: bool = False, only: int | None = None) -> How:
    """Read cached keys rotated `times` times from query `first` on, in one layer or all.

    They are those before `first`, or before the query with `each`.
    """
    held: dict[str, Any] = {}

    def rope(here: Any, op: Any, x: Any, table: Any, **how: Any) -> Any:
        y = op(x, table, **how)
        held["key"] = op(y, table, **how) if times else x
        return y

    def scores(here: Any, op: Any, q: Any, k: Any, heads: Any) -> Any:
        right = op(q, k, heads)
        if only is not None and here.layer != only:
            return right
        own = held["key"]
        made = k.copy()
        made[..., k.shape[-1] - own.shape[-1] :] = own
        wrong = op(q, made, heads)
        for query in range(first, len(q)):
            stop = query if each else first
            right[:, query, :stop] = wrong[:, query, :stop]
        return right

    return broken_here(rope=rope, scores=scores)


ENGINE_FAULTS = (
    placed("cached-unrotated", "llama", "keys of 7 cached tokens unrotated, outputs of layers",
           "kv_cache", "kv_cache", cached(7, 0), LAYERS),
    placed("cached-unrotated-one", "qwen3", "the same in layer 1, normalised keys", "kv_cache",
           "L1.kv_cache", cached(9, 0, only=1), LAYERS),
    placed("cached-unrotated-steps", "phi2", "the same of steps and a partial rope, every point",
           "kv_cache", "kv_cache", cached(6, 0, each=True), None),
    placed("cached-twice", "gemma2", "cached keys rotated twice, from logits alone", "kv_cache",
           "kv_cache", cached(8, 2), LOGITS),
    placed("cached-latent", "deepseek_v2", "the cached part of all keys unrotated", "kv_cache",
           "kv_cache", cached(5, 0)),
)  # fmt: skip
