"""Newer models by their names: llama4's text part, bitnet, eurobert.

What converting, comparing, checking and quantizing need; no forward pass. Sources:
transformers' modeling files; the gguf package's name map; the converter's llama4.py.
"""

from collections.abc import Mapping

from aprfmt.arch import moe, rules
from aprfmt.arch.joins import Split
from aprfmt.arch.named import named
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import Rope
from aprfmt.arch.rows import (
    FUSED,
    LAYER,
    RoleRow,
    attention,
    experts,
    gated_mlp,
    linear,
    norm,
    tables,
    whole,
)
from aprfmt.arch.spec import Binding, Facts, HyperRule
from aprfmt.arch.steps import Transposed
from aprfmt.arch.values import sequence
from aprfmt.arch.values import whole as whole_number
from aprfmt.base.protocols import Value

Params = Mapping[str, Value]
Found = tuple[Value, str] | None
_BEFORE, _AFTER = whole()
_NORMS = norm("attn_norm", "input_layernorm"), norm("ffn_norm", "post_attention_layernorm")

# --- llama4 --------------------------------------------------------------------------------------

_F = "feed_forward."
_GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_HALVES = (Transposed(), Split(("moe_ffn_size", "moe_ffn_size"), axis=1))


def _shared(role: str, hf: str, out: str, into: str) -> tuple[RoleRow, ...]:
    return linear(role, f"{_F}shared_expert.{hf}", out, into, "moe_layers")


_LLAMA4 = tables(
    (
        *_BEFORE,
        *_NORMS[0],
        *attention(),
        *_NORMS[1],
        *gated_mlp(needs="!moe_layers", module="feed_forward"),
        RoleRow("ffn_gate_inp.weight", _F + "router.weight", ("n_experts", "hidden_size"),
            "moe_layers"),
        *experts()[0],
        *_shared("ffn_gate_shexp", "gate_proj", "shared_ffn_size", "hidden_size"),
        *_shared("ffn_up_shexp", "up_proj", "shared_ffn_size", "hidden_size"),
        *_shared("ffn_down_shexp", "down_proj", "hidden_size", "shared_ffn_size"),
        *_AFTER,
    ),
    # Experts are stored [in, out], gate and up side by side.
    hf_first=(
        Binding((f"{LAYER}{_F}experts.gate_up_proj",), _GATE_UP, _HALVES),
        Binding((f"{LAYER}{_F}experts.down_proj",), ("ffn_down_exps.weight",), _HALVES[:1]),
    ),
    hf_more=FUSED,
)  # fmt: skip


def _sparse(facts: Facts, hp: Params) -> Found:
    """Return the layers with experts: those listed, or every so many."""
    listed, step = facts.first("moe_layers"), facts.first("interleave_moe_layer_step")
    if listed is not None:
        on = {whole_number(item, listed[1]) for item in sequence(*listed)}
        return tuple(i in on for i in range(hp["n_layers"])), listed[1]
    return None if step is None else (_every(whole_number(*step), hp), step[1])


def _every(step: int, hp: Params) -> tuple[bool, ...]:
    return tuple(step > 0 and (i + 1) % step == 0 for i in range(hp["n_layers"]))


def _sparse_gguf(facts: Facts, hp: Params) -> Found:
    step = facts.first("{arch}.interleave_moe_layer_step")
    return None if step is None else (_every(whole_number(*step), hp), step[1])


def _write_sparse(value: Value, hp: Params) -> Params:
    return {"moe_layers": [i for i, sparse in enumerate(value) if sparse]}


def _write_sparse_gguf(value: Value, hp: Params) -> Params:
    first = (*value, True).index(True) + 1
    step = first if any(value) else 0
    return {"{arch}.interleave_moe_layer_step": step}


LLAMA4 = named(
    "llama4", ("llama4_text", "Llama4ForCausalLM", "llama4", "Llama4ForConditionalGeneration"),
    "llama4", _LLAMA4,
    rules.hyper_table(
        rules.n_kv_heads(8),
        rules.head_dim(128),
        rules.context_length(131072),
        rules.norm_eps(1e-5),
        rules.ffn_size(16384, "intermediate_size_mlp"),
        *rules.attention_biases(),
        *rope_rules(Rope(theta=500000.0)),
        rules.rope_style("interleaved"),
        *moe.counts(16, 1, "num_local_experts num_experts"),
        moe.expert_size("intermediate_size", 8192),
        rules.size("shared_ffn_size", "intermediate_size", "expert_shared_feed_forward_length",
            default=lambda hp: hp["moe_ffn_size"], hf_default=8192),
        HyperRule(
            "moe_layers",
            read={"hf": _sparse, "gguf": _sparse_gguf},
            write={"hf": _write_sparse, "gguf": _write_sparse_gguf},
            default=rules.per_layer(True),
        ),
    ),
    derived=ROPE_TENSORS,
)  # fmt: skip

# --- bitnet, eurobert ---------------------------------------------------------------------------

BITNET = named(
    "bitnet", ("bitnet", "BitNetForCausalLM"), "bitnet",
    tables(
        (
            *_BEFORE,
            *_NORMS[0],
            *attention(),
            *norm("attn_sub_norm", "self_attn.attn_sub_norm"),
            *_NORMS[1],
            *gated_mlp(),
            *norm("ffn_sub_norm", "mlp.ffn_sub_norm", ("ffn_size",)),
            *(row for row in _AFTER if row.role != "output.weight"),
            RoleRow("output.weight", "lm_head.weight", ("vocab_size", "hidden_size"),
                "!tied_embeddings", gguf="", layered=False),
        ),
        hf_more=FUSED,
    ),
    rules.hyper_table(
        rules.n_kv_heads(5),
        rules.context_length(2048),
        rules.norm_eps(1e-5),
        rules.activation("relu2"),
        *rules.attention_biases(),
        *rope_rules(Rope(theta=500000.0)),
    ),
)  # fmt: skip

EUROBERT = named(
    "eurobert", ("eurobert", "EuroBertModel", "EuroBertForMaskedLM"), "eurobert",
    tables(
        (
            *_BEFORE,
            *_NORMS[0],
            *attention(bias=None, out_bias=None),
            *_NORMS[1],
            *gated_mlp(),
            *(row for row in _AFTER if row.role != "output.weight"),
            RoleRow("output.weight", "lm_head.weight", ("vocab_size", "hidden_size"),
                "optional", gguf="", layered=False),
        ),
        hf_more=FUSED,
    ),
    rules.hyper_table(
        rules.context_length(8192),
        rules.norm_eps(1e-5),
        rules.fixed("tied_embeddings", True),
        *rope_rules(Rope(theta=250000.0)),
    ),
)  # fmt: skip
