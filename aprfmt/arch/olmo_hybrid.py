"""olmo_hybrid: delta nets after a norm, and attention whose output is normalised.

Layers with a delta net have their norms before it and before the MLP, layers with attention
after both, as olmo2. In either there is a norm between mixing and MLP: one role, `ffn_norm`. A
delta net's strength goes up to 2. Published files call the norms of delta layers
`attention_layer_norm` and `feedforward_layer_norm`, those of layers with attention as olmo2;
transformers 5 reads and writes other spellings too. Files without rope say `rope_theta: null`.
Sources: transformers' modeling_olmo_hybrid, and its conversion mapping. llama.cpp has no such
architecture.
"""

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import delta_net, hyper_rules
from aprfmt.arch.delta_net import CHANNELS, ELSEWHERE, IN_LAYERS, KEYS, VALUES
from aprfmt.arch.joining_steps import Joined
from aprfmt.arch.recurrent_steps import Depthwise
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import Binding, BlockSpec, Facts, Found, HyperRule, Params
from aprfmt.arch.spec_builders import full_spec
from aprfmt.arch.tensor_rows import (
    KV,
    LAYER,
    Q,
    RoleRow,
    gated_mlp,
    linear,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_NET, _HEADS = LAYER + "linear_attn.", ("delta_value_heads",)
_PARTS = (KEYS, KEYS, VALUES)
_JOINED = tuple(f"{_NET}{part}_proj.weight" for part in "qkv")
_KERNELS = tuple(f"{_NET}{part}_conv1d.weight" for part in "qkv")
_DEPTHWISE = Depthwise(CHANNELS, "conv_taps")
_BIAS, _OUT = "attention_bias", "attention_out_bias"


def _delta_row(role: str, hf: str, *shape: str) -> RoleRow:
    """Return the row of a delta net's tensor; `hf` is its name below `linear_attn.`, or ""."""
    return RoleRow(role, hf and f"linear_attn.{hf}", shape, IN_LAYERS)


_MADE = make_tables(
    with_model_rows(
        *norm("attn_norm", "attention_layer_norm", needs=IN_LAYERS),
        _delta_row("attn_qkv.weight", "", CHANNELS, "hidden_size"),
        _delta_row("attn_gate.weight", "g_proj.weight", VALUES, "hidden_size"),
        _delta_row("ssm_beta.weight", "b_proj.weight", *_HEADS, "hidden_size"),
        _delta_row("ssm_alpha.weight", "a_proj.weight", *_HEADS, "hidden_size"),
        _delta_row("ssm_conv1d.weight", "", CHANNELS, "conv_taps"),
        _delta_row("ssm_dt.bias", "dt_bias", *_HEADS),
        _delta_row("ssm_a.weight", "A_log", *_HEADS),
        _delta_row("ssm_norm.weight", "o_norm.weight", "delta_value_dim"),
        _delta_row("ssm_out.weight", "o_proj.weight", "hidden_size", VALUES),
        *linear("attn_q", "self_attn.q_proj", Q, "hidden_size", ELSEWHERE, bias=_BIAS),
        *linear("attn_k", "self_attn.k_proj", KV, "hidden_size", ELSEWHERE, bias=_BIAS),
        *linear("attn_v", "self_attn.v_proj", KV, "hidden_size", ELSEWHERE, bias=_BIAS),
        *linear("attn_output", "self_attn.o_proj", "hidden_size", Q, ELSEWHERE, bias=_OUT),
        *norm("attn_q_norm", "self_attn.q_norm", (Q,), ELSEWHERE),
        *norm("attn_k_norm", "self_attn.k_norm", (KV,), ELSEWHERE),
        *norm("ffn_norm", "feedforward_layer_norm"),
        *gated_mlp(),
        *norm("post_ffw_norm", "post_feedforward_layernorm", needs=ELSEWHERE),
    ),
    hf_first=(
        Binding(_JOINED, ("attn_qkv.weight",), (Joined(_PARTS),)),
        Binding(_KERNELS, ("ssm_conv1d.weight",), (Joined(_PARTS), _DEPTHWISE)),
    ),
    hf_more=(
        Binding((f"{LAYER}input_layernorm.weight",), ("attn_norm.weight",)),
        Binding((f"{LAYER}post_attention_layernorm.weight",), ("ffn_norm.weight",)),
        Binding((f"{_NET}conv1d.weight",), ("ssm_conv1d.weight",), (_DEPTHWISE,)),
    ),
)


def _rope_layers_rule() -> HyperRule:
    """Return the rule for the layers with rope: those with attention, or none."""

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has rope, key) of config.json.

        None without `rope_theta`. A base of null means that no layer has rope. Otherwise those
        with attention have it.
        """
        rope = facts.first("rope_parameters", "rope_scaling")
        inside = rope[0] if rope is not None and isinstance(rope[0], Mapping) else {}
        outside = facts.first("rope_theta", null=True)
        # A base of null, in the rope object or outside, means that no layer has rope.
        if "rope_theta" in inside:
            theta = inside["rope_theta"]
        elif outside is None:
            return None
        else:
            theta = outside[0]
        on = theta is not None
        return tuple(on and not delta for delta in hp["delta_layers"]), "rope_theta"

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {"rope_theta": None} for a model without rope in any layer.

        {} for other models. `value` has one boolean per layer.
        """
        return {} if any(value) else {"rope_theta": None}

    usual = delta_net.rotated_layers_rule()
    return replace(usual, read={"hf": read}, write={"hf": write})


