"""State space models: mamba, falcon_mamba and mamba2, and what hybrids share with them.

A mixer takes the place of attention. mamba's has a compressed time step (x_proj, dt_proj) and a
rate for each number of state; mamba2's has heads, with one rate each, and groups of heads that
share B and C. GGUF stores minus the exponential of A_log, and mamba2's vectors with an axis of one.
Sources: transformers' modeling files; the gguf package's name map; the converter's mamba.py.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aprfmt.arch import hyper_rules
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.layout_steps import Reshaped
from aprfmt.arch.recurrent_steps import Depthwise, NegativeExp
from aprfmt.arch.spec import BlockSpec, Facts, Found, HyperRule, Loss, Params
from aprfmt.arch.spec_builders import full_spec
from aprfmt.arch.tensor_rows import RoleRow, Rows, linear, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import finite_number, sequence, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

UNBOUNDED = 1 << 20  # the context length that the converter writes for models without one
_ONE = (Reshaped(("ssm_heads",), ("ssm_heads", "1")),)
_CHANNELS = "ssm_size+2*ssm_groups*ssm_state"


def _convolution_rows(module: str, channels: str, needs: str) -> Rows:
    """Return the rows of a mixer's depthwise convolution over `channels`, weight and bias."""
    both = " & ".join(filter(None, (needs, "conv_bias")))
    return (
        RoleRow(
            "ssm_conv1d.weight",
            f"{module}.conv1d.weight",
            (channels, "conv_taps"),
            needs,
            (Depthwise(channels, "conv_taps"),),
        ),
        RoleRow("ssm_conv1d.bias", f"{module}.conv1d.bias", (channels,), both),
    )


def mamba_rows(module: str, needs: str = "") -> Rows:
    """Return the tensor-table rows of a mamba mixer.

    `module` is its name in Hugging Face files, `needs` the condition for a layer to have it.
    """
    return (
        *linear("ssm_in", f"{module}.in_proj", "2*ssm_size", "hidden_size", needs, bias="ssm_bias"),
        *_convolution_rows(module, "ssm_size", needs),
        *linear("ssm_x", f"{module}.x_proj", "ssm_rank+2*ssm_state", "ssm_size", needs),
        *linear("ssm_dt", f"{module}.dt_proj", "ssm_size", "ssm_rank", needs, bias=""),
        RoleRow(
            "ssm_a.weight",
            f"{module}.A_log",
            ("ssm_size", "ssm_state"),
            needs,
            (),
            (NegativeExp(),),
            "ssm_a",
        ),
        RoleRow("ssm_d.weight", f"{module}.D", ("ssm_size",), needs, gguf="ssm_d"),
        *linear("ssm_out", f"{module}.out_proj", "hidden_size", "ssm_size", needs, bias="ssm_bias"),
    )


def mamba2_rows(module: str, needs: str = "", out_bias: str = "ssm_bias") -> Rows:
    """Return the tensor-table rows of a mamba2 mixer.

    `module` is its name in Hugging Face files, `needs` the condition for a layer to have it,
    `out_bias` that for the last matrix's bias.
    """
    normed = " & ".join(filter(None, (needs, "ssm_norm")))
    into = "2*ssm_size+2*ssm_groups*ssm_state+ssm_heads"
    return (
        *linear("ssm_in", f"{module}.in_proj", into, "hidden_size", needs, bias="ssm_bias"),
        *_convolution_rows(module, _CHANNELS, needs),
        RoleRow("ssm_dt.bias", f"{module}.dt_bias", ("ssm_heads",), needs),
        RoleRow(
            "ssm_a.weight",
            f"{module}.A_log",
            ("ssm_heads",),
            needs,
            (),
            (*_ONE, NegativeExp()),
            "ssm_a",
        ),
        RoleRow("ssm_d.weight", f"{module}.D", ("ssm_heads",), needs, (), _ONE, "ssm_d"),
        RoleRow(
            "ssm_norm.weight",
            f"{module}.norm.weight",
            ("ssm_size",),
            normed,
            (),
            (Reshaped(("ssm_size",), ("ssm_groups", "ssm_group_size")),),
        ),
        *linear("ssm_out", f"{module}.out_proj", "hidden_size", "ssm_size", needs, bias=out_bias),
    )


