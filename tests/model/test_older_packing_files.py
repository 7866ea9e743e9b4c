"""quantize_config.json (AutoGPTQ) and quant_config.json (AutoAWQ) state how weights are packed.

Seen red: "in no table" and "only in B" of an ordinary file; weights left packed where it alone
states the packing; a copy that kept a file that no longer holds.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from tests.cli.run import aprfmt as command
from tests.conversion import dialect_folders

NAMES = {"gptq": "quantize_config.json", "awq": "quant_config.json"}


def folder(path: Path, dialect: str, **changed: Any) -> Path:
    """Write a packed model with the library's own file, as the library of its time did."""
    dialect_folders.write_folder(path, dialect)
    section = dict(json.loads((path / "config.json").read_text())["quantization_config"])
    section.pop("quant_method")
    if dialect == "awq":
        section["w_bit"], section["q_group_size"] = section.pop("bits"), section.pop("group_size")
        section["version"] = str(section.get("version", "gemm")).upper()
    (path / NAMES[dialect]).write_text(json.dumps(section | changed))
    return path


@pytest.mark.parametrize("dialect", NAMES)
def test_the_file_is_known_and_agrees(dialect: str, tmp_path: Path) -> None:
    with_it, without = folder(tmp_path / "a", dialect), folder(tmp_path / "b", dialect)
    (without / NAMES[dialect]).unlink()
    assert NAMES[dialect] not in json.dumps(command("validate", with_it, "--json").json)
    assert command("diff", without, with_it).code == 0
    with aprfmt.open(with_it) as model:
        assert not [note for note in model.notes if note.key == "two_packings"]


@pytest.mark.parametrize("dialect", NAMES)
def test_it_alone_states_the_packing(dialect: str, tmp_path: Path) -> None:
    there, right = folder(tmp_path / "a", dialect), folder(tmp_path / "b", dialect)
    config = json.loads((there / "config.json").read_text())
    del config["quantization_config"]
    (there / "config.json").write_text(json.dumps(config))
    with aprfmt.open(there) as one, aprfmt.open(right) as other:
        for key, view in other.roles.items():
            np.testing.assert_array_equal(one.roles[key].numpy(), view.numpy())


@pytest.mark.parametrize(
    ("dialect", "changed", "says"),
    [
        ("gptq", {"bits": 8}, "bits 4 and 8"),
        ("gptq", {"group_size": 64}, "group_size"),
        ("awq", {"q_group_size": 64}, "group_size"),
    ],
)
def test_a_contradiction_is_a_finding(
    dialect: str, changed: dict[str, Any], says: str, tmp_path: Path
) -> None:
    there = folder(tmp_path / "a", dialect, **changed)
    told = json.dumps(command("validate", there, "--json").json)
    assert says in told and NAMES[dialect] in told


@pytest.mark.parametrize("dialect", NAMES)
def test_a_decoded_copy_does_not_keep_it(dialect: str, tmp_path: Path) -> None:
    there = folder(tmp_path / "a", dialect)
    aprfmt.convert(there, tmp_path / "b", to="safetensors", encoding="F32")
    assert not (tmp_path / "b" / NAMES[dialect]).exists()
    aprfmt.convert(there, tmp_path / "c", to="safetensors")
    assert (tmp_path / "c" / NAMES[dialect]).exists()
