"""Rotary positions in config.json, in old and new keys: to the normal form of rope.py and back.

Old (most files on hubs): `rope_theta`, `rope_scaling` {rope_type or type, ...} or null,
`partial_rotary_factor`, gemma3's `rope_local_base_freq`. New (transformers 5): `rope_parameters`,
one object or one for each layer type. Source: transformers' modeling_rope_utils.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aprfmt.arch.spec import Facts, Params
from aprfmt.arch.value_checks import (
    boolean,
    divisors,
    finite_number,
    positive_number,
    text,
    whole_number,
)
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Scaling = dict[str, Value]
ORIGINAL = "original_max_position_embeddings"
ROPE_OBJECTS = ("rope_parameters", "rope_scaling")  # keys whose value is an object of rope
YARN_BETAS = (32.0, 1.0)  # default beta_fast and beta_slow, from the YaRN paper


@dataclass(frozen=True)
class RopeDefaults:
    """What differs between architectures in how config.json describes rope.

    Defaults for absent keys: `theta`; `theta_local` (windowed layers; None: same as theta);
    `partial`, the rotated fraction of a head (None: transformers always rotates whole heads, and
    with `partial_fails` its pass fails where a fraction is asked for, with a scaling or without);
    `original`, the trained length (phi3); `hf_default`, the scaling in normal form. `local_key` is
    the old config key of theta_local, `base_key` of theta. `layers`: the layers the scaling applies
    to ("all", "full"). `aliases`: old names of scaling types. `nested`: new configs have one object
    per layer type. `new`: transformers reads `rope_parameters` only, so no older key is read or
    written. `log_mul`: a GGUF's yarn_log_multiplier is this times mscale_all_dim.
    """

    theta: float = 10000.0
    theta_local: float | None = None
    local_key: str = ""
    base_key: str = "rope_theta"
    partial: float | None = None
    partial_fails: bool = False
    layers: str = "all"
    original: int | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    nested: bool = False
    new: bool = False
    log_mul: float = 0.1
    hf_default: Mapping[str, Value] | None = None


def yarn_mscale(factor: float, m: float = 1.0) -> float:
    """Return yarn's correction for a scaling factor, 0.1 m ln(factor) + 1; 1 without scaling."""
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def yarn_attention_factor(factor: float, mscale: Value, all_dim: Value) -> float:
    """Return yarn's factor on cos and sin; a ratio of corrections if both mscale terms are given.

    The terms are config.json's mscale and mscale_all_dim.
    """
    if not mscale or not all_dim:
        return yarn_mscale(factor)
    return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)


def longrope_attention_factor(factor: float, original: int) -> float:
    """Return longrope's factor on cos and sin; 1 if nothing is scaled.

    `factor` is the context length over `original`, the trained length.
    """
    if factor <= 1 or original <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))


class _Objects:
    """Config objects searched in order, each with its name in `rows`; null counts as absent."""

    def __init__(self) -> None:
        """Start without objects."""
        self.rows: list[tuple[str, Params]] = []

    def find(self, *keys: str) -> tuple[Value, str] | None:
        """Return (value, full key) of the first of these keys that any object has, or None.

        All keys are looked up, so that an overridden one is not reported as unknown.
        """
        every = [
            (value, f"{label}.{key}")
            for label, values in self.rows
            for key in keys
            if (value := values.get(key)) is not None
        ]
        return every[0] if every else None

    def get(self, key: str, check: Callable[[Value, str], Any], default: Value = None) -> Value:
        """Return `check(value, key)` for the first object that has the key, else the default."""
        found = self.find(key)
        return default if found is None else check(*found)


