"""The table of capture points, in execution order, with the names other engines have for them.

A point's value is the tensor as the next operation reads it, [tokens, ...]. If an architecture
makes a point always equal to another one, the point is an alias and not captured; if the
architecture has no such tensor, the point is absent. docs/capture_points.md is printed from this
table, and foreign traces are read with it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from aprfmt.arch.spec import BlockSpec
from aprfmt.arch.vocabulary import role_key
from aprfmt.base.protocols import Value
from aprfmt.inference.point_names import Name as Name
from aprfmt.inference.point_names import llama_cpp as _cpp
from aprfmt.inference.point_names import transformers as _hf

WHOLE = -1  # the layer of whole-model points
Rows = Literal["tokens", "scores", "keys", "logits", "sequence"]


@dataclass(frozen=True)
class LayerFacts:
    """A layer of one model: the facts that decide which points it has."""

    block: BlockSpec
    hp: Mapping[str, Value]
    roles: Collection[str]
    layer: int

    def has(self, role: str) -> bool:
        """Say whether the layer has a tensor (`attn_q.bias`)."""
        return role_key(None if self.layer == WHOLE else self.layer, role) in self.roles

    @property
    def mla(self) -> bool:
        """Multi-head latent attention."""
        return self.block.attention == "mla"

    @property
    def moe(self) -> bool:
        """The layer has experts."""
        return bool(self.hp["moe_layers"][self.layer])

    @property
    def rotates(self) -> bool:
        """The layer rotates q and k."""
        return self.block.position == "rope" and bool(self.hp["rope_layers"][self.layer])

    @property
    def normed_late(self) -> bool:
        """The layer's q/k-norms follow rope."""
        return bool(self.hp["qk_norm"]) and self.block.qk_norm_place == "after_rope"

    @property
    def tempered(self) -> bool:
        """The layer's queries get a factor that grows with the position."""
        return self.block.temperature != "none" and self.hp["temperature_scale"] is not None

    @property
    def parallel(self) -> bool:
        """Attention and MLP read the same norm."""
        return bool(self.hp["parallel_residual"])

    @property
    def normed(self) -> bool:
        """Attention reads a norm of the stream."""
        return normed_before(self.block) and bool(self.hp["attn_norm_layers"][self.layer])

    @property
    def summed(self) -> bool:
        """The sums with the stream are normalised."""
        return self.block.placement == "after"

    @property
    def unscaled(self) -> bool:
        """A block's output is added to the stream without a factor."""
        return unscaled(self.block, self.hp)


def unscaled(block: BlockSpec, hp: Mapping[str, Value]) -> bool:
    """Say whether a block's output is added to the stream without a factor."""
    return block.placement in ("pre", "after") and float(hp["residual_scale"]) == 1


def normed_before(block: BlockSpec) -> bool:
    """Say whether attention and the MLP read a norm of the stream."""
    return block.placement in ("pre", "sandwich")


# HERE: computed and captured. ABSENT: the architecture has no such tensor. Any other string is
# the name of the point it equals (of the same layer, or a whole-model one; "out-" is the layer
# before).
HERE, ABSENT, BEFORE = "", "-", "out-"
Where = Callable[[LayerFacts], str]


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
    rows: Rows = "tokens"
    layered: bool = True
    inner: bool = False
    finite: bool = True  # infinities are a fault
    where: Where = lambda place: HERE


def _if(condition: Callable[[LayerFacts], bool], otherwise: str = ABSENT) -> Where:
    return lambda place: HERE if condition(place) else otherwise


def _product(part: str) -> Where:
    """Return the placing of q_mm, k_mm or v_mm: it differs from q, k or v only by the bias."""

    def where(place: LayerFacts) -> str:
        if not place.has(f"attn_{part}.weight"):
            return ABSENT
        return HERE if place.has(f"attn_{part}.bias") else part

    return where


def _is_normed(place: LayerFacts) -> bool:
    return bool(place.hp["qk_norm"]) and not place.mla and not place.normed_late


def _rotated(part: str) -> Where:
    """Return the placing of q_rope or k_rope; without rotation it equals the point before it."""

    def where(place: LayerFacts) -> str:
        if place.rotates or place.mla:
            return HERE
        return f"{part}_norm" if _is_normed(place) else part

    return where


def _contribution(otherwise: Callable[[LayerFacts], str]) -> Where:
    return lambda place: HERE if not place.unscaled else otherwise(place)


def _is_scaled(place: LayerFacts) -> bool:
    learned = place.block.position == "learned" or "token_types.weight" in place.roles
    return learned or float(place.hp["embedding_scale"]) != 1


def _embedded(place: LayerFacts) -> str:
    """Return the point that is the input of layer 0."""
    if "token_embd_norm.weight" in place.roles:
        return "embd_norm"
    return "embd_scaled" if _is_scaled(place) else "embd"