def inner_width_rule(expand: str = "expand", key: str = "") -> HyperRule:
    """Return the rule that reads and writes the mixers' inner width.

    config.json gives it by `key`, or as a factor of the hidden size by `expand`.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (inner width of the mixers, key) of config.json; None without `key` and `expand`.

        `key` has the width and counts first; `expand` has it as a multiple of the hidden size.
        """
        stated, found = facts.first(key) if key else None, facts.first(expand)
        if stated is not None:
            return stated
        return None if found is None else (whole_number(*found, 1) * hp["hidden_size"], found[1])

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {key: number} for the mixers' inner width, `value`.

        `expand` gets it as a multiple of the hidden size if it is one; `key`, if any, gets the
        width.
        """
        times, rest = divmod(value, hp["hidden_size"])
        return ({} if rest else {expand: times}) | ({key: value} if key else {})

    return HyperRule(
        "ssm_size",
        {"gguf": ("{arch}.ssm.inner_size",)},
        "size",
        lambda hp: 2 * hp["hidden_size"],
        read={"hf": read},
        write={"hf": write},
    )


def time_step_rank_rule(hf: str) -> HyperRule:
    """Return the rule that reads and writes the rank of the compressed time step.

    "auto" in config.json stands for a sixteenth of the hidden size, rounded up.
    """

    def sixteenth(hp: Params) -> int:
        """Return the default rank of the compressed time step: hidden size / 16, rounded up."""
        return -(-int(hp["hidden_size"]) // 16)

    def read(facts: Facts, hp: Params) -> Found:
        """Return (rank of the compressed time step, key) of config.json.

        None for "auto" or no key.
        """
        found = facts.first(hf)
        return None if found is None or found[0] == "auto" else found

    return HyperRule(
        "ssm_rank",
        {"hf": (hf,), "gguf": ("{arch}.ssm.time_step_rank",)},
        "size",
        sixteenth,
        read={"hf": read},
    )


def _group_size(hp: Params) -> int:
    """Return the channels of one group: the heads that share B and C."""
    return int(hp["ssm_size"]) // int(hp["ssm_groups"])


def _check_groups(value: Value, facts: Facts, hp: Params) -> str:
    """Return ""; ArchError where groups do not divide the heads, or heads the inner width."""
    heads, width = int(hp["ssm_heads"]), int(hp["ssm_size"])
    if heads % int(value) or width % heads:
        raise ArchError(
            f"the mixers have {heads} heads in {value} groups, and {width} channels; expected "
            "groups of equally many heads, and heads of equally many channels"
        )
    return ""


def state_rules(state: str, taps: str, default: int) -> tuple[HyperRule, ...]:
    """Return the rules for state size and convolution taps, which both kinds of mixers have.

    The first two arguments are keys of config.json, `default` is the state size without a key.
    """
    return (
        hyper_rules.size("ssm_state", state, "ssm.state_size", hf_default=default),
        hyper_rules.size("conv_taps", taps, "ssm.conv_kernel", default=4),
    )


def head_rules(heads: str, groups: str, default: int, n_groups: int) -> tuple[HyperRule, ...]:
    """Return the rules that read and write mamba2's heads, groups and channels of a group.

    The first two arguments are keys of config.json, the others the defaults of both.
    """
    return (
        hyper_rules.size("ssm_heads", heads, "ssm.time_step_rank", hf_default=default),
        hyper_rules.size(
            "ssm_groups", groups, "ssm.group_count", hf_default=n_groups, check=_check_groups
        ),
        HyperRule("ssm_group_size", default=_group_size),
    )


_LIMITS = "time_step_limit"  # config.json's key of the least and the greatest time step


def limit_rules(least: str = "") -> tuple[HyperRule, ...]:
    """Return the rules that read and write the least and the greatest time step.

    config.json has both in time_step_limit. With `least` (keys of the least one, separated by
    spaces) that is not read and there is no greatest one (nemotron_h).
    """

    def read_low(facts: Facts, hp: Params) -> Found:
        """Return (least time step, key) of config.json; None without the key."""
        found = _read_time_step_limits(facts)
        return None if found is None else (found[0][0], found[1])

    def read_high(facts: Facts, hp: Params) -> Found:
        """Return (greatest time step or None for infinity, key) of config.json; None without it."""
        found = _read_time_step_limits(facts)
        if found is None:
            return None
        return (None if math.isinf(found[0][1]) else found[0][1]), found[1]

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {"time_step_limit": [least, greatest]}; {} where neither is limited.

        `value` is the least time step of the scan. No greatest is written as transformers'
        infinity.
        """
        greatest = hp["ssm_step_high"]
        if not value and greatest is None:
            return {}
        # transformers 5 writes infinity so (PreTrainedConfig, float tags)
        return {_LIMITS: [value, {"__float__": "Infinity"} if greatest is None else greatest]}

    if least:
        keys = tuple(least.split())
        return (
            HyperRule("ssm_step_low", {"hf": keys}, "float", 0.0, {"hf": 0.001}),
            hyper_rules.fixed("ssm_step_high", None),
        )
    return (
        # The greatest one is read before `write` is called: both are in one key.
        HyperRule("ssm_step_low", {}, "float", 0.0, read={"hf": read_low}, write={"hf": write}),
        HyperRule(
            "ssm_step_high",
            {},
            "positive",
            None,
            read={"hf": read_high},
            write={"hf": lambda value, hp: {}},
        ),
    )