@dataclass
class HFRope:
    """The rope objects of one config: of full layers, of windowed layers, and the outer one."""

    row: RopeDefaults
    facts: Facts
    dim: Callable[[], int] = int  # gives the elements of a head in full layers; asked if needed
    full: _Objects = field(default_factory=_Objects)
    local: _Objects = field(default_factory=_Objects)
    outer: _Objects = field(default_factory=_Objects)

    def __post_init__(self) -> None:
        """Sort the config's rope objects into `full`, `local` and `outer`.

        `full` are those of layers without a window, `local` those of layers with one. `outer` has
        the objects that are not nested by kind of layer. ArchError for a value that is no object.
        """
        for name in ("rope_parameters",) if self.row.new else ("rope_scaling", "rope_parameters"):
            value = self.facts.values.get(name)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ArchError(f"{name}: is a {type(value).__name__}; expected an object or null")
            kinds = (("full_attention", self.full), ("sliding_attention", self.local))
            if any(isinstance(value.get(kind), Mapping) for kind, _ in kinds):
                for kind, into in kinds:
                    if isinstance(value.get(kind), Mapping):
                        into.rows.append((f"{name}.{kind}", value[kind]))
            else:
                self.full.rows.append((name, value))
                self.outer.rows.append((name, value))

    def read_theta(self) -> tuple[Value, str] | None:
        """Return (rope base of the layers without a window, key); None without the key."""
        top = None if self.row.new else self.facts.first("rope_theta", self.row.base_key)
        return self.full.find("rope_theta") or top

    def read_theta_local(self) -> tuple[Value, str] | None:
        """Return (rope base of windowed layers, key); None where the config gives none."""
        top = self.facts.first(self.row.local_key) if self.row.local_key else None
        return self.local.find("rope_theta") or top

    def read_partial(self) -> tuple[Value, str] | None:
        """Return (fraction of a head that rope rotates, key); None without the key."""
        keys = ("partial_rotary_factor", "rope_pct", "rotary_pct")
        top, _ = self.facts.first(*keys), self.local.find(*keys)  # not unknown then
        return self.full.find(*keys) or top

    def read_scaling(self, context: int) -> tuple[Scaling | None, str] | None:
        """Return (scaling in normal form or None for none, key); None without a rope type.

        `context` is the context length. ArchError for an unknown type, or for windowed layers that
        have another scaling.
        """
        self.facts.first(ORIGINAL)  # looked up because the key may exist without scaling, too
        full = self._read_object_scaling(self.full, context)
        local = self._read_object_scaling(self.local, context) if self.local.rows else None
        if local is not None and local[0] is not None and full != local:
            same = full is not None and full[0] == local[0]
            if not same:
                raise ArchError(
                    f"{local[1]}: the windowed layers have a scaling of their own; expected none, "
                    "or the one of the full layers"
                )
        return full

    def read_scaled_layers(self) -> tuple[str, str] | None:
        """Return ("all", key) if the windowed layers have a scaling too; else None.

        "all" is a value of the hyperparameter `rope_scaling_layers`.
        """
        found = self.local.find("rope_type", "type")
        return None if found is None or text(*found).lower() == "default" else ("all", found[1])

    def _read_object_scaling(
        self, rope: _Objects, context: int
    ) -> tuple[Scaling | None, str] | None:
        """Return (normal form or None for no scaling, key) of one object; None without a type.

        Raises ArchError for a type of scaling that is not known.
        """
        found = rope.find("rope_type", "type")
        if found is None:
            return None
        kind = text(*found).lower()
        kind = self.row.aliases.get(kind, kind)
        if kind == "default":
            return None, found[1]
        if kind not in _READ:
            raise ArchError(
                f"{found[1]}: rope type {kind!r} is not known; known: default, {', '.join(_READ)}"
            )
        parts = _READ[kind](self, rope, context, self._original_length(rope, context))
        return {"type": kind, **parts}, found[1]

    def _original_length(self, rope: _Objects, context: int) -> int:
        """Return the trained length; the config's own key overrides the rope object's.

        `context`, the context length, is the default.
        """
        top, stated = self.facts.first(ORIGINAL), rope.find(ORIGINAL)
        if not self.outer.rows and self.full.rows:
            top = None  # objects per layer type have their own key
        elif top is None and self.row.original is not None:
            return self.row.original
        found = top or stated
        return context if found is None else whole_number(*found, 1)


def _read_factor(hf: HFRope, rope: _Objects, context: int, original: int) -> Scaling:
    """Return {"factor": number}, all that a linear or dynamic scaling has; ArchError without it.

    Only `rope`, the object to read, is used here. The other arguments are for other types: the
    config's rope, the context length, the trained length.
    """
    factor = rope.get("factor", positive_number)
    if factor is None:
        raise ArchError("rope scaling: has no factor; expected a number above zero")
    return {"factor": factor}


