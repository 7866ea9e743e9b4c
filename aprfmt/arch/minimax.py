"""minimax (MiniMax-Text-01): lightning attention in most layers, attention in others, experts.

The residual stream after a norm, times a factor, is added to the output of attention or MLP,
times another. Sources: transformers' modeling_minimax and configuration_minimax. llama.cpp
has no such architecture.
"""

from collections.abc import Mapping

from aprfmt.arch import hyper_rules, moe
from aprfmt.arch.layer_kinds import read_layer_kinds
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import Window, window_rules
from aprfmt.arch.spec import Binding, BlockSpec, Facts, HyperRule
from aprfmt.arch.spec_builders import full_spec
from aprfmt.arch.tensor_rows import (
    KV,
    LAYER,
    Q,
    RoleRow,
    experts,
    linear,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import finite_number
from aprfmt.base.protocols import Value

Params = Mapping[str, Value]
Found = tuple[Value, str] | None
_IN, _ELSE, _MOE = "lightning_layers", "!lightning_layers", "block_sparse_moe."
_EXPERTS, _EXPERT_BINDINGS = experts(_MOE + "experts", "w1", "w3", "w2")
_MADE = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *linear("attn_q", "self_attn.q_proj", Q, "hidden_size", _ELSE),
        *linear("attn_k", "self_attn.k_proj", KV, "hidden_size", _ELSE),
        *linear("attn_v", "self_attn.v_proj", KV, "hidden_size", _ELSE),
        *linear("attn_output", "self_attn.o_proj", "hidden_size", Q, _ELSE),
        *linear("attn_qkv", "self_attn.qkv_proj", f"3*{Q}", "hidden_size", _IN),
        *linear("attn_gate", "self_attn.output_gate", Q, "hidden_size", _IN),
        *norm("ssm_norm", "self_attn.norm", (Q,), _IN),
        *linear("ssm_out", "self_attn.out_proj", "hidden_size", Q, _IN),
        *norm("ffn_norm", "post_attention_layernorm"),
        RoleRow(
            "ffn_gate_inp.weight", _MOE + "gate.weight", ("n_experts", "hidden_size"), "moe_layers"
        ),
        *_EXPERTS,
    ),
    hf_first=_EXPERT_BINDINGS,
    # transformers 5 calls the module `mlp` in memory.
    hf_more=(Binding((LAYER + "mlp.gate.weight",), ("ffn_gate_inp.weight",)),),
)
# Of the stream and of what is added: in layers with attention, with lightning, after the MLP.
_FACTORS = tuple(
    f"{part}_{kind}_factor"
    for part in ("full_attn", "linear_attn", "mlp")
    for kind in ("alpha", "beta")
)


def _lightning_layers_rule() -> HyperRule:
    """Return the rule for the layers with lightning attention; by default every other one."""
    kinds = ("full_attention", "linear_attention")
    return HyperRule(
        _IN,
        read={"hf": read_layer_kinds(kinds[1:], kinds[:1], "layer_types")},
        write={"hf": lambda value, hp: {"layer_types": [kinds[on] for on in value]}},
        default=lambda hp: tuple(i % 2 == 1 for i in range(hp["n_layers"])),
    )


def _residual_scales_rule() -> HyperRule:
    """Return the rule for the six factors on residual streams and outputs."""

    def read(facts: Facts, hp: Params) -> Found:
        """Return (factors in the order of _FACTORS, the first key) of config.json; else None."""
        found = [facts.first(key) for key in _FACTORS]
        if not any(found):
            return None
        values = tuple(1.0 if each is None else float(finite_number(*each)) for each in found)
        return values, next(each[1] for each in found if each is not None)

    return HyperRule(
        "residual_scales", read={"hf": read}, default=(1.0,) * len(_FACTORS),
        write={"hf": lambda value, hp: dict(zip(_FACTORS, value, strict=True))},
    )  # fmt: skip


def _mixed(hp: Params) -> str:
    """Return two features that no published model has together, in words; "" for none."""
    if not any(hp[_IN]):
        return "a stream that continues from the norm, and no layer with lightning attention"
    return "" if not all(hp[_IN]) else "lightning attention, and no layer with attention"


MINIMAX = full_spec(
    "minimax",
    _MADE,
    hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.context_length(4096 * 32),
        hyper_rules.norm_eps(1e-5),
        *rope_rules(RopeDefaults(theta=1e6)),
        *window_rules(Window(listed=False)),
        *moe.expert_count_rules(8, 2, "num_local_experts num_experts"),
        moe.expert_size_rule("intermediate_size"),
        moe.all_moe_layers_rule(),
        hyper_rules.fixed("norm_topk", True),
        _lightning_layers_rule(),
        _residual_scales_rule(),
    ),
    BlockSpec(recurrence="lightning", residual="norm", router_cast="logits"),
    ignored=frozenset({"block_size", "router_jitter_noise"}),
    buffers={"hf": tuple(
        f"{LAYER}self_attn.{name}"
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    )},
    mixed=_mixed,
)  # fmt: skip
