"""llama4's text part: chunks, layers without rope, experts whose weight multiplies their input.

Layers with rope see their own chunk of positions and normalise q and k after rope, without a
weight; every fourth sees everything, and its queries grow with the position. An expert's weight
is the sigmoid of its logit; a shared expert is added. Experts are stored [in, out], gate and up
joined on the last axis. In a GGUF chunks have 8192 positions, whatever its keys say (0: there
are none), and models of 128 experts have no norms of q and k. Sources: transformers'
modeling_llama4; the converter's llama4.py; llama.cpp's llama4.cpp.
"""

from collections.abc import Callable

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.layout_steps import Transposed
from aprfmt.arch.nope_layers import all_but_every, rope_layers_rule, rotating_layers
from aprfmt.arch.qwen2_moe import shared_expert_rows
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import Window, window_period, window_rules
from aprfmt.arch.spec import (
    ArchSpec,
    Binding,
    BlockSpec,
    Facts,
    Found,
    HyperRule,
    Loss,
    Params,
    PerLayer,
)
from aprfmt.arch.tensor_rows import (
    FUSED,
    LAYER,
    RoleRow,
    attention,
    experts,
    gated_mlp,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import boolean, finite_number, sequence, whole_number
from aprfmt.base.protocols import Value

_CHUNK, _SCALE, _LENGTH = 8192, 0.1, 8192  # transformers' defaults, and llama.cpp's only values
_UNNORMED = 128  # experts
_F = "feed_forward."
_GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_HALVES = (Transposed(), Split(("moe_ffn_size", "moe_ffn_size"), axis=1))

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(),
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(needs="!moe_layers", module="feed_forward"),
        RoleRow(
            "ffn_gate_inp.weight", _F + "router.weight", ("n_experts", "hidden_size"), "moe_layers"
        ),
        *experts()[0],
        *shared_expert_rows(_F + "shared_expert"),
    ),
    hf_first=(
        Binding((f"{LAYER}{_F}experts.gate_up_proj",), _GATE_UP, _HALVES),
        Binding((f"{LAYER}{_F}experts.down_proj",), ("ffn_down_exps.weight",), _HALVES[:1]),
    ),
    hf_more=FUSED,
)


def _read_moe_layers(facts: Facts, hp: Params) -> Found:
    """Return (which layers have experts, key) of config.json; None without a list and a step."""
    listed, step = facts.first("moe_layers"), facts.first("interleave_moe_layer_step")
    if listed is not None:
        on = {whole_number(item, listed[1]) for item in sequence(*listed)}
        return tuple(i in on for i in range(hp["n_layers"])), listed[1]
    return None if step is None else (_layers_of_step(whole_number(*step), hp), step[1])


def _layers_of_step(step: int, hp: Params) -> PerLayer:
    """Return one boolean a layer: True for every step-th; all False for 0."""
    return tuple(step > 0 and (i + 1) % step == 0 for i in range(hp["n_layers"]))


def _read_moe_layers_gguf(facts: Facts, hp: Params) -> Found:
    """Return (which layers have experts, key) of a GGUF's step; None without the key."""
    step = facts.first("{arch}.interleave_moe_layer_step")
    return None if step is None else (_layers_of_step(whole_number(*step), hp), step[1])


def _write_moe_layers(value: Value, hp: Params) -> Params:
    """Return config.json's {key: numbers of the layers with experts}."""
    return {"moe_layers": [i for i, sparse in enumerate(value) if sparse]}


def _expert_step(layers: PerLayer) -> int:
    """Return the number of the first layer with experts, counted from 1; 0 for none."""
    return (*layers, True).index(True) + 1 if any(layers) else 0


def _write_moe_layers_gguf(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: step} of the layers with experts."""
    return {"{arch}.interleave_moe_layer_step": _expert_step(value)}


def _read_temperature_switch(facts: Facts) -> tuple[bool, str]:
    """Return (whether attention temperature tuning is on, key) of config.json.

    It multiplies queries by a factor that grows with the position. True without a key. Published
    files have a number where the class has a boolean.
    """
    found = facts.first("attn_temperature_tuning")
    if found is None:
        return True, "attn_scale"
    value, key = found
    return (boolean(value, key) if isinstance(value, bool) else whole_number(value, key) > 0), key


def _read_scale(facts: Facts, hp: Params) -> Found:
    """Return (scale of the attention temperature, key) of config.json.

    The scale is None where the temperature is off.
    """
    (tuned, key), found = _read_temperature_switch(facts), facts.first("attn_scale")
    if not tuned:
        return None, key
    return (_SCALE, key) if found is None else (finite_number(*found), found[1])


def _read_length(facts: Facts, hp: Params) -> Found:
    """Return (positions from one attention temperature to the next, key) of config.json.

    The number is None where the tuning is switched off.
    """
    (tuned, key), found = _read_temperature_switch(facts), facts.first("floor_scale")
    if not tuned:
        return None, key
    return (_LENGTH, key) if found is None else (whole_number(*found, 1), found[1])


def _write_scale(value: Value, hp: Params) -> Params:
    """Return config.json's {key: value}: whether the temperature is tuned, and its scale then."""
    on = value is not None
    return {"attn_temperature_tuning": on, **({"attn_scale": value} if on else {})}


