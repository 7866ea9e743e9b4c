"""Parts of packed weights that config.json promises and that are not stored.

Seen red: the promises not asked; one group called an order; a scale that only some experts lack
said twice.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from tests.cli.run import aprfmt as command
from tests.conversion import dialect_folders
from tests.conversion.folders import tensors_of, write_mixed

Change = Callable[[dict[str, Any]], Any]


def weights(section: dict[str, Any]) -> dict[str, Any]:
    """Return what the only group of a compressed-tensors section says of weights."""
    found: dict[str, Any] = section["config_groups"]["group_0"]["weights"]
    return found


def of_inputs(dynamic: Any) -> Change:
    """Return a change by which the group quantizes activations, with scales so."""
    said = {"num_bits": 8, "type": "float", "dynamic": dynamic, "strategy": "tensor"}
    return lambda section: section["config_groups"]["group_0"].update(input_activations=said)


def folder(path: Path, dialect: str, change: Change, lost: str = "", few: bool = False) -> Path:
    """Write a folder in a dialect, its section changed, without the parts whose name ends so."""
    dialect_folders.write_folder(path, dialect)
    config = json.loads((path / "config.json").read_text())
    section = copy.deepcopy(config["quantization_config"])
    change(section)
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    rows = tensors_of(path)
    if few:
        name = "model.layers.0.mlp.down_proj.input_scale"
        rows[name] = ("F32", (1,), b"\0\0\x80\x3f")
    kept = {name: row for name, row in rows.items() if not lost or not name.endswith(lost)}
    write_mixed(path / "model.safetensors", kept)
    return path


def nothing(section: dict[str, Any]) -> None:
    """Change nothing."""


LOST: dict[str, tuple[str, Change, str, str]] = {
    "an order of compressed-tensors": (
        "compressed_packed", lambda s: weights(s).update(actorder="group"), "", "weight_g_idx",
    ),
    "an order stated as true": (
        "compressed_packed", lambda s: weights(s).update(actorder=True), "", "weight_g_idx",
    ),
    "an order of GPTQ": ("gptq", lambda s: s.update(desc_act=True), "g_idx", "g_idx"),
    "static scales of inputs": ("compressed_plain", of_inputs(False), "", "input_scale"),
    "local scales of inputs": ("compressed_plain", of_inputs("local"), "", "input_global_scale"),
    "a static scheme of fp8": (
        "fp8_block", lambda s: s.update(activation_scheme="static"), "", "input_scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOST)
def test_a_promised_part_that_is_not_there_fails(kind: str, tmp_path: Path) -> None:
    dialect, change, lost, part = LOST[kind]
    bad = folder(tmp_path / "m", dialect, change, lost)
    found = {row.name: row for row in aprfmt.validate(bad).checks}["packed"]
    assert found.outcome == "FAIL" and f"packed weights have no {part}" in found.found, found
    assert f"have no {part}" in command("inspect", bad).out.partition("\n")[0]


@pytest.mark.parametrize(("dialect", "change"), [
    ("compressed_packed", nothing),
    ("compressed_packed", lambda s: weights(s).update(actorder="weight")),
    ("compressed_packed", lambda s: weights(s).update(actorder=None)),
    ("compressed_plain", nothing),
    ("compressed_plain", lambda s: weights(s).update(actorder="group")),  # one group a row
    ("compressed_plain", of_inputs(True)),
    ("compressed_packed_float", nothing),
    ("gptq", nothing),
    ("gptq", lambda s: s.update(desc_act=True)),
    ("fp8_block", lambda s: s.update(activation_scheme="dynamic")),
    ("modelopt", nothing),
])  # fmt: skip
def test_what_is_not_promised_is_not_missed(dialect: str, change: Change, tmp_path: Path) -> None:
    good = folder(tmp_path / "m", dialect, change)
    found = {row.name: row for row in aprfmt.validate(good).checks}["packed"]
    assert found.outcome == "PASS", found
    with aprfmt.open(good) as model:
        assert not [note for note in model.notes if note.key == "promised_parts"]


def test_a_scale_that_only_some_weights_lack_is_another_note(tmp_path: Path) -> None:
    made = folder(tmp_path / "m", "compressed_plain", of_inputs(False), few=True)
    with aprfmt.open(made) as model:
        assert [note.key for note in model.notes] == ["partial_input_scales"]


def test_a_conversion_says_that_an_order_is_lost(tmp_path: Path) -> None:
    def in_another_order(section: Any) -> None:
        weights(section).update(actorder="group")

    made = folder(tmp_path / "m", "compressed_packed", in_another_order)
    done = command("convert", made, tmp_path / "m.gguf", "--allow-inexact")
    assert done.code == 0 and "have no weight_g_idx" in done.err


@pytest.mark.parametrize(("change", "lost"), [
    (lambda s: weights(s).update(symmetric=False), "weight_zero_point"),
    (nothing, "weight_shape"),
])  # fmt: skip
def test_a_part_without_which_nothing_decodes_fails_where_it_is_read(
    change: Change, lost: str, tmp_path: Path
) -> None:
    bad = folder(tmp_path / "m", "compressed_packed", change, lost)
    found = {row.name: row for row in aprfmt.validate(bad).checks}["layout"]
    assert found.outcome == "FAIL" and lost in found.found, found
