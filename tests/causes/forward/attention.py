"""Seeded faults of `aprfmt/causes/forward/attention.py`.

Seen red: chunks taken for windows named a window of their size; a window in one more layer was
"every layer has the window", with the base of rope that this gave to a layer that was right.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.changed_encoders import encoder
from tests.diagnosis.dumps import as_npz, everything, logits_only
from tests.diagnosis.engine_changes import (
    ALL,
    FIVE,
    LAYERS,
    LOGITS,
    THREE,
    How,
    dumped,
    heads,
    placed,
    traced,
)
from tests.diagnosis.engines import COARSE, broken, broken_here
from tests.diagnosis.making import engine


def windowed_too() -> Any:
    """Return a backend in which the third of six layers has the others' window of 8."""
    turns = iter(range(1 << 30))

    def probs(op: Any, scores: Any, heads: Any) -> Any:
        if next(turns) % 6 != 2:
            return op(scores, heads)
        at = np.arange(scores.shape[-1])
        near = heads.mask & (at > at[-scores.shape[1] :, None] - 8)
        return op(scores, replace(heads, mask=near, causal=None))

    return broken("probs", probs)


def chunks(i: Any, j: Any) -> Any:
    """See keys of the query's own nine only."""
    return (j <= i) & (i // 9 == j // 9)


def gone(key: int, token: int) -> How:
    """Let keys before one be gone from a token on."""

    def probs(here: Any, op: Any, scores: Any, own: Any) -> Any:
        at = np.arange(own.mask.shape[-1])
        mask = own.mask & ((at[None] >= key) | (at[: len(own.mask), None] < token))
        return op(scores, replace(own, mask=mask, causal=None))

    return broken_here(probs=probs)


def ring(first: int, last: int) -> How:
    """Let only the first keys of a full cache and the last ones be seen."""

    def probs(here: Any, op: Any, scores: Any, own: Any) -> Any:
        key = np.arange(own.mask.shape[-1])[None]
        query = np.arange(len(own.mask))[:, None]
        mask = own.mask & ((key < first) | (key > query - last))
        return op(scores, replace(own, mask=mask, causal=None))

    return broken_here(probs=probs)


def ahead(count: int, windows: bool = False) -> Any:
    """Return a backend whose queries see so many later keys; `windows`: in layers with one only."""

    def mask(own: Any) -> Any:
        at = np.arange(own.mask.shape[-1])
        later = at[None] - at[:, None]
        there = own.mask[-1].sum() < len(at) or not windows
        return own.mask | (later > 0) & (later <= count) if there else own.mask

    return lambda: broken("probs", heads(mask=mask, causal=None))


def open_chunks(own: Any) -> Any:
    """See all tokens of a query's own eight in layers with chunks, which may be run one by one."""
    at = np.arange(own.mask.shape[-1]) // 8
    every = len(at) > 8 and own.mask[-1].all()
    return own.mask if every else own.mask | (at[:, None] == at)


ENGINE_FAULTS = (
    engine("window-dropped", "mistral", "no sliding window", "sliding_window", "sliding_window",
           hp={"sliding_window": None}),
    engine("window-5", "qwen2", "a window of 5 for 8, where layers have one", "sliding_window",
           "L1.sliding_window", fine=True, hp={"sliding_window": 5}),
    engine("mask-none", "llama", "attention sees later tokens", "mask", "mask", upstream=(25,),
           backend=lambda: broken("probs", heads(mask=ALL, causal=None))),
    engine("attn-softcap", "gemma2", "scores not capped", "softcap", "attn_softcap",
           hp={"attn_softcap": None}),
    engine("attn-softcap-3", "gemma2", "scores capped at 3 for 4", "softcap", "attn_softcap",
           fine=True, hp={"attn_softcap": 3.0}),
    engine("final-softcap", "gemma2", "logits not capped", "softcap", "final_softcap", fine=True,
           hp={"final_softcap": None}),
    engine("final-softcap-only-logits", "gemma2", "the same, from the ten slots", "softcap",
           "final_softcap", confidence="ambiguous", hp={"final_softcap": None}),
    engine("attention-scale", "granite", "1/sqrt(d) for the model's factor", "attention_scale",
           "attn_scale", hp=lambda hp: {"attn_scale": hp["head_dim"] ** -0.5}),
    engine("attention-scale-1", "phi3", "scores not scaled", "attention_scale", "attn_scale",
           fine=True, hp={"attn_scale": 1.0}),
    traced("logits-window", "mistral", "a window of 9 for 8, from logits alone",
           ["sliding_window"], ["sliding_window"], LOGITS, THREE, hp={"sliding_window": 9}),
    traced("logits-every-window", "gemma3", "every layer has the window, from logits alone",
           ["sliding_window"], ["window_layers"], LOGITS, {},
           hp=lambda hp: {"window_layers": (True,) * len(hp["window_layers"])}),
    traced("window-in-one-more", "gemma3", "the only layer without a window has it, and its rope",
           ["sliding_window"], ["window_layers"], COARSE, {},
           hp=lambda hp: {"window_layers": (True,) * len(hp["window_layers"])}),
    traced("window-in-one-less", "gemma3", "the first window is lost, and its rope",
           ["sliding_window"], ["window_layers"], COARSE, {},
           hp=lambda hp: {"window_layers": (False, *hp["window_layers"][1:])}),
    traced("logits-cap", "gemma2", "logits not capped, from logits alone", ["softcap"],
           ["final_softcap"], LOGITS, {}, confidence="ambiguous", hp={"final_softcap": None}),
    traced("stacked-scores", "llama", "base and scale of the scores, from outputs of layers",
           ["attention_scale", "rope_theta"], ["attn_scale"], LAYERS, THREE,
           hp=lambda hp: {"rope_theta": 1e4, "attn_scale": 1 / hp["head_dim"]}),
    traced("stacked-caps", "gemma2", "cap, scale and activation, from outputs of layers",
           ["attention_scale", "softcap", "activation"], ["attn_scale"], LAYERS, {},
           hp=lambda hp: {"attn_softcap": None, "attn_scale": hp["head_dim"] ** -0.5,
                          "activation": "gelu"}),
    engine("chunks-dropped", "llama4", "no chunks", "sliding_window", "sliding_window",
           hp={"sliding_window": None}),
    engine("chunks-5", "llama4", "chunks of 5 for 8", "sliding_window", "sliding_window",
           fine=True, hp={"sliding_window": 5}),
    engine("chunks-windows", "llama4", "the last 8 positions seen for those of the chunk",
           "sliding_window", "sliding_window", fine=True, block={"window": "sliding"}),
    engine("queries-steady", "llama4", "no factor on the queries", "attention_scale",
           "temperature_scale", fine=True, hp={"temperature_scale": None}),
    engine("queries-length", "llama4", "their factor grows by 7 positions for 5",
           "attention_scale", "temperature_length", fine=True, hp={"temperature_length": 7}),
    engine("olmo3-window", "olmo3", "no sliding window", "sliding_window", "sliding_window",
           hp={"sliding_window": None}),
    engine("mpt-scale", "mpt", "scores not scaled", "attention_scale", "attn_scale", fine=True,
           hp={"attn_scale": 1.0}),
    engine("ministral-window", "ministral", "no sliding window", "sliding_window",
           "sliding_window", hp={"sliding_window": None}),
    engine("ministral-steady", "ministral3", "no factor on the queries", "attention_scale",
           "temperature_scale", fine=True, hp={"temperature_scale": None}),
    engine("gemma4-window", "gemma4", "a window of 9 for 8", "sliding_window", "L0.sliding_window",
           fine=True, hp={"sliding_window": 9}),
    engine("gemma4-wrong-window", "gemma4", "a window in a layer that has none", "sliding_window",
           "L2.sliding_window", fine=True,
           backend=windowed_too),
    dumped("hf-prefix", "llama", "the first 7 tokens see each other, logits alone", ["mask"],
           ["mask"], logits_only, as_npz, FIVE,
           wrong=wrong.seen(lambda i, j: (j <= i) | (i < 7) & (j < 7))),
    dumped("hf-chunks", "llama", "attention within nine tokens", ["mask"], ["mask"], everything,
           as_npz, THREE, wrong=wrong.seen(chunks)),
    dumped("hf-hidden-as-zero", "qwen3", "hidden keys have a score of zero, logits alone",
           ["mask"], ["mask"], logits_only, as_npz, THREE, wrong=wrong.hidden_as_zero()),
    dumped("hf-window-in-one", "mistral", "a window of 9 for 8 in layer 1, logits alone",
           ["sliding_window"], ["L1.sliding_window"], logits_only, as_npz, THREE,
           wrong=wrong.seen(lambda i, j: (j <= i) & (j > i - 9), 1)),
    dumped("hf-twice-and-chunks", "llama", "attention added twice, within nine tokens",
           ["mask", "residual"], ["mask"], everything, as_npz, THREE,
           wrong=wrong.both(wrong.layer_of(wrong.twice_added), wrong.seen(chunks))),
    placed("evicted", "llama", "the first key is gone from token 12 on", "mask", "mask",
           gone(1, 12)),
    placed("evicted-logits", "qwen2_5_vl", "the first 4 keys are gone from token 16 on",
           "mask", "mask", gone(4, 16), LOGITS),
    placed("ring", "llama", "the first 2 keys and the last 10 are seen", "mask", "mask",
           ring(2, 10)),
    placed("ring-logits", "qwen2_5_vl", "the first key and the last 15 are seen", "mask", "mask",
           ring(1, 15), LOGITS),
    engine("window-open", "gpt_oss", "sliding windows open on both sides", "mask", "L0.mask",
           backend=ahead(7, True)),
    engine("window-open-probs", "mistral", "the same, every point recorded", "mask", "mask",
           fine=True, backend=ahead(7, True)),
    traced("layers-window-open", "gemma2", "the same, from outputs of layers", ["mask"],
           ["L0.mask"], LAYERS, {}, backend=ahead(7, True)),
    traced("logits-window-open", "mistral", "the same, from logits alone", ["mask"], ["mask"],
           LOGITS, {}, backend=ahead(7, True)),
    engine("ahead", "llama", "queries see five later tokens", "mask", "mask", backend=ahead(5)),
    traced("layers-ahead", "gpt2", "two later tokens, from outputs of layers", ["mask"], ["mask"],
           LAYERS, {}, backend=ahead(2)),
    engine("ahead-in-window", "gemma3", "two later tokens beside the window", "mask", "mask",
           fine=True, backend=ahead(2)),
    engine("chunks-open", "llama4", "chunks open on both sides", "mask", "L0.mask",
           backend=lambda: broken("probs", heads(mask=open_chunks, causal=None))),
    engine("chunks-open-probs", "llama4", "the same, every point recorded", "mask", "L0.mask",
           fine=True, backend=lambda: broken("probs", heads(mask=open_chunks, causal=None))),
    engine("scale-inverse", "deepseek_v3", "scores times the root that should divide them",
           "attention_scale", "attn_scale", hp=lambda hp: {"attn_scale": 1 / hp["attn_scale"]}),
    traced("logits-scale-inverse", "qwen2", "the same, from logits alone", ["attention_scale"],
           ["attn_scale"], LOGITS, {}, hp=lambda hp: {"attn_scale": 1 / hp["attn_scale"]}),
    traced("layers-scale-far", "llama", "scores times 25 for 1/4, from outputs of layers",
           ["attention_scale"], ["attn_scale"], LAYERS, {}, hp={"attn_scale": 25.0}),
    engine("scale-far-down", "llama", "scores times 1/200 for 1/4", "attention_scale",
           "attn_scale", hp={"attn_scale": 0.005}),
    encoder("causal"),
    encoder("window"),
)  # fmt: skip
