"""What a tower's config.json leaves out is what transformers takes for it.

Seen red: another number of layers where none is said.
"""

from typing import Any

import pytest

from aprfmt.arch import ARCHS
from aprfmt.arch.hyperparameters import read_hyper
from aprfmt.arch.spec import Facts, HyperParams

transformers = pytest.importorskip("transformers")

# By architecture: the model type, and the part of its configuration that describes the tower.
TOWERS = {
    "clip_vision": ("clip", "vision_config"),
    "siglip_vision": ("siglip", "vision_config"),
    "gemma3_vision": ("gemma3", "vision_config"),
    "pixtral_vision": ("pixtral", ""),
    "qwen2_vl_vision": ("qwen2_vl", "vision_config"),
    "qwen2_5_vl_vision": ("qwen2_5_vl", "vision_config"),
    "qwen3_vl_vision": ("qwen3_vl", "vision_config"),
    "qwen2_audio_tower": ("qwen2_audio", "audio_config"),
    "voxtral_tower": ("voxtral", "audio_config"),
}


def hyper(name: str, config: dict[str, Any]) -> HyperParams:
    """Return what is read, but for the width of the projector, which its tensors say."""
    return read_hyper(ARCHS[name], Facts("hf", config, {}), "config.json", complete=False)[0]


@pytest.mark.parametrize("name", TOWERS)
def test_what_is_not_said_is_what_transformers_takes(name: str) -> None:
    kind, part = TOWERS[name]
    config = transformers.AutoConfig.for_model(kind)
    said = (getattr(config, part) if part else config).to_dict()
    assert hyper(name, {}) == hyper(name, said)


def test_every_tower_is_asked() -> None:
    assert set(TOWERS) == {name for name in ARCHS if name.endswith(("_vision", "_tower"))}
