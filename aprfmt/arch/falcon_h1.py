"""falcon_h1: attention and a mamba2 mixer in parallel in every layer.

Every projection has a factor in config.json; llama.cpp's converter multiplies them into the
weights, which rounds them. Here the weights are not changed, and writing a GGUF warns unless
all factors are 1. Sources: transformers' modeling_falcon_h1; the gguf package's name map; the
converter's falcon_h1.py.
"""

from collections.abc import Mapping

from aprfmt.arch import hyper_rules, losses
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
from aprfmt.arch.spec_builders import full_spec
from aprfmt.arch.tensor_rows import (
    LAYER,
    RoleRow,
    attention,
    gated_mlp,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import finite_number, sequence
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

# Hyperparameter -> key of config.json.
_FACTORS: Mapping[str, str] = {
    "embedding_scale": "embedding_multiplier", "logit_scale": "lm_head_multiplier",
    "attn_in_scale": "attention_in_multiplier", "attn_out_scale": "attention_out_multiplier",
    "key_scale": "key_multiplier", "ssm_in_scale": "ssm_in_multiplier",
    "ssm_out_scale": "ssm_out_multiplier",
}  # fmt: skip
_MLP, _SSM = "mlp_multipliers", "ssm_multipliers"
_LISTED = ("ffn_gate_scale", "ffn_down_scale")


def _read_factors(facts: Facts, key: str, count: int) -> tuple[tuple[float, ...], str] | None:
    """Return (`count` factors, key) of a list; None without it, ArchError for another count."""
    found = facts.first(key)
    if found is None:
        return None
    factors = tuple(finite_number(part, key) for part in sequence(*found, count))
    if len(factors) != count:
        raise ArchError(f"{key}: has {len(factors)} entries; expected {count}")
    return factors, found[1]


def _mlp_factor_rule(name: str) -> HyperRule:
    """Return the rule for one of the MLP's two factors; the first one's rule writes both."""
    at = _LISTED.index(name)

    def read(facts: Facts, hp: Params) -> Found:
        """Return (number `at` in config.json's list of the MLP's multipliers, key).

        None without the list.
        """
        found = _read_factors(facts, _MLP, len(_LISTED))
        return None if found is None else (found[0][at], found[1])

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {key: list of both MLP multipliers}.

        {} for the second one's rule.
        """
        return {} if at else {_MLP: [hp[each] for each in _LISTED]}

    return HyperRule(name, kind="float", default=1.0, read={"hf": read}, write={"hf": write})


_SCALES = (
    *(HyperRule(name, {"hf": (key,)}, "float", 1.0) for name, key in _FACTORS.items()),
    *map(_mlp_factor_rule, _LISTED),
    HyperRule(
        "ssm_scales", {"hf": (_SSM,)}, default=(1.0,) * 5,
        read={"hf": lambda facts, hp: _read_factors(facts, _SSM, 5)},
    ),
)  # fmt: skip


def _factor_loss(name: str) -> Loss:
    """Return the Loss (what a GGUF cannot express) of a factor other than 1.

    `name` is the hyperparameter with the factor, or with several.
    """
    return Loss(
        "gguf",
        name,
        lambda hp: any(x != 1 for x in _as_tuple(hp[name])),
        "llama.cpp expects the weights multiplied by this factor, and has no key for it: it would "
        "run this file without it",
    )


def _as_tuple(value: Value) -> tuple[float, ...]:
    """Return the factors of a value: a tuple, or one number as a tuple."""
    return value if isinstance(value, tuple) else (value,)


FALCON_H1 = full_spec(
    "falcon_h1",
    make_tables(
        with_model_rows(
            *norm("attn_norm", "input_layernorm"),
            *attention(),
            *mamba2_rows(LAYER + "mamba", out_bias="ssm_out_bias"),
            # The gguf package's map names it without a suffix here, and llama.cpp asks for that.
            RoleRow(
                "ffn_norm.weight", "pre_ff_layernorm.weight", ("hidden_size",), gguf="ffn_norm"
            ),
            *gated_mlp(bias="mlp_bias", module="feed_forward"),
            final="model.final_layernorm",
        ),
        gguf_more=(Binding(("blk.{L}.ffn_norm.weight",), ("ffn_norm.weight",)),),
    ),
    hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.ffn_size(14336),
        hyper_rules.context_length(8192),
        hyper_rules.norm_eps(1e-5),
        *hyper_rules.attention_biases(),
        hyper_rules.mlp_bias(hf="mlp_bias"),
        *rope_rules(RopeDefaults(theta=100000.0)),
        HyperRule("ssm_layers", default=hyper_rules.per_layer(True)),
        inner_width_rule("mamba_expand", "mamba_d_ssm"),
        *head_rules("mamba_n_heads", "mamba_n_groups", 128, 1),
        *state_rules("mamba_d_state", "mamba_d_conv", 256),
        *bias_rules("mamba_conv_bias", "mamba_proj_bias"),
        hyper_rules.flag("ssm_out_bias", False, "projectors_bias", present=("ssm_out.bias",)),
        *mixer_rules(limits=limit_rules()),
        hyper_rules.flag("ssm_norm", False, "mamba_rms_norm", present=("ssm_norm.weight",)),
        HyperRule(
            "ssm_norm_first", {"hf": ("mamba_norm_before_gate",)}, "bool", True, {"gguf": False}
        ),
        *_SCALES,
    ),
    BlockSpec(recurrence="mamba2", recurrence_place="parallel", multipliers="projections"),
    lost=(
        *LOST,
        *losses.common_losses(),
        *(_factor_loss(name) for name in (*_FACTORS, *_LISTED, "ssm_scales")),
        Loss(
            "gguf",
            "ssm_norm_first",
            lambda hp: hp["ssm_norm"] and hp["ssm_norm_first"],
            "llama.cpp applies the mixers' norm after the gate, this model before it",
        ),
    ),
    derived=ROPE_TENSORS,
    ignored=IGNORED | {"mamba_d_head", "num_logits_to_keep", "mamba_use_mlp"},
)
