"""The table of hypotheses about a forward pass: one row per cause, with the points that show it.

A row proposes changes of the reference, with values solved from the trace, likeliest first; it
proposes nothing if the signature does not fit. A change becomes a cause only if the changed pass no
longer differs (examine.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aprfmt.diagnosis.hypotheses import (
    attention,
    cache,
    capture,
    convolution,
    linear,
    mlp,
    moe,
    norm,
    per_layer,
    queries,
    rope,
    softmax,
    stream,
    weights,
)
from aprfmt.diagnosis.mismatch import Change, Mismatch


@dataclass(frozen=True)
class Hypothesis:
    """One cause of compare/causes.py, and the function that proposes changes for it."""

    cause: str
    propose: Callable[[Mismatch], Iterator[Change]]


HYPOTHESES: tuple[Hypothesis, ...] = (
    Hypothesis("capture_point", capture.neighbour),
    Hypothesis("row_offset", stream.embedding_rows),
    Hypothesis("multiplier", stream.factor),
    Hypothesis("missing_bias", linear.bias),
    Hypothesis("norm_eps", norm.eps),
    Hypothesis("norm_offset", norm.offset),
    Hypothesis("stale_tensor", norm.weight),
    Hypothesis("tied_embedding", weights.head),
    Hypothesis("swapped_tensors", linear.other_weight),
    Hypothesis("transpose", linear.transposed),
    Hypothesis("head_order", linear.rows_moved),
    Hypothesis("scale", weights.scaled),
    Hypothesis("dtype_mislabel", weights.reread),
    Hypothesis("bit_rot", weights.one_value),
    Hypothesis("quantisation", weights.quantised),
    Hypothesis("stale_tensor", weights.stale),
    Hypothesis("qk_norm", queries.norms),
    Hypothesis("attention_scale", queries.temperature),
    Hypothesis("positions", queries.slopes),
    Hypothesis("rope_layers", rope.layers),
    Hypothesis("rope_pairing", rope.backwards),
    Hypothesis("positions", rope.positions),
    Hypothesis("positions", rope.learned),
    Hypothesis("rope_pairing", rope.pairing),
    Hypothesis("partial_rotary", rope.partial),
    Hypothesis("rope_theta", rope.theta),
    Hypothesis("rope_scaling", rope.scaling),
    Hypothesis("gqa_mapping", attention.gqa),
    Hypothesis("attention_scale", attention.scale),
    Hypothesis("softcap", attention.softcap),
    Hypothesis("sliding_window", attention.window),
    Hypothesis("mask", attention.mask),
    Hypothesis("softmax_reduction", softmax.softmax),
    Hypothesis("kv_sharing", per_layer.shared_keys),
    Hypothesis("kv_cache", cache.cache),
    Hypothesis("convolution", convolution.convolution),
    Hypothesis("conv_state", convolution.convolution),
    Hypothesis("per_layer_input", per_layer.layer_inputs),
    Hypothesis("altup", per_layer.stream_copies),
    Hypothesis("residual", stream.residual),
    Hypothesis("activation", mlp.activation),
    Hypothesis("activation", mlp.clamp),
    Hypothesis("activation", mlp.bent),
    Hypothesis("moe_routing", moe.routing),
    Hypothesis("expert_order", moe.order),
    Hypothesis("softcap", stream.final_cap),
)
