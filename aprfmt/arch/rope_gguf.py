"""Rotary positions in GGUF: keys, and divisors of the frequencies, which are tensors.

Read as llama.cpp reads them. Source: `load_hparams` and `llama_context` of llama.cpp, its
converter's `set_gguf_parameters` and `generate_extra_tensors`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from aprfmt.arch.rope_hf import (
    YARN_BETAS,
    full_head_dim,
    longrope_attention_factor,
    yarn_attention_factor,
)
from aprfmt.arch.spec import DerivedTensor, Facts, Params
from aprfmt.arch.value_checks import (
    finite_number,
    positive_number,
    same_derived_values,
    same_value,
    shortest_decimal,
    text,
    whole_number,
)
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Scaling = dict[str, Value]

FREQS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_KEY = "{arch}.rope.scaling."

# Values of a scaling in normal form -> what GGUF calls them, after its prefix; lists are tensors.
_CALLED: Mapping[str, Mapping[str, str]] = {
    "longrope": {"attention_factor": "attn_factor"},
    "yarn": {
        "attention_factor": "attn_factor", "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow", "mscale": "yarn_log_multiplier",
        "mscale_all_dim": "yarn_log_multiplier", "truncate": "",
    },
}  # fmt: skip
_STORED = {"long_factor": LONG, "short_factor": SHORT, "factors": FREQS}

# GGUF stores llama3 scaling as divisors only. These are the parameters of every llama 3.x release
# (low_freq_factor, high_freq_factor, original_context_length); divisors that they explain are
# read as llama3, all others as `factors`.
LLAMA3 = (1.0, 4.0, 8192)
_DIVISORS = ("llama3", "factors", "proportional")  # types that are divisors and no more
# A divisor that leaves a pair where it is, as the converter writes it.
UNTURNED = 1e30


def llama3_divisors(scaling: Params, theta: float, dim: int) -> tuple[float, ...]:
    """Return the numbers by which llama3 scaling divides the dim/2 inverse frequencies.

    `scaling` is the normal form, `theta` rope's base, `dim` the rotated elements of a head.
    """
    factor, original = scaling["factor"], scaling["original_context_length"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    out = []
    for i in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / dim)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(out)


def stored_scaling_name(kind: str, name: str, arch: str) -> str:
    """Return the name of the GGUF key or tensor that holds one value of a rope scaling.

    `kind` is the scaling's type, `name` the value's name in the normal form. `arch` begins the
    keys. A llama3 or proportional scaling is a tensor of divisors. "" where a GGUF has neither key
    nor tensor for it.
    """
    if kind in ("llama3", "proportional"):
        return FREQS
    called = _CALLED.get(kind, {}).get(name, name)
    return _STORED.get(name, _KEY.format(arch=arch) + called if called else "")


def read_gguf(facts: Facts, hp: Params, log_mul: float) -> tuple[Scaling | None, str] | None:
    """Return (scaling in normal form or None for no scaling, key); None if nothing says it.

    `log_mul`: yarn_log_multiplier is this times mscale_all_dim. ArchError for an unknown type.
    """
    long, short = _read_divisors(facts, LONG, hp), _read_divisors(facts, SHORT, hp)
    stated = facts.first(_KEY + "type")
    if long is not None and short is not None:
        return _read_longrope(facts, hp, long, short), LONG
    found = facts.first(_KEY + "factor", "{arch}.rope.scale_linear")
    factor = positive_number(*found) if found is not None and found[0] != 0 else 1.0
    kind = "linear" if stated is None else text(*stated)
    freqs = _read_divisors(facts, FREQS, hp)
    if kind == "yarn":
        return _read_yarn(facts, hp, factor, log_mul), (stated or ("", ""))[1]
    if kind not in ("none", "linear", "longrope"):
        raise ArchError(
            f"{(stated or ('', ''))[1]}: rope scaling {kind!r} is not known; known: none, linear, "
            "yarn, longrope"
        )
    if kind != "linear":
        factor = 1.0  # llama.cpp ignores the factor
    if freqs is not None and any(value != 1.0 for value in freqs):
        return _proportional_scaling(freqs, factor) or _scaling_of_divisors(
            freqs, factor, hp
        ), FREQS
    if factor != 1.0 and found is not None:
        return {"type": "linear", "factor": shortest_decimal(factor)}, found[1]
    return None if stated is None else (None, stated[1])


def lost_divisors_text(facts: Facts) -> str:
    """Return a remark on a GGUF that names longrope and lacks its divisors, "" for any other.

    llama.cpp then rotates every pair as without a scaling.
    """
    if facts.style != "gguf":
        return ""
    missing = [name for name in (LONG, SHORT) if name not in facts.tensors]
    stated = facts.first(_KEY + "type")
    said = stated if stated is not None and stated[0] == "longrope" else None
    if stated is None or stated[0] != "yarn":  # a yarn scaling has the key and no divisors
        said = said or facts.first(_KEY + "attn_factor")
    if not missing or (said is None and len(missing) == 2):
        return ""
    what = f"{said[1]} is {said[0]}" if said is not None else f"there is a {LONG}"
    if said is None and LONG in missing:
        what = f"there is a {SHORT}"
    return (
        f"{what}, and there is no {' and no '.join(missing)}, which longrope needs: nothing is "
        "scaled without"
    )


def ignored_factor_text(value: Value, facts: Facts) -> str:
    """Return a remark on a GGUF's yarn_attn_factor, which llama.cpp overwrites; "" without one.

    `value` is the scaling in normal form. A factor of 1, or the one that llama.cpp computes, gets
    no remark.
    """
    if facts.style != "gguf" or value is None or value["type"] != "yarn":
        return ""
    found = facts.first(_KEY + "yarn_attn_factor")
    computed = value["attention_factor"]
    if found is None or any(same_value(shortest_decimal(found[0]), x) for x in (1.0, computed)):
        return ""
    return (
        f"{found[1]} is {found[0]:.6g}: llama.cpp overwrites it and multiplies by {computed:.6g}; "
        f"it reads {found[1].replace('yarn_', '')}"
    )


def _read_divisors(facts: Facts, name: str, hp: Params) -> tuple[float, ...] | None:
    """Return the divisors in a tensor, one for each rotated pair; None without the tensor.

    ArchError for another number of them, or one that is not positive and finite.
    """
    values = facts.vector(name)
    if values is None:
        return None
    pairs = (hp["rope_dim"] if hp["global_head_dim"] is None else full_head_dim(hp)) // 2
    if len(values) != pairs or not all(0 < v < math.inf for v in values):
        raise ArchError(
            f"tensor {name!r}: {len(values)} values; expected {pairs} numbers above "
            "zero, one for every pair of rotated elements"
        )
    return tuple(shortest_decimal(value) for value in values)


def _scaling_of_divisors(freqs: tuple[float, ...], factor: float, hp: Params) -> Scaling:
    """Return the llama3 scaling that gives the divisors, else one of type "factors".

    The second has the divisors themselves, each multiplied by `factor`.
    """
    low, high, original = LLAMA3
    guess = {
        "type": "llama3",
        "factor": max(freqs),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_context_length": original,
    }
    explained = llama3_divisors(guess, hp["rope_theta"], hp["rope_dim"])
    if factor == 1.0 and same_derived_values(freqs, explained):
        return guess
    return {"type": "factors", "factors": tuple(value * factor for value in freqs)}


def _proportional_scaling(freqs: tuple[float, ...], factor: float) -> Scaling | None:
    """Return the proportional scaling that gives the divisors; None if there is none.

    Its divisors are one number for the rotated pairs, then so large that no other pair rotates.
    """
    turned = sum(value < UNTURNED / 2 for value in freqs)
    if turned == len(freqs) or len(set(freqs[:turned])) > 1 or max(freqs[:turned], default=1) > 1e9:
        return None
    first = freqs[0] if turned else 1.0
    return {"type": "proportional", "factor": first * factor, "rotated": 2 * turned}


def _original_length(facts: Facts, hp: Params) -> int:
    """Return the trained length: its key, or the context length."""
    found = facts.first(_KEY + "original_context_length")
    length: int = hp["context_length"] if found is None else whole_number(*found, 1)
    return length


def _read_longrope(
    facts: Facts, hp: Params, long: tuple[float, ...], short: tuple[float, ...]
) -> Scaling:
    """Return the longrope scaling in normal form, from two lists of divisors and the keys.

    `long` and `short` are the divisors beyond and up to the trained length.
    """
    original = _original_length(facts, hp)
    found = facts.first(_KEY + "attn_factor")
    attention = 1.0 if found is None else shortest_decimal(positive_number(*found))
    implied = longrope_attention_factor(hp["context_length"] / original, original)
    return {
        "type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_context_length": original,
        "attention_factor": implied if same_value(attention, implied) else attention,
    }


def _read_yarn(facts: Facts, hp: Params, factor: float, log_mul: float) -> Scaling:
    """Return the yarn scaling of a GGUF's keys, in normal form.

    `log_mul`: the key yarn_log_multiplier is this times mscale_all_dim. llama.cpp computes yarn's
    factor on queries and keys from `factor`, and multiplies it by the key attn_factor, which
    every architecture loads. What yarn_attn_factor states it overwrites.
    """

    def read_key(name: str, default: float | None) -> float | None:
        """Return the number under a GGUF's rope scaling key `name`, else `default`.

        The rounding to float32 is undone.
        """
        found = facts.first(_KEY + name)
        return default if found is None else shortest_decimal(finite_number(*found))

    # llama.cpp takes mscale to be the same.
    logarithmic = read_key("yarn_log_multiplier", None)
    every = float(f"{logarithmic / log_mul:.7g}") if logarithmic else None
    implied = yarn_attention_factor(factor, every, every)
    attention = implied * positive_number(read_key("attn_factor", 1.0), _KEY + "attn_factor")
    return {
        "type": "yarn",
        "factor": shortest_decimal(factor),
        "original_context_length": _original_length(facts, hp),
        "beta_fast": read_key("yarn_beta_fast", YARN_BETAS[0]),
        "beta_slow": read_key("yarn_beta_slow", YARN_BETAS[1]),
        "attention_factor": implied if same_value(attention, implied) else attention,
        "mscale": every,
        "mscale_all_dim": every,
        "truncate": True,
    }


# --- writing ----------------------------------------------------------------------------------


def write_gguf(scaling: Params | None, log_mul: float) -> dict[str, Value]:
    """Return GGUF's {key: value} of a scaling, with "{arch}" still in the keys.

    Empty for no scaling and for scalings that are stored as divisors, see `ROPE_TENSORS`.
    `log_mul`: the key yarn_log_multiplier is this times mscale_all_dim.
    """
    write = _WRITE.get(scaling["type"]) if scaling is not None else None
    keys = {} if write is None or scaling is None else write(scaling)
    if "yarn_log_multiplier" in keys:
        keys["yarn_log_multiplier"] *= log_mul
    return {_KEY + name: value for name, value in keys.items()}


def _write_linear(scaling: Params) -> Scaling:
    """Return a linear rope scaling as GGUF's {key without its prefix: value}: type and factor."""
    return {"type": "linear", "factor": scaling["factor"]}


