"""Rotary sections: which pairs of elements rotate by time, height, width (qwen2_vl and later).

A text has one position for all three, so they change nothing in it; transformers reads them from
the rope object, llama.cpp requires them in a GGUF (four numbers, of which the last is 0).
"""

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch.rope_hf import ROPE_OBJECTS, RopeDefaults, write_hf
from aprfmt.arch.spec import Facts, HyperRule, Params
from aprfmt.arch.value_checks import sequence, whole_number
from aprfmt.base.protocols import Value

Sections = tuple[int, int, int]
_KEY = "{arch}.rope.dimension_sections"
INTERLEAVED = "mrope_interleaved"  # whether pairs take turns; fixed by the model type
IGNORED = frozenset(f"{name}.{INTERLEAVED}" for name in ROPE_OBJECTS)


def _parse_sections(found: tuple[Value, str] | None) -> tuple[Value, str] | None:
    """Return ((pairs by time, by height, by width), key) of a list.

    `found` is (list, key) as a file has it; None gives None.
    """
    if found is None:
        return None
    parts = tuple(whole_number(part, found[1]) for part in sequence(*found, 3))
    return parts[:3], found[1]


def _read_hf(facts: Facts, hp: Params) -> tuple[Value, str] | None:
    """Return ((pairs rotated by time, by height, by width), key) of config.json's rope object.

    None without the key.
    """
    for name in ROPE_OBJECTS:
        rope = facts.values.get(name)
        if isinstance(rope, Mapping) and rope.get("mrope_section") is not None:
            return _parse_sections((rope["mrope_section"], f"{name}.mrope_section"))
    return None


def _plain_rope_object(rope: RopeDefaults, hp: Params) -> Params:
    """Return the rope object of config.json without theta and sections."""
    found: Params | None = write_hf(rope, hp["rope_scaling"], hp)["rope_scaling"]
    return found or {"rope_type": "default"}


def sections_rule(rope: RopeDefaults, usual: Sections) -> HyperRule:
    """Return the rule for how many pairs of a head rope rotates by time, by height and by width.

    `usual` are the three numbers without a key. Other numbers are written to config.json, with the
    whole rope object.
    """

    def write_config(value: Value, hp: Params) -> Params:
        """Return config.json's {"rope_parameters": object with the sections}.

        {} for the usual sections. `value` has three numbers of pairs of a head: those rotated by
        time, height and width.
        """
        if value == usual:
            return {}
        return {
            "rope_parameters": {
                **_plain_rope_object(rope, hp),
                "rope_theta": hp["rope_theta"],
                "partial_rotary_factor": hp["rope_dim"] / hp["head_dim"],
                "mrope_section": value,
            }
        }

    return HyperRule(
        "rope_sections",
        {"gguf": (_KEY,)},
        read={"hf": _read_hf, "gguf": lambda facts, hp: _parse_sections(facts.first(_KEY))},
        write={"hf": write_config, "gguf": lambda value, hp: {_KEY: [*value, 0]}},
        default=usual,
    )


def old_sections_rule(
    rope: RopeDefaults, usual: Sections, *, interleaved: bool = False
) -> HyperRule:
    """Return the rule for rope's sections, which these config.json always have in `rope_scaling`.

    The sections are how many pairs of a head rotate by time, by height and by width. `usual` are
    the three numbers without a key. `interleaved`: config.json says that pairs take turns.
    """

    def write_config(value: Value, hp: Params) -> Params:
        """Return config.json's {"rope_scaling": object with the sections}.

        `value` has three numbers of pairs of a head: those rotated by time, height and width.
        """
        turns = {INTERLEAVED: True} if interleaved else {}
        return {"rope_scaling": {**_plain_rope_object(rope, hp), **turns, "mrope_section": value}}

    rule = sections_rule(rope, usual)
    return replace(rule, write={**rule.write, "hf": write_config})