def _strength_rule() -> HyperRule:
    """Return the rule for the factor on a delta net's beta: 2 or 1, by a switch of config.json.

    2 (the default) allows negative eigenvalues of the state's update.
    """
    key = "linear_allow_neg_eigval"

    def read(facts: Facts, hp: Params) -> Found:
        """Return (factor on a delta net's beta, key) of config.json: 2 with the switch on, else 1.

        None without the key.
        """
        found = facts.first(key)
        return None if found is None else (2.0 if found[0] else 1.0, key)

    return HyperRule(
        "delta_strength", read={"hf": read}, write={"hf": lambda value, hp: {key: value == 2.0}},
        default=2.0,
    )  # fmt: skip


def _default_delta_layers(hp: Params) -> tuple[bool, ...]:
    """Return one boolean a layer: a delta net in all but every fourth, or all but the last.

    The last one only where there are fewer than four layers. It is transformers' default.
    """
    layers = tuple((i + 1) % delta_net.INTERVAL != 0 for i in range(hp["n_layers"]))
    return layers if not all(layers) else (*layers[:-1], False)


def _check_both_kinds(value: Value, facts: Facts, hp: Params) -> str:
    """Return ""; ArchError unless there are layers of both kinds, which transformers requires."""
    if facts.style == "hf" and (all(value) or not any(value)):
        raise ArchError(
            f"layer_types: all are {'linear' if all(value) else 'full'}_attention; expected some "
            "layers of linear_attention and some of full_attention"
        )
    return ""


_SIZES = {rule.name: rule for rule in delta_net.size_rules()}
OLMO_HYBRID = full_spec(
    "olmo_hybrid",
    _MADE,
    hyper_rules.hyper_table(
        hyper_rules.context_length(65536),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        *rope_rules(RopeDefaults()),
        *_SIZES.values(),
        replace(_SIZES["delta_layers"], default=_default_delta_layers, check=_check_both_kinds),
        _rope_layers_rule(),
        _strength_rule(),
        hyper_rules.fixed("delta_norm_eps", 1e-5),
        hyper_rules.size(
            "delta_key_heads", "linear_num_key_heads", default=lambda hp: hp["n_heads"]
        ),
        hyper_rules.size(
            "delta_value_heads", "linear_num_value_heads", default=lambda hp: hp["n_heads"]
        ),
        hyper_rules.size(
            "delta_key_dim", "linear_key_head_dim",
            default=lambda hp: int(0.75 * hp["hidden_size"] / hp["delta_key_heads"]),
        ),
        hyper_rules.size(
            "delta_value_dim", "linear_value_head_dim", default=lambda hp: 2 * hp["delta_key_dim"]
        ),
    ),
    BlockSpec(
        norm_cast="after_weight", placement="by_mixer", qk_norm="width", rope_cast="result",
        recurrence="gated_delta",
    ),
    ignored=frozenset(
        """linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max
        linear_dt_init_floor""".split()
    ),
)  # fmt: skip
