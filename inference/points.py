"""The table of capture points, in execution order, with the names other engines have for them.

A point's value is the tensor as the next operation reads it, [tokens, ...]. If an architecture
makes a point always equal to another one, the point is an alias and not captured; if the
architecture has no such tensor, the point is absent. docs/capture_points.md is printed from this
table, and foreign traces are read with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from aprfmt.inference.placing import ABSENT as ABSENT
from aprfmt.inference.placing import BEFORE as BEFORE
from aprfmt.inference.placing import (
    CONV,
    DELTA,
    DENSE,
    DRAFT,
    GATE,
    GATED,
    LATENT_Q,
    MLA,
    MOE,
    SHORT_CONV,
    PlaceOf,
    contribution,
    embedded,
    ended,
    entering,
    ffn_norm,
    has_last_norm,
    if_,
    is_normed,
    is_scaled,
    multiplied,
    of_attention,
    product,
    raw_logits,
    rotated,
)
from aprfmt.inference.placing import HERE as HERE
from aprfmt.inference.placing import WHOLE as WHOLE
from aprfmt.inference.placing import LayerFacts as LayerFacts
from aprfmt.inference.placing import normed_before as normed_before
from aprfmt.inference.placing import unscaled as unscaled
from aprfmt.inference.point_names import Name as Name
from aprfmt.inference.point_names import llama_cpp as _cpp
from aprfmt.inference.point_names import transformers as _hf

RowMeaning = Literal["tokens", "scores", "keys", "logits", "sequence"]


@dataclass(frozen=True)
class Point:
    """One row: one capture point.

    `shape` names its axes; `rows` says what its first axis (of `scores`: its second) counts.
    `llama_cpp` are graph nodes and `hf` modules; the first one that exists is used. `apr` is the
    stage of `--save-tensor` (points of one stage are joined in this table's order).
    `inner`: inside a fused operation, so that wanting it takes the stepped form.
    """

    name: str
    shape: str
    sentence: str
    llama_cpp: tuple[Name, ...] = ()
    apr: str = ""
    hf: tuple[Name, ...] = ()
    rows: RowMeaning = "tokens"
    layered: bool = True
    inner: bool = False
    finite: bool = True  # infinities are a fault
    where: PlaceOf = lambda place: HERE


def _product_names(part: str) -> tuple[Name, ...]:
    return _cpp(f" MUL_MAT:attn_{part}.weight")


def _biased(*roles: str) -> tuple[Name, ...]:
    """Return names of the node that adds a role's bias, else of the one that reads its weight."""
    op = "MUL" if any("norm" in role for role in roles) else "MUL_MAT"
    return _cpp(
        *(f" ADD:{role}.bias" for role in roles), *(f" {op}:{role}.weight" for role in roles)
    )


_ROWS: tuple[Point, ...] = (
    Point("embd", "tokens, hidden_size", "rows of the token embedding, unscaled",
          _cpp(" GET_ROWS:token_embd.weight"), "embedding",
          _hf("embed_tokens", "wte", "embed_in", "word_embeddings",
              "embeddings.word_embeddings", "embeddings.tok_embeddings"),
          layered=False),
    Point("embd_in", "tokens, hidden_size", "the embedding's rows projected: opt_350m", (), "",
          _hf("project_in"), layered=False,
          where=if_(lambda place: place.has("embd_in.weight"))),
    Point("embd_scaled", "tokens, hidden_size",
          "after the embedding's factor, or with learned positions and the token type added",
          _cpp("inp_scaled SCALE", "embd SCALE", "inp_embd SCALE", "inpL ADD"), "",
          _hf("embed_tokens[scaled]", "embeddings.LayerNorm#in"), layered=False,
          where=if_(is_scaled, "embd")),
    Point("embd_norm", "tokens, hidden_size", "after the norm of the embedding: encoders, bloom",
          _biased("token_embd_norm"), "",
          _hf("embeddings.LayerNorm", "embeddings.norm", "word_embeddings_layernorm"),
          layered=False,
          where=lambda place: HERE if embedded(place) == "embd_norm" else embedded(place)),
    Point("draft_embd_norm", "tokens, hidden_size",
          "embedding of the token after each, after its norm: draft heads",
          layered=False, where=DRAFT),
    Point("draft_hidden", "tokens, hidden_size",
          "the model's rows behind its last norm, as the draft head reads them",
          layered=False, where=DRAFT),
    Point("draft_hidden_norm", "tokens, hidden_size", "these rows after the head's norm",
          layered=False, where=DRAFT),
    Point("draft_in", "tokens, hidden_size",
          "both joined, the embedding first, and projected: what enters the draft head's layer",
          layered=False, where=DRAFT),
    Point("in", "tokens, hidden_size", "residual stream entering the layer", (), "",
          _hf("#in"), where=entering),
    Point("attn_norm", "tokens, hidden_size",
          "after the norm before attention, weight and bias applied", _biased("attn_norm"),
          "attn_norm", _hf("input_layernorm", "attention_layernorm", "operator_norm", "ln_1",
                           "ln_attn", "norm_1", "self_attn_layer_norm pre"),
          where=if_(lambda place: place.normed, "in")),
    Point("attn_gate", "tokens, heads*head_dim", "gate of the attention, no sigmoid yet",
          _cpp(" MUL_MAT:attn_q_gate.weight"), "",
          _hf("self_attn.q_proj[gate]"), where=GATE),
    Point("q_a", "tokens, q_lora_rank", "compressed query (MLA)", _biased("attn_q_a"), "",
          _hf("self_attn.q_a_proj"), where=LATENT_Q),
    Point("q_a_norm", "tokens, q_lora_rank", "compressed query after its norm (MLA)",
          _biased("attn_q_a_norm"), "", _hf("self_attn.q_a_layernorm"), where=LATENT_Q),
    Point("q_mm", "tokens, heads, head_dim", "query product only, before the bias",
          _product_names("q"), "qkv_matmul", inner=True, where=product("q")),
    Point("q_b", "tokens, heads, head_dim", "query expanded from its compressed form (MLA)",
          _biased("attn_q_b"), "", _hf("self_attn.q_b_proj"),
          where=lambda place: "q" if LATENT_Q(place) == HERE else ABSENT),
    Point("q", "tokens, heads, head_dim", "query with its bias, before norm and rope",
          _biased("attn_q"), "qkv_bias",
          _hf("self_attn.q_proj", "attn.q_proj",
              "attention.self.query", "attention.q_lin", "attention.attn.q",
              "self_attn.qkv_proj[qkv]", "attn.Wqkv[qkv]",
              "attn.c_attn[qkv]", "attention.query_key_value[qkv]",
              "self_attention.query_key_value[qkv]")),
    Point("kv_a", "tokens, kv_lora_rank+qk_rope_head_dim",
          "compressed keys and values, then the part to rotate (MLA)", _biased("attn_kv_a_mqa"),
          "", _hf("self_attn.kv_a_proj_with_mqa"), where=MLA),
    Point("k_pe", "tokens, 1, qk_rope_head_dim",
          "part of the key that all heads share, before rope (MLA)", _cpp("k_pe VIEW"), "",
          _hf("self_attn.kv_a_proj_with_mqa[tail]"), where=MLA),
    Point("kv_a_norm", "tokens, kv_lora_rank", "compressed keys and values after their norm (MLA)",
          _biased("attn_kv_a_norm"), "", _hf("self_attn.kv_a_layernorm"), where=MLA),
    Point("k_nope", "tokens, heads, qk_nope_head_dim", "unrotated part of the keys (MLA)",
          _cpp("k_nope_view VIEW"), "", _hf("self_attn.kv_b_proj[heads]"), where=MLA),
    Point("k_mm", "tokens, kv_heads, head_dim", "key product only, before the bias",
          _product_names("k"), "qkv_matmul", inner=True, where=product("k")),
    Point("k", "tokens, kv_heads, head_dim", "key with its bias, before norm and rope",
          _biased("attn_k"), "qkv_bias",
          _hf("self_attn.k_proj", "attn.k_proj",
              "attention.self.key", "attention.k_lin", "attention.attn.k",
              "self_attn.qkv_proj[qkv]", "attn.Wqkv[qkv]",
              "attn.c_attn[qkv]", "attention.query_key_value[qkv]",
              "self_attention.query_key_value[qkv]"),
          where=if_(lambda place: not place.mla)),
    Point("v_mm", "tokens, kv_heads, value_dim", "value product only, before the bias",
          _product_names("v"), "qkv_matmul", inner=True, where=product("v")),
    Point("v", "tokens, kv_heads, value_dim", "value with its bias", _biased("attn_v"), "qkv_bias",
          _hf("self_attn.v_proj", "attn.v_proj",
              "attention.self.value", "attention.v_lin", "attention.attn.v",
              "self_attn.qkv_proj[qkv]", "attn.Wqkv[qkv]",
              "attn.c_attn[qkv]", "attention.query_key_value[qkv]",
              "self_attention.query_key_value[qkv]",
              "self_attn.kv_b_proj[heads]")),
    Point("k_pe_rope", "tokens, 1, qk_rope_head_dim", "the shared part after rope (MLA)",
          _cpp("k_pe ROPE"), "",
          where=lambda place: ABSENT if not place.mla else HERE if place.rotates else "k_pe"),
    Point("q_norm", "tokens, heads, head_dim", "query after its norm, before rope",
          _biased("attn_q_norm"), "", _hf("self_attn.q_norm", "self_attn.q_layernorm"),
          where=if_(is_normed)),
    Point("k_norm", "tokens, kv_heads, head_dim", "key after its norm, before rope",
          _biased("attn_k_norm"), "", _hf("self_attn.k_norm", "self_attn.k_layernorm"),
          where=if_(is_normed)),
    Point("q_rope", "tokens, heads, head_dim",
          "query after rope, unscaled, rotated part in split halves", _cpp("Qcur ROPE"),
          "q_post_rope", _hf("#q_rope"), where=rotated("q")),
    Point("k_rope", "tokens, kv_heads, head_dim",
          "key after rope, rotated part in split halves", _cpp("Kcur ROPE"), "k_post_rope",
          _hf("#k_rope"), where=rotated("k")),
    Point("q_attn", "tokens, heads, head_dim",
          "query as attention reads it, where a norm or a factor follows rope", (), "",
          _hf("#q_attn"),
          where=if_(lambda place: place.normed_late or place.tempered, "q_rope")),
    Point("k_attn", "tokens, kv_heads, head_dim",
          "key as attention reads it, where a norm follows rope", (), "", _hf("#k_attn"),
          where=if_(lambda place: place.normed_late, "k_rope")),
    Point("k_cache", "keys, kv_heads, head_dim", "keys that attention reads, cached ones first",
          _cpp("cache_k VIEW"), "", _hf("#k_cache"), rows="keys"),
    Point("v_cache", "keys, kv_heads, value_dim",
          "values that attention reads, cached ones first", _cpp("cache_v VIEW"), "",
          _hf("#v_cache"), rows="keys"),
    Point("scores", "heads, tokens, keys",
          "q.k times the scale, after the softcap, before mask and sinks",
          _cpp("kq_scaled_2 SCALE", "kq MUL_MAT"), "attn_scores", _hf("#scores"), rows="scores",
          inner=True),
    Point("probs", "heads, tokens, keys", "after mask, sinks and softmax, a sink's column dropped",
          _cpp("kq_soft_max SOFT_MAX"), "attn_softmax", _hf("#probs"), rows="scores", inner=True),
    Point("attn_mixed", "tokens, heads*value_dim", "probs.v, heads joined, where a gate follows",
          where=GATE),
    Point("delta_qkv", "tokens, delta_channels", "a delta net's q, k and v before the convolution",
          (), "", _hf("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz[groups]"),
          where=DELTA),
    Point("conv_in", "tokens, 3*hidden_size",
          "a short convolution's two gates and what is convolved: gate before, gate after, values",
          _biased("shortconv.in_proj"), "", _hf("conv.in_proj"), where=SHORT_CONV),
    Point("conv_x", "tokens, hidden_size", "what a short convolution reads: values times a gate",
          where=SHORT_CONV),
    Point("conv", "tokens, channels",
          "after the convolution; of a delta net q, k and v after the activation too", where=CONV),
    Point("conv_gated", "tokens, hidden_size",
          "after the convolution and its second gate, before the output product", (), "",
          _hf("conv.out_proj#in"), where=SHORT_CONV),
    Point("delta_gate", "tokens, value_heads*value_dim",
          "gate of a delta net, before its activation", (), "",
          _hf("linear_attn.in_proj_z", "linear_attn.in_proj_qkvz[groups]"), where=DELTA),
    Point("beta", "tokens, value_heads", "how much of a value's error a delta net writes, 0 to 1",
          where=DELTA),
    Point("decay", "tokens, value_heads", "logarithm of what a delta net's state is multiplied by",
          where=DELTA),
    Point("delta", "tokens, value_heads*value_dim",
          "what a delta net reads from its state, heads joined", where=DELTA),
    Point("delta_norm", "tokens, value_heads*value_dim",
          "after the norm and the gate, before the output product", (), "",
          _hf("linear_attn.out_proj#in"), where=DELTA),
    Point("attn", "tokens, heads*value_dim",
          "probs.v, heads joined, after a gate, before the output product",
          _cpp("attn_gated MUL", "kqv_out"), "attention",
          _hf("self_attn.o_proj#in", "self_attn.dense#in", "attn.c_proj#in", "attn.out_proj#in",
              "attention.dense#in", "self_attention.dense#in", "self_attn.out_proj#in",
              "attention.output.dense#in", "attention.out_lin#in", "attention.attn.o#in",
              "attn.Wo#in"), where=ended),
    Point("attn_out", "tokens, hidden_size", "output projection with its bias",
          _biased("attn_output", "ssm_out", "shortconv.out_proj"), "attn_out",
          _hf("self_attn.o_proj", "self_attn.dense", "attn.c_proj", "attn.out_proj",
              "attention.dense", "self_attention.dense", "self_attn.out_proj",
              "linear_attn.out_proj", "attention.output.dense", "attention.out_lin",
              "attention.attn.o", "attn.Wo", "conv.out_proj", "self_attn", "attn")),
    Point("attn_contrib", "tokens, hidden_size",
          "what is added to the stream: after the post-norm or the residual factor",
          _cpp(" MUL:post_attention_norm.weight"), "",
          _hf("post_self_attn_layernorm", "post_attention_layernorm sandwich",
              "post_attention_layernorm post"),
          where=contribution(lambda place: "attn_out")),
    Point("attn_sum", "tokens, hidden_size",
          "attention's output added to the stream, where the sum is normalised", (), "",
          _hf("attention.output.LayerNorm#in", "attention.LayerNorm#in", "sa_layer_norm#in",
              "post_attention_layernorm#in after", "self_attn_layer_norm#in after"),
          where=if_(lambda place: place.summed, "mid")),
    Point("mid", "tokens, hidden_size", "residual stream after attention",
          _cpp("ffn_inp ADD", "sa_out ADD"), "post_attn_residual",
          _hf("pre_feedforward_layernorm#in", "feedforward_layernorm#in", "ln_2#in",
              "post_attention_layernorm#in pre", "norm_2#in", "final_layer_norm#in pre",
              "mlp_norm#in", "ffn_norm#in", "self_attn_layer_norm after",
              "sa_layer_norm", "attention.output.LayerNorm", "attention.LayerNorm",
              "post_attention_layernorm after"),
          where=if_(lambda place: not place.parallel)),
    Point("ffn_norm", "tokens, hidden_size", "after the norm before the MLP",
          _biased("ffn_norm"), "ffn_norm",
          _hf("pre_feedforward_layernorm", "feedforward_layernorm", "ln_2", "ln_mlp", "norm_2",
              "final_layer_norm pre", "mlp_norm", "ffn_norm", "post_attention_layernorm pre"),
          where=ffn_norm),
    Point("router", "tokens, n_experts", "expert logits with bias", _biased("ffn_gate_inp"), "",
          _hf("mlp.gate", "mlp.router", "block_sparse_moe.gate", "block_sparse_moe.router",
              "feed_forward.router", "feed_forward.gate"),
          where=MOE),
    Point("experts", "tokens, n_experts_used", "ids of the chosen experts, heaviest first",
          _cpp("ffn_moe_topk VIEW"), "", _hf("#experts"), where=MOE),
    Point("expert_w", "tokens, n_experts_used", "weights of the chosen experts as applied",
          _cpp("ffn_moe_weights_scaled SCALE", "ffn_moe_weights_softmax RESHAPE",
               "ffn_moe_weights_norm RESHAPE", "ffn_moe_weights_norm DIV",
               "ffn_moe_weights GET_ROWS"),
          "moe_router", _hf("#expert_w"), where=MOE),
    Point("router_margin", "tokens",
          "score of the last chosen expert or group minus the next one's, infinite without one",
          finite=False, where=MOE),
    Point("ffn_gate", "tokens, ffn_size", "gate product with bias", _biased("ffn_gate"),
          "ffn_gate", _hf("mlp.gate_proj", "mlp.gate_up_proj[halves]", "mlp.Wi[halves]",
                          "feed_forward.gate_proj", "feed_forward.w1"),
          where=GATED),
    Point("ffn_up", "tokens, ffn_size", "up product with bias", _biased("ffn_up"), "ffn_up",
          _hf("mlp.up_proj", "mlp.fc1", "mlp.c_fc", "mlp.fc_in", "mlp.dense_h_to_4h",
              "ffn.up_proj", "fc1", "intermediate.dense", "ffn.lin1", "mlp.gate_up_proj[halves]",
              "mlp.Wi[halves]", "feed_forward.up_proj", "feed_forward.w3"),
          where=DENSE),
    Point("ffn_act", "tokens, ffn_size", "act(gate); of a plain MLP act(up)",
          _cpp("ffn_gelu", "ffn_silu", "ffn_relu"), "ffn_silu",
          _hf("mlp.act_fn", "mlp.activation_fn", "mlp.act", "mlp.gelu_impl", "ffn.act",
              "activation_fn", "feed_forward.activation_fn",
              "intermediate.intermediate_act_fn", "ffn.activation"), where=DENSE),
    Point("ffn_mul", "tokens, ffn_size", "act(gate) times up",
          _cpp("ffn_swiglu", "ffn_geglu", "ffn_gate_par"), "ffn_swigl",
          _hf("mlp.down_proj#in", "mlp.Wo#in", "feed_forward.down_proj#in", "feed_forward.w2#in"),
          where=multiplied),
    Point("ffn_out", "tokens, hidden_size", "down product with bias", _biased("ffn_down"),
          "ffn_out", _hf("mlp.down_proj", "mlp.fc2", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.Wo",
              "ffn.down_proj", "fc2", "output.dense", "ffn.lin2", "mlp", "feed_forward.down_proj",
              "feed_forward.w2", "feed_forward"),
          where=if_(lambda place: not place.moe, "moe_out")),
    Point("moe_out", "tokens, hidden_size", "weighted sum of the experts plus the shared expert",
          _cpp("ffn_out", "ffn_moe_out"), "moe_ffn_out",
          _hf("mlp", "block_sparse_moe", "feed_forward"), where=MOE),
    Point("ffn_contrib", "tokens, hidden_size",
          "what is added to the stream: after the post-norm or the residual factor",
          _cpp(" MUL:post_ffw_norm.weight"), "",
          _hf("post_feedforward_layernorm", "post_mlp_layernorm"),
          where=contribution(lambda place: "moe_out" if place.moe else "ffn_out")),
    Point("ffn_sum", "tokens, hidden_size",
          "the MLP's output added to the stream, where the sum is normalised", (), "",
          _hf("output.LayerNorm#in", "output_layer_norm#in", "post_mlp_layernorm#in after",
              "final_layer_norm#in after"),
          where=if_(lambda place: place.summed, "out")),
    Point("out", "tokens, hidden_size", "residual stream leaving the layer", _cpp("l_out"),
          "post_ffn_residual", _hf("#out", "")),
    Point("head_in", "tokens, width", "projected for the head: opt_350m, causal bert", (), "",
          _hf("project_out", "predictions.transform.dense", "lm_head.dense"), layered=False,
          where=if_(lambda place: place.has("head_in.weight"))),
    Point("head_act", "tokens, hidden_size", "act(head_in) of causal bert, before its norm", (), "",
          _hf("predictions.transform.LayerNorm#in", "lm_head.layer_norm#in"), layered=False,
          where=if_(lambda place: place.block.head == "dense")),
    Point("final_norm", "tokens, hidden_size", "after the last norm", _biased("output_norm"),
          "final_norm", _hf("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f",
                            "final_norm", "embedding_norm", "predictions.transform.LayerNorm",
                            "lm_head.layer_norm"), layered=False,
          where=if_(lambda place: has_last_norm(place.block, place.roles))),
    Point("pooled", "1, hidden_size",
          "the text's embedding: the mean of the last rows, the first or the last, unscaled",
          _cpp("result_embd_pooled"), rows="sequence", layered=False,
          where=if_(lambda place: place.hp["pooling"] is not None)),
    Point("logits_raw", "rows, vocab_size", "head product with its bias",
          (*_biased("output"), *_cpp(" MUL_MAT:token_embd.weight")), "",
          _hf("lm_head", "predictions.decoder"),
          rows="logits", layered=False, where=raw_logits),
    Point("logits", "rows, vocab_size", "after factor and softcap", _cpp("result_output"),
          "lm_head", _hf("logits"), rows="logits", layered=False,
          where=if_(lambda place: place.block.head != "none")),
)  # fmt: skip
# Points between the norm before attention and its result: layers with a recurrence have none.
_OF_ATTENTION = frozenset(
    """q_a q_a_norm q_mm q_b q kv_a k_pe kv_a_norm k_nope k_mm k v_mm v k_pe_rope q_norm k_norm
    q_rope k_rope q_attn k_attn k_cache v_cache scores probs""".split()
)
POINTS: Mapping[str, Point] = {
    point.name: replace(point, where=of_attention(point.where))
    if point.name in _OF_ATTENTION
    else point
    for point in _ROWS
}