def _read_time_step_limits(facts: Facts) -> tuple[tuple[float, float], str] | None:
    """Return ((least, greatest time step of the scan), its key in config.json), or None.

    The greatest may be infinite. ArchError for anything but two numbers in order.
    """
    found = facts.first(_LIMITS)
    if found is None:
        return None
    listed = [
        part.get("__float__") if isinstance(part, Mapping) else part for part in sequence(*found, 2)
    ]
    low = finite_number(listed[0], _LIMITS)
    endless = listed[1] in ("Infinity", "inf", math.inf)
    high = math.inf if endless else finite_number(listed[1], _LIMITS)
    if len(listed) != 2 or not 0 <= low < high:
        raise ArchError(f"{_LIMITS}: is {listed!r}; expected two numbers from 0 on, in order")
    return (low, high), found[1]


def mixer_rules(
    *, limits: tuple[HyperRule, ...] = (), activation: HyperRule | None = None
) -> tuple[HyperRule, ...]:
    """Return the rules that all mixers have: norm of the gate, time steps, activation.

    `limits` replaces "no limits of time steps", `activation` the model's own activation.
    """
    return (
        hyper_rules.fixed("ssm_norm", False),
        hyper_rules.fixed("ssm_norm_first", False),
        *(
            limits
            or (hyper_rules.fixed("ssm_step_low", 0.0), hyper_rules.fixed("ssm_step_high", None))
        ),
        activation or HyperRule("ssm_activation", default=lambda hp: hp["activation"]),
    )


_GGUF_ASSUMES = "llama.cpp knows no limits of time steps: it takes every step as it is"
LOST: tuple[Loss, ...] = (
    Loss("gguf", "ssm_step_low", lambda hp: bool(hp["ssm_step_low"]), _GGUF_ASSUMES),
    Loss("gguf", "ssm_step_high", lambda hp: hp["ssm_step_high"] is not None, _GGUF_ASSUMES),
    Loss(
        "gguf", "ssm_activation", lambda hp: hp["ssm_activation"] != "silu",
        "GGUF has no key for it: llama.cpp computes silu after the convolutions",
    ),
)  # fmt: skip
# Keys that say how weights are drawn, or by how many tokens a scan goes: no output depends on them.
IGNORED = frozenset(
    """time_step_scale time_step_min time_step_max time_step_init_scheme time_step_floor
    rescale_prenorm_residual use_mambapy use_associative_scan chunk_size mamba_chunk_size
    use_mamba_kernels time_step_rank""".split()
)


def bias_rules(conv: str, projections: str) -> tuple[HyperRule, ...]:
    """Return the rules that read and write biases of the convolution and of the projections.

    The arguments are the keys of config.json.
    """
    return (
        hyper_rules.flag("conv_bias", True, conv, present=("ssm_conv1d.bias",)),
        hyper_rules.flag("ssm_bias", False, projections, present=("ssm_in.bias",)),
    )


