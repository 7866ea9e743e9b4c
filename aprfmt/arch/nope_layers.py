"""Rules for models in which every n-th layer has no rope (smollm3, llama4)."""

from collections.abc import Callable

from aprfmt.arch.spec import Facts, HyperRule, Params, PerLayer
from aprfmt.arch.value_checks import sequence, whole_number

FoundLayers = tuple[PerLayer, str] | None


def all_but_every(hp: Params, interval: int = 4) -> PerLayer:
    """Return one boolean a layer: False in every `interval`-th, True in all others.

    True stands for what most layers have, as rope or a delta net.
    """
    return tuple((i + 1) % interval != 0 for i in range(hp["n_layers"]))


def read_no_rope_layers(facts: Facts, hp: Params) -> FoundLayers:
    """Return (which layers have rope, key) of no_rope_layers or of their interval; else None.

    no_rope_layers has 1 for layers with rope; an empty list says nothing.
    """
    found, interval = facts.first("no_rope_layers"), facts.first("no_rope_layer_interval")
    if found is not None and len(sequence(*found)):
        entries = sequence(*found, hp["n_layers"])[: hp["n_layers"]]
        return tuple(whole_number(entry, found[1], 0, 1) == 1 for entry in entries), found[1]
    if interval is not None:
        return all_but_every(hp, whole_number(*interval, 1)), interval[1]
    return None


def rotating_layers(facts: Facts | None, hp: Params) -> PerLayer:
    """Return one boolean a layer, True with rope: by config.json, else all but every fourth."""
    found = None if facts is None else read_no_rope_layers(facts, hp)
    return all_but_every(hp) if found is None else found[0]


def rope_layers_rule(gguf: Callable[[Params], PerLayer] = all_but_every) -> HyperRule:
    """Return the rule for the layers with rope; `gguf` gives those that llama.cpp rotates."""
    return HyperRule(
        "rope_layers",
        read={"hf": read_no_rope_layers},
        write={"hf": lambda value, hp: {"no_rope_layers": [int(on) for on in value]}},
        default=all_but_every,
        default_in={"gguf": gguf},
    )