def _write_length(value: Value, hp: Params) -> Params:
    """Return config.json's {key: positions}, empty without attention temperature tuning."""
    return {} if value is None else {"floor_scale": value}


def _default_with_chunks(value: float) -> Callable[[Params], Value]:
    """Return a default function: `value` for a model with chunks, else None, like llama.cpp."""
    return lambda hp: value if any(hp["window_layers"]) else None


def _rope_layers_gguf(hp: Params) -> PerLayer:
    """Return one boolean a layer: whether llama.cpp rotates it.

    It rotates three of four layers, and without chunks all but the last.
    """
    return all_but_every(hp, 4 if any(hp["window_layers"]) else hp["n_layers"])


def _read_qk_norm_gguf(facts: Facts, hp: Params) -> Found:
    """Return (whether llama.cpp normalises q and k, key of the number of experts).

    llama.cpp decides it by that number. None without the key.
    """
    found = facts.first("{arch}.expert_count")
    return None if found is None else (whole_number(*found) != _UNNORMED, found[1])


def _temperature_values(hp: Params) -> tuple[Value, Value]:
    """Return (scale, positions from one value to the next) of the attention temperature."""
    return hp["temperature_scale"], hp["temperature_length"]


_LOST = (
    Loss(
        "gguf",
        "sliding_window",
        lambda hp: any(hp["window_layers"]) and hp["sliding_window"] != _CHUNK,
        f"GGUF has no key for it: llama.cpp has chunks of {_CHUNK} positions",
    ),
    Loss(
        "gguf",
        "rope_layers",
        lambda hp: hp["rope_layers"] != _rope_layers_gguf(hp),
        "GGUF has no key for the list: llama.cpp rotates in all layers but every fourth, without "
        "chunks in all but the last",
        assumed=True,
    ),
    Loss(
        "gguf",
        "temperature_scale",
        lambda hp: (
            _temperature_values(hp)
            != (_default_with_chunks(_SCALE)(hp), _default_with_chunks(_LENGTH)(hp))
        ),
        f"GGUF has no key for it: llama.cpp takes {_SCALE} and a length of {_LENGTH}",
    ),
    Loss(
        "gguf",
        "qk_norm",
        lambda hp: hp["qk_norm"] is not (hp["n_experts"] != _UNNORMED),
        f"GGUF has no key for it: llama.cpp normalises q and k unless there are {_UNNORMED} "
        "experts",
    ),
    Loss(
        "gguf",
        "moe_layers",
        lambda hp: hp["moe_layers"] != _layers_of_step(_expert_step(hp["moe_layers"]), hp),
        "GGUF has a step only: llama.cpp expects experts in every so many layers",
    ),
)

LLAMA4 = ArchSpec(
    name="llama4",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.head_dim(128),
        hyper_rules.context_length(131072),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.ffn_size(16384, "intermediate_size_mlp"),
        *hyper_rules.attention_biases(),
        HyperRule(
            "qk_norm",
            {"hf": ("use_qk_norm",)},
            "bool",
            True,
            read={"gguf": _read_qk_norm_gguf},
            write={"gguf": lambda value, hp: {}},
        ),
        *rope_rules(RopeDefaults(theta=500000.0)),
        hyper_rules.rope_style("interleaved"),
        rope_layers_rule(_rope_layers_gguf),
        *window_rules(
            Window(
                _CHUNK,
                _CHUNK,
                rotating_layers,
                window_period(4),
                stated=True,
                hf="attention_chunk_size",
                kind="chunked_attention",
                gguf_fixed=True,
            )
        ),
        HyperRule(
            "temperature_scale",
            kind="float",
            read={"hf": _read_scale},
            write={"hf": _write_scale},
            default=_SCALE,
            default_in={"gguf": _default_with_chunks(_SCALE)},
        ),
        HyperRule(
            "temperature_length",
            read={"hf": _read_length},
            write={"hf": _write_length},
            default=_LENGTH,
            default_in={"gguf": _default_with_chunks(_LENGTH)},
        ),
        *moe.expert_count_rules(16, 1, "num_local_experts num_experts"),
        moe.expert_size_rule("intermediate_size", 8192),
        hyper_rules.size(
            "shared_ffn_size",
            "intermediate_size",
            "expert_shared_feed_forward_length",
            default=lambda hp: hp["moe_ffn_size"],
            hf_default=8192,
        ),
        HyperRule(
            "moe_layers",
            read={"hf": _read_moe_layers, "gguf": _read_moe_layers_gguf},
            write={"hf": _write_moe_layers, "gguf": _write_moe_layers_gguf},
            default=hyper_rules.per_layer(True),
        ),
        moe.router_rule("sigmoid"),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(
        qk_norm="plain",
        qk_norm_place="rotated",
        window="chunk",
        temperature="unrotated",
        expert_weights="input",
        shared_expert="plain",
        rope_cast="result",
    ),
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY, *_LOST),
    derived=ROPE_TENSORS,
)
