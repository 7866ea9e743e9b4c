"""Seeded faults of `aprfmt/causes/forward/rope.py`.

Seen red: ALiBi's slopes left a cause unnamed, and ALiBi left out was "residual", confirmed. A
factor of one of YaRN's two scales was located. Long factors in a short text were explained only:
"positions counted from 4" passes the length that decides, too.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aprfmt.inference.score_bias import alibi_slopes
from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.changed_encoders import encoder
from tests.diagnosis.dumps import as_npz, everything, layer_outputs, logits_only
from tests.diagnosis.engine_changes import (
    LAYERS,
    LOGITS,
    SEVEN,
    THREE,
    How,
    dumped,
    last,
    placed,
    rope,
    traced,
    without_offset,
)
from tests.diagnosis.engines import broken_here
from tests.diagnosis.head_changes import exchanged_slopes
from tests.diagnosis.making import engine
from tests.diagnosis.token_edits import Texts, configured, rows
from tests.models import IDS


def slopes(change: Callable[[Any], Any]) -> How:
    """Take other slopes."""
    return broken_here(alibi_bias=lambda here, op, own, *rest: op(change(np.asarray(own)), *rest))


NONE: How = {"block": {"score_bias": "none"}}


EVEN = slopes(lambda own: np.array([2.0 ** (-8 * (i + 1) / len(own)) for i in range(len(own))]))


def last_elements(here: Any, op: Any, x: Any, table: Any, **how: Any) -> Any:
    """Rotate the last elements of a head."""
    still = x.shape[-1] - 2 * table[0].shape[-1]
    turned = op(np.ascontiguousarray(x[..., still:]), table, **how)
    return np.concatenate([x[..., :still], turned], -1)


def half_of_pairs(here: Any, op: Any, x: Any, table: Any, **how: Any) -> Any:
    """Rotate half of the elements, by the first of the whole head's frequencies."""
    few = table[0].shape[-1] // 2
    return op(x, tuple(np.ascontiguousarray(part[:, :few]) for part in table), **how)


def head_frequencies(here: Any, op: Any, x: Any, table: Any, **how: Any) -> Any:
    """Rotate the model's elements by the frequencies that a rotation of the whole head has."""
    cos, sin = (np.asarray(part, np.float64) for part in table)
    own = np.arctan2(sin[1], cos[1]) ** (2 * cos.shape[-1] / x.shape[-1])
    angles = np.arange(len(cos))[:, None] * own
    return op(x, (np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)), **how)


ROTATED = broken_here(rope=last_elements)


def without(key: str) -> Callable[[Texts], None]:
    return lambda config: config["rope_parameters"].pop(key)


def attended(scale: float) -> Callable[[Any], dict[str, Any]]:
    """Return a change of YaRN's factor on cos and sin to the formula's of one scale."""

    def change(own: Any) -> dict[str, Any]:
        scaling = own["rope_scaling"]
        factor = 0.1 * scale * math.log(scaling["factor"]) + 1
        return {"rope_scaling": dict(scaling) | {"attention_factor": factor}}

    return change


def long_factors(own: Any) -> dict[str, Any]:
    """Return a longrope with its long factors at every length."""
    scaling = own["rope_scaling"]
    return {"rope_scaling": dict(scaling) | {"short_factor": scaling["long_factor"]}}


