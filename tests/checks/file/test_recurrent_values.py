"""`validate` of the parameters of recurrent layers, and what `inspect` says of the rates."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.run import aprfmt
from tests.models import save_tiny

_FOLDER = TemporaryDirectory(prefix="aprfmt-recurrent-")


@cache
def _folder(name: str) -> Path:
    """Return a tiny model whose rates, skips and biases are drawn, as after a training."""
    folder = Path(_FOLDER.name) / name
    save_tiny(name, folder)
    rng = np.random.default_rng(3)

    def drawn(key: str, values: Any) -> Any:
        if key.endswith("A_log"):
            return rng.uniform(-0.5, 2.8, values.shape).astype(values.dtype)
        if key.endswith((".D", "dt_bias")):
            return rng.uniform(0.5, 1.5, values.shape).astype(values.dtype)
        return values

    _edit(folder, drawn)
    return folder


def _edit(folder: Path, change: Callable[[str, Any], Any]) -> None:
    """Replace each tensor of a folder's file by `change(name, values)`."""
    path = folder / "model.safetensors"
    held = load_file(path)
    made = {name: np.ascontiguousarray(change(name, values)) for name, values in held.items()}
    save_file(made, path, {"format": "pt"})


def _findings(path: Path) -> list[dict[str, Any]]:
    """Return the findings of `role_bounds` on recurrent parameters."""
    found = aprfmt("validate", path, "--json").json["findings"]
    return [one for one in found if one["check"] == "role_bounds" and "ssm_" in one["where"]]


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next", "bamba"])
@pytest.mark.parametrize("change", [np.negative, lambda rates: np.log(-rates)])
def test_rates_above_zero_fail(name: str, change: Any, tmp_path: Path) -> None:
    """Seen red: PASS, and "unusual: nothing"."""
    path = tmp_path / "model.gguf"
    assert aprfmt("convert", _folder(name), path, "--quiet").code == 0
    assert not _findings(path)
    assert "decay rates" not in aprfmt("inspect", path).out
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.endswith("ssm_a"):
            tensor.data[...] = change(np.array(tensor.data))
    (found,) = _findings(path)
    assert found["level"] == "fail" and "decay rates up to" in found["found"]
    assert "has decay rates above zero" in aprfmt("inspect", path).out


CHANGES: dict[str, tuple[str, Any, str, str]] = {
    "the rates for the logarithms": ("A_log", lambda v: -np.exp(v), "warning", "below zero"),
    "their sizes for the logarithms": ("A_log", np.exp, "warning", "rates up to"),
    "logarithms that overflow": ("A_log", lambda v: v + 89, "fail", "rates up to"),
    "skips of one layer left at ones": ("0.mixer.D", np.ones_like, "warning", "value is 1"),
    "skips of one layer left at zeros": ("0.mixer.D", np.zeros_like, "warning", "value is 0"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_odd_values_are_named(what: str, tmp_path: Path) -> None:
    end, change, level, says = CHANGES[what]
    folder = tmp_path / "model"
    shutil.copytree(_folder("mamba2"), folder)
    assert not _findings(folder)
    _edit(folder, lambda name, values: change(values) if name.endswith(end) else values)
    (found,) = _findings(folder)
    assert found["level"] == level and says in found["found"], found


def test_skips_that_are_ones_in_all_layers_are_not_named(tmp_path: Path) -> None:
    """As before a training."""
    folder = tmp_path / "model"
    shutil.copytree(_folder("mamba2"), folder)
    _edit(folder, lambda name, v: np.ones_like(v) if name.endswith(".D") else v)
    assert not _findings(folder)
