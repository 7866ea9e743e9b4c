"""Seeded faults of `aprfmt/causes/forward/norm.py`."""

from tests.diagnosis import dumps
from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.changed_encoders import encoder
from tests.diagnosis.dumps import as_npz, everything
from tests.diagnosis.engine_changes import FIVE, THREE, dumped, rope
from tests.diagnosis.making import engine

ENGINE_FAULTS = (
    engine("eps-1e-6", "llama", "norms add 1e-6 for 3e-4", "norm_eps", "norm_eps",
           hp={"norm_eps": 1e-6}),
    engine("eps-layer-norm", "gpt2", "layer norms add 1e-6", "norm_eps", "norm_eps",
           hp={"norm_eps": 1e-6}),
    engine("eps-post-norm", "olmo2", "q/k and post norms add 1e-6", "norm_eps", "norm_eps",
           hp={"norm_eps": 1e-6}),
    engine("numbers", "qwen2", "eps, base and window at once",
           ("norm_eps", "rope_theta", "sliding_window"), "norm_eps", fine=True,
           hp={"norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": None}),
    dumped("hf-eps", "qwen2", "eps 1e-6, raw .bin files with a mapping", ["norm_eps"],
           ["norm_eps"], dumps.everything, dumps.as_raw, THREE, wrong=dumps.eps),
    engine("olmo-hybrid-eps", "olmo_hybrid", "the model's epsilon behind a delta net", "norm_eps",
           "delta_norm_eps", fine=True, hp=lambda hp: {"delta_norm_eps": hp["norm_eps"]}),
    dumped("hf-eps-outside", "llama", "epsilon is added to the root", ["norm_eps"], ["norm_eps"],
           everything, as_npz, FIVE, wrong=wrong.forwards("RMSNorm", wrong.eps_outside)),
    dumped("hf-one-norm-eps", "llama", "another epsilon in one norm of layer 1", ["norm_eps"],
           ["L1.norm_eps"], everything, as_npz, FIVE,
           wrong=wrong.one_eps("model.layers.1.input_layernorm", 1e-2)),
    dumped("hf-three", "qwen3", "keys not rotated, their norm left out, another epsilon",
           ["norm_eps", "qk_norm", "rope_layers"], ["norm_eps"], everything, as_npz, THREE,
           wrong=wrong.both(rope(wrong.queries_only), wrong.left_out("k_norm"), dumps.eps)),
    encoder("epsilon"),
)  # fmt: skip
