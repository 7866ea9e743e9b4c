"""The capture points: one table, in execution order.

A point's meaning is fixed here: the tensor as the next operation reads it, [tokens, ...]. Its key
is `L3.attn_out`, a whole-model point's its name. Where an architecture makes a point equal to
another by construction it is not captured but has an alias; where the architecture has no such
tensor it is absent. docs/capture_points.md is printed from this table.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from aprfmt.arch.spec import BlockSpec
from aprfmt.arch.vocabulary import role_key
from aprfmt.errors import UsageError
from aprfmt.names import near
from aprfmt.tensor import Value

WHOLE = -1  # the layer of whole-model points
Rows = Literal["tokens", "scores", "keys", "logits"]


@dataclass(frozen=True)
class Place:
    """A layer of one model: what decides which points it has."""

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
    def parallel(self) -> bool:
        """Attention and MLP read the same norm."""
        return bool(self.hp["parallel_residual"])

    @property
    def unscaled(self) -> bool:
        """What a block computes is added to the stream as it is."""
        return self.block.placement == "pre" and float(self.hp["residual_scale"]) == 1


# HERE: computed and captured. ABSENT: the architecture has no such tensor. Any other string is
# the name of the point it equals (of the same layer, or a whole-model one; "out-" is the layer
# before).
HERE, ABSENT, BEFORE = "", "-", "out-"
Where = Callable[[Place], str]


@dataclass(frozen=True)
class Point:
    """One row: what is captured where.

    `shape` names its axes; `rows` says what its first axis (of `scores`: its second) counts.
    `llama_cpp` is the graph node with its occurrence, `apr` the stage of `--save-tensor` (points
    of one stage are joined in this table's order), `hf` the module of transformers' llama.
    `inner`: inside a fused operation, so that wanting it takes the stepped form.
    """

    name: str
    shape: str
    sentence: str
    llama_cpp: str = ""
    apr: str = ""
    hf: str = ""
    rows: Rows = "tokens"
    layered: bool = True
    inner: bool = False
    finite: bool = True  # an infinity here is a fault
    where: Where = lambda place: HERE


def _if(condition: Callable[[Place], bool], otherwise: str = ABSENT) -> Where:
    return lambda place: HERE if condition(place) else otherwise


def _product(part: str) -> Where:
    """Say where q_mm, k_mm or v_mm is: only a bias sets it apart."""

    def where(place: Place) -> str:
        if not place.has(f"attn_{part}.weight"):
            return ABSENT
        return HERE if place.has(f"attn_{part}.bias") else part

    return where


def _is_normed(place: Place) -> bool:
    return bool(place.hp["qk_norm"]) and not place.mla


def _rotated(part: str) -> Where:
    """Say where q_rope or k_rope is; without rotation the point before it."""

    def where(place: Place) -> str:
        if place.rotates or place.mla:
            return HERE
        return f"{part}_norm" if place.hp["qk_norm"] else part

    return where


def _contribution(otherwise: Callable[[Place], str]) -> Where:
    return lambda place: HERE if not place.unscaled else otherwise(place)


def _is_scaled(place: Place) -> bool:
    return place.block.position == "learned" or float(place.hp["embedding_scale"]) != 1


def _entering(place: Place) -> str:
    if place.layer > 0:
        return BEFORE
    return "embd_scaled" if _is_scaled(place) else "embd"


def _multiplied(place: Place) -> str:
    if place.moe:
        return ABSENT
    return HERE if place.block.mlp == "gated" else "ffn_act"


def _ffn_norm(place: Place) -> str:
    if place.parallel:
        return "attn_norm" if place.block.placement != "post" else "in"
    return HERE if place.block.placement != "post" else "mid"


def _raw_logits(place: Place) -> str:
    scaled = float(place.hp["logit_scale"]) != 1 or place.hp["final_softcap"] is not None
    return HERE if scaled else "logits"


_GATED = _if(lambda place: not place.moe and place.block.mlp == "gated")
_DENSE = _if(lambda place: not place.moe)
_MOE = _if(lambda place: place.moe)
_LATENT_Q = _if(lambda place: place.mla and place.hp["q_lora_rank"] is not None)
_MLA = _if(lambda place: place.mla)

_ROWS: tuple[Point, ...] = (
    Point("embd", "tokens, hidden_size", "rows of the token embedding, unscaled",
          "inp_embd (GET_ROWS)", "embedding", "embed_tokens (gemma: the scaled one)",
          layered=False),
    Point("embd_scaled", "tokens, hidden_size",
          "after the embedding's factor or with learned positions added: the input of layer 0",
          "inp_scaled (gemma), ADD (gpt2)", "", "input of layers.0", layered=False,
          where=_if(_is_scaled, "embd")),
    Point("in", "tokens, hidden_size", "residual stream entering the layer", "l_out-(i-1)", "",
          "input of layers.i", where=_entering),
    Point("attn_norm", "tokens, hidden_size",
          "after the norm before attention, weight and bias applied", "attn_norm", "attn_norm",
          "input_layernorm", where=_if(lambda place: place.block.placement != "post", "in")),
    Point("q_a", "tokens, q_lora_rank", "compressed query (MLA)", "q (MUL_MAT 1st)", "",
          "self_attn.q_a_proj", where=_LATENT_Q),
    Point("q_a_norm", "tokens, q_lora_rank", "compressed query after its norm (MLA)", "q (norm)",
          "", "self_attn.q_a_layernorm", where=_LATENT_Q),
    Point("q_mm", "tokens, heads, head_dim", "query product only, before the bias",
          "Qcur 1st (MUL_MAT)", "qkv_matmul", "", inner=True, where=_product("q")),
    Point("q_b", "tokens, heads, head_dim", "query expanded from its compressed form (MLA)",
          "q (MUL_MAT 2nd)", "", "self_attn.q_b_proj",
          where=lambda place: "q" if _LATENT_Q(place) == HERE else ABSENT),
    Point("q", "tokens, heads, head_dim", "query with its bias, before norm and rope",
          "Qcur 2nd (ADD), 1st without bias", "qkv_bias", "self_attn.q_proj"),
    Point("kv_a", "tokens, kv_lora_rank+qk_rope_head_dim",
          "compressed keys and values, then the part to rotate (MLA)", "kv_cmpr_pe", "",
          "self_attn.kv_a_proj_with_mqa", where=_MLA),
    Point("k_pe", "tokens, 1, qk_rope_head_dim",
          "part of the key that all heads share, before rope (MLA)", "k_pe 1st", "", "",
          where=_MLA),
    Point("kv_a_norm", "tokens, kv_lora_rank", "compressed keys and values after their norm (MLA)",
          "kv_cmpr", "", "self_attn.kv_a_layernorm", where=_MLA),
    Point("k_nope", "tokens, heads, qk_nope_head_dim", "unrotated part of the keys (MLA)",
          "k_nope", "", "self_attn.kv_b_proj", where=_MLA),
    Point("k_mm", "tokens, kv_heads, head_dim", "key product only, before the bias",
          "Kcur 1st (MUL_MAT)", "qkv_matmul", "", inner=True, where=_product("k")),
    Point("k", "tokens, kv_heads, head_dim", "key with its bias, before norm and rope",
          "Kcur 2nd (ADD), 1st without bias", "qkv_bias", "self_attn.k_proj",
          where=_if(lambda place: not place.mla)),
    Point("v_mm", "tokens, kv_heads, value_dim", "value product only, before the bias",
          "Vcur 1st (MUL_MAT)", "qkv_matmul", "", inner=True, where=_product("v")),
    Point("v", "tokens, kv_heads, value_dim", "value with its bias",
          "Vcur 2nd (ADD), 1st without bias", "qkv_bias", "self_attn.v_proj"),
    Point("k_pe_rope", "tokens, 1, qk_rope_head_dim", "the shared part after rope (MLA)",
          "k_pe (ROPE)", "", "",
          where=lambda place: ABSENT if not place.mla else HERE if place.rotates else "k_pe"),
    Point("q_norm", "tokens, heads, head_dim", "query after its norm, before rope", "Qcur_normed",
          "", "self_attn.q_norm", where=_if(_is_normed)),
    Point("k_norm", "tokens, kv_heads, head_dim", "key after its norm, before rope",
          "Kcur_normed", "", "self_attn.k_norm", where=_if(_is_normed)),
    Point("q_rope", "tokens, heads, head_dim",
          "query after rope, unscaled, rotated part in split halves", "Qcur last (ROPE)",
          "q_post_rope", "result of apply_rotary_pos_emb", where=_rotated("q")),
    Point("k_rope", "tokens, kv_heads, head_dim",
          "key after rope, rotated part in split halves", "Kcur last (ROPE)", "k_post_rope",
          "result of apply_rotary_pos_emb", where=_rotated("k")),
    Point("k_cache", "keys, kv_heads, head_dim", "keys that attention reads, cached ones first",
          "cache_k view", "", "past_key_values", rows="keys"),
    Point("v_cache", "keys, kv_heads, value_dim",
          "values that attention reads, cached ones first", "cache_v view", "",
          "past_key_values", rows="keys"),
    Point("scores", "heads, tokens, keys",
          "q.k times the scale, after the softcap, before mask and sinks",
          "kq is before the scale (gemma: after); kq_scaled_2 after the softcap", "attn_scores",
          "inside eager_attention_forward", rows="scores", inner=True),
    Point("probs", "heads, tokens, keys", "after mask, sinks and softmax, a sink's column dropped",
          "kq_soft_max", "attn_softmax", "attentions", rows="scores", inner=True),
    Point("attn", "tokens, heads*value_dim", "probs.v, heads joined, before the output product",
          "kqv_out (or the flash-attention node)", "attention", "input of self_attn.o_proj"),
    Point("attn_out", "tokens, hidden_size", "output projection with its bias",
          "attn_out, or an unnamed MUL_MAT or ADD", "attn_out", "self_attn.o_proj"),
    Point("attn_contrib", "tokens, hidden_size",
          "what is added to the stream: after the post-norm or the residual factor",
          "attn_post_norm (gemma, olmo2)", "", "post_attention_layernorm (gemma, olmo2)",
          where=_contribution(lambda place: "attn_out")),
    Point("mid", "tokens, hidden_size", "residual stream after attention",
          "ffn_inp (gemma2: sa_out)", "post_attn_residual", "input of the second norm",
          where=_if(lambda place: not place.parallel)),
    Point("ffn_norm", "tokens, hidden_size", "after the norm before the MLP",
          "ffn_norm (gpt-oss: attn_post_norm)", "ffn_norm",
          "post_attention_layernorm, pre_feedforward_layernorm (gemma2, gemma3)",
          where=_ffn_norm),
    Point("router", "tokens, n_experts", "expert logits with bias", "ffn_moe_logits(_biased)", "",
          "mlp.gate", where=_MOE),
    Point("experts", "tokens, n_experts_used", "ids of the chosen experts, heaviest first",
          "ffn_moe_topk", "", "", where=_MOE),
    Point("expert_w", "tokens, n_experts_used", "weights of the chosen experts as applied",
          "ffn_moe_weights_norm or _scaled", "moe_router", "", where=_MOE),
    Point("router_margin", "tokens",
          "score of the last chosen expert or group minus the next one's, infinite without one",
          finite=False, where=_MOE),
    Point("ffn_gate", "tokens, ffn_size", "gate product with bias", "ffn_gate(_b)", "ffn_gate",
          "mlp.gate_proj", where=_GATED),
    Point("ffn_up", "tokens, ffn_size", "up product with bias", "ffn_up(_b)", "ffn_up",
          "mlp.up_proj", where=_DENSE),
    Point("ffn_act", "tokens, ffn_size", "act(gate); of a plain MLP act(up)",
          "none for gated models: act of ffn_gate", "ffn_silu", "mlp.act_fn", where=_DENSE),
    Point("ffn_mul", "tokens, ffn_size", "act(gate) times up", "ffn_swiglu, ffn_geglu",
          "ffn_swigl", "input of mlp.down_proj",
          where=_multiplied),
    Point("ffn_out", "tokens, hidden_size", "down product with bias", "ffn_out", "ffn_out",
          "mlp.down_proj", where=_if(lambda place: not place.moe, "moe_out")),
    Point("moe_out", "tokens, hidden_size", "weighted sum of the experts plus the shared expert",
          "ffn_moe_out", "moe_ffn_out", "mlp", where=_MOE),
    Point("ffn_contrib", "tokens, hidden_size",
          "what is added to the stream: after the post-norm or the residual factor",
          "ffn_post_norm", "", "post_feedforward_layernorm (gemma, olmo2)",
          where=_contribution(lambda place: "moe_out" if place.moe else "ffn_out")),
    Point("out", "tokens, hidden_size", "residual stream leaving the layer", "l_out",
          "post_ffn_residual", "layers.i"),
    Point("final_norm", "tokens, hidden_size", "after the last norm", "result_norm", "final_norm",
          "norm", layered=False),
    Point("logits_raw", "rows, vocab_size", "head product with its bias", "", "", "lm_head",
          rows="logits", layered=False, where=_raw_logits),
    Point("logits", "rows, vocab_size", "after factor and softcap", "result_output", "lm_head",
          "logits", rows="logits", layered=False),
)  # fmt: skip
POINTS: Mapping[str, Point] = {point.name: point for point in _ROWS}

# The ten slots users of `apr trace --payload` know, under those names, and two beside them.
SLOTS: Mapping[str, tuple[str, ...]] = {
    "attn_norm": ("attn_norm",),
    "qkv": ("q", "k", "v"),
    "qkv_nobias": ("q_mm", "k_mm", "v_mm"),
    "attn_out": ("attn_out",),
    "ffn_norm": ("ffn_norm",),
    "ffn_gate": ("ffn_gate",),
    "ffn_up": ("ffn_up",),
    "ffn_silu": ("ffn_act",),
    "ffn_swigl": ("ffn_mul",),
    "ffn_out": ("ffn_out",),
    "output": ("out",),
}
# Stages of APRT folders: `apr`'s name -> the points it joins, in table order.
STAGES: Mapping[str, tuple[str, ...]] = {
    stage: tuple(point.name for point in _ROWS if point.apr == stage)
    for stage in dict.fromkeys(point.apr for point in _ROWS if point.apr)
}
STAGE_ALIASES: Mapping[str, str] = {"layer_output": "post_ffn_residual"}

_KEY = re.compile(r"L(\d{1,9})\.(\w+)")


def key_name(point: str, layer: int) -> str:
    """Return `L3.attn_out`, or the name of a whole-model point."""
    return point if layer == WHOLE else f"L{layer}.{point}"


def parse_key(key: str) -> tuple[str, int]:
    """Return (point, layer) of a key; UsageError for one that is none of the table's."""
    match = _KEY.fullmatch(key)
    name, layer = (match[2], int(match[1])) if match else (key, WHOLE)
    if name not in POINTS or POINTS[name].layered != (layer != WHOLE):
        raise UsageError(
            f"capture point {key!r} is not known; near ones: {', '.join(near(name, POINTS))}, "
            "written L3.attn_out or final_norm"
        )
    return name, layer


@dataclass(frozen=True)
class Instance:
    """A point of one model: captured under its own key, equal to another's, or absent."""

    point: Point
    layer: int
    alias_of: str  # key of the point it equals, "" otherwise
    absent: bool

    @property
    def key(self) -> str:
        """`L3.attn_out`."""
        return key_name(self.point.name, self.layer)


def instances(
    block: BlockSpec, hp: Mapping[str, Value], roles: Collection[str]
) -> dict[str, Instance]:
    """Return every point of a model by key, in execution order, aliases and absent ones too.

    `k_cache` and `v_cache` are captured only in passes that continue a cache.
    """
    layers = range(int(hp["n_layers"]))
    before = [point for point in _ROWS if not point.layered and point.name.startswith("embd")]
    after = [point for point in _ROWS if not point.layered and point not in before]
    inside = [point for point in _ROWS if point.layered]
    rows = [(point, WHOLE) for point in before]
    rows += [(point, layer) for layer in layers for point in inside]
    rows += [(point, WHOLE) for point in after]
    found = {}
    for point, layer in rows:
        status = point.where(Place(block, hp, roles, layer))
        alias = ""
        if status == BEFORE:
            alias = key_name("out", layer - 1)
        elif status not in (HERE, ABSENT):
            alias = key_name(status, layer if POINTS[status].layered else WHOLE)
        instance = Instance(point, layer, alias, status == ABSENT)
        found[instance.key] = instance
    return found


def resolve(key: str, known: Mapping[str, Instance]) -> Instance | None:
    """Follow aliases to the instance that is captured; None where the point is absent.

    Raises UsageError for a key the model does not have.
    """
    parse_key(key)
    while key in known:
        instance = known[key]
        if instance.absent:
            return None
        if not instance.alias_of:
            return instance
        key = instance.alias_of
    raise UsageError(f"{key}: the model has no such layer")


def select_points(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return point names for `all`, slot names, stage names or point names, in table order.

    Raises UsageError for another name.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        name = STAGE_ALIASES.get(pattern, pattern)
        names = tuple(POINTS) if name == "all" else SLOTS.get(name) or STAGES.get(name)
        if name in POINTS:
            names = (name,)
        if names is None:
            every = [*POINTS, *SLOTS, *STAGES]
            raise UsageError(
                f"capture point {pattern!r} is not known; near ones: "
                f"{', '.join(near(pattern, every))}, or all"
            )
        chosen.update(names)
    return tuple(name for name in POINTS if name in chosen)
