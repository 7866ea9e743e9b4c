"""The rules for rope in an architecture's hyperparameter table.

The normal form of the hyperparameter `rope_scaling` is None (no scaling) or a mapping with
`type` and all of the type's fields, defaults filled in:

- linear: factor
- dynamic: factor (the trained length is the hyperparameter context_length)
- llama3: factor, low_freq_factor, high_freq_factor, original_context_length
- yarn: factor, original_context_length, beta_fast, beta_slow, attention_factor, truncate, and
  mscale, mscale_all_dim (None where the model gives none)
- longrope: short_factor, long_factor, original_context_length, attention_factor
- factors: factors (inverse frequency i is divided by factors[i])
- proportional: factor, rotated (elements of a head that are rotated, by the frequencies of a
  whole head; the pairs after them are not)

`attention_factor` multiplies cos and sin. Arithmetic: transformers' modeling_rope_utils.
"""

import math
from reprlib import repr as short_repr

from aprfmt.arch.rope_gguf import ignored_factor_text, lost_divisors_text, read_gguf, write_gguf
from aprfmt.arch.rope_hf import HFRope, RopeDefaults, full_head_dim, write_hf
from aprfmt.arch.spec import Facts, Found, HyperRule, Params
from aprfmt.arch.value_checks import MAX_ROTATED, finite_number, positive_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError


