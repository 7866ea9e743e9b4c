"""Find a module's algorithm in a ModelOpt section, or that the module is not quantized.

A *section* is the quantization settings in config.json or hf_quant_config.json.

`quant_algo` holds for every module that no pattern of `exclude_modules` (`ignore` in config.json)
matches; with MIXED_PRECISION, `quantized_layers` names the modules and the algorithm of each.
Patterns are shell wildcards over the whole name.

Source: nvidia-modelopt 0.47, export/convert_hf_config.py and quant_utils.py.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from aprfmt.codecs.dialect import Config
from aprfmt.codecs.scope import Scope, section_mapping, section_names
from aprfmt.errors import CodecError

METHOD = "modelopt"
MIXED = "MIXED_PRECISION"
_EXCLUDED = ("exclude_modules", "ignore")
# What an algorithm is where a section names none: bits and type of a group's weights.
_GROUPS: Mapping[tuple[Any, Any], str] = {(8, "float"): "FP8", (4, "float"): "NVFP4"}


def _algorithm_section(stated: Mapping[str, Any]) -> Config:
    """Return a section with only the algorithm of `stated`, in capitals, and its group size.

    The group size is left out where that has none.
    """
    found = {"quant_method": METHOD, "quant_algo": str(stated.get("quant_algo")).upper()}
    size = stated.get("group_size")
    return found if size is None else {**found, "group_size": size}


def _default_section(section: Config) -> Config:
    """Return the section that applies to all modules which are not excluded.

    Without `quant_algo` the algorithm follows from the weights of the first group. Raises
    CodecError where neither names one.
    """
    weights: Mapping[str, Any] = {}
    for group in section_mapping(section, "config_groups").values():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            weights = group["weights"]
            break
    kind = weights.get("num_bits"), weights.get("type")
    algorithm = section.get("quant_algo")
    if algorithm is None and all(isinstance(part, int | str) for part in kind):
        algorithm = _GROUPS.get(kind)
    if not isinstance(algorithm, str):
        raise CodecError(f"config says quant_algo {algorithm!r}, expected the name of an algorithm")
    size = section.get("group_size") or weights.get("group_size")
    return _algorithm_section({"quant_algo": algorithm, "group_size": size})


def _layer_sections(section: Config) -> Mapping[str, Any]:
    """Return {layer name: settings} of `quantized_layers`; CodecError where they are missing."""
    layers = section_mapping(section, "quantized_layers")
    if not layers:
        raise CodecError(f"config says {MIXED} and no quantized_layers, expected one a weight")
    for name, own in layers.items():
        if not isinstance(own, Mapping):
            raise CodecError(
                f"config says quantized_layers {name!r} {own!r}, expected an algorithm"
            )
    return layers


def _section_at(section: Config, module: str) -> Config | None:
    """Return the section that applies to one module; None where the module is not quantized."""
    if any(fnmatchcase(module, pattern) for pattern in section_names(section, *_EXCLUDED)):
        return None
    if section.get("quant_algo") != MIXED:
        return _default_section(section)
    layers, name = _layer_sections(section), module
    while name:  # stacked experts are named by the module that holds them
        if name in layers:
            return _algorithm_section(layers[name])
        name = name.rpartition(".")[0]
    return None


def _all_sections(section: Config) -> Sequence[Config]:
    """Return the different sections that some module may have."""
    if section.get("quant_algo") != MIXED:
        return [_default_section(section)]
    found: list[Config] = []
    for own in _layer_sections(section).values():
        said = _algorithm_section(own)
        if said not in found:
            found.append(said)
    return found


SCOPE = Scope(_section_at, _all_sections)
