"""Seeded faults of `aprfmt/causes/forward/kv_cache.py`."""

from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.dumps import as_npz, layer_outputs
from tests.diagnosis.engine_changes import THREE, dumped, stale
from tests.diagnosis.making import engine

SHIFTED = lambda n: [0, *range(n - 1)]  # noqa: E731


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
)  # fmt: skip