def _write_longrope(scaling: Params) -> Scaling:
    """Return the keys of a longrope scaling, without their prefix; its divisors are tensors."""
    return {
        "type": "longrope",
        "original_context_length": scaling["original_context_length"],
        "attn_factor": scaling["attention_factor"],
    }


def _write_yarn(scaling: Params) -> Scaling:
    """Return the keys of a yarn scaling, without their prefix; defaults are left out."""
    out = {
        "type": "yarn",
        "factor": scaling["factor"],
        "original_context_length": scaling["original_context_length"],
        "yarn_beta_fast": scaling["beta_fast"],
        "yarn_beta_slow": scaling["beta_slow"],
    }
    every, attention = scaling["mscale_all_dim"], scaling["attention_factor"]
    if every:
        out["yarn_log_multiplier"] = every
    if not same_value(attention, yarn_attention_factor(scaling["factor"], every, every)):
        out["attn_factor"] = attention / yarn_attention_factor(scaling["factor"], every, every)
    return out


_WRITE: Mapping[str, Callable[[Any], Scaling]] = {
    "linear": _write_linear,
    "longrope": _write_longrope,
    "yarn": _write_yarn,
}


def _make_freqs(hp: Params) -> tuple[float, ...] | None:
    """Return the values of rope_freqs.weight, one divisor a pair; None if it is not needed."""
    scaling = hp["rope_scaling"]
    if scaling is None:
        return None
    if scaling["type"] == "llama3":
        return llama3_divisors(scaling, hp["rope_theta"], hp["rope_dim"])
    if scaling["type"] == "proportional":
        turned, pairs = int(scaling["rotated"]) // 2, full_head_dim(hp) // 2
        return (float(scaling["factor"]),) * turned + (UNTURNED,) * (pairs - turned)
    factors: tuple[float, ...] | None = scaling.get("factors")
    return factors


