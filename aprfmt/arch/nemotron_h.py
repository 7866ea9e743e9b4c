"""nemotron_h and its mixture: a layer is a mamba2 mixer, attention, an MLP, or experts.

config.json spells the kinds as a list or as letters (M, *, -, E); GGUF has key heads of zero where
attention is missing and widths of zero where the MLP or the experts are. Sources: transformers'
modeling_nemotron_h; the gguf package's name map; the converter's nemotron.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from aprfmt.arch import hyper_rules, moe
from aprfmt.arch.deepseek import routed_scale_rule, sigmoid_router_rule
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.joining_steps import Stacked
from aprfmt.arch.layer_kinds import (
    ATTENTION,
    STATE_SPACE,
    attention_layers_rule,
    attention_rows,
    each_layer,
    kv_heads_rule,
    read_counts,
)
from aprfmt.arch.mamba import (
    IGNORED,
    LOST,
    bias_rules,
    head_rules,
    limit_rules,
    mamba2_rows,
    mixer_rules,
    state_rules,
)
from aprfmt.arch.mla import expert_groups_rule
from aprfmt.arch.spec import Binding, BlockSpec, Facts, Found, HyperRule, Params, Read
from aprfmt.arch.spec_builders import Made, full_spec
from aprfmt.arch.tensor_rows import RoleRow, Rows, linear, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import sequence, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_WIDTHS = "{arch}.feed_forward_length"
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_LAYER = "backbone.layers.{L}."
_MIXER = _LAYER + "mixer"


_KINDS = "layers_block_type", "layer_types", "hybrid_override_pattern"


def _layer_count_rule() -> HyperRule:
    """Return the rule for the number of layers: as many as kinds listed, as in transformers."""
    usual = hyper_rules.n_layers()

    def read(facts: Facts, hp: Params) -> Found:
        """Return (number of layers, key) of config.json; None without a key.

        The length of the list of layer kinds counts, else the stated number.
        """
        found, stated = facts.first(*_KINDS), facts.first(*usual.keys["hf"])
        if found is None:
            return stated
        return len(found[0] if isinstance(found[0], str) else sequence(*found)), found[1]

    return replace(usual, read={"hf": read})


def _read_kinds(facts: Facts, hp: Params) -> tuple[list[Value], str] | None:
    """Return (kind of each layer in transformers' words, key); None without the key.

    ArchError for unknown kinds, too few of them, or a model with both MLPs and experts.
    """
    found = facts.first(*_KINDS)
    if found is None:
        return None
    if isinstance(found[0], str):
        kinds: list[Value] = [_LETTERS.get(letter) for letter in found[0]]
    else:
        kinds = list(sequence(*found))
    known = {*_LETTERS.values(), *ATTENTION, *STATE_SPACE}
    if len(kinds) < hp["n_layers"] or any(kind not in known for kind in kinds):
        raise ArchError(
            f"{found[1]}: is {found[0]!r}; expected a kind for each of {hp['n_layers']} layers: "
            f"{', '.join(sorted(known))}, or a letter of {' '.join(_LETTERS)}"
        )
    both = [kind for kind in ("mlp", "moe") if kind in kinds]
    if len(both) > 1:
        raise ArchError(
            f"{found[1]}: has dense MLPs (layer {kinds.index('mlp')}) and experts (layer "
            f"{kinds.index('moe')}); every published nemotron_h has one kind or the other"
        )
    return kinds[: hp["n_layers"]], found[1]


def _read_layers_of_kind(*names: str) -> Read:
    """Return a read function: which layers are of one of the kinds `names`."""

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: its kind is among `names`, key) of config.json's list.

        None without the list.
        """
        found = _read_kinds(facts, hp)
        return None if found is None else (tuple(kind in names for kind in found[0]), found[1])

    return read


def _kind_words(hp: Params) -> list[str]:
    """Return the kind of each layer as config.json lists them."""
    marks = (("attention_layers", "attention"), ("mlp_layers", "mlp"), ("moe_layers", "moe"))
    return [
        next((word for name, word in marks if hp[name][i]), "mamba") for i in range(hp["n_layers"])
    ]


def _read_wide_layers(facts: Facts, hp: Params) -> Found:
    """Return (which layers' width in a GGUF is not zero, key); None without the key."""
    found = read_counts(facts, _WIDTHS)
    if found is None:
        return None
    return tuple(width > 0 for width in each_layer(*found, hp)), found[1]


def _layers_by_width_rule(name: str, kind: str) -> HyperRule:
    """Return the rule that reads and writes which layers are of one kind.

    In a GGUF those whose MLP width is not zero. `name` is the hyperparameter, `kind`
    config.json's word for the kind.
    """
    return HyperRule(
        name,
        {"gguf": (_WIDTHS,)},
        read={"hf": _read_layers_of_kind(kind), "gguf": _read_wide_layers},
        write={"hf": lambda value, hp: {}, "gguf": lambda value, hp: {}},
        default=hyper_rules.per_layer(False),
    )


def _default_ssm_layers(hp: Params) -> tuple[bool, ...]:
    """Return which layers are of no other kind: those with a mixer."""
    return tuple(word == "mamba" for word in _kind_words(hp))


def _width_rule(rule: HyperRule, layers: str) -> HyperRule:
    """Return a width's rule changed to a GGUF's list of widths by layer.

    The list has zeros in layers that are not among `layers`, a hyperparameter. A key that GGUF
    has for the width alone is written as well, and read first.
    """
    own = tuple(key for key in rule.keys["gguf"] if key != _WIDTHS)

    def read(facts: Facts, hp: Params) -> Found:
        """Return (width of the MLP, GGUF key that states it), or None if no key states it.

        The rule's own key is read first. Without it, the width is the largest entry of
        `feed_forward_length`, the list of widths by layer, if one of them is not zero.
        """
        stated, found = facts.first(*own), read_counts(facts, _WIDTHS)
        if stated is not None or found is None or not any(found[0]):
            return stated
        return max(found[0]), found[1]

    def write(value: Value, hp: Params) -> Params:
        """Return GGUF's {key: value} for a width: the list by layer, and the width's own key.

        The list has 0 in layers that the hyperparameter `layers` does not mark. Not every width
        has a separate key.
        """
        return {_WIDTHS: [value if on else 0 for on in hp[layers]], **dict.fromkeys(own, value)}

    return replace(rule, read={"gguf": read}, write={"gguf": write})


def _inner_width_rule() -> HyperRule:
    """Return the rule that reads and writes the mixers' inner width: heads times head dim."""

    def read(facts: Facts, hp: Params) -> Found:
        """Return (inner width of the mamba2 mixers, key) of config.json: heads times head dim.

        Absent keys have the defaults 128 and 64, so None is never returned.
        """
        heads, size = facts.first("mamba_num_heads"), facts.first("mamba_head_dim")
        count = 128 if heads is None else whole_number(*heads, 1)
        each = 64 if size is None else whole_number(*size, 1)
        return count * each, (size or heads or ("", "mamba_head_dim"))[1]

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {"mamba_head_dim": elements of a head of the mixers}.

        `value` is the mixers' inner width, over all heads.
        """
        return {"mamba_head_dim": value // hp["ssm_heads"]}

    return HyperRule(
        "ssm_size",
        {"gguf": ("{arch}.ssm.inner_size",)},
        "size",
        read={"hf": read},
        write={"hf": write},
    )


# llama.cpp asks for the epsilon of LayerNorms, and uses that of RMSNorms.
_EPS_KEYS = tuple(f"{{arch}}.attention.layer_norm_{kind}epsilon" for kind in ("rms_", ""))
_EPS = replace(
    hyper_rules.norm_eps(1e-5, "layer_norm_epsilon"),
    keys={"hf": ("layer_norm_epsilon",), "gguf": _EPS_KEYS, "apr": ("rms_norm_eps",)},
    write={"gguf": lambda value, hp: dict.fromkeys(_EPS_KEYS, value)},
)


_SECOND = frozenset({"attention.layer_norm_epsilon"})  # read under the other name


def _make_nemotron_tables(*mlp: RoleRow, hf_first: tuple[Binding, ...] = ()) -> Made:
    """Return the tensor table and bindings: attention and mixer rows, and those of the MLP."""
    return make_tables(
        with_model_rows(
            *norm("attn_norm", _LAYER + "norm"),
            *attention_rows(_MIXER, bias=None),
            *mamba2_rows(_MIXER, "ssm_layers"),
            *mlp,
            embed="backbone.embeddings",
            final="backbone.norm_f",
        ),
        hf_first=hf_first,
    )


def _conv_activation_rule() -> HyperRule:
    """Return the rule for the activation after the convolutions; the MLPs have another one."""
    return replace(hyper_rules.activation("silu", "mamba_hidden_act"), name="ssm_activation")


def _nemotron_rules(*overrides: HyperRule) -> tuple[HyperRule, ...]:
    """Return the hyperparameter rules of both models; `overrides` replace or add to them."""
    return hyper_rules.hyper_table(
        _layer_count_rule(),
        kv_heads_rule(8),
        hyper_rules.head_dim(128),
        hyper_rules.context_length(4096),
        _EPS,
        hyper_rules.activation("relu2", "mlp_hidden_act"),
        hyper_rules.mlp_bias(),
        *NO_ROPE,
        attention_layers_rule(
            _read_layers_of_kind(*ATTENTION),
            lambda value, hp: {"layers_block_type": _kind_words(hp)},
        ),
        HyperRule("ssm_layers", default=_default_ssm_layers),
        HyperRule("mlp_layers", default=hyper_rules.per_layer(False)),
        hyper_rules.fixed("wide_stream", False),  # transformers does not read residual_in_fp32
        _inner_width_rule(),
        *mixer_rules(
            limits=limit_rules(least="time_step_min mamba_dt_min"),
            activation=_conv_activation_rule(),
        ),
        *head_rules("mamba_num_heads", "n_groups", 128, 8),
        *state_rules("ssm_state_size", "conv_kernel", 128),
        *bias_rules("use_conv_bias", "use_bias"),
        hyper_rules.flag("ssm_norm", True, present=("ssm_norm.weight",)),
        *overrides,
    )


def _mlp_rows(role: str, hf: str, size: str, needs: str) -> Rows:
    """Return the table rows of an MLP without a gate; `role` is the end of its role names."""
    return (
        *linear(f"ffn_up{role}", f"{hf}.up_proj", size, "hidden_size", needs, bias="mlp_bias"),
        *linear(f"ffn_down{role}", f"{hf}.down_proj", "hidden_size", size, needs, bias="mlp_bias"),
    )


_CALLED = "nemotron_h", "NemotronHForCausalLM"
_IGNORED = (
    IGNORED
    | _SECOND
    | frozenset(
        """residual_in_fp32 attention_bias expand mamba_expand time_step_limit mamba_dt_limit
    mamba_dt_max mamba_dt_init_floor mamba_proj_bias mamba_ssm_cache_dtype num_logits_to_keep
    sliding_window
    moe_shared_expert_overlap n_shared_experts hidden_dropout attention_dropout
    num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern""".split()
    )
) - {"time_step_min"}
_OF_EXPERTS = frozenset(
    """n_routed_experts num_experts_per_tok moe_intermediate_size moe_latent_size n_group
    moe_shared_expert_intermediate_size norm_topk_prob routed_scaling_factor topk_group""".split()
)
_BLOCK = BlockSpec(
    norm_cast="after_weight", recurrence="mamba2", halves="one", position="none", mlp="plain"
)
NEMOTRON_H = full_spec(
    "nemotron_h",
    _make_nemotron_tables(*_mlp_rows("", _MIXER, "ffn_size", "mlp_layers")),
    _nemotron_rules(
        _width_rule(hyper_rules.ffn_size(21504), "mlp_layers"),
        _layers_by_width_rule("mlp_layers", "mlp"),
    ),
    _BLOCK,
    ignored=_IGNORED | _OF_EXPERTS,
    lost=LOST,
)


def _has_experts(names: Collection[str], values: Mapping[str, Value]) -> bool:
    """Return whether tensor names show a router; `values` is not used."""
    return any(".mixer.gate." in name or ".ffn_gate_inp." in name for name in names)


def _expert_row(name: str, shape: tuple[str, ...]) -> tuple[RoleRow, Binding, Binding]:
    """Return (row, binding of one tensor an expert, binding of transformers 5's one tensor)."""
    role = f"ffn_{name}_exps.weight"
    each = Binding(
        (f"{_MIXER}.experts.{{E}}.{name}_proj.weight",), (role,), (Stacked("n_experts"),)
    )
    joined = Binding((f"{_MIXER}.experts.{name}_proj",), (role,))
    return RoleRow(role, "", shape, "moe_layers"), each, joined


_EXPERTS = (
    _expert_row("up", ("n_experts", "moe_ffn_size", "expert_width")),
    _expert_row("down", ("n_experts", "expert_width", "moe_ffn_size")),
)
_LATENT = "moe_layers & latent_size"
NEMOTRON_H_MOE = full_spec(
    "nemotron_h_moe",
    _make_nemotron_tables(
        RoleRow(
            "ffn_gate_inp.weight",
            _MIXER + ".gate.weight",
            ("n_experts", "hidden_size"),
            "moe_layers",
        ),
        RoleRow(
            "exp_probs_b.bias",
            _MIXER + ".gate.e_score_correction_bias",
            ("n_experts",),
            "moe_layers",
        ),
        *linear(
            "ffn_latent_down",
            _MIXER + ".fc1_latent_proj",
            "latent_size",
            "hidden_size",
            _LATENT,
            bias="mlp_bias",
        ),
        *linear(
            "ffn_latent_up",
            _MIXER + ".fc2_latent_proj",
            "hidden_size",
            "latent_size",
            _LATENT,
            bias="mlp_bias",
        ),
        *(row for row, *_ in _EXPERTS),
        *_mlp_rows("_shexp", _MIXER + ".shared_experts", "shared_ffn_size", "moe_layers"),
        hf_first=tuple(binding for _, *each in _EXPERTS for binding in each),
    ),
    _nemotron_rules(
        hyper_rules.flag("mlp_bias", False, "mlp_bias", present=("ffn_up_shexp.bias",)),
        _layers_by_width_rule("moe_layers", "moe"),
        _width_rule(moe.expert_size_rule(hf_default=7688), "moe_layers"),
        HyperRule("ffn_size", {"hf": ("intermediate_size",)}, "size", 21504),
        hyper_rules.size(
            "shared_ffn_size",
            "moe_shared_expert_intermediate_size",
            "expert_shared_feed_forward_length",
            hf_default=7688,
        ),
        *moe.expert_count_rules(8, 2, "n_routed_experts num_experts"),
        moe.norm_topk_rule(True),
        routed_scale_rule(1.0),
        hyper_rules.size("latent_size", "moe_latent_size", "moe_latent_size", default=None),
        HyperRule("expert_width", default=lambda hp: hp["latent_size"] or hp["hidden_size"]),
        expert_groups_rule("n_expert_groups", "n_group", "expert_group_count", 1),
        expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 1),
        sigmoid_router_rule(),
    ),
    replace(_BLOCK, shared_expert="plain", router_cast="none"),
    evidence=_has_experts,
    ignored=_IGNORED,
    lost=LOST,
)
