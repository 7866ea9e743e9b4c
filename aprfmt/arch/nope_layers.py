"""Models in which every so many layers do not rotate (smollm3, llama4)."""

from collections.abc import Callable, Mapping

from aprfmt.arch.sliding_window import PerLayer
from aprfmt.arch.spec import Facts, HyperRule
from aprfmt.arch.value_checks import sequence, whole_number
from aprfmt.base.protocols import Value

Params = Mapping[str, Value]
FoundLayers = tuple[PerLayer, str] | None


def every_fourth(hp: Params, interval: int = 4) -> PerLayer:
    """Rotate all layers but every so many."""
    return tuple((i + 1) % interval != 0 for i in range(hp["n_layers"]))


def read_no_rope_layers(facts: Facts, hp: Params) -> FoundLayers:
    """Read no_rope_layers (1 for layers that do rotate; empty: none said) or their interval."""
    found, interval = facts.first("no_rope_layers"), facts.first("no_rope_layer_interval")
    if found is not None and len(sequence(*found)):
        entries = sequence(*found, hp["n_layers"])[: hp["n_layers"]]
        return tuple(whole_number(entry, found[1], 0, 1) == 1 for entry in entries), found[1]
    if interval is not None:
        return every_fourth(hp, whole_number(*interval, 1)), interval[1]
    return None


def rotating_layers(facts: Facts | None, hp: Params) -> PerLayer:
    """Return the layers that rotate by a config, or every fourth not."""
    found = None if facts is None else read_no_rope_layers(facts, hp)
    return every_fourth(hp) if found is None else found[0]


def rope_layers(gguf: Callable[[Params], PerLayer] = every_fourth) -> HyperRule:
    """Return the rule for the layers that rotate; `gguf`: those that llama.cpp rotates."""
    return HyperRule(
        "rope_layers",
        read={"hf": read_no_rope_layers},
        write={"hf": lambda value, hp: {"no_rope_layers": [int(on) for on in value]}},
        default=every_fourth,
        default_in={"gguf": gguf},
    )