def _write_no_heads(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: 0} for the attention heads that these models do not have."""
    return {"{arch}.attention.head_count": 0}


# No attention, no MLP, no positions, and no bound on them.
_ALONE: tuple[HyperRule, ...] = (
    HyperRule("n_heads", default=0, write={"gguf": _write_no_heads}),
    *(
        hyper_rules.fixed(name, 0)
        for name in ("n_kv_heads", "head_dim", "value_head_dim", "ffn_size")
    ),
    hyper_rules.context_length(UNBOUNDED, ""),
    hyper_rules.fixed("attn_scale", 1.0),
    *NO_ROPE,
    HyperRule("ssm_layers", default=hyper_rules.per_layer(True)),
    HyperRule("mlp_layers", default=hyper_rules.per_layer(False)),
    HyperRule("wide_stream", {"hf": ("residual_in_fp32",)}, "bool", True),
)


_UNUSED = frozenset({"attention.head_count", "feed_forward_length"})  # zeros in a GGUF


def _make_mamba_tables(mixer: Rows) -> Any:
    """Return the tensor table and bindings of a model whose layers are a norm and a mixer."""
    rows = (*norm("attn_norm", "backbone.layers.{L}.norm"), *mixer)
    return make_tables(with_model_rows(*rows, embed="backbone.embeddings", final="backbone.norm_f"))


def _mamba_rules(*overrides: HyperRule) -> tuple[HyperRule, ...]:
    """Return the hyperparameter rules of both mambas; `overrides` replace or add to them."""
    return hyper_rules.hyper_table(
        *_ALONE,
        hyper_rules.n_layers(32),
        hyper_rules.norm_eps(1e-5, "layer_norm_epsilon"),
        *bias_rules("use_conv_bias", "use_bias"),
        *overrides,
    )


def _mamba_block(**fields: Any) -> BlockSpec:
    """Return the block spec of a mixer alone: no MLP, no positions."""
    return BlockSpec(halves="one", position="none", **fields)


_MIXER = "backbone.layers.{L}.mixer"
_MAMBA_HYPER = (
    hyper_rules.tied_embeddings(True),
    inner_width_rule("expand", "intermediate_size"),
    time_step_rank_rule("time_step_rank"),
    *state_rules("state_size", "conv_kernel", 16),
    *mixer_rules(),
)


def _inner_norms_rule(value: bool) -> HyperRule:
    """Return the rule for whether time step, B and C have norms without weights.

    `value` is the default; a GGUF has a key for it.
    """
    return HyperRule("ssm_inner_norms", {"gguf": ("{arch}.ssm.dt_b_c_rms",)}, "bool", value)


def _is_falcon_mamba(names: Any, values: Mapping[str, Value]) -> bool:
    """Return whether a GGUF's keys say that the model is falcon_mamba, not mamba.

    `names` (the tensors') is not used: every evidence function is given both.
    """
    return values.get("mamba.ssm.dt_b_c_rms") is True


_EPS = HyperRule(
    "ssm_inner_eps", {"hf": ("mixer_rms_eps",)}, "positive", 1e-6,
    {"gguf": lambda hp: hp["norm_eps"]},
)  # fmt: skip
MAMBA = full_spec(
    "mamba",
    _make_mamba_tables(mamba_rows(_MIXER)),
    _mamba_rules(*_MAMBA_HYPER, _inner_norms_rule(False)),
    _mamba_block(recurrence="mamba"),
    ignored=_UNUSED | IGNORED,
    lost=LOST,
)
FALCON_MAMBA = full_spec(
    "falcon_mamba",
    _make_mamba_tables(mamba_rows(_MIXER)),
    _mamba_rules(*_MAMBA_HYPER, _inner_norms_rule(True), _EPS),
    _mamba_block(recurrence="mamba", ssm_norms="plain"),
    ignored=_UNUSED | IGNORED,
    evidence=_is_falcon_mamba,
    lost=(
        *LOST,
        Loss(
            "gguf",
            "ssm_inner_eps",
            lambda hp: hp["ssm_inner_eps"] != hp["norm_eps"],
            "llama.cpp takes the other norms' epsilon for those of time step, B and C",
        ),
    ),
)


def _write_head_sizes(value: Value, hp: Params) -> Params:
    """Return config.json's {key: value} of the inner width: its factor and the head dim."""
    return {"expand": value // hp["hidden_size"], "head_dim": value // hp["ssm_heads"]}


MAMBA2 = full_spec(
    "mamba2",
    _make_mamba_tables(mamba2_rows(_MIXER)),
    _mamba_rules(
        hyper_rules.tied_embeddings(),
        replace(inner_width_rule(), write={"hf": _write_head_sizes}),
        *head_rules("num_heads", "n_groups", 128, 8),
        *state_rules("state_size", "conv_kernel", 128),
        *mixer_rules(limits=limit_rules()),
        hyper_rules.flag("ssm_norm", True, present=("ssm_norm.weight",)),
    ),
    _mamba_block(recurrence="mamba2"),
    ignored=_UNUSED | IGNORED | {"head_dim"},
    lost=LOST,
)
