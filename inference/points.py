"""The table of capture points, in execution order, with the names other engines have for them.

A point's value is the tensor as the next operation reads it, [tokens, ...]. If an architecture
makes a point always equal to another one, the point is an alias and not captured; if the
architecture has no such tensor, the point is absent. This table gives
docs/reference/capture_points.md, and foreign traces are read with it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from aprfmt.inference.point_placement import ABSENT as ABSENT
from aprfmt.inference.point_placement import (
    ACTIVATED,
    BLOCKS_SCORED,
    COMPRESSED,
    CONV,
    COPIED,
    DELTA,
    DENSE,
    DRAFT,
    GATE,
    GATED,
    GATED_DELTA,
    HYPER,
    INDEX_KEYS,
    INDEX_WINDOWS,
    INDEXED,
    KIMI_DELTA,
    LATENT,
    LATENT_Q,
    LIGHTNING,
    MAMBA,
    MIXED,
    MLA,
    MOE,
    PARALLEL,
    PER_LAYER,
    SHORT_CONV,
    SPARSE,
    SSM,
    TOKENS_SCORED,
    WINDOW_KEYS,
    PlaceOf,
    changes_embedding,
    has_last_norm,
    has_norms_before_rope,
    here_if,
    only_attention,
    only_mixing_layers,
    only_mlp_layers,
    only_own_keys,
    place_attention_result,
    place_between_halves,
    place_contribution,
    place_embedded,
    place_entering,
    place_ffn_norm,
    place_mixer_sum,
    place_mlp_out,
    place_multiplied,
    place_product,
    place_raw_logits,
    place_rotated,
    place_values,
)
from aprfmt.inference.point_placement import BEFORE as BEFORE
from aprfmt.inference.point_placement import HERE as HERE
from aprfmt.inference.point_placement import WHOLE as WHOLE
from aprfmt.inference.point_placement import LayerFacts as LayerFacts
from aprfmt.inference.point_placement import adds_unscaled as adds_unscaled
from aprfmt.inference.point_placement import has_input_norms as has_input_norms
from aprfmt.inference.point_placement import norm_placement as norm_placement
from aprfmt.inference.point_placement import norm_role as norm_role

RowMeaning = Literal["tokens", "scores", "keys", "logits", "sequence"]


@dataclass(frozen=True, slots=True)
class Name:
    """One name another engine has for a point.

    transformers: `text` is a module's path below the layer (or the model); `#in` is what the module
    reads. `part` says which columns are the point's if the module's result has those of several
    points; `placement` is the block placement for which the name means this point, "" for all.
    llama.cpp: `text` is a graph node's name without its layer, `op` its operation; with `role` it
    is the node that reads this weight, whatever its name. If several nodes fit, the last one is
    used.
    """

    text: str
    part: str = ""
    placement: str = ""
    op: str = ""
    role: str = ""

    def __str__(self) -> str:
        """Return the name as the reference page prints it.

        That is the node or module, the operation, the weight, the `part`, and the placement of
        norms.
        """
        words = [self.text, self.op, f"of {self.role}" if self.role else ""]
        words += [f"({self.part})" if self.part else "", self.placement and f"[{self.placement}]"]
        return " ".join(word for word in words if word)


_MODULE = re.compile(r"([\w.#]*)(?:\[(\w+)\])?(?: (\S+))?")
_NODE = re.compile(r"(\w*) ?([A-Z_]*)(?::(\S+))?")


def _hf(*texts: str) -> tuple[Name, ...]:
    """Return the names that short texts stand for, in transformers.

    Examples: `self_attn.qkv_proj[q]`, `mlp.down_proj#in`, `post_attention_layernorm pre`.
    """
    found = [_MODULE.fullmatch(text) for text in texts]
    return tuple(Name(m[1], m[2] or "", m[3] or "") for m in found if m)


def _cpp(*texts: str) -> tuple[Name, ...]:
    """Return the names that short texts stand for, in llama.cpp.

    Examples: `kq_soft_max`, `Qcur ROPE`, ` MUL_MAT:attn_q.weight`.
    """
    found = [_NODE.fullmatch(text) for text in texts]
    return tuple(Name(m[1], op=m[2], role=m[3] or "") for m in found if m)


@dataclass(frozen=True)
class Point:
    """One row of the table: a capture point.

    `shape` names its axes; `rows` says what its first axis (of `scores`: its second) counts.
    `llama_cpp` are graph nodes and `hf` modules; the first one that exists is used. `apr` is the
    stage of `--save-tensor` (points of one stage are joined in this table's order). `inner`: inside
    a fused operation, so that wanting it makes the pass run step by step. `finite`: infinities are
    a fault. `where` returns the point's placing in a layer (point_placement.py).
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


def _names_of_product(part: str) -> tuple[Name, ...]:
    """Return llama.cpp's names for q, k or v (`part`) before its bias."""
    return _cpp(f" MUL_MAT:attn_{part}.weight")


def _bias_node(*roles: str) -> tuple[Name, ...]:
    """Return llama.cpp's names of two graph nodes per role: "ADD:ROLE.bias" and "MUL:ROLE.weight".

    The second is "MUL_MAT:ROLE.weight" unless a role is a norm. It is the node of a model without
    the bias.
    """
    op = "MUL" if any("norm" in role for role in roles) else "MUL_MAT"
    return _cpp(
        *(f" ADD:{role}.bias" for role in roles), *(f" {op}:{role}.weight" for role in roles)
    )


def _hyper_points(branch: str, norm: str, what: str) -> tuple[Point, ...]:
    """Return the points of the hyper-connection around a branch, "attn" or "ffn".

    `norm` is transformers' name of the norm before it, `what` the branch in words.
    """
    return (
        Point(
            f"hc_{branch}_pre",
            "tokens, hc_streams",
            f"weights of the streams in what {what} reads: deepseek_v4",
            where=HYPER,
        ),
        Point(
            f"hc_{branch}_post",
            "tokens, hc_streams",
            f"how much of what {what} gives each stream gets",
            (),
            "",
            _hf(f"{branch}_hc"),
            where=HYPER,
        ),
        Point(
            f"hc_{branch}_comb",
            "tokens, hc_streams*hc_streams",
            "how much of each stream goes to each: rows are the streams before",
            where=HYPER,
        ),
        Point(
            f"hc_{branch}_in",
            "tokens, hidden_size",
            f"the streams' weighted sum, which the norm before {what} reads",
            (),
            "",
            _hf(f"{norm}#in streams"),
            where=HYPER,
        ),
    )


_ROWS: tuple[Point, ...] = (
    Point("embd", "tokens, hidden_size", "rows of the token embedding, unscaled",
          _cpp(" GET_ROWS:token_embd.weight"), "embedding",
          _hf("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings",
              "embeddings.word_embeddings", "embeddings.tok_embeddings"),
          layered=False),
    Point("embd_in", "tokens, hidden_size", "the embedding's rows projected: opt_350m", (), "",
          _hf("project_in"), layered=False,
          where=here_if(lambda place: place.has_role("embd_in.weight"))),
    Point("embd_scaled", "tokens, hidden_size",
          "after the embedding's factor, or with learned positions and the token type added",
          _cpp("inp_scaled SCALE", "embd SCALE", "inp_embd SCALE", "inpL ADD"), "",
          _hf("embed_tokens[scaled]", "embeddings.LayerNorm#in"), layered=False,
          where=here_if(changes_embedding, "embd")),
    Point("embd_norm", "tokens, hidden_size", "after the norm of the embedding: encoders, bloom",
          _bias_node("token_embd_norm"), "",
          _hf("embeddings.LayerNorm", "embeddings.norm", "word_embeddings_layernorm"),
          layered=False,
          where=lambda place: (
              HERE if place_embedded(place) == "embd_norm" else place_embedded(place))),
    Point("draft_embd_norm", "tokens, hidden_size",
          "embedding of the token after each, after its norm: draft heads",
          layered=False, where=DRAFT),
    Point("draft_hidden", "tokens, hidden_size",
          "the model's rows after its last norm, as the draft head reads them",
          layered=False, where=DRAFT),
    Point("draft_hidden_norm", "tokens, hidden_size", "these rows after the head's norm",
          layered=False, where=DRAFT),
    Point("draft_in", "tokens, hidden_size",
          "both joined, the embedding first, and projected: what enters the draft head's layer",
          layered=False, where=DRAFT),
    Point("per_layer_embd", "tokens, n_layers*per_layer_size",
          "rows of the embedding that every layer has a part of, scaled: gemma3n, gemma4", (), "",
          _hf("embed_tokens_per_layer"), layered=False, where=PER_LAYER),
    Point("per_layer_proj", "tokens, n_layers*per_layer_size",
          "the embedding projected for all layers, scaled and normalised layer by layer", (), "",
          _hf("per_layer_projection_norm"), layered=False, where=PER_LAYER),
    Point("per_layer", "tokens, n_layers*per_layer_size",
          "their sum over the root of 2: what the layers' own inputs are cut from",
          layered=False, where=PER_LAYER),
    Point("altup_embd", "tokens, altup_streams*hidden_size",
          "the copies of the stream that enter layer 0, side by side: gemma3n",
          layered=False, where=COPIED),
    Point("hc_embd", "tokens, hc_streams*hidden_size",
          "the streams that enter layer 0, copies of the embedding side by side: deepseek_v4",
          layered=False, where=HYPER),
    Point("in", "tokens, hidden_size",
          "residual stream entering the layer; of gemma3n, deepseek_v4 all of them, side by side",
          (), "",
          _hf("#in"), where=place_entering),
    Point("altup_modes", "tokens, altup_streams",
          "what the router makes of the first copy, -1 to 1, to predict all copies", where=COPIED),
    Point("altup_predicted", "tokens, altup_streams*hidden_size",
          "the predicted copies; the layer runs on the first", where=COPIED),
    *_hyper_points("attn", "input_layernorm", "attention"),
    Point("attn_norm", "tokens, hidden_size",
          "after the norm before attention, weight and bias applied", _bias_node("attn_norm"),
          "attn_norm", _hf("input_layernorm", "attention_layernorm", "operator_norm", "ln_1",
                           "ln_attn", "norm_1", "self_attn_layer_norm pre", "norm"),
          where=here_if(lambda place: place.has_attention_norm, "in")),
    Point("laurel", "tokens, hidden_size",
          "the norm's result plus a normalised product of low rank of it: gemma3n",
          _cpp("laurel_out"), "", _hf("laurel"), where=COPIED),
    Point("attn_gate", "tokens, heads*head_dim",
          "gate of the attention, no sigmoid yet; of lfm3 one number a head",
          _cpp(" MUL_MAT:attn_q_gate.weight"), "",
          _hf("self_attn.g_proj", "self_attn.q_proj[gate]"), where=GATE),
    Point("delta_qkv", "tokens, delta_channels", "a delta net's q, k and v before the convolution",
          (), "", _hf("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz[groups]"),
          where=GATED_DELTA),
    *(
        Point(f"delta_{part}", "tokens, delta_value_heads*delta_value_dim",
              f"{what} of Kimi delta attention before the convolution",
              # llama.cpp's node of it is `q_mm` of other models: a log does not say which it is.
              (), "", _hf(f"self_attn.{part}_proj"), where=KIMI_DELTA)
        for part, what in (("q", "query"), ("k", "key"), ("v", "value"))
    ),
    Point("conv_in", "tokens, 3*hidden_size",
          "a short convolution's two gates and what is convolved: gate before, gate after, values",
          _bias_node("shortconv.in_proj"), "", _hf("conv.in_proj"), where=SHORT_CONV),
    Point("conv_x", "tokens, hidden_size", "what a short convolution reads: values times a gate",
          where=SHORT_CONV),
    Point("ssm_gate", "tokens, ssm_size", "gate of a state space mixer, before its activation",
          (), "", _hf("mixer.in_proj[ssm]", "mamba.in_proj[ssm]"), where=SSM),
    Point("ssm_conv_in", "tokens, channels",
          "what a state space mixer's convolution reads: values, of mamba2 B and C too",
          (), "", _hf("mixer.in_proj[ssm]", "mamba.in_proj[ssm]"), where=SSM),
    Point("conv", "tokens, channels",
          "after the convolution; of a delta net and a state space mixer after the activation too",
          where=CONV),
    Point("ssm_x", "tokens, ssm_rank+2*ssm_state", "compressed time step, then B and C (mamba)",
          _bias_node("ssm_x"), "", _hf("mixer.x_proj", "mamba.x_proj"), where=MAMBA),
    Point("ssm_dt", "tokens, ssm_heads", "time step before its bias; of mamba one a channel",
          (), "", _hf("mixer.in_proj[ssm]", "mamba.in_proj[ssm]"), where=SSM),
    Point("ssm_step", "tokens, ssm_heads", "time step after bias, softplus and limits", where=SSM),
    Point("ssm_scan", "tokens, ssm_size",
          "what is read from the state and what skips it, heads joined", where=SSM),
    Point("ssm_gated", "tokens, ssm_size",
          "after the gate and its norm, before the output product", (), "",
          _hf("mixer.out_proj#in", "mamba.out_proj#in"), where=SSM),
    Point("ssm_out", "tokens, hidden_size", "output product of a mixer next to attention", (), "",
          _hf("mamba.out_proj", "mamba"),
          where=here_if(lambda place: place.has_parallel_recurrence)),
    Point("conv_gated", "tokens, hidden_size",
          "after the convolution and its second gate, before the output product", (), "",
          _hf("conv.out_proj#in"), where=SHORT_CONV),
    Point("lightning_qkv", "tokens, heads*3*head_dim",
          "query, key and value of each head of lightning attention, before the activation",
          (), "", _hf("self_attn.qkv_proj"), where=LIGHTNING),
    Point("lightning_gate", "tokens, heads*head_dim", "gate of lightning attention, no sigmoid yet",
          (), "", _hf("self_attn.output_gate"), where=LIGHTNING),
    Point("lightning", "tokens, heads*head_dim",
          "what lightning attention reads from its state, heads joined", (), "",
          _hf("self_attn.norm#in"), where=LIGHTNING),
    Point("lightning_norm", "tokens, heads*head_dim", "that after its norm, before the gate",
          (), "", _hf("self_attn.norm"), where=LIGHTNING),
    Point("lightning_gated", "tokens, heads*head_dim",
          "after the gate, before the output product", (), "", _hf("self_attn.out_proj#in"),
          where=LIGHTNING),
    Point("delta_gate_low", "tokens, delta_value_dim",
          "first product of the gate of Kimi delta attention", _bias_node("ssm_g_a"), "",
          _hf("self_attn.g_a_proj"), where=KIMI_DELTA),
    Point("delta_gate", "tokens, delta_value_heads*delta_value_dim",
          "gate of a delta net, before its activation", _bias_node("ssm_g_b"), "",
          _hf("linear_attn.in_proj_z", "linear_attn.in_proj_qkvz[groups]", "linear_attn.g_proj",
              "self_attn.g_b_proj"),
          where=DELTA),
    Point("beta_mm", "tokens, delta_value_heads",
          "product of which a delta net's `beta` is made, no sigmoid yet", _bias_node("ssm_beta"),
          "", _hf("linear_attn.in_proj_b", "linear_attn.b_proj", "linear_attn.in_proj_ba[groups]",
                  "self_attn.b_proj"),
          where=DELTA),
    Point("beta", "tokens, delta_value_heads",
          "how much of a value's error a delta net writes, 0 to 1, or to 2",
          where=DELTA),
    Point("forget_low", "tokens, delta_value_dim",
          "first product of the decay of Kimi delta attention", _bias_node("ssm_f_a"), "",
          _hf("self_attn.forget_gate.f_a_proj", "self_attn.f_a_proj"), where=KIMI_DELTA),
    Point("forget", "tokens, delta_value_heads*delta_value_dim",
          "second product of the decay, no dt_bias yet", _bias_node("ssm_f_b"), "",
          _hf("self_attn.forget_gate.f_b_proj", "self_attn.f_b_proj"), where=KIMI_DELTA),
    Point("alpha", "tokens, delta_value_heads",
          "product of which the decay of a gated delta net is made, no dt_bias yet",
          _bias_node("ssm_alpha"), "",
          _hf("linear_attn.in_proj_a", "linear_attn.a_proj", "linear_attn.in_proj_ba[groups]"),
          where=GATED_DELTA),
    Point("decay", "tokens, delta_decays",
          "logarithm of what a delta net's state is multiplied by, of Kimi delta attention by "
          "channel",
          where=DELTA),
    Point("delta", "tokens, delta_value_heads*delta_value_dim",
          "what a delta net reads from its state, heads joined", where=DELTA),
    Point("delta_norm", "tokens, delta_value_heads*delta_value_dim",
          "after the norm and the gate, before the output product", (), "",
          _hf("linear_attn.out_proj#in", "linear_attn.o_proj#in", "self_attn.o_proj#in",
              "linear_attn.norm", "linear_attn.o_norm", "self_attn.o_norm"),
          where=DELTA),
    Point("q_a", "tokens, q_lora_rank", "compressed query (MLA)", _bias_node("attn_q_a"), "",
          _hf("self_attn.q_a_proj"), where=LATENT_Q),
    Point("q_a_norm", "tokens, q_lora_rank", "compressed query after its norm (MLA)",
          _bias_node("attn_q_a_norm"), "", _hf("self_attn.q_a_layernorm", "self_attn.q_a_norm"),
          where=LATENT_Q),
    Point("compress_kv", "tokens, 2*head_dim",
          "what compressed keys are made of: deepseek_v4, without an indexer half as wide", (), "",
          _hf("self_attn.compressor.kv_proj"), where=WINDOW_KEYS),
    Point("compress_gate", "tokens, 2*head_dim",
          "how much of it each token gives, before the position's bias and the softmax", (), "",
          _hf("self_attn.compressor.gate_proj"), where=WINDOW_KEYS),
    Point("compressed_k", "windows, 1, head_dim",
          "keys that stand for windows of tokens, normalised and rotated, cached ones first",
          rows="keys", where=WINDOW_KEYS),
    Point("index_compress_kv", "tokens, 2*index_head_dim",
          "what an indexer's compressed keys are made of: deepseek_v4", (), "",
          _hf("self_attn.compressor.indexer.kv_proj"), where=INDEX_WINDOWS),
    Point("index_compress_gate", "tokens, 2*index_head_dim",
          "how much of it each token gives, before the position's bias and the softmax", (), "",
          _hf("self_attn.compressor.indexer.gate_proj"), where=INDEX_WINDOWS),
    Point("index_compressed_k", "windows, 1, index_head_dim",
          "an indexer's compressed keys, normalised and rotated, cached ones first",
          rows="keys", where=INDEX_WINDOWS),
    Point("index_q", "tokens, index_heads*index_head_dim",
          "an indexer's queries, after a norm if it has one, before rope",
          _bias_node("indexer.attn_q_b"), "",
          _hf("self_attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj",
              "self_attn.indexer.q_norm"), where=INDEXED),
    Point("index_k", "tokens, index_head_dim", "an indexer's key after its norm, before rope",
          _cpp(" ADD:indexer.k_norm.bias"), "", _hf("self_attn.indexer.k_norm"), where=INDEX_KEYS),
    Point("index_q_rope", "tokens, index_heads, index_head_dim",
          "an indexer's queries after rope, rotated part in split halves", where=INDEXED),
    Point("index_k_rope", "tokens, 1, index_head_dim",
          "an indexer's key after rope, rotated part in split halves", where=INDEX_KEYS),
    Point("index_w", "tokens, index_heads", "weights of an indexer's heads, unscaled",
          _bias_node("indexer.proj"), "",
          _hf("self_attn.indexer.weights_proj",
              "self_attn.compressor.indexer.scorer.weights_proj"), where=TOKENS_SCORED),
    Point("index_scores", "tokens, keys",
          "an indexer's score of every key, hidden ones too: its heads' max(0, q.k), weighed",
          inner=True, where=TOKENS_SCORED),
    Point("index_keys", "tokens, keys",
          "1 where attention reads the key: among the best of an indexer and not later, else 0",
          inner=True, where=TOKENS_SCORED),
    Point("index_block_scores", "index_heads, tokens, blocks",
          "best score of a block's keys by each head of an indexer, infinite for later ones: "
          "minimax_m3_vl", rows="scores", inner=True, finite=False, where=BLOCKS_SCORED),
    Point("index_blocks", "index_heads, tokens, blocks",
          "1 where a group of heads reads the block: among the best, or next to the query, else 0",
          rows="scores", inner=True, where=BLOCKS_SCORED),
    Point("index_margin", "tokens",
          "score of the last key that an indexer chooses minus the next one's, infinite without",
          inner=True, finite=False, where=INDEXED),
    Point("q_mm", "tokens, heads, head_dim", "query product only, before the bias",
          _names_of_product("q"), "qkv_matmul", inner=True, where=place_product("q")),
    Point("q_b", "tokens, heads, head_dim", "query expanded from its compressed form (MLA)",
          _bias_node("attn_q_b"), "", _hf("self_attn.q_b_proj"),
          where=lambda place: "q" if LATENT_Q(place) == HERE else ABSENT),
    Point("q", "tokens, heads, head_dim", "query with its bias, before norm and rope",
          _bias_node("attn_q"), "qkv_bias",
          _hf("self_attn.q_proj", "attn.q_proj", "mixer.q_proj",
              "attention.self.query", "attention.q_lin", "attention.attn.q",
              "self_attn.qkv_proj[qkv]", "attn.Wqkv[qkv]",
              "attn.c_attn[qkv]", "attention.query_key_value[qkv]",
              "self_attention.query_key_value[qkv]")),
    Point("kv_a", "tokens, kv_lora_rank+qk_rope_head_dim",
          "compressed keys and values, then the part to rotate (MLA)", _bias_node("attn_kv_a_mqa"),
          "", _hf("self_attn.kv_a_proj_with_mqa"), where=MLA),
    Point("k_pe", "tokens, 1, qk_rope_head_dim",
          "part of the key that all heads share, before rope (MLA)", _cpp("k_pe VIEW"), "",
          _hf("self_attn.kv_a_proj_with_mqa[tail]"), where=MLA),
    Point("kv_a_norm", "tokens, kv_lora_rank", "compressed keys and values after their norm (MLA)",
          _bias_node("attn_kv_a_norm"), "", _hf("self_attn.kv_a_layernorm"), where=MLA),
    Point("k_nope", "tokens, heads, qk_nope_head_dim", "unrotated part of the keys (MLA)",
          _cpp("k_nope_view VIEW"), "", _hf("self_attn.kv_b_proj[heads]"), where=MLA),
    Point("k_mm", "tokens, kv_heads, head_dim", "key product only, before the bias",
          _names_of_product("k"), "qkv_matmul", inner=True, where=place_product("k")),
    Point("k", "tokens, kv_heads, head_dim", "key with its bias, before norm and rope",
          _bias_node("attn_k"), "qkv_bias",
          _hf("self_attn.k_proj", "attn.k_proj", "mixer.k_proj", "self_attn.kv_proj",
              "attention.self.key", "attention.k_lin", "attention.attn.k",
              "self_attn.qkv_proj[qkv]", "attn.Wqkv[qkv]",
              "attn.c_attn[qkv]", "attention.query_key_value[qkv]",
              "self_attention.query_key_value[qkv]"),
          where=here_if(lambda place: not place.mla)),
    Point("v_mm", "tokens, kv_heads, value_dim", "value product only, before the bias",
          _names_of_product("v"), "qkv_matmul", inner=True, where=place_product("v")),
    Point("v", "tokens, kv_heads, value_dim", "value with its bias",
          _bias_node("attn_v"), "qkv_bias",
          _hf("self_attn.v_proj", "attn.v_proj", "mixer.v_proj",
              "attention.self.value", "attention.v_lin", "attention.attn.v",
              "self_attn.qkv_proj[qkv]", "attn.Wqkv[qkv]",
              "attn.c_attn[qkv]", "attention.query_key_value[qkv]",
              "self_attention.query_key_value[qkv]",
              "self_attn.kv_b_proj[heads]"), where=place_values),
    Point("k_pe_rope", "tokens, 1, qk_rope_head_dim", "the shared part after rope (MLA)",
          _cpp("k_pe ROPE"), "",
          where=lambda place: ABSENT if not place.mla else HERE if place.rotates else "k_pe"),
    Point("q_norm", "tokens, heads, head_dim", "query after its norm, before rope",
          _bias_node("attn_q_norm"), "", _hf("self_attn.q_norm", "self_attn.q_layernorm",
                                                "self_attn.q_b_norm"),
          where=here_if(has_norms_before_rope)),
    Point("k_norm", "tokens, kv_heads, head_dim", "key after its norm, before rope",
          _bias_node("attn_k_norm"), "", _hf("self_attn.k_norm", "self_attn.k_layernorm",
                                                "self_attn.kv_norm"),
          where=here_if(has_norms_before_rope)),
    Point("v_norm", "tokens, kv_heads, value_dim",
          "value after a norm without a weight: gemma3n, gemma4", _cpp("Vcur_normed"), "",
          _hf("self_attn.v_norm"),
          where=here_if(lambda place: place.block.value_norm != "none", "v")),
    Point("q_rope", "tokens, heads, head_dim",
          "query after rope, unscaled, rotated part in split halves", _cpp("Qcur ROPE"),
          "q_post_rope", _hf("#q_rope", "self_attn.q_rope"), where=place_rotated("q")),
    Point("k_rope", "tokens, kv_heads, head_dim",
          "key after rope, rotated part in split halves", _cpp("Kcur ROPE"), "k_post_rope",
          _hf("#k_rope", "self_attn.k_rope"), where=place_rotated("k")),
    Point("q_attn", "tokens, heads, head_dim",
          "query as attention reads it, where a norm or a factor follows rope", (), "",
          _hf("#q_attn"),
          where=here_if(lambda place: place.norms_after_rope or place.has_query_factors, "q_rope")),
    Point("k_attn", "tokens, kv_heads, head_dim",
          "key as attention reads it, where a norm follows rope", (), "", _hf("#k_attn"),
          where=here_if(lambda place: place.norms_after_rope, "k_rope")),
    Point("k_cache", "keys, kv_heads, head_dim", "keys that attention reads, cached ones first",
          _cpp("cache_k VIEW"), "", _hf("#k_cache"), rows="keys"),
    Point("v_cache", "keys, kv_heads, value_dim",
          "values that attention reads, cached ones first", _cpp("cache_v VIEW"), "",
          _hf("#v_cache"), rows="keys",
          where=here_if(lambda place: not place.compressed)),
    Point("scores", "heads, tokens, keys",
          "q.k times the scale, after the softcap, before mask and sinks",
          _cpp("kq_scaled_2 SCALE", "kq MUL_MAT"), "attn_scores", _hf("#scores"), rows="scores",
          inner=True),
    Point("probs", "heads, tokens, keys", "after mask, sinks and softmax, a sink's column dropped",
          _cpp("kq_soft_max SOFT_MAX"), "attn_softmax", _hf("#probs"), rows="scores", inner=True),
    Point("attn_mixed", "tokens, heads*value_dim",
          "probs.v, heads joined, where a gate follows, or the rotation is undone (deepseek_v4)",
          where=MIXED),
    Point("attn", "tokens, heads*value_dim",
          "probs.v, heads joined, after a gate, before the output product",
          _cpp("attn_gated MUL", "kqv_out"), "attention",
          _hf("self_attn.o_proj#in", "self_attn.dense#in", "attn.c_proj#in", "attn.out_proj#in",
              "attention.dense#in", "self_attention.dense#in", "self_attn.out_proj#in",
              "attention.output.dense#in", "attention.out_lin#in", "attention.attn.o#in",
              "attn.Wo#in", "mixer.o_proj#in", "self_attn.o_a_proj#in"),
          where=place_attention_result),
    Point("attn_low", "tokens, output_groups*output_rank",
          "each group of heads projected by itself: deepseek_v4", (), "",
          _hf("self_attn.o_b_proj#in"), where=COMPRESSED),
    Point("attn_out", "tokens, hidden_size", "output projection with its bias",
          _bias_node("attn_output", "ssm_out", "shortconv.out_proj"), "attn_out",
          _hf("self_attn.o_proj", "self_attn.dense", "attn.c_proj", "attn.out_proj",
              "attention.dense", "self_attention.dense", "self_attn.out_proj",
              "linear_attn.out_proj", "linear_attn.o_proj", "attention.output.dense",
              "attention.out_lin",
              "attention.attn.o", "attn.Wo", "conv.out_proj", "mixer.out_proj", "mixer.o_proj",
              "mamba.out_proj", "self_attn.o_b_proj", "self_attn", "attn", "linear_attn",
              "self_attention", "attention pre", "mamba", "mixer", "conv"),
          where=only_mixing_layers(lambda place: HERE)),
    Point("attn_contrib", "tokens, hidden_size",
          "what is added to the stream: after the post-norm or the residual factor",
          _cpp(" MUL:post_attention_norm.weight"), "",
          _hf("post_self_attn_layernorm", "post_attention_layernorm sandwich",
              "post_attention_layernorm post", "post_operator_norm"),
          where=only_mixing_layers(place_mixer_sum)),
    Point("attn_sum", "tokens, hidden_size",
          "attention's output added to the stream, where the sum is normalised", (), "",
          _hf("attention.output.LayerNorm#in", "attention.LayerNorm#in", "sa_layer_norm#in",
              "post_attention_layernorm#in after", "self_attn_layer_norm#in after"),
          where=here_if(lambda place: place.norms_after_sum, "mid")),
    Point("mid", "tokens, hidden_size", "residual stream after attention",
          _cpp("ffn_inp ADD", "sa_out ADD", "attn_laurel", "attn_out ADD"), "post_attn_residual",
          _hf("pre_feedforward_layernorm#in", "feedforward_layernorm#in",
              "pre_ff_layernorm#in", "ln_2#in",
              "post_attention_layernorm#in pre", "norm_2#in", "ffn_hc#in",
              "final_layer_norm#in pre",
              "mlp_norm#in", "ffn_norm#in", "self_attn_layer_norm after",
              "sa_layer_norm", "attention.output.LayerNorm", "attention.LayerNorm",
              "post_attention_layernorm after", "attention.output after"),
          where=place_between_halves),
    *_hyper_points("ffn", "post_attention_layernorm", "the experts"),
    Point("ffn_norm", "tokens, hidden_size", "after the norm before the MLP",
          _bias_node("ffn_norm"), "ffn_norm",
          _hf("pre_feedforward_layernorm", "feedforward_layernorm", "pre_ff_layernorm",
              "ln_2", "ln_mlp", "norm_2",
              "final_layer_norm pre", "mlp_norm", "ffn_norm", "post_attention_layernorm pre",
              "post_attention_layernorm streams"),
          where=place_ffn_norm),
    Point("ffn_gate", "tokens, ffn_size", "gate product with bias", _bias_node("ffn_gate"),
          "ffn_gate", _hf("mlp.gate_proj", "mlp.gate_up_proj[halves]", "mlp.Wi[halves]",
                          "feed_forward.gate_proj", "feed_forward.w1",
                          "shared_mlp.input_linear[halves]"),
          where=GATED),
    Point("ffn_topk", "tokens, ffn_size",
          "the gate above its row's mean plus some standard deviations, 0 elsewhere: gemma3n", (),
          "", _hf("mlp.act_fn#in"), where=SPARSE),
    Point("ffn_up", "tokens, ffn_size", "up product with bias", _bias_node("ffn_up"), "ffn_up",
          _hf("mlp.up_proj", "mlp.fc1", "mlp.c_fc", "mlp.fc_in", "mlp.dense_h_to_4h",
              "ffn.up_proj", "fc1", "intermediate.dense", "ffn.lin1", "mlp.gate_up_proj[halves]",
              "mlp.Wi[halves]", "feed_forward.up_proj", "feed_forward.w3", "mixer.up_proj",
              "shared_mlp.input_linear[halves]"),
          where=DENSE),
    Point("ffn_act", "tokens, ffn_size", "act(gate); of a plain MLP act(up)",
          _cpp("ffn_gelu", "ffn_silu", "ffn_relu"), "ffn_silu",
          _hf("mlp.act_fn", "mlp.activation_fn", "mlp.act", "mlp.gelu_impl", "ffn.act",
              "activation_fn", "feed_forward.activation_fn",
              "intermediate.intermediate_act_fn", "ffn.activation", "mixer.act_fn",
              "feed_forward.act_fn", "shared_mlp.activation"), where=ACTIVATED),
    Point("ffn_mul", "tokens, ffn_size", "act(gate) times up",
          _cpp("ffn_swiglu", "ffn_geglu", "ffn_gate_par"), "ffn_swigl",
          _hf("mlp.down_proj#in", "mlp.Wo#in", "feed_forward.down_proj#in", "feed_forward.w2#in",
              "shared_mlp.output_linear#in"),
          where=place_multiplied),
    Point("ffn_out", "tokens, hidden_size", "down product with bias", _bias_node("ffn_down"),
          "ffn_out", _hf("mlp.down_proj", "mlp.fc2", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.Wo",
              "ffn.down_proj", "fc2", "output.dense", "ffn.lin2", "mlp", "feed_forward.down_proj",
              "feed_forward.w2", "feed_forward", "mixer.down_proj", "shared_mlp.output_linear",
              "shared_mlp", "mixer"),
          where=place_mlp_out),
    Point("ffn_mlp", "tokens, hidden_size",
          "the dense MLP's output after its own norm, where experts are added to it: gemma4",
          _cpp("ffn_mlp"), "", _hf("post_feedforward_layernorm_1"), where=PARALLEL),
    Point("moe_norm", "tokens, hidden_size", "the stream after the experts' own norm: gemma4",
          _cpp("ffn_norm_2"), "", _hf("pre_feedforward_layernorm_2"), where=PARALLEL),
    Point("router_in", "tokens, hidden_size",
          "the stream as the router reads it, normalised and scaled: gemma4", (), "",
          _hf("router.proj#in"), where=PARALLEL),
    Point("latent", "tokens, latent_size", "what experts read, projected from the stream",
          _bias_node("ffn_latent_down"), "", _hf("mixer.fc1_latent_proj"), where=LATENT),
    Point("router", "tokens, n_experts", "expert logits with bias", _bias_node("ffn_gate_inp"), "",
          _hf("router.proj", "mlp.gate", "mlp.router", "block_sparse_moe.gate",
              "block_sparse_moe.router",
              "feed_forward.router", "feed_forward.gate", "mixer.gate", "router"),
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
    Point("latent_out", "tokens, latent_size",
          "weighted sum of experts that read such a projection", (), "",
          _hf("mixer.fc2_latent_proj#in"), where=LATENT),
    Point("moe_out", "tokens, hidden_size", "weighted sum of the experts plus the shared expert",
          _cpp("ffn_out", "ffn_moe_out"), "moe_ffn_out",
          _hf("experts", "mlp", "block_sparse_moe", "feed_forward", "mixer", "mlp.experts",
              "block_sparse_moe.experts"), where=MOE),
    Point("ffn_moe", "tokens, hidden_size", "the experts' output after its own norm: gemma4",
          _cpp("ffn_moe"), "", _hf("post_feedforward_layernorm_2"), where=PARALLEL),
    Point("ffn_combined", "tokens, hidden_size", "dense MLP and experts added: gemma4",
          _cpp("ffn_moe_combined"), "", _hf("post_feedforward_layernorm#in"), where=PARALLEL),
    Point("ffn_contrib", "tokens, hidden_size",
          "what is added to the stream: after the post-norm or the residual factor",
          _cpp(" MUL:post_ffw_norm.weight"), "",
          _hf("post_feedforward_layernorm", "post_mlp_layernorm", "post_ffn_norm"),
          where=only_mlp_layers(
              place_contribution(lambda place: "moe_out" if place.moe else "ffn_out"))),
    Point("ffn_sum", "tokens, hidden_size",
          "the MLP's output added to the stream, where the sum is normalised", (), "",
          _hf("output.LayerNorm#in", "output_layer_norm#in", "post_mlp_layernorm#in after",
              "final_layer_norm#in after"),
          where=here_if(lambda place: place.norms_after_sum, "out")),
    Point("ffn_stream", "tokens, hidden_size",
          "stream after the MLP, before the layer's own embedding or a factor: gemma3n, gemma4",
          _cpp("pe_in", "attn_ffw_laurel_gated"),
          where=here_if(lambda place: place.has_layer_inputs or place.block.layer_scale, "out")),
    Point("altup_modes_after", "tokens, altup_streams",
          "what the router makes of the stream after the MLP, to correct all copies",
          where=COPIED),
    Point("altup_corrected", "tokens, altup_streams*hidden_size",
          "the copies after what the layer changed", where=COPIED),
    Point("per_layer_gate", "tokens, per_layer_size",
          "product that gates the layer's own embedding", _bias_node("inp_gate"), "",
          _hf("per_layer_input_gate"), where=PER_LAYER),
    Point("per_layer_mul", "tokens, per_layer_size",
          "act(gate) times the layer's own embedding", (), "", _hf("per_layer_projection#in"),
          where=PER_LAYER),
    Point("per_layer_out", "tokens, hidden_size", "it projected to the stream's width",
          _bias_node("proj"), "", _hf("per_layer_projection"), where=PER_LAYER),
    Point("per_layer_contrib", "tokens, hidden_size",
          "what is added to the stream: after the norm", _cpp(" MUL:post_norm.weight"), "",
          _hf("post_per_layer_input_norm"), where=PER_LAYER),
    Point("out", "tokens, hidden_size",
          "residual stream leaving the layer; of gemma3n and deepseek_v4 all of them, side by side",
          _cpp("l_out"),
          "post_ffn_residual",
          _hf("#out", "", "output", "output.LayerNorm", "output_layer_norm",
              "post_mlp_layernorm after", "final_layer_norm after")),
    Point("altup_merged", "tokens, hidden_size",
          "the mean of the copies, projected back to one magnitude", _cpp("unembd_merged"), "",
          _hf("norm#in"), layered=False, where=COPIED),
    Point("hc_head_pre", "tokens, hc_streams",
          "weights of the streams in what the last norm reads: deepseek_v4",
          layered=False, where=HYPER),
    Point("hc_merged", "tokens, hidden_size", "the streams' sum by these weights", (), "",
          _hf("hc_head"), layered=False, where=HYPER),
    Point("head_in", "tokens, width", "projected for the head: opt_350m, causal bert", (), "",
          _hf("project_out", "predictions.transform.dense", "lm_head.dense"), layered=False,
          where=here_if(lambda place: place.has_role("head_in.weight"))),
    Point("head_act", "tokens, hidden_size", "act(head_in) of causal bert, before its norm", (), "",
          _hf("predictions.transform.LayerNorm#in", "lm_head.layer_norm#in"), layered=False,
          where=here_if(lambda place: place.block.head == "dense")),
    Point("final_norm", "tokens, hidden_size", "after the last norm", _bias_node("output_norm"),
          "final_norm", _hf("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f",
                            "final_norm", "embedding_norm", "predictions.transform.LayerNorm",
                            "lm_head.layer_norm"), layered=False,
          where=here_if(lambda place: has_last_norm(place.block, place.roles))),
    Point("pooled", "1, hidden_size",
          "the text's embedding: the mean of the last rows, the first or the last, unscaled",
          _cpp("result_embd_pooled"), "",
          _hf("sentence_embedding", "sentence_embeddings", "text_embeds", "dense_vecs"),
          rows="sequence", layered=False,
          where=here_if(lambda place: place.hp["pooling"] is not None)),
    Point("logits_raw", "rows, vocab_size", "head product with its bias",
          (*_bias_node("output"), *_cpp(" MUL_MAT:token_embd.weight")), "",
          _hf("lm_head", "predictions.decoder", "lm_head.decoder", "embed_out",
                                 "output_projection", "vocab_projector"),
          rows="logits", layered=False, where=place_raw_logits),
    Point("logits", "rows, vocab_size", "after factor and softcap", _cpp("result_output"),
          "lm_head", _hf("logits"), rows="logits", layered=False,
          where=here_if(lambda place: place.block.head != "none")),
)  # fmt: skip
# Points between the norm before attention and its result: layers with a recurrence have none.
_OF_ATTENTION = frozenset(
    """index_block_scores index_blocks q_a q_a_norm index_q index_k index_q_rope index_k_rope
    index_w index_scores index_keys index_margin index_compress_kv index_compress_gate
    index_compressed_k compress_kv compress_gate compressed_k q_mm q_b q kv_a k_pe kv_a_norm
    k_nope k_mm k v_mm v k_pe_rope q_norm k_norm v_norm q_rope k_rope q_attn k_attn k_cache
    v_cache scores probs""".split()
)
# Those of them that a layer with an earlier layer's keys and values does not have.
_OF_KEYS = frozenset("k_mm k v_mm v k_norm v_norm k_rope k_attn".split())


def _limit_to_attention(point: Point) -> Point:
    """Return a point, made absent in layers without attention if it is one of attention's.

    Points of keys and values are absent too in layers that use an earlier layer's.
    """
    where = only_own_keys(point.where) if point.name in _OF_KEYS else point.where
    where = only_attention(where) if point.name in _OF_ATTENTION else where
    return replace(point, where=where)


POINTS: Mapping[str, Point] = {point.name: _limit_to_attention(point) for point in _ROWS}
