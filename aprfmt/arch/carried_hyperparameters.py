"""Hyperparameters that our own files store in keys of their own; each is checked when read.

`aprfmt.hyper.NAME` is a JSON text: the value itself, lists with one boolean a layer, or the
normal form of rope_scaling (rope.py).
"""

import math
from collections.abc import Mapping, Sequence
from reprlib import repr as short_repr

from aprfmt.arch.spec import CARRIED, Facts
from aprfmt.arch.value_checks import divisors, finite_number, positive_number, text, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError, FormatError

_MAX_BYTES = 1 << 20

LAYERED = (
    "rope_layers", "window_layers", "moe_layers", "delta_layers", "conv_layers",
    "attn_norm_layers",
    "attention_layers", "ssm_layers", "mlp_layers", "encoder_layers", "decoder_layers",
    "encoder_bias_layers", "decoder_bias_layers", "own_kv_layers", "wide_layers",
    "sink_layers", "merger_layers", "index_layers",
    "lightning_layers", "heavy_layers", "hash_layers",
)  # fmt: skip
LISTED = ("rope_sections",)  # whole numbers
NUMBERED = ("ffn_sparsity",)  # a number a layer
NUMBERS = ("ssm_scales", "residual_scales")
WORDS: Mapping[str, tuple[str, ...]] = {
    "activation": ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai"),
    "ssm_activation": ("silu", "gelu", "gelu_tanh", "relu", "relu2"),
    "pooling": ("mean", "cls", "last"),
    "rope_style": ("half", "interleaved"),
    "rope_scaling_layers": ("all", "full"),
    "router": (
        "softmax",
        "softmax_topk",
        "sigmoid_bias",
        "sigmoid_bias_eps",
        "group_limited_greedy",
        "sqrtsoftplus_bias",
    ),
}
NULLABLE = (
    "rope_theta_local", "rope_scaling", "sliding_window", "attn_softcap", "final_softcap",
    "q_lora_rank", "ssm_step_high", "temperature_scale", "temperature_length", "value_scale",
    "global_head_dim", "global_kv_heads",
)  # fmt: skip
_OPTIONAL = ("mscale", "mscale_all_dim")
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_context_length"),
    "yarn": (
        "factor", "original_context_length", "beta_fast", "beta_slow", "attention_factor",
        "truncate", *_OPTIONAL,
    ),
    "longrope": ("short_factor", "long_factor", "original_context_length", "attention_factor"),
    "factors": ("factors",),
    "proportional": ("factor", "rotated"),
}  # fmt: skip


def read_aprfmt_key(
    facts: Facts, name: str, usual: Value, settled: Mapping[str, Value]
) -> tuple[Value, str] | None:
    """Return (value, key) of `aprfmt.hyper.NAME`; None if the file has no such key.

    `usual` is the value the hyperparameter would have otherwise; it gives the expected type.
    `settled` are the hyperparameters read so far. Raises ArchError for a value the hyperparameter
    cannot have.
    """
    found = facts.first(CARRIED + name)
    if found is None:
        return None
    from aprfmt.formats.bounded_json import loads

    try:
        value = loads(text(*found), found[1], max_bytes=_MAX_BYTES)
    except (FormatError, UnicodeEncodeError) as error:
        raise ArchError(f"{found[1]}: holds no JSON value ({error})") from None
    return _check_value(name, found[1], value, usual, settled), found[1]


def _check_value(
    name: str, key: str, value: Value, usual: Value, settled: Mapping[str, Value]
) -> Value:
    """Return the value in the hyperparameter's type, a tuple for a list; else ArchError.

    None stays None where the hyperparameter may be absent.
    """
    if name == "rope_scaling":
        return None if value is None else _check_scaling(value, key)
    if name in LAYERED:
        layers = settled["n_layers"]
        if (
            isinstance(value, list)
            and len(value) == layers
            and all(type(on) is bool for on in value)
        ):
            return tuple(value)
        raise ArchError(f"{key}: is {short_repr(value)}; expected {layers} times true or false")
    if name in LISTED and isinstance(value, list):
        return tuple(whole_number(part, key) for part in value)
    if name in NUMBERED:
        if isinstance(value, list) and len(value) == settled["n_layers"]:
            return tuple(float(finite_number(part, key)) for part in value)
        raise ArchError(
            f"{key}: is {short_repr(value)}; expected a list of {settled['n_layers']} numbers"
        )
    if name in NUMBERS and isinstance(value, list):
        return tuple(finite_number(part, key) for part in value)
    if name in WORDS:
        if value in WORDS[name]:
            return value
        raise ArchError(f"{key}: is {short_repr(value)}; expected one of {', '.join(WORDS[name])}")
    # Any other hyperparameter has the type of its usual value.
    if value is None:
        if usual is None or name in NULLABLE:
            return None
    elif isinstance(value, bool) or isinstance(usual, bool):
        if type(value) is type(usual):
            return value
    elif isinstance(usual, int):
        return whole_number(value, key)
    elif isinstance(value, (int, float)):
        return finite_number(value, key)
    raise ArchError(f"{key}: is {short_repr(value)}; expected a value like {short_repr(usual)}")


def _check_scaling(value: Value, key: str) -> Mapping[str, Value]:
    """Return a rope scaling in normal form; ArchError for other keys or values."""
    kind = value.get("type") if isinstance(value, dict) else None
    wanted = SCALINGS.get(kind, ()) if isinstance(kind, str) else ()
    if not wanted or set(value) != {"type", *wanted}:
        raise ArchError(f"{key}: is {short_repr(value)}; expected a rope scaling in normal form")
    # Each field has its own type; all other fields are positive numbers.
    out: dict[str, Value] = {"type": kind}
    for name in wanted:
        part, where = value[name], f"{key}.{name}"
        if name in _OPTIONAL:
            out[name] = None if part is None else finite_number(part, where)
        elif name == "original_context_length":
            out[name] = whole_number(part, where, 1)
        elif name == "rotated":
            out[name] = whole_number(part, where)
        elif isinstance(part, Sequence) and not isinstance(part, str):
            out[name] = divisors(part, where)
        elif name == "truncate":
            if not isinstance(part, bool):
                raise ArchError(f"{where}: is {short_repr(part)}; expected true or false")
            out[name] = part
        else:
            out[name] = positive_number(part, where)
    low, high = out.get("low_freq_factor"), out.get("high_freq_factor")
    if low is not None and math.isclose(low, high or 0):
        raise ArchError(f"{key}: low_freq_factor and high_freq_factor are equal")
    for name in ("factors", "short_factor", "long_factor"):
        if name in out and not isinstance(out[name], tuple):
            raise ArchError(f"{key}.{name}: is {short_repr(out[name])}; expected a list")
    return out