def have_equal_divisors(a: Params, b: Params) -> bool:
    """Return whether two models' rope scalings divide the frequencies by the same numbers.

    `a` and `b` are hyperparameters. A llama3 scaling equals the divisors that a GGUF stores for
    it. False where either has no scaling, or one that is more than divisors, as yarn and longrope
    are.
    """
    scalings = [one["rope_scaling"] for one in (a, b)]
    if any(one is None or one["type"] not in _DIVISORS for one in scalings):
        return False
    first, second = (_make_freqs(one) or () for one in (a, b))
    return bool(first) and same_derived_values(first, second)


def _make_long_factors(hp: Params) -> tuple[float, ...] | None:
    """Return the divisors for contexts beyond the trained length; None without longrope."""
    return (hp["rope_scaling"] or {}).get("long_factor")


def _make_short_factors(hp: Params) -> tuple[float, ...] | None:
    """Return the divisors for contexts up to the trained length; None without longrope."""
    return (hp["rope_scaling"] or {}).get("short_factor")


ROPE_TENSORS: tuple[DerivedTensor, ...] = (
    DerivedTensor({"gguf": FREQS}, _make_freqs),
    DerivedTensor({"gguf": LONG}, _make_long_factors),
    DerivedTensor({"gguf": SHORT}, _make_short_factors),
)