def _entering(place: LayerFacts) -> str:
    if place.layer > 0:
        return BEFORE
    return _embedded(place)


def _multiplied(place: LayerFacts) -> str:
    if place.moe:
        return ABSENT
    return HERE if place.block.mlp == "gated" else "ffn_act"


def _ffn_norm(place: LayerFacts) -> str:
    if place.parallel and place.block.parallel_norm == "one":
        return "attn_norm" if normed_before(place.block) else "in"
    return HERE if normed_before(place.block) else "mid"


def _raw_logits(place: LayerFacts) -> str:
    if place.block.head == "none":
        return ABSENT
    scaled = float(place.hp["logit_scale"]) != 1 or place.hp["final_softcap"] is not None
    return HERE if scaled else "logits"


_GATED = _if(lambda place: not place.moe and place.block.mlp == "gated")
_DENSE = _if(lambda place: not place.moe)
_MOE = _if(lambda place: place.moe)
_LATENT_Q = _if(lambda place: place.mla and place.hp["q_lora_rank"] is not None)
_MLA = _if(lambda place: place.mla)


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
          _hf("embed_tokens", "wte", "embed_in", "word_embeddings"),
          layered=False),
    Point("embd_scaled", "tokens, hidden_size",
          "after the embedding's factor, or with learned positions and the token type added",
          _cpp("inp_scaled SCALE", "embd SCALE", "inp_embd SCALE", "inpL ADD"), "",
          _hf("embed_tokens[scaled]", "embeddings.LayerNorm#in"), layered=False,
          where=_if(_is_scaled, "embd")),
    Point("embd_norm", "tokens, hidden_size", "after the norm of the embedding: encoders, bloom",
          _biased("token_embd_norm"), "",
          _hf("embeddings.LayerNorm", "embeddings.norm", "word_embeddings_layernorm"),
          layered=False,
          where=lambda place: HERE if _embedded(place) == "embd_norm" else _embedded(place)),
    Point("in", "tokens, hidden_size", "residual stream entering the layer", (), "",
          _hf("#in"), where=_entering),
    Point("attn_norm", "tokens, hidden_size",
          "after the norm before attention, weight and bias applied", _biased("attn_norm"),
          "attn_norm", _hf("input_layernorm", "ln_1", "ln_attn"),
          where=_if(lambda place: place.normed, "in")),
    Point("q_a", "tokens, q_lora_rank", "compressed query (MLA)", _biased("attn_q_a"), "",
          _hf("self_attn.q_a_proj"), where=_LATENT_Q),
    Point("q_a_norm", "tokens, q_lora_rank", "compressed query after its norm (MLA)",
          _biased("attn_q_a_norm"), "", _hf("self_attn.q_a_layernorm"), where=_LATENT_Q),
    Point("q_mm", "tokens, heads, head_dim", "query product only, before the bias",
          _product_names("q"), "qkv_matmul", inner=True, where=_product("q")),
    Point("q_b", "tokens, heads, head_dim", "query expanded from its compressed form (MLA)",
          _biased("attn_q_b"), "", _hf("self_attn.q_b_proj"),
          where=lambda place: "q" if _LATENT_Q(place) == HERE else ABSENT),
    Point("q", "tokens, heads, head_dim", "query with its bias, before norm and rope",
          _biased("attn_q"), "qkv_bias",
          _hf("self_attn.q_proj", "attn.q_proj", "self_attn.qkv_proj[qkv]",
              "attn.c_attn[qkv]", "attention.query_key_value[qkv]",
              "self_attention.query_key_value[qkv]")),
    Point("kv_a", "tokens, kv_lora_rank+qk_rope_head_dim",
          "compressed keys and values, then the part to rotate (MLA)", _biased("attn_kv_a_mqa"),
          "", _hf("self_attn.kv_a_proj_with_mqa"), where=_MLA),
    Point("k_pe", "tokens, 1, qk_rope_head_dim",
          "part of the key that all heads share, before rope (MLA)", _cpp("k_pe VIEW"), "",
          _hf("self_attn.kv_a_proj_with_mqa[tail]"), where=_MLA),
    Point("kv_a_norm", "tokens, kv_lora_rank", "compressed keys and values after their norm (MLA)",
          _biased("attn_kv_a_norm"), "", _hf("self_attn.kv_a_layernorm"), where=_MLA),
    Point("k_nope", "tokens, heads, qk_nope_head_dim", "unrotated part of the keys (MLA)",
          _cpp("k_nope_view VIEW"), "", _hf("self_attn.kv_b_proj[heads]"), where=_MLA),
    Point("k_mm", "tokens, kv_heads, head_dim", "key product only, before the bias",
          _product_names("k"), "qkv_matmul", inner=True, where=_product("k")),
    Point("k", "tokens, kv_heads, head_dim", "key with its bias, before norm and rope",
          _biased("attn_k"), "qkv_bias",
          _hf("self_attn.k_proj", "attn.k_proj", "self_attn.qkv_proj[qkv]",
              "attn.c_attn[qkv]", "attention.query_key_value[qkv]",
              "self_attention.query_key_value[qkv]"),
          where=_if(lambda place: not place.mla)),
    Point("v_mm", "tokens, kv_heads, value_dim", "value product only, before the bias",
          _product_names("v"), "qkv_matmul", inner=True, where=_product("v")),
    Point("v", "tokens, kv_heads, value_dim", "value with its bias", _biased("attn_v"), "qkv_bias",
          _hf("self_attn.v_proj", "attn.v_proj", "self_attn.qkv_proj[qkv]",
              "attn.c_attn[qkv]", "attention.query_key_value[qkv]",
              "self_attention.query_key_value[qkv]",
              "self_attn.kv_b_proj[heads]")),
    Point("k_pe_rope", "tokens, 1, qk_rope_head_dim", "the shared part after rope (MLA)",
          _cpp("k_pe ROPE"), "",
          where=lambda place: ABSENT if not place.mla else HERE if place.rotates else "k_pe"),
    Point("q_norm", "tokens, heads, head_dim", "query after its norm, before rope",
          _biased("attn_q_norm"), "", _hf("self_attn.q_norm", "self_attn.q_layernorm"),
          where=_if(_is_normed)),
    Point("k_norm", "tokens, kv_heads, head_dim", "key after its norm, before rope",
          _biased("attn_k_norm"), "", _hf("self_attn.k_norm", "self_attn.k_layernorm"),
          where=_if(_is_normed)),
    Point("q_rope", "tokens, heads, head_dim",
          "query after rope, unscaled, rotated part in split halves", _cpp("Qcur ROPE"),
          "q_post_rope", _hf("#q_rope"), where=_rotated("q")),
    Point("k_rope", "tokens, kv_heads, head_dim",
          "key after rope, rotated part in split halves", _cpp("Kcur ROPE"), "k_post_rope",
          _hf("#k_rope"), where=_rotated("k")),
    Point("q_attn", "tokens, heads, head_dim",
          "query as attention reads it, where a norm or a factor follows rope", (), "",
          _hf("#q_attn"),
          where=_if(lambda place: place.normed_late or place.tempered, "q_rope")),
    Point("k_attn", "tokens, kv_heads, head_dim",
          "key as attention reads it, where a norm follows rope", (), "", _hf("#k_attn"),
          where=_if(lambda place: place.normed_late, "k_rope")),
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
    Point("attn", "tokens, heads*value_dim", "probs.v, heads joined, before the output product",
          _cpp("kqv_out"), "attention",
          _hf("self_attn.o_proj#in", "self_attn.dense#in", "attn.c_proj#in", "attn.out_proj#in",
              "attention.dense#in", "self_attention.dense#in")),
    Point("attn_out", "tokens, hidden_size", "output projection with its bias",
          _biased("attn_output"), "attn_out",
          _hf("self_attn.o_proj", "self_attn.dense", "attn.c_proj", "attn.out_proj",
              "attention.dense", "self_attention.dense", "self_attn", "attn")),
    Point("attn_contrib", "tokens, hidden_size",
          "what is added to the stream: after the post-norm or the residual factor",
          _cpp(" MUL:post_attention_norm.weight"), "",
          _hf("post_self_attn_layernorm", "post_attention_layernorm sandwich",
              "post_attention_layernorm post"),
          where=_contribution(lambda place: "attn_out")),
    Point("attn_sum", "tokens, hidden_size",
          "attention's output added to the stream, where the sum is normalised", (), "",
          _hf("attention.output.LayerNorm#in", "attention.LayerNorm#in", "sa_layer_norm#in",
              "post_attention_layernorm#in after"),
          where=_if(lambda place: place.summed, "mid")),
    Point("mid", "tokens, hidden_size", "residual stream after attention",
          _cpp("ffn_inp ADD", "sa_out ADD"), "post_attn_residual",
          _hf("pre_feedforward_layernorm#in", "ln_2#in", "post_attention_layernorm#in pre",
              "attention.output.LayerNorm", "attention.LayerNorm", "sa_layer_norm", "mlp_norm#in",
              "post_attention_layernorm after"),
          where=_if(lambda place: not place.parallel)),
    Point("ffn_norm", "tokens, hidden_size", "after the norm before the MLP",
          _biased("ffn_norm"), "ffn_norm",
          _hf("pre_feedforward_layernorm", "ln_2", "ln_mlp", "post_attention_layernorm pre"),
          where=_ffn_norm),
    Point("router", "tokens, n_experts", "expert logits with bias", _biased("ffn_gate_inp"), "",
          _hf("mlp.gate", "mlp.router", "block_sparse_moe.gate", "block_sparse_moe.router"),
          where=_MOE),
    Point("experts", "tokens, n_experts_used", "ids of the chosen experts, heaviest first",
          _cpp("ffn_moe_topk VIEW"), "", _hf("#experts"), where=_MOE),
    Point("expert_w", "tokens, n_experts_used", "weights of the chosen experts as applied",
          _cpp("ffn_moe_weights_scaled SCALE", "ffn_moe_weights_softmax RESHAPE",
               "ffn_moe_weights_norm RESHAPE", "ffn_moe_weights_norm DIV",
               "ffn_moe_weights GET_ROWS"),
          "moe_router", _hf("#expert_w"), where=_MOE),
    Point("router_margin", "tokens",
          "score of the last chosen expert or group minus the next one's, infinite without one",
          finite=False, where=_MOE),
    Point("ffn_gate", "tokens, ffn_size", "gate product with bias", _biased("ffn_gate"),
          "ffn_gate", _hf("mlp.gate_proj", "mlp.gate_up_proj[halves]"), where=_GATED),
    Point("ffn_up", "tokens, ffn_size", "up product with bias", _biased("ffn_up"), "ffn_up",
          _hf("mlp.up_proj", "mlp.fc1", "mlp.c_fc", "mlp.fc_in", "mlp.dense_h_to_4h",
              "mlp.gate_up_proj[halves]"), where=_DENSE),
    Point("ffn_act", "tokens, ffn_size", "act(gate); of a plain MLP act(up)",
          _cpp("ffn_gelu", "ffn_silu", "ffn_relu"), "ffn_silu",
          _hf("mlp.act_fn", "mlp.activation_fn", "mlp.act"), where=_DENSE),
    Point("ffn_mul", "tokens, ffn_size", "act(gate) times up",
          _cpp("ffn_swiglu", "ffn_geglu", "ffn_gate_par"), "ffn_swigl", _hf("mlp.down_proj#in"),
          where=_multiplied),
    Point("ffn_out", "tokens, hidden_size", "down product with bias", _biased("ffn_down"),
          "ffn_out", _hf("mlp.down_proj", "mlp.fc2", "mlp.c_proj", "mlp"),
          where=_if(lambda place: not place.moe, "moe_out")),
    Point("moe_out", "tokens, hidden_size", "weighted sum of the experts plus the shared expert",
          _cpp("ffn_out", "ffn_moe_out"), "moe_ffn_out", _hf("mlp", "block_sparse_moe"),
          where=_MOE),
    Point("ffn_contrib", "tokens, hidden_size",
          "what is added to the stream: after the post-norm or the residual factor",
          _cpp(" MUL:post_ffw_norm.weight"), "",
          _hf("post_feedforward_layernorm", "post_mlp_layernorm"),
          where=_contribution(lambda place: "moe_out" if place.moe else "ffn_out")),
    Point("ffn_sum", "tokens, hidden_size",
          "the MLP's output added to the stream, where the sum is normalised", (), "",
          _hf("output.LayerNorm#in", "output_layer_norm#in", "post_mlp_layernorm#in after"),
          where=_if(lambda place: place.summed, "out")),
    Point("out", "tokens, hidden_size", "residual stream leaving the layer", _cpp("l_out"),
          "post_ffn_residual", _hf("#out", "")),
    Point("final_norm", "tokens, hidden_size", "after the last norm", _biased("output_norm"),
          "final_norm", _hf("norm", "final_layernorm", "final_layer_norm", "ln_f"), layered=False,
          where=_if(lambda place: place.block.head == "logits" or place.has("output_norm.weight"))),
    Point("pooled", "1, hidden_size",
          "the text's embedding: the mean of the last rows, the first or the last, unscaled",
          _cpp("result_embd_pooled"), rows="sequence", layered=False,
          where=_if(lambda place: place.hp["pooling"] is not None)),
    Point("logits_raw", "rows, vocab_size", "head product with its bias",
          (*_biased("output"), *_cpp(" MUL_MAT:token_embd.weight")), "",
          _hf("lm_head"), rows="logits", layered=False, where=_raw_logits),
    Point("logits", "rows, vocab_size", "after factor and softcap", _cpp("result_output"),
          "lm_head", _hf("logits"), rows="logits", layered=False,
          where=_if(lambda place: place.block.head == "logits")),
)  # fmt: skip
POINTS: Mapping[str, Point] = {point.name: point for point in _ROWS}
