"""granite 4 hybrids and bamba: attention in some layers, mamba2's mixers in the others.

GGUF has one name for them: bamba's files say that rope is used and have no factors, granite's
have experts with a shared one, or, without experts, the shared MLP alone. Sources: transformers'
modeling files; the gguf package's name map; the converter's granite.py.
"""

from collections.abc import Collection, Mapping

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.granite import FACTORS, MEMORY
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.layer_kinds import (
    ATTENTION,
    SSM,
    STATE_SPACE,
    attention_layers_rule,
    attention_rows,
    kv_heads_rule,
    other_layers_rule,
    read_layer_kinds,
    read_layer_numbers,
    write_indices,
)
from aprfmt.arch.mamba import (
    IGNORED,
    LOST,
    bias_rules,
    head_rules,
    inner_width_rule,
    limit_rules,
    mamba2_rows,
    mixer_rules,
    state_rules,
)
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import Binding, BlockSpec, Facts, Found, HyperRule, Loss, Params
from aprfmt.arch.spec_builders import Made, full_spec
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

ROTATED = "{arch}.rope.scaling.finetuned"
_SSM_RULES = (
    other_layers_rule(),
    inner_width_rule("mamba_expand"),
    *head_rules("mamba_n_heads", "mamba_n_groups", 128, 1),
    *state_rules("mamba_d_state", "mamba_d_conv", 256),
    *bias_rules("mamba_conv_bias", "mamba_proj_bias"),
    *mixer_rules(limits=limit_rules()),
    hyper_rules.flag("ssm_norm", True, present=("ssm_norm.weight",)),
)


def _rope_layers_rule(usual: bool) -> HyperRule:
    """Return the rule for the layers with rope: all or none; `usual` without a key."""

    def all_layers(value: bool, hp: Params) -> tuple[bool, ...]:
        """Return `value`, whether positions are rotated, once for every layer."""
        return (value,) * int(hp["n_layers"])

    def read_hf(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has rope, key) of config.json; None without the key.

        All layers have rope, or none.
        """
        found = facts.first("position_embedding_type")
        return None if found is None else (all_layers(found[0] == "rope", hp), found[1])

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has rope, key) of a GGUF; None without the key.

        All layers have rope, or none.
        """
        found = facts.first(ROTATED)
        return None if found is None else (all_layers(found[0] is True, hp), found[1])

    def write_hf(value: Value, hp: Params) -> Params:
        """Return config.json's {"position_embedding_type": "rope" or "nope"}.

        `value` has one boolean per layer. {} for an architecture that has rope without a key
        (`usual`).
        """
        return {} if usual else {"position_embedding_type": "rope" if any(value) else "nope"}

    return HyperRule(
        "rope_layers",
        default=hyper_rules.per_layer(usual),
        read={"gguf": read_gguf} | ({} if usual else {"hf": read_hf}),
        write={"hf": write_hf, "gguf": lambda value, hp: {ROTATED: any(value)}},
    )


def _is_bamba(names: Collection[str], values: Mapping[str, Value]) -> bool:
    """Return whether a GGUF's keys say that the model is bamba, not granite.

    `names` (the tensors') is not used: every evidence function is given both.
    """
    rotated = values.get("granitehybrid.rope.scaling.finetuned") is True
    return rotated and "granitehybrid.logit_scale" not in values


_IGNORED = IGNORED | {"mamba_d_head", "z_loss_coefficient", "num_logits_to_keep"}
BAMBA = full_spec(
    "bamba",
    make_tables(
        with_model_rows(
            *norm("attn_norm", "input_layernorm"),
            *attention_rows(permuted=True),
            *mamba2_rows(LAYER + "mamba", SSM),
            *norm("ffn_norm", "pre_ff_layernorm"),
            *gated_mlp(bias="mlp_bias", module="feed_forward"),
            final="model.final_layernorm",
        )
    ),
    hyper_rules.hyper_table(
        kv_heads_rule(8),
        hyper_rules.ffn_size(14336),
        hyper_rules.context_length(262144),
        hyper_rules.norm_eps(1e-5),
        *hyper_rules.attention_biases(),
        hyper_rules.mlp_bias(),
        *rope_rules(RopeDefaults(partial=0.5)),
        hyper_rules.rope_style("half", permuted=True),
        _rope_layers_rule(True),
        attention_layers_rule(
            read_layer_numbers("attn_layer_indices"),
            write_indices("attn_layer_indices"),
            hyper_rules.per_layer(False),
        ),
        *_SSM_RULES,
    ),
    BlockSpec(recurrence="mamba2"),
    ignored=_IGNORED,
    lost=(
        *LOST,
        *losses.common_losses(partial=True),
        Loss(
            "gguf",
            "rope_dim",
            lambda hp: hp["rope_dim"] != hp["head_dim"],
            "the converter reorders whole heads, so that llama.cpp rotates other pairs than this "
            "model does",
        ),
    ),
    evidence=_is_bamba,
    derived=ROPE_TENSORS,
)

