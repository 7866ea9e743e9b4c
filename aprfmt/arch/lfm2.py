"""lfm2 and its mixture: short convolutions, and attention with normed heads in some layers.

The norm behind the last layer is called embedding_norm, and so it is in GGUF. Sources:
transformers' modeling files; the gguf package's name map; the converter's lfm2.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import moe, rules
from aprfmt.arch.deepseek import routed_scale, sigmoid_router
from aprfmt.arch.layer_kinds import (
    ATTENTION,
    IN,
    attention_layers,
    attention_rows,
    by_index,
    by_names,
    kv_heads,
)
from aprfmt.arch.mla import dense_first
from aprfmt.arch.named import named
from aprfmt.arch.recurrent_steps import Depthwise
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import Rope
from aprfmt.arch.rows import RoleRow, experts, linear, norm, tables, whole
from aprfmt.arch.spec import Facts, HyperRule
from aprfmt.arch.values import boolean, number
from aprfmt.arch.values import whole as whole_number
from aprfmt.base.protocols import Value

Params = Mapping[str, Value]
Found = tuple[Value, str] | None
Rows = tuple[RoleRow, ...]
_OFF = f"!{IN}"
_BEFORE, _ = whole()
_LAST = RoleRow(
    "output_norm.weight", "model.embedding_norm.weight", ("hidden_size",),
    gguf="token_embd_norm.weight", layered=False,
)  # fmt: skip
_HEAD = RoleRow(
    "output.weight", "lm_head.weight", ("vocab_size", "hidden_size"), "!tied_embeddings",
    layered=False,
)  # fmt: skip


def _mlp(needs: str = "") -> Rows:
    return (
        *linear("ffn_gate", "feed_forward.w1", "ffn_size", "hidden_size", needs),
        *linear("ffn_up", "feed_forward.w3", "ffn_size", "hidden_size", needs),
        *linear("ffn_down", "feed_forward.w2", "hidden_size", "ffn_size", needs),
    )


def _rows(*mlp: RoleRow, head: RoleRow = _HEAD) -> Rows:
    return (
        *_BEFORE,
        *norm("attn_norm", "operator_norm"),
        *attention_rows(bias=None, out="out_proj"),
        *norm("attn_q_norm", "self_attn.q_layernorm", ("head_dim",), IN),
        *norm("attn_k_norm", "self_attn.k_layernorm", ("head_dim",), IN),
        *linear("shortconv.in_proj", "conv.in_proj", "3*hidden_size", "hidden_size", _OFF),
        RoleRow("shortconv.conv.weight", "conv.conv.weight", ("hidden_size", "conv_taps"), _OFF,
            (Depthwise("hidden_size", "conv_taps"),)),
        *linear("shortconv.out_proj", "conv.out_proj", "hidden_size", "hidden_size", _OFF),
        *norm("ffn_norm", "ffn_norm"),
        *mlp,
        _LAST,
        head,
    )  # fmt: skip


def _adjusted(facts: Facts, hp: Params) -> Found:
    """Return the MLP's width: two thirds of the stated one, times a factor, rounded up."""
    stated = facts.first("block_ff_dim", "intermediate_size")
    adjust = facts.first("block_auto_adjust_ff_dim")
    if stated is None or (adjust is not None and not boolean(*adjust)):
        return stated
    size = 2 * whole_number(*stated, 1) // 3
    factor, unit = facts.first("block_ffn_dim_multiplier"), facts.first("block_multiple_of")
    if factor is not None:
        size = int(number(*factor) * size)
    multiple = 256 if unit is None else whole_number(*unit, 1)
    return -(-size // multiple) * multiple, stated[1]


def _attending() -> HyperRule:
    """Return the rule for the layers with attention: by kind, or old files' list of numbers."""
    kinds, numbers = by_names(ATTENTION, "layer_types"), by_index("full_attn_idxs")

    def read(facts: Facts, hp: Params) -> Found:
        return kinds(facts, hp) or numbers(facts, hp)

    def write(value: Value, hp: Params) -> Params:
        return {"layer_types": ["full_attention" if on else "conv" for on in value]}

    return attention_layers(read, write)


_SHARED = (
    kv_heads(8),
    rules.context_length(128000),
    rules.norm_eps(1e-5, "norm_eps"),
    rules.tied_embeddings(True),
    rules.fixed("qk_norm", True),
    *rope_rules(Rope(theta=1e6)),
    rules.size("conv_taps", "conv_L_cache", "shortconv.l_cache", default=3),
    _attending(),
)

LFM2 = named(
    "lfm2", tables(_rows(*_mlp())),
    rules.hyper_table(
        *_SHARED,
        replace(
            rules.ffn_size(12288), read={"hf": _adjusted},
            write={"hf": lambda value, hp: {
                "intermediate_size": value, "block_auto_adjust_ff_dim": False,
            }},
        ),
    ),
)  # fmt: skip

_EXPERTS, _EXPERTS_HF = experts("feed_forward.experts", "w1", "w3", "w2")
LFM2_MOE = named(
    "lfm2_moe",
    tables(
        _rows(
            *_mlp("!moe_layers"),
            RoleRow("ffn_gate_inp.weight", "feed_forward.gate.weight",
                ("n_experts", "hidden_size"), "moe_layers"),
            RoleRow("exp_probs_b.bias", "feed_forward.expert_bias", ("n_experts",), "moe_layers"),
            *_EXPERTS,
            head=replace(_HEAD, gguf=""),
        ),
        hf_first=_EXPERTS_HF,
    ),
    rules.hyper_table(
        *_SHARED,
        rules.ffn_size(7168),
        *moe.counts(32, 4),
        moe.expert_size(hf_default=1792),
        dense_first(2, "num_dense_layers"),
        moe.norm_topk(True, gguf=True),
        routed_scale(1.0),
        sigmoid_router(),
    ),
)  # fmt: skip
