"""jamba: attention in every n-th layer, mamba's mixers in the others; experts in some.

The time step, B and C have norms of their own; there is no rope. A GGUF shows by key heads of
zero where attention is missing, and by its tensors where experts are. Sources: transformers'
modeling_jamba; the gguf package's name map; the converter's jamba.py.
"""

from collections.abc import Mapping

from aprfmt.arch import hyper_rules, moe
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.layer_kinds import (
    SSM,
    attention_layers_rule,
    attention_rows,
    kv_heads_rule,
    layers_with_role,
    other_layers_rule,
    read_layer_period,
    write_period,
)
from aprfmt.arch.mamba import (
    bias_rules,
    inner_width_rule,
    mamba_rows,
    state_rules,
    time_step_rank_rule,
)
from aprfmt.arch.spec import Facts, HyperRule
from aprfmt.arch.spec_builders import names_only_spec
from aprfmt.arch.tensor_rows import (
    LAYER,
    RoleRow,
    experts,
    gated_mlp,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.base.protocols import Value

_ATTENTION = "attn_layer_period", "attn_layer_offset"
_EXPERTS = "expert_layer_period", "expert_layer_offset"
_ROWS, _BINDINGS = experts("feed_forward.experts")


def _read_moe_layers(facts: Facts, hp: Mapping[str, Value]) -> tuple[Value, str] | None:
    """Return (one boolean a layer, key) of config.json: all False if there is one expert."""
    if hp["n_experts"] == 1:
        return (False,) * hp["n_layers"], "num_experts"
    return read_layer_period(*_EXPERTS, (2, 1))(facts, hp)


JAMBA = names_only_spec(
    "jamba",
    make_tables(
        with_model_rows(
            *norm("attn_norm", "input_layernorm"),
            *attention_rows(bias=None),
            *mamba_rows(LAYER + "mamba", SSM),
            *norm("ssm_dt_norm", "mamba.dt_layernorm", ("ssm_rank",), SSM),
            *norm("ssm_b_norm", "mamba.b_layernorm", ("ssm_state",), SSM),
            *norm("ssm_c_norm", "mamba.c_layernorm", ("ssm_state",), SSM),
            *norm("ffn_norm", "pre_ff_layernorm"),
            *gated_mlp(needs="!moe_layers", module="feed_forward"),
            RoleRow(
                "ffn_gate_inp.weight",
                "feed_forward.router.weight",
                ("n_experts", "hidden_size"),
                "moe_layers",
            ),
            *_ROWS,
            final="model.final_layernorm",
        ),
        hf_first=_BINDINGS,
    ),
    hyper_rules.hyper_table(
        kv_heads_rule(8),
        hyper_rules.ffn_size(14336),
        hyper_rules.context_length(262144),
        *NO_ROPE,
        *moe.expert_count_rules(16, 2),
        hyper_rules.size("moe_ffn_size", default=lambda hp: hp["ffn_size"]),
        HyperRule(
            "moe_layers",
            read={"hf": _read_moe_layers},
            write={"hf": write_period(*_EXPERTS)},
            default=hyper_rules.per_layer(True),
            shape=layers_with_role("ffn_gate_inp.weight"),
        ),
        attention_layers_rule(read_layer_period(*_ATTENTION, (8, 4)), write_period(*_ATTENTION)),
        other_layers_rule(),
        inner_width_rule("mamba_expand"),
        time_step_rank_rule("mamba_dt_rank"),
        *state_rules("mamba_d_state", "mamba_d_conv", 16),
        *bias_rules("mamba_conv_bias", "mamba_proj_bias"),
    ),
)