def rope_rules(rope: RopeDefaults) -> tuple[HyperRule, ...]:
    """Return the rules for base, rotated elements and scaling of an architecture's rope.

    `rope` says where the architecture differs from others.
    """

    def rope_of_config(facts: Facts) -> HFRope:
        """Return the reader of a config.json's rope keys.

        `rope` has what the architecture differs in.
        """
        return HFRope(rope, facts)

    def check_bases(value: Value, facts: Facts, hp: Params) -> str:
        """Return a warning if config.json's `rope_theta` and rope object give two bases, else "".

        The warning says that transformers uses the rope object's.
        """
        top, inner = facts.first("rope_theta"), None
        if facts.style == "hf" and top is not None:
            inner = rope_of_config(facts).full.find("rope_theta")
        if top is None or inner is None or top[0] == inner[0]:
            return ""
        return (
            f"rope_theta is {short_repr(top[0])}, {inner[1]} is {short_repr(inner[0])}; "
            "transformers takes the second"
        )

    def local_base(found: Found, hp: Params) -> Found:
        """Return (rope base of windowed layers, key), None for a base equal to other layers'.

        `found` is (base, key) as read, or None. Architectures that always write the base keep an
        equal one.
        """
        if found is None or rope.theta_local is not None or found[0] != hp["rope_theta"]:
            return found
        return None, found[1]

    def check_partial(value: Value, facts: Facts, hp: Params) -> str:
        """Return a warning if config.json asks for a partial rotation of heads that is ignored.

        Else "". `value` is the rope scaling. Raises ArchError where transformers' forward pass
        fails: with a rope scaling, and for some architectures without one.
        """
        if facts.style != "hf" or rope.partial is not None:
            return ""
        found = rope_of_config(facts).read_partial()
        said_of = rope_of_config(facts).local.find("partial_rotary_factor") if rope.new else None
        if said_of is not None and said_of[0] != 1:
            return (
                f"{said_of[1]} is {short_repr(said_of[0])}; transformers rotates whole heads in "
                "layers with a window: ignored"
            )
        if found is None or found[0] == 1:
            return ""
        said = f"{found[1]} is {short_repr(found[0])}"
        if value is not None and value["type"] == "proportional":
            return ""
        if value is None and not rope.partial_fails:
            return f"{said}; transformers rotates whole heads of this architecture: ignored"
        scaled = "" if value is None else " with a rope scaling"
        raise ArchError(
            f"{said}{scaled}; expected no such key: transformers makes frequencies "
            "of the part for an architecture that rotates whole heads, and fails"
        )

    def check_scaling(value: Value, facts: Facts, hp: Params) -> str:
        """Return the first remark on what a scaling's file states without effect; "" for none."""
        return (
            check_partial(value, facts, hp)
            or lost_divisors_text(facts)
            or ignored_factor_text(value, facts)
        )

    def read_rope_dim(facts: Facts, hp: Params) -> Found:
        """Return (rotated elements of a head, key) of config.json; None without the key."""
        found = None if rope.partial is None else rope_of_config(facts).read_partial()
        if found is None:
            return None
        rotated = finite_number(hp["head_dim"] * positive_number(*found), found[1])
        return int(rotated), found[1]

    def write_rope_dim(value: Value, hp: Params) -> Params:
        """Return config.json's {"partial_rotary_factor": fraction of a head that rope rotates}.

        {} for whole heads. `value` is the number of rotated elements of a head.
        """
        if rope.partial is None or (value == hp["head_dim"] and rope.partial == 1.0):
            return {}
        part = value / hp["head_dim"]
        if int(hp["head_dim"] * part) != value:
            part = math.nextafter(part, math.inf)
        return {"partial_rotary_factor": part}

    def read_scaling(facts: Facts, hp: Params) -> Found:
        """Return (rope scaling in normal form, key) of config.json; None without a scaling's type.

        A scaling that rotates whole heads by unchanged frequencies is returned as (None, key).
        """
        found = HFRope(rope, facts, lambda: full_head_dim(hp)).read_scaling(hp["context_length"])
        made = None if found is None else found[0]
        if found is None or made is None or made["type"] != "proportional":
            return found
        if made["rotated"] != full_head_dim(hp) or made["factor"] != 1:
            return found
        return None, found[1]  # whole heads turn by unchanged frequencies

    def write_theta(value: Value, hp: Params) -> Params:
        """Return config.json's {"rope_theta": base}; {} where the rope object has the base."""
        return {} if rope.new else {"rope_theta": value}

    def write_local_base(value: Value, hp: Params) -> Params:
        """Return config.json's {key: rope base of windowed layers}.

        {} without an old key for that base.
        """
        return {rope.local_key: value} if rope.local_key and value is not None else {}

    return (
        HyperRule(
            "rope_theta",
            {
                "hf": ("rope_theta",),
                "gguf": ("{arch}.rope.freq_base",),
                "apr": ("rope_theta", "model.rope_theta"),
            },
            kind="positive",
            read={"hf": lambda facts, hp: rope_of_config(facts).read_theta()},
            write={"hf": write_theta},
            default=rope.theta,
            default_in={"gguf": 10000.0},
            check=check_bases,
        ),
        HyperRule(
            "rope_theta_local",
            {"gguf": ("{arch}.rope.freq_base_swa",)},
            kind="positive",
            read={
                "hf": lambda facts, hp: local_base(rope_of_config(facts).read_theta_local(), hp),
                "gguf": lambda facts, hp: local_base(facts.first("{arch}.rope.freq_base_swa"), hp),
            },
            write={"hf": write_local_base},
            default=rope.theta_local,
        ),
        HyperRule(
            "rope_dim",
            {"gguf": ("{arch}.rope.dimension_count",)},
            kind="size",
            read={"hf": read_rope_dim},
            write={"hf": write_rope_dim},
            default=lambda hp: int(
                hp["head_dim"] * (1.0 if rope.partial is None else rope.partial)
            ),
            high=MAX_ROTATED,
            default_in={"gguf": lambda hp: hp["head_dim"]},
        ),
        HyperRule(
            "rope_scaling",
            read={"hf": read_scaling, "gguf": lambda facts, hp: read_gguf(facts, hp, rope.log_mul)},
            write={
                "hf": lambda value, hp: write_hf(rope, value, hp),
                "gguf": lambda value, hp: write_gguf(value, rope.log_mul),
            },
            default=None,
            default_in={"hf": rope.hf_default},
            check=check_scaling,
        ),
        HyperRule(
            "rope_scaling_layers",
            read={"hf": lambda facts, hp: rope_of_config(facts).read_scaled_layers()},
            default=rope.layers,
        ),
    )
