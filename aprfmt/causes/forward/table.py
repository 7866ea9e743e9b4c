"""The table of hypotheses about a forward pass: one row per cause, with the points that show it.

A row proposes changes of the reference, with values solved from the trace, likeliest first; it
proposes nothing if the signature does not fit. A change becomes a cause only if the changed pass no
longer differs (examine.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aprfmt.causes.forward import (
    attention,
    capture_names,
    convolution,
    delta_net,
    experts,
    kv_cache,
    linear,
    mlp,
    moe,
    norm,
    query_key,
    residual_stream,
    rope,
    score_bias,
    shards,
    softmax,
    state_space,
    weights,
)
from aprfmt.causes.forward.mismatch import Change, Mismatch


@dataclass(frozen=True)
class Hypothesis:
    """One cause of causes/, and the function that proposes changes for it."""

    cause: str
    propose: Callable[[Mismatch], Iterator[Change]]


HYPOTHESES: tuple[Hypothesis, ...] = (
    Hypothesis("capture_point", capture_names.neighbour),
    Hypothesis("row_offset", residual_stream.embedding_rows),
    Hypothesis("token_ids", residual_stream.embedding_rows),
    Hypothesis("token_type_ids", residual_stream.token_types),
    Hypothesis("multiplier", residual_stream.factor),
    Hypothesis("multiplier", residual_stream.half_factor),
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
    Hypothesis("qk_norm", query_key.norms),
    Hypothesis("attention_scale", query_key.temperature),
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
    Hypothesis("kv_cache", kv_cache.cache),
    Hypothesis("recurrence", delta_net.delta_net),
    Hypothesis("recurrence", state_space.state_space),
    Hypothesis("convolution", convolution.convolution),
    Hypothesis("conv_state", convolution.convolution),
    Hypothesis("residual", residual_stream.residual),
    Hypothesis("activation", mlp.activation),
    Hypothesis("activation", mlp.clamp),
    Hypothesis("activation", mlp.bent),
    Hypothesis("activation", mlp.shaped),
    Hypothesis("moe_routing", moe.routing),
    Hypothesis("moe_routing", experts.experts),
    Hypothesis("expert_order", moe.order),
    Hypothesis("softcap", residual_stream.final_cap),
    Hypothesis("dropout", residual_stream.dropout),
)