_MOE, _MLP = LAYER + "block_sparse_moe.", LAYER + "shared_mlp."
_EXPERTS = (
    Binding((_MOE + "input_linear.weight",), ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        (Split(("moe_ffn_size", "moe_ffn_size"), axis=1),)),
    Binding((_MOE + "output_linear.weight",), ("ffn_down_exps.weight",)),
)  # fmt: skip
_ROUTER = RoleRow("ffn_gate_inp.weight", "block_sparse_moe.router.layer.weight",
                  ("n_experts", "hidden_size"), "moe_layers")  # fmt: skip


def _make_granite_tables(suffix: str, size: str, routed: tuple[RoleRow, ...]) -> Made:
    """Return (tensor table, bindings) of a granite hybrid.

    `suffix` and `size` are the role's ending and the width of the MLP that every token takes.
    `routed` are the rows of the experts, empty without them.
    """
    gate, up, down = (f"ffn_{name}{suffix}.weight" for name in ("gate", "up", "down"))
    return make_tables(
        with_model_rows(
            *norm("attn_norm", "input_layernorm"),
            *attention_rows(permuted=True),
            *mamba2_rows(LAYER + "mamba", SSM),
            *norm("ffn_norm", "post_attention_layernorm"),
            *routed,
            *(RoleRow(role, "", (size, "hidden_size")) for role in (gate, up)),
            RoleRow(down, "", ("hidden_size", size)),
        ),
        hf_first=(
            *(_EXPERTS if routed else ()),
            Binding((_MLP + "input_linear.weight",), (gate, up), (Split((size, size)),)),
            Binding((_MLP + "output_linear.weight",), (down,)),
        ),
        hf_more=MEMORY if routed else (),
    )


def _write_layer_types(value: Value, hp: Params) -> Params:
    """Return config.json's {key: kind of each layer}."""
    return {"layer_types": ["attention" if on else "mamba" for on in value]}


def _granite_rules(*overrides: HyperRule) -> tuple[HyperRule, ...]:
    """Return the rules of both granite hybrids; `overrides` replace or add to them."""
    return hyper_rules.hyper_table(
        kv_heads_rule(),
        hyper_rules.context_length(2048),
        *hyper_rules.attention_biases(),
        hyper_rules.rope_style("half", permuted=True),
        _rope_layers_rule(False),
        *FACTORS,
        attention_layers_rule(
            read_layer_kinds(ATTENTION, STATE_SPACE, "layer_types", "layers_block_type"),
            _write_layer_types,
            hyper_rules.per_layer(False),
        ),
        *_SSM_RULES,
        *overrides,
    )


_NO_EXPERTS = {"num_local_experts": 0, "num_experts_per_tok": 0}
GRANITE_HYBRID_MOE = full_spec(
    "granite_hybrid_moe", _make_granite_tables("_shexp", "shared_ffn_size",
        (_ROUTER, *experts()[0])),
    _granite_rules(
        *moe.expert_count_rules(8, 2, "num_local_experts num_experts"),
        hyper_rules.ffn_size(32000),
        hyper_rules.size("moe_ffn_size", "", "expert_feed_forward_length",
            default=lambda hp: hp["ffn_size"]),
        hyper_rules.size("shared_ffn_size", "shared_intermediate_size",
            "expert_shared_feed_forward_length", hf_default=1024),
        moe.all_moe_layers_rule(),
        hyper_rules.fixed("router", "softmax_topk"),
        hyper_rules.fixed("norm_topk", True),
    ),
    BlockSpec(recurrence="mamba2", shared_expert="plain"),
    evidence=moe.has_router, derived=ROPE_TENSORS, ignored=_IGNORED,
    lost=(*LOST, *losses.common_losses()),
)  # fmt: skip
GRANITE_HYBRID = full_spec(
    "granite_hybrid",
    _make_granite_tables("", "ffn_size", ()),
    _granite_rules(
        hyper_rules.ffn_size(1024, "shared_intermediate_size"),
        # transformers makes eight experts where the key is missing
        HyperRule("n_experts", default=0, write={"hf": lambda value, hp: _NO_EXPERTS}),
    ),
    BlockSpec(recurrence="mamba2"),
    derived=ROPE_TENSORS,
    ignored=_IGNORED | {"intermediate_size", *_NO_EXPERTS},
    lost=(*LOST, *losses.common_losses()),
)
