"""Weights that lack the scale of their inputs, where the others of their kind have one: said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.conversion.dialect_folders import write_folder
from tests.conversion.folders import tensors_of, write_mixed

LACKING = ("layers.1.mlp",)
KINDS = ("modelopt", "fp8_block", "compressed_plain")


def with_scales(folder: Path, dialect: str, lacking: tuple[str, ...], **section: Any) -> list[str]:
    """Write a folder whose weights have input_scale but for those named; return these."""
    expected = write_folder(folder, dialect)
    rows = {k: row for k, row in tensors_of(folder).items() if not k.endswith("input_scale")}
    without = [name for name in expected if any(part in name for part in lacking)]
    for at, name in enumerate(expected):
        if name not in without:
            raw = np.float32(0.006 + 0.0001 * at).tobytes()
            rows[name.removesuffix("weight") + "input_scale"] = ("F32", (), raw)
    write_mixed(folder / "model.safetensors", rows)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= section
    (folder / "config.json").write_text(json.dumps(config))
    return without


@pytest.mark.parametrize("dialect", KINDS)
def test_weights_without_the_scale_that_others_have_are_named(dialect: str, tmp_path: Path) -> None:
    names = with_scales(tmp_path / "m", dialect, LACKING)
    shown = aprfmt("inspect", tmp_path / "m", "--json").json
    (note,) = [note["text"] for note in shown["notes"] if note["key"] == "partial_input_scales"]
    assert note.startswith(f"{len(names)} of 14 ") and min(names) in note and "1.0" in note
    assert any("input_scale" in said for said in shown["summary"]["unusual"])
    found = aprfmt("validate", tmp_path / "m", "--json").json
    (finding,) = [one for one in found["findings"] if one["check"] == "quantization"]
    assert finding["level"] == "warning" and min(names) in finding["found"]


@pytest.mark.parametrize("dialect", KINDS)
@pytest.mark.parametrize("lacking", [(), ("",)])
def test_all_or_none_is_as_it_should_be(
    dialect: str, lacking: tuple[str, ...], tmp_path: Path
) -> None:
    with_scales(tmp_path / "m", dialect, lacking)
    shown = aprfmt("inspect", tmp_path / "m", "--json").json
    assert not [note for note in shown["notes"] if note["key"] == "partial_input_scales"]


def test_an_algorithm_that_leaves_inputs_alone_needs_none(tmp_path: Path) -> None:
    with_scales(tmp_path / "m", "modelopt", LACKING, quant_algo="W4A16_NVFP4")
    shown = aprfmt("inspect", tmp_path / "m", "--json").json
    assert not [note for note in shown["notes"] if note["key"] == "partial_input_scales"]


def test_other_layers_of_a_mixture_may_have_none(tmp_path: Path) -> None:
    """What the configuration says of each weight decides which are of one kind."""
    said = {
        f"model.layers.{layer}.{module}": {
            "quant_algo": "NVFP4" if layer == 0 else "W4A8_NVFP4_FP8", "group_size": 16,
        }
        for layer in range(2)
        for module in ("self_attn", "mlp")
    }  # fmt: skip
    with_scales(
        tmp_path / "m", "modelopt", ("layers.1.",), quant_algo="MIXED_PRECISION",
        quantized_layers=said,
    )  # fmt: skip
    shown = aprfmt("inspect", tmp_path / "m", "--json").json
    assert not [note for note in shown["notes"] if note["key"] == "partial_input_scales"]
