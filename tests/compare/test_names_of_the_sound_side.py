"""Checkpoints of trainers, whose names lie below a key: a fault of the other side comes first."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.model import open_model
from tests.cli.run import aprfmt

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """Return the folder of a model."""
    folder = tmp_path / "sound"
    assert aprfmt("demo", "--into", folder).code == 0
    return folder


def nested(path: Path, tensors: dict[str, Any]) -> Path:
    """Return the checkpoint of a trainer: a model's tensors below `model`, and a step."""
    import torch

    held = {name: torch.from_numpy(np.array(x, np.float32)) for name, x in tensors.items()}
    torch.save({"model": held, "step": 3}, path)
    return path


def weights(folder: Path) -> dict[str, Any]:
    """Return the tensors of a folder's weights, float32."""
    with open_model(folder) as model:
        return {name: model[name].numpy().astype(np.float32) for name in model}


def test_a_lost_tensor_comes_before_the_names_of_the_sound_side(
    sound: Path, tmp_path: Path
) -> None:
    whole = weights(sound)
    a = nested(tmp_path / "whole.pt", whole)
    save_file({name: x for name, x in whole.items() if name != UP}, sound / "model.safetensors")
    told = aprfmt("diff", a, sound, "--json").json
    assert [one["cause"] for one in told["causes"]] == ["missing_tensors", "tensor_names"]
    assert told["causes"][0]["where"] == [f"model.{UP}"]
    assert told["causes"][1]["says"].startswith("A: ") and told["causes"][1]["remedy"] is None
    assert told["pronounced"]["says"].startswith("different, ")


def test_a_lost_tensor_comes_before_the_names_of_its_own_side(sound: Path, tmp_path: Path) -> None:
    whole = weights(sound)
    b = nested(tmp_path / "less.pt", {name: x for name, x in whole.items() if name != UP})
    save_file(whole, sound / "model.safetensors")
    told = aprfmt("diff", sound, b, "--json").json
    assert [one["cause"] for one in told["causes"]] == ["missing_tensors", "tensor_names"]
    assert told["causes"][1]["says"].startswith("B: ")
    assert "--rename model.=" in told["causes"][1]["remedy"]["command"]


def test_a_changed_tensor_comes_before_the_names_of_the_sound_side(
    sound: Path, tmp_path: Path
) -> None:
    whole = weights(sound)
    a = nested(tmp_path / "whole.pt", whole)
    save_file(whole | {UP: whole[UP] * np.float32(1.25)}, sound / "model.safetensors")
    told = aprfmt("diff", a, sound, "--json").json
    assert [one["cause"] for one in told["causes"]] == ["scale", "tensor_names"]


def test_other_names_alone_are_equal_values(sound: Path, tmp_path: Path) -> None:
    whole = weights(sound)
    save_file(whole, sound / "model.safetensors")
    told = aprfmt("diff", nested(tmp_path / "whole.pt", whole), sound, "--json").json
    assert [one["cause"] for one in told["causes"]] == ["tensor_names"]
    assert told["pronounced"]["says"].startswith("different to readers, though of equal values")
