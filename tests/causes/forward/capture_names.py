"""Seeded faults of `aprfmt/causes/forward/capture_names.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from aprfmt.inference.kv_cache import KVCache
from tests.diagnosis.engine_changes import THREE, traced
from tests.diagnosis.engines import COARSE
from tests.diagnosis.making import engine


def recorded_as(at: str, instead: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a renaming: `at` gets the values of `instead`."""

    def rename(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: values.get(key.rpartition(".")[0] + "." + instead, value)
            if key.endswith("." + at)
            else value
            for key, value in values.items()
        }

    return rename


def without_stream(values: dict[str, Any]) -> dict[str, Any]:
    """Record the value a layer adds under the name of the stream after it."""
    return {
        key: value - values[key.replace(".out", ".mid")] if key.endswith(".out") else value
        for key, value in values.items()
    }


Values = dict[str, Any]


PRODUCTS = frozenset({"q", "k", "v", "attn_out", "ffn_out", "logits"})


def only(points: frozenset[str], change: Callable[[Values], Values]) -> Callable[[Values], Values]:
    """Return a renaming that keeps the values of these points after `change`."""

    def rename(values: Values) -> Values:
        return {
            key: value for key, value in change(values).items() if key.rpartition(".")[2] in points
        }

    return rename


def before_biases(values: Values) -> Values:
    """Record the products under the names of q, k and v."""
    for name in ("q", "k", "v"):
        values = recorded_as(name, f"{name}_mm")(values)
    return values


def heads_first(values: Values) -> Values:
    """Lay q and k out as [heads, tokens, head_dim]."""
    return {
        key: np.ascontiguousarray(value.swapaxes(0, 1)).reshape(value.shape)
        if key.rpartition(".")[2] in ("q", "k")
        else value
        for key, value in values.items()
    }


def with_stream(values: Values) -> Values:
    """Record the stream after attention as attention's output."""
    return recorded_as("attn_out", "mid")(values)


ENGINE_FAULTS = (
    engine("clean-steps", "llama", "nothing: tokens 20 to 28 behind a cache", "capture_rows",
           "L0.q", fine=True, verdict="same", cached=20, cache=KVCache),
    engine("bias-elsewhere", "qwen2", "q recorded before its bias", "capture_point", "L0.q",
           fine=True, verdict="same", rename=recorded_as("q", "q_mm")),
    engine("stream-elsewhere", "llama", "what a layer adds recorded as its output",
           "capture_point", "L0.out", fine=True, verdict="same", rename=without_stream),
    engine("last-row", "llama", "the last token's rows only", "capture_rows", "L0.q",
           verdict="same", rows="last"),
    traced("before-biases", "qwen2", "q, k and v recorded before their biases",
           ["capture_point"], ["L0.q", "L0.k", "L0.v"], COARSE, THREE, verdict="same",
           rename=only(COARSE, before_biases)),
    traced("before-biases-blind", "qwen2", "the same, without the weights", ["capture_point"],
           ["L0.q", "L0.k", "L0.v"], PRODUCTS, THREE, verdict="same", without_model=True,
           rename=only(PRODUCTS, before_biases)),
    traced("heads-first", "llama", "q and k laid out by heads", ["capture_point"],
           ["L0.q", "L0.k"], PRODUCTS, verdict="same", rename=only(PRODUCTS, heads_first)),
    traced("after-rope-blind", "llama", "q recorded after rope, without the weights",
           ["capture_point"], ["L0.q"], PRODUCTS, verdict="same", without_model=True,
           rename=only(PRODUCTS, recorded_as("q", "q_rope"))),
    traced("with-stream", "llama", "the stream recorded as attention's output",
           ["capture_point"], ["L0.attn_out"], PRODUCTS, verdict="same",
           rename=only(PRODUCTS, with_stream)),
)  # fmt: skip
