"""`validate --against SRC` reads the values: a copy of every name is no copy of every value.

Seen red: 400 of 722 tensors with other values, all of them "copied".
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import aprfmt as command
from tests.model.relations.edits import edited

ONE = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
CHANGES: dict[str, Callable[[Any], Any]] = {
    "one value": lambda held: held | {ONE: _set(held[ONE], (5, 7), 9.0)},
    "zero": lambda held: held | {ONE: held[ONE] * 0},
    "another layer's": lambda held: held | {ONE: held[ONE.replace(".1.", ".2.")].clone()},
    "rows in another order": lambda held: held | {ONE: held[ONE].flip(0)},
    "a norm": lambda held: held | {NORM: held[NORM] + 1},
}
COPIES = {
    "the same": ("convert", "copy.safetensors"),
    "GGUF": ("convert", "copy.gguf"),
    "APR": ("convert", "copy.apr", "--encoding", "F16"),
    "Q4_K_M": ("quantize", "copy.gguf", "--type", "Q4_K_M"),
    "AWQ": ("quantize", "copy", "--type", "AWQ-g32", "--to", "safetensors"),
    "NF4": ("quantize", "copy", "--type", "NF4", "--to", "safetensors"),
    "FP8": ("quantize", "copy", "--type", "COMPRESSED-FP8", "--to", "safetensors"),
    "MLX": ("quantize", "copy", "--type", "MLX-4bit-g64", "--to", "safetensors"),
}


def _set(tensor: Any, at: tuple[int, ...], value: float) -> Any:
    found = tensor.clone()
    found[at] = value
    return found


def _row(copy: Path, source: Path) -> tuple[int, Any]:
    done = command("validate", copy, "--against", source, "--json")
    (row,) = [one for one in done.json["checks"] if one["name"] == "source_values"]
    return done.code, row


@pytest.mark.parametrize("label", CHANGES)
@pytest.mark.parametrize("container", ["", "copy.gguf"])
def test_other_values_fail(label: str, container: str, demo_model: Path, tmp_path: Path) -> None:
    copy = edited(demo_model, tmp_path / "b", CHANGES[label])
    if container:
        assert command("convert", copy, tmp_path / container, "--quiet").code == 0
        copy = tmp_path / container
    code, row = _row(copy, demo_model)
    assert (code, row["outcome"]) == (1, "FAIL")
    assert "DIFFERENT" in command("validate", copy, "--against", demo_model, "-v").out


@pytest.mark.parametrize("label", COPIES)
def test_every_copy_of_ours_passes(label: str, demo_model: Path, tmp_path: Path) -> None:
    verb, name, *more = COPIES[label]
    assert command(verb, demo_model, tmp_path / name, *more, "--quiet").code == 0
    code, row = _row(tmp_path / name, demo_model)
    assert (code, row["outcome"]) == (0, "PASS"), row


def test_without_a_source_it_is_not_asked(demo_model: Path) -> None:
    names = [one["name"] for one in command("validate", demo_model, "--json").json["checks"]]
    assert names and "source_values" not in names


def test_what_fails_stands_above_what_is_odd(demo_model: Path, tmp_path: Path) -> None:
    """Seen red: an agent's twelve lines that began with the warnings."""

    def widened(held: Any) -> Any:
        return {name: tensor.float() for name, tensor in CHANGES["one value"](held).items()}

    copy = edited(demo_model, tmp_path / "b", widened)
    done = command("validate", copy, "--against", demo_model, "--format", "agent")
    lines = done.out.splitlines()
    assert done.code == 1 and lines[1].startswith("  source_values: "), lines
    assert any("warning: " in line for line in lines[2:])
