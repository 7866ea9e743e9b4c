"""minimax-m2: sigmoid routing with a bias, q/k-norms over the whole projection, partial rope.

Source: transformers' modeling_minimax_m2; the converter's minimax.py, llama.cpp's minimax-m2.cpp.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.deepseek import sigmoid_router_rule
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, Facts, HyperRule
from aprfmt.arch.tensor_rows import (
    FUSED,
    KV,
    LAYER,
    Q,
    RoleRow,
    attention,
    experts,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import whole_number
from aprfmt.base.protocols import Value

_MOE = "block_sparse_moe."
_EXPERTS, _EXPERT_BINDINGS = experts(_MOE + "experts", "w1", "w3", "w2")
_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(bias=None, out_bias=None),
        *norm("attn_q_norm", "self_attn.q_norm", (Q,)),
        *norm("attn_k_norm", "self_attn.k_norm", (KV,)),
        *norm("ffn_norm", "post_attention_layernorm"),
        RoleRow(
            "ffn_gate_inp.weight", _MOE + "gate.weight", ("n_experts", "hidden_size"), "moe_layers"
        ),
        RoleRow("exp_probs_b.bias", _MOE + "e_score_correction_bias", ("n_experts",), "moe_layers"),
        *_EXPERTS,
    ),
    hf_first=_EXPERT_BINDINGS,
    # transformers 5 calls the module `mlp` in memory.
    hf_more=(
        Binding((LAYER + "mlp.gate.weight",), ("ffn_gate_inp.weight",)),
        Binding((LAYER + "mlp.e_score_correction_bias",), ("exp_probs_b.bias",)),
        *FUSED,
    ),
)


def rotary_dim_rules(rope: RopeDefaults) -> tuple[HyperRule, ...]:
    """Return the rules for rope; published configs say `rotary_dim` for the rotated elements.

    `rope` says where the architecture differs from others.
    """
    rows = {rule.name: rule for rule in rope_rules(rope)}
    usual: Any = rows["rope_dim"].read["hf"]

    def read(facts: Facts, hp: Mapping[str, Value]) -> tuple[Value, str] | None:
        """Return (rotated elements of a head, key) of config.json; None without a key.

        The key of other architectures counts, else `rotary_dim`.
        """
        stated = facts.first("rotary_dim")
        found: tuple[Value, str] | None = usual(facts, hp)
        if found is None and stated is not None:
            return whole_number(*stated, 1), stated[1]
        return found

    rows["rope_dim"] = replace(rows["rope_dim"], read={"hf": read})
    return tuple(rows.values())


MINIMAX_M2 = ArchSpec(
    name="minimax_m2",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.head_dim(128),
        hyper_rules.context_length(196608),
        hyper_rules.tied_embeddings(shown=False),
        hyper_rules.fixed("qk_norm", True),
        *rotary_dim_rules(RopeDefaults(theta=5e6, partial=1.0)),
        *moe.expert_count_rules(256, 8, "num_local_experts num_experts"),
        moe.expert_size_rule("intermediate_size"),
        moe.all_moe_layers_rule(),
        hyper_rules.fixed("norm_topk", True),
        sigmoid_router_rule(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(qk_norm="width", router_cast="logits"),
    lost=losses.common_losses(partial=True),
    ignored=frozenset(
        """router_jitter_noise attn_type_list use_mtp num_mtp_modules mtp_transformer_layers
        use_qk_norm qk_norm_type use_routing_bias scoring_func shared_intermediate_size
        shared_moe_mode layernorm_full_attention_beta layernorm_linear_attention_beta
        layernorm_mlp_beta""".split()
    ),
)
