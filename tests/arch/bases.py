"""What transformers takes for the base of the rotary frequencies where a config says none."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

# Bases that the models' own code assumed, and transformers before 5; it has 10000 for them now.
OLDER: Mapping[str, float] = {"eurobert": 250000.0, "falcon_h1": 100000.0}
_ROTARY = ("rope_theta", "compress_rope_theta", "rope_parameters", "rope_scaling")


def silent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what it says of rotary positions."""
    return {key: value for key, value in config.items() if key not in _ROTARY}


def assumed(kind: str, config: Mapping[str, Any], folder: Path) -> float:
    """Return the base that transformers' config class of a model type has for a silent config."""
    (folder / "config.json").write_text(json.dumps(config))
    stated: Any = transformers.CONFIG_MAPPING[kind].from_pretrained(folder)
    rope = stated.get_text_config().rope_parameters
    return float(rope.get("full_attention", rope.get("compress", rope))["rope_theta"])