def _read_llama3(hf: HFRope, rope: _Objects, context: int, original: int) -> Scaling:
    """Return the values of a llama3 scaling: factor, both frequency factors, trained length.

    `rope` is the object to read, `original` the trained length. `hf` and `context` are for other
    types of scaling. Raises ArchError where the two frequency factors are missing or equal.
    """
    low, high = (
        rope.get("low_freq_factor", positive_number),
        rope.get("high_freq_factor", positive_number),
    )
    if low is None or high is None or low == high:
        raise ArchError(
            f"rope scaling llama3: low_freq_factor {low}, high_freq_factor {high}; expected two "
            "different numbers"
        )
    return {
        **_read_factor(hf, rope, context, original),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_context_length": original,
    }


def _read_yarn(hf: HFRope, rope: _Objects, context: int, original: int) -> Scaling:
    """Return the values of a yarn scaling: factor, betas, mscales, attention factor, lengths.

    `rope` is the object to read, `hf` the config's rope. `context` and `original` are the context
    length and the trained length.
    """
    factor = rope.get("factor", positive_number, context / original)
    m, every = rope.get("mscale", finite_number), rope.get("mscale_all_dim", finite_number)
    return {
        "factor": factor,
        "original_context_length": original,
        "beta_fast": rope.get("beta_fast", finite_number) or YARN_BETAS[0],
        "beta_slow": rope.get("beta_slow", finite_number) or YARN_BETAS[1],
        "attention_factor": rope.get(
            "attention_factor", positive_number, yarn_attention_factor(factor, m, every)
        ),
        "mscale": m or None,
        "mscale_all_dim": every or None,
        # transformers looks for `truncate` in the outer object only.
        "truncate": hf.outer.get("truncate", boolean, True),
    }


def _read_longrope(hf: HFRope, rope: _Objects, context: int, original: int) -> Scaling:
    """Return the values of a longrope scaling: both lists of divisors and the attention factor.

    If both lists are equal it is a scaling of type "factors", one divisor for each pair. `rope` is
    the object to read, `context` and `original` are the context length and the trained length. `hf`
    is for other types. Raises ArchError where a list is missing, or where short_mscale and
    long_mscale differ.
    """
    short, long = rope.get("short_factor", divisors), rope.get("long_factor", divisors)
    if short is None or long is None:
        raise ArchError("rope scaling longrope: needs the lists short_factor and long_factor")
    factor = rope.get("factor", positive_number, context / original)
    usual = rope.get("short_mscale", positive_number, longrope_attention_factor(factor, original))
    if rope.get("long_mscale", positive_number, usual) != usual:
        raise ArchError(
            "rope scaling longrope: long_mscale is not short_mscale; expected one factor"
        )
    attention = rope.get("attention_factor", positive_number, usual)
    if short == long and attention == 1.0:
        return {"type": "factors", "factors": short}
    return {
        "short_factor": short,
        "long_factor": long,
        "original_context_length": original,
        "attention_factor": attention,
    }


