"""lfm3: short convolutions, windows and full attention, norms on both sides, a gate for each head.

Layers with a window have a rope base of their own, those without rotate a part of the head.
Sources: transformers' modeling_lfm3 and configuration_lfm3. llama.cpp has no such architecture.
"""

from collections.abc import Sequence
from dataclasses import replace

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.layer_kinds import IN, attention_rows, layers_with_role, other_layers_rule
from aprfmt.arch.lfm2 import CONVOLUTION, GATED, LAST
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults, full_head_dim
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, Facts, Found, HyperRule, Params
from aprfmt.arch.tensor_rows import LAYER, RoleRow, make_tables, model_rows, norm
from aprfmt.arch.value_checks import listed_kinds
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_CONV, _WINDOW, _FULL = "conv", "sliding_attention", "full_attention"
_AROUND = ("post_attention_norm.weight", "post_ffw_norm.weight")
_KINDS = (_CONV, _WINDOW, _FULL)
_BEFORE, _ = model_rows()


def _default_kinds(hp: Params) -> list[str]:
    """Return the kind of each layer that transformers assumes where none are listed."""
    return [
        _FULL if i % 4 == 2 else _WINDOW if i % 4 == 0 and i > 0 else _CONV
        for i in range(hp["n_layers"])
    ]


def _read_kinds(facts: Facts, hp: Params) -> tuple[Sequence[str], str]:
    """Return (kind of each layer, key), the key "" for the default; ArchError for another kind."""
    found = facts.first("layer_types")
    if found is None:
        return _default_kinds(hp), ""
    return listed_kinds(*found, hp["n_layers"], _KINDS), found[1]


def _layers_of_kind_rule(name: str, kind: str) -> HyperRule:
    """Return the rule for which layers are of one kind."""

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it is of the kind `kind`, key) of config.json.

        Without its list of kinds the default list counts.
        """
        kinds, key = _read_kinds(facts, hp)
        return tuple(each == kind for each in kinds), key

    return HyperRule(
        name,
        default=lambda hp: tuple(each == kind for each in _default_kinds(hp)),
        read={"hf": read},
        write={"hf": lambda value, hp: {}},
    )


def _write_kinds(value: Value, hp: Params) -> Params:
    """Return config.json's {key: kind of each layer}; `value` says which layers have a window."""
    pairs = zip(hp["conv_layers"], value, strict=True)
    return {"layer_types": [_CONV if conv else _WINDOW if on else _FULL for conv, on in pairs]}


def _read_window_size(facts: Facts, hp: Params) -> Found:
    """Return (window size or None for null, key) of config.json; None without the key.

    Raises ArchError for no size where a layer has a window.
    """
    found = facts.first("sliding_window", null=True)
    if found is not None and not found[0] and _WINDOW in _read_kinds(facts, hp)[0]:
        raise ArchError(
            f"{found[1]}: is {found[0]!r}, and layer_types has layers with a window; expected a "
            "number of positions above zero"
        )
    return found


def _rope_rules() -> tuple[HyperRule, ...]:
    """Return the rules for rope; by default half of each head without a window is rotated."""

    def default_scaling(hp: Params) -> Params:
        """Return the default rope scaling of layers without a window, in normal form.

        It rotates the first half of a head's pairs; `rotated` is their number of elements.
        """
        rotated = 2 * int(0.5 * full_head_dim(hp) // 2)
        return {"type": "proportional", "factor": 1.0, "rotated": rotated}

    made = rope_rules(
        RopeDefaults(theta=1e6, theta_local=10000.0, layers="full", nested=True, new=True)
    )
    return tuple(
        replace(rule, default_in={"hf": default_scaling}) if rule.name == "rope_scaling" else rule
        for rule in made
    )


_TENSORS, _BINDINGS = make_tables(
    (
        *_BEFORE,
        *norm("attn_norm", "operator_norm"),
        *attention_rows(),
        RoleRow("attn_gate.weight", "self_attn.gate_proj.weight", ("n_heads", "hidden_size"),
            f"{IN} & head_gate"),
        *norm("attn_q_norm", "self_attn.q_norm", ("head_dim",), IN),
        *norm("attn_k_norm", "self_attn.k_norm", ("head_dim",), IN),
        *CONVOLUTION,
        *norm("post_attention_norm", "post_operator_norm", needs="sandwich_norms"),
        *norm("ffn_norm", "ffn_norm"),
        *GATED,
        *norm("post_ffw_norm", "post_ffn_norm", needs="sandwich_norms"),
        LAST,
        RoleRow("output.weight", "lm_head.weight", ("vocab_size", "hidden_size"),
            "!tied_embeddings", layered=False),
    ),
    # transformers' name in memory
    hf_more=(Binding((LAYER + "self_attn.g_proj.weight",), ("attn_gate.weight",)),),
)  # fmt: skip
LFM3 = ArchSpec(
    name="lfm3",
    hyper=hyper_rules.hyper_table(
        hyper_rules.hidden_size(2048),
        hyper_rules.n_layers(24),
        hyper_rules.n_heads(16),
        hyper_rules.n_kv_heads(4),
        hyper_rules.head_dim(128),
        hyper_rules.ffn_size(7680),
        hyper_rules.vocab_size(128000),
        hyper_rules.context_length(128000),
        hyper_rules.norm_eps(1e-5, "norm_eps"),
        hyper_rules.fixed("activation", "silu"),
        hyper_rules.tied_embeddings(True),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        hyper_rules.flag("sandwich_norms", True, "use_sandwich_norm", present=_AROUND),
        hyper_rules.flag("head_gate", True, "use_attention_gate", present=("attn_gate.weight",)),
        *_rope_rules(),
        hyper_rules.size("conv_taps", "conv_L_cache", default=7),
        replace(
            _layers_of_kind_rule("conv_layers", _CONV),
            shape=layers_with_role("shortconv.conv.weight"),
        ),
        HyperRule(
            "sliding_window",
            {"hf": ("sliding_window",)},
            "int",
            256,
            read={"hf": _read_window_size},
        ),
        replace(_layers_of_kind_rule("window_layers", _WINDOW), write={"hf": _write_kinds}),
        other_layers_rule("rope_layers", "conv_layers"),
        other_layers_rule("attention_layers", "conv_layers"),
        hyper_rules.flag("conv_bias", False, "conv_bias", present=("shortconv.in_proj.bias",)),
    ),
    tensors=_TENSORS,
    bindings={"hf": _BINDINGS["hf"]},
    block=BlockSpec(
        placement="sandwich",
        qk_norm="head",
        recurrence="short_conv",
        rope_cast="result",
        attention_gate="sigmoid_head",
    ),
    lost=losses.common_losses(),
)
