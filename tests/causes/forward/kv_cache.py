"""Seeded faults of `aprfmt/causes/forward/kv_cache.py`."""

from typing import Any

from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.dumps import as_npz, layer_outputs
from tests.diagnosis.engine_changes import LAYERS, LOGITS, THREE, How, dumped, placed, stale
from tests.diagnosis.engines import broken_here
from tests.diagnosis.making import engine

SHIFTED = lambda n: [0, *range(n - 1)]  # noqa: E731


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
    engine("cache-shifted", "llama", "layer 0 reads the row before", "kv_cache", "L0.kv_cache",
           cache=stale(SHIFTED)),
    engine("cache-one", "llama", "one row of the cache is its neighbour's", "kv_cache",
           "L1.kv_cache", fine=True, upstream=(26,),
           cache=stale(lambda n: [*range(7), 6, *range(8, n)], 1)),
    engine("cache-steps", "llama", "later tokens read one stale row",
           ("kv_cache", "capture_rows"), "L1.v_cache", fine=True, cached=20,
           cache=stale(lambda n: [*range(7), 6, *range(8, n)], 1)),
    dumped("hf-first-cache", "llama", "all layers read the first one's keys and values",
           ["kv_cache"], ["kv_cache"], layer_outputs, as_npz, THREE,
           wrong=wrong.first_layers_cache()),
    dumped("hf-never-written", "qwen2",
           "five rows of a layer's cache are zero, outputs of layers", ["kv_cache"],
           ["L1.kv_cache"], layer_outputs, as_npz, THREE, wrong=wrong.never_written(1, 4, 9)),
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