def _read_proportional(hf: HFRope, rope: _Objects, context: int, original: int) -> Scaling:
    """Return the factor of a proportional scaling and how many elements of a head it rotates.

    The first pairs get the frequencies of a whole head, the others are not rotated. `rope` is the
    object to read, `hf` the config's rope. `context` and `original` are for other types. Raises
    ArchError where partial_rotary_factor is not between 0 and 1.
    """
    part = rope.get("partial_rotary_factor", finite_number, 1.0)
    if not 0 <= part <= 1:
        raise ArchError(
            f"rope scaling proportional: partial_rotary_factor is {part!r}; expected a number "
            "from 0 to 1"
        )
    rotated = 2 * int(part * hf.dim() // 2)
    return {"factor": float(rope.get("factor", positive_number, 1.0)), "rotated": rotated}


_READ: Mapping[str, Callable[[HFRope, _Objects, int, int], Scaling]] = {
    "linear": _read_factor,
    "dynamic": _read_factor,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "proportional": _read_proportional,
}


# --- writing: old-style keys, which transformers 4 and 5 both load -----------------------------


def write_hf(
    row: RopeDefaults, scaling: Mapping[str, Value] | None, hp: Params
) -> dict[str, Value]:
    """Return config.json's {key: value} of rope: `rope_scaling`, nested `rope_parameters`.

    Nested parameters are written where windowed and full layers differ in a way that old keys
    cannot say. Where a missing scaling means a default one (`hf_default`), a model without
    scaling gets the type "default".
    """
    old = None if scaling is None else _WRITE[scaling["type"]](scaling, hp)
    unscaled = None if row.hf_default is None else {"rope_type": "default"}
    out: dict[str, Value] = {} if row.new else {"rope_scaling": unscaled if old is None else old}
    if row.original is not None:
        out[ORIGINAL] = (scaling or {}).get("original_context_length", row.original)
    everywhere = hp["rope_scaling_layers"] == "all"
    # In some architectures old-style keys scale only the full layers, and some have no old key for
    # the windowed layers' base.
    wider = old is not None and everywhere and row.layers == "full"
    unsaid = hp.get("rope_theta_local") is not None and not row.local_key
    if row.nested or wider or unsaid:
        local = hp["rope_theta"] if hp["rope_theta_local"] is None else hp["rope_theta_local"]
        plain = {"rope_type": "default"}
        out["rope_parameters"] = {
            "full_attention": {**(old or plain), "rope_theta": hp["rope_theta"]},
            "sliding_attention": {**(old if old and everywhere else plain), "rope_theta": local},
        }
    return out


def _write_factor(scaling: Params, hp: Params) -> Scaling:
    """Return the rope object of a linear or dynamic scaling: its type and factor."""
    return {"rope_type": scaling["type"], "factor": scaling["factor"]}


def _write_llama3(scaling: Params, hp: Params) -> Scaling:
    """Return the rope object of a llama3 scaling, in config.json's keys."""
    return {
        **_write_factor(scaling, hp),
        "low_freq_factor": scaling["low_freq_factor"],
        "high_freq_factor": scaling["high_freq_factor"],
        ORIGINAL: scaling["original_context_length"],
    }


def _write_yarn(scaling: Params, hp: Params) -> Scaling:
    """Return the rope object of a yarn scaling, in config.json's keys; defaults are left out."""
    out = {
        **_write_factor(scaling, hp),
        ORIGINAL: scaling["original_context_length"],
        "beta_fast": scaling["beta_fast"],
        "beta_slow": scaling["beta_slow"],
    }
    m, every = scaling["mscale"], scaling["mscale_all_dim"]
    optional = {"mscale": m, "mscale_all_dim": every}
    if scaling["attention_factor"] != yarn_attention_factor(scaling["factor"], m, every):
        optional["attention_factor"] = scaling["attention_factor"]
    if not scaling["truncate"]:
        optional["truncate"] = False
    return out | {key: value for key, value in optional.items() if value is not None}


def _write_longrope(scaling: Params, hp: Params) -> Scaling:
    """Return the rope object of a longrope scaling; its default attention factor is left out."""
    original = scaling["original_context_length"]
    out = {
        "rope_type": "longrope",
        "short_factor": list(scaling["short_factor"]),
        "long_factor": list(scaling["long_factor"]),
        ORIGINAL: original,
    }
    if scaling["attention_factor"] != longrope_attention_factor(
        hp["context_length"] / original, original
    ):
        out["attention_factor"] = scaling["attention_factor"]
    return out


def _write_factors(scaling: Params, hp: Params) -> Scaling:
    """Return the longrope object that expresses one divisor for each pair."""
    factors = list(scaling["factors"])
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        ORIGINAL: hp["context_length"],
        "attention_factor": 1.0,
    }


def full_head_dim(hp: Params) -> int:
    """Return the elements of a head in layers without a window."""
    other = hp["global_head_dim"]
    return int(hp["head_dim"] if other is None else other)


def _write_proportional(scaling: Params, hp: Params) -> Scaling:
    """Return the rope object of a proportional scaling.

    The rotated fraction is moved to the next float where rounding would lose a rotated pair.
    """
    dim, rotated = full_head_dim(hp), scaling["rotated"]
    part = rotated / dim
    if 2 * int(part * dim // 2) != rotated:
        part = math.nextafter(part, math.inf)
    factor = {} if scaling["factor"] == 1 else {"factor": scaling["factor"]}
    return {"rope_type": "proportional", "partial_rotary_factor": part, **factor}


_WRITE: Mapping[str, Callable[[Params, Params], Scaling]] = {
    "linear": _write_factor,
    "dynamic": _write_factor,
    "llama3": _write_llama3,
    "yarn": _write_yarn,
    "longrope": _write_longrope,
    "factors": _write_factors,
    "proportional": _write_proportional,
}