ENGINE_FAULTS = (
    engine("theta", "llama", "base 10000 for 5000", "rope_theta", "rope_theta", upstream=(3,),
           hp={"rope_theta": 10000.0}),
    engine("theta-odd", "qwen3", "base 7345, behind a q/k-norm", "rope_theta", "rope_theta",
           fine=True, hp={"rope_theta": 7345.0}),
    engine("scaling-dropped", "llama-llama3", "llama3 scaling left out", "rope_scaling",
           "rope_scaling", hp={"rope_scaling": None}),
    engine("yarn-dropped", "llama-yarn", "yarn left out", "rope_scaling", "rope_scaling",
           fine=True, hp={"rope_scaling": None}),
    engine("longrope-other-list", "phi3", "the factors of long texts in a short one",
           "rope_scaling", "rope_scaling.short_factor", hp=long_factors),
    engine("yarn-mscale", "deepseek_v3-yarn", "the factor of mscale alone, not its ratio",
           "rope_scaling", "rope_scaling.attention_factor", hp=attended(0.8)),
    engine("yarn-mscale-all-fine", "deepseek_v3-yarn", "the factor of mscale_all_dim alone",
           "rope_scaling", "rope_scaling.attention_factor", fine=True, hp=attended(1.2)),
    engine("linear-factor", "llama", "positions divided by 4", "rope_scaling", "rope_scaling",
           fine=True, hp={"rope_scaling": {"type": "linear", "factor": 4.0}}),
    engine("local-theta", "gemma3", "local layers rotate with the global base", "rope_theta",
           "L0.rope_theta_local", fine=True,
           hp=lambda hp: {"rope_theta_local": hp["rope_theta"]}),
    engine("nope-rotates", "smollm3", "a layer rotates that should not", "rope_layers",
           "L3.rope_layers", hp={"rope_layers": (True,) * 5}),
    engine("layer-still", "llama", "layer 1 does not rotate", "rope_layers", "L1.rope_layers",
           hp={"rope_layers": (True, False, True)}),
    engine("full-layer-rotates", "cohere2", "a layer without a window rotates", "rope_layers",
           "L3.rope_layers", hp={"rope_layers": (True,) * 5}),
    engine("partial-whole", "phi2", "all elements rotated for half of them", "partial_rotary",
           "rope_dim", hp=lambda hp: {"rope_dim": hp["head_dim"]}),
    engine("positions-5", "llama", "positions counted from 5", "positions", "positions",
           fine=True, positions=range(5, 5 + len(IDS))),
    engine("positions-learned", "gpt2", "learned positions two rows on", "positions",
           "positions", positions=range(2, 2 + len(IDS))),
    traced("layers-theta", "llama", "base 10000 for 5000, from outputs of layers",
           ["rope_theta"], ["rope_theta"], LAYERS, hp={"rope_theta": 1e4}),
    traced("logits-theta", "qwen2", "base 7345 for 5000, from logits alone", ["rope_theta"],
           ["rope_theta"], LOGITS, THREE, hp={"rope_theta": 7345.0}),
    traced("stacked-numbers", "llama", "eps and base, from logits alone",
           ["rope_theta", "norm_eps"], ["rope_theta"], LOGITS,
           hp={"norm_eps": 1e-6, "rope_theta": 1e4}),
    engine("rotated-fourth", "llama4", "the fourth layer rotates too", "rope_layers",
           "L3.rope_layers", fine=True, hp={"rope_layers": (True,) * 5}),
    engine("exaone4-rotates", "exaone4", "the layer without a window rotates", "rope_layers",
           "L3.rope_layers", fine=True, hp={"rope_layers": (True,) * 5}),
    engine("glm4-whole", "glm4", "whole heads rotated for half of them", "partial_rotary",
           "rope_dim", hp=lambda hp: {"rope_dim": hp["head_dim"]}),
    engine("bigcode-positions", "gpt_bigcode", "learned positions two rows on", "positions",
           "positions", positions=range(2, 31)),
    engine("falcon-theta", "falcon", "base 1e6 for 5000", "rope_theta", "rope_theta",
           hp={"rope_theta": 1e6}),
    engine("falcon-rw-slopes", "falcon_rw", "slopes that end at 4 for 8", "positions",
           "alibi_max_bias", fine=True, hp={"alibi_max_bias": 4.0}),
    engine("falcon-rw-40b-none", "falcon_rw_40b", "nothing is added for the distance",
           "positions", "scores", fine=True, block={"score_bias": "none"}),
    engine("roberta-causal-row", "roberta_causal", "positions begin at the padding's row",
           "positions", "position_offset", fine=True, hp={"position_offset": 0}),
    traced("roberta-causal-row-coarse", "roberta_causal", "the same, outputs of layers",
           ["positions"], ["position_offset"], LAYERS, {}, hp={"position_offset": 0}),
    traced("opt-row-logits", "opt", "positions begin one row early, from logits alone",
           ["positions"], ["position_offset"], LOGITS, {}, hp={"position_offset": 1}),
    traced("theta-low", "smollm3", "base 350 for 5000, outputs of layers", ["rope_theta"],
           ["rope_theta"], LAYERS, {}, hp={"rope_theta": 350.0}),
    traced("theta-low-logits", "llama", "base 350 for 5000, from logits alone", ["rope_theta"],
           ["rope_theta"], LOGITS, {}, hp={"rope_theta": 350.0}),
    engine("bloom-slopes", "bloom", "slopes that end at 4 for 8", "positions", "alibi_max_bias",
           fine=True, hp={"alibi_max_bias": 4.0}),
    engine("opt-row", "opt", "positions begin at the table's first row", "positions",
           "position_offset", fine=True, hp={"position_offset": 0}),
    engine("qwen2-vl-section", "qwen2_vl", "half of each head rotated, as if by one section",
           "partial_rotary", "rope_dim", hp=lambda hp: {"rope_dim": hp["head_dim"] // 2}),
    engine("qwen3-vl-theta", "qwen3_vl", "transformers' own base for 5000", "rope_theta",
           "rope_theta", hp={"rope_theta": 5e5}),
    engine("bamba-whole", "bamba", "whole heads rotated for half of them", "partial_rotary",
           "rope_dim", hp=lambda hp: {"rope_dim": hp["head_dim"]}),
    engine("gemma4-unified-theta", "gemma4_unified", "10000 for the base 9000", "rope_theta",
           "L2.rope_theta", hp={"rope_theta": 10000.0}),
    engine("lfm3-theta", "lfm3", "5000 for the base 9000", "rope_theta", "L2.rope_theta",
           hp={"rope_theta": 5000.0}),
    dumped("hf-keys-unrotated", "llama", "keys are not rotated, outputs of layers",
           ["rope_layers"], ["rope_layers"], layer_outputs, as_npz, SEVEN,
           wrong=rope(wrong.queries_only)),
    dumped("hf-rotated-twice", "qwen3", "q and k are rotated twice, logits alone",
           ["rope_layers"], ["rope_layers"], logits_only, as_npz, THREE,
           wrong=rope(wrong.rotated_twice)),
    dumped("hf-values-rotated", "llama", "values are rotated too", ["rope_layers"],
           ["rope_layers"], everything, as_npz, THREE, wrong=wrong.turned_values()),
    dumped("hf-positions-jump", "qwen3", "positions jump by 5 at token 11, logits alone",
           ["positions"], ["positions"], logits_only, as_npz, THREE, wrong=wrong.jump(11, 5)),
    placed("alibi-none", "bloom", "no ALiBi", "positions", "scores", NONE),
    placed("alibi-none-logits", "mpt", "no ALiBi, from logits alone", "positions", "scores", NONE,
           LOGITS),
    placed("alibi-none-keys", "falcon_rw", "no ALiBi, of keys in bfloat16", "positions", "scores",
           NONE),
    placed("alibi-even", "mpt", "slopes of a power of two for six heads", "positions",
           "alibi_slopes", EVEN),
    placed("alibi-even-logits", "bloom", "the same, from logits alone", "positions",
           "alibi_slopes", EVEN, LOGITS),
    placed("alibi-sign", "bloom", "slopes of the other sign", "positions", "alibi_slopes",
           slopes(lambda own: -own)),
    placed("alibi-rank", "bloom", "both ranks take the first one's slopes", "positions",
           "alibi_slopes", slopes(lambda own: np.tile(own[: len(own) // 2], 2))),
    placed("alibi-rank-logits", "mpt", "slopes of half as many heads on both ranks, logits alone",
           "positions", "alibi_slopes",
           slopes(lambda own: np.tile(alibi_slopes(len(own) // 2, 8.0), 2)), LOGITS),
    placed("alibi-ranks", "bloom", "three ranks take the slopes of two heads", "positions",
           "alibi_slopes", slopes(lambda own: np.tile(alibi_slopes(2, 8.0), 3))),
    placed("alibi-solved", "bloom", "slopes that no formula gives, from the scores", "positions",
           "alibi_slopes", slopes(lambda own: own * np.linspace(1.1, 1.7, len(own))), None),
    placed("rotary-end", "phi2", "the last elements of heads rotate", "partial_rotary",
           "rope_dim", ROTATED),
    placed("rotary-end-logits", "gpt_neox", "the same, from logits alone", "partial_rotary",
           "rope_dim", ROTATED, LOGITS),
    placed("rotary-half", "llama", "half of each head rotates, by the first frequencies",
           "partial_rotary", "rope_dim", broken_here(rope=half_of_pairs)),
    # https://github.com/pie-project/pie/pull/603
    placed("rotary-head-angles", "phi2", "a part of each head rotates, by a whole head's angles",
           "partial_rotary", "rope_dim", broken_here(rope=head_frequencies)),
    placed("two-places", "gemma", "the last norm lacks its 1 and the base is another",
           "rope_theta norm_offset", "rope_theta",
           {**without_offset(last), "hp": {"rope_theta": 1e4}}),
    encoder("row"),
    encoder("rows"),
    encoder("distance"),
    encoder("base"),
    placed("bloom-slopes-heads", "bloom", "slopes of heads 1 and 4 exchanged", "positions",
           "alibi_slopes", broken_here(add=exchanged_slopes)),
)  # fmt: skip


FILE_FAULTS = rows({
    "sub-key-lost": ("rope_scaling lost its trained length",
                     configured("llama-llama3", without("original_max_position_embeddings")),
                     "rope_scaling", "rope_scaling.original_max_position_embeddings"),
    "sub-key-unread": ("rope_scaling lost a key that nothing can be read without",
                       configured("llama-llama3", without("low_freq_factor")), "rope_scaling",
                       "rope_parameters.low_freq_factor"),
}, "bug")  # fmt: skip
