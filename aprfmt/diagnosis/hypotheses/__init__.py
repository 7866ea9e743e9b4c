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
    delta_net,
    experts,
    linear,
    mlp,
    moe,
    norm,
    queries,
    rope,
    score_bias,
    shards,
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
    Hypothesis("token_ids", stream.embedding_rows),
    Hypothesis("token_type_ids", stream.token_types),
    Hypothesis("multiplier", stream.factor),
    Hypothesis("multiplier", stream.half_factor),
    Hypothesis("missing_bias", linear.bias),
    Hypothesis("norm_eps", norm.eps),
    Hypothesis("norm_offset", norm.offset),
    Hypothesis("stale_tensor", norm.weight),
    Hypothesis("tied_embedding", weights.head),
    Hypothesis("swapped_tensors", linear.other_weight),
    Hypothesis("transpose", linear.transposed),
    Hypothesis("head_order", linear.rows_moved),
    Hypothesis("tensor_parallel", shards.shards),
    Hypothesis("scale", weights.scaled),
    Hypothesis("dtype_mislabel", weights.reread),
    Hypothesis("bit_rot", weights.one_value),
    Hypothesis("quantisation", weights.quantised),
    Hypothesis("stale_tensor", weights.stale),
    Hypothesis("qk_norm", queries.norms),
    Hypothesis("attention_scale", queries.temperature),
    Hypothesis("positions", score_bias.score_bias),
    Hypothesis("rope_layers", rope.layers),
    Hypothesis("rope_pairing", rope.backwards),
    Hypothesis("positions", rope.positions),
    Hypothesis("positions", rope.learned),
    Hypothesis("rope_pairing", rope.pairing),
    Hypothesis("partial_rotary", rope.partial),
    Hypothesis("partial_rotary", rope.elements),
    Hypothesis("rope_theta", rope.theta),
    Hypothesis("rope_scaling", rope.scaling),
    Hypothesis("gqa_mapping", attention.gqa),
    Hypothesis("attention_scale", attention.scale),
    Hypothesis("softcap", attention.softcap),
    Hypothesis("sliding_window", attention.window),
    Hypothesis("mask", attention.mask),
    Hypothesis("softmax_reduction", softmax.softmax),
    Hypothesis("kv_cache", cache.cache),
    Hypothesis("recurrence", delta_net.delta_net),
    Hypothesis("convolution", convolution.convolution),
    Hypothesis("conv_state", convolution.convolution),
    Hypothesis("residual", stream.residual),
    Hypothesis("activation", mlp.activation),
    Hypothesis("activation", mlp.clamp),
    Hypothesis("activation", mlp.bent),
    Hypothesis("activation", mlp.shaped),
    Hypothesis("moe_routing", moe.routing),
    Hypothesis("moe_routing", experts.experts),
    Hypothesis("expert_order", moe.order),
    Hypothesis("softcap", stream.final_cap),
    Hypothesis("dropout", stream.dropout),
)
