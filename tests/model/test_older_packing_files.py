"""quantize_config.json (AutoGPTQ) and quant_config.json (AutoAWQ) state how weights are packed.

Seen red: "in no table" and "only in B" of an ordinary file; weights left packed where it alone
states the packing; a copy that kept a file that no longer holds.
"""

import json
import shlex
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


# What the file says otherwise, and whether a loader that goes by it reads other weights.
APART = [
    ("gptq", {"bits": 8}, "bits 4 and 8", True),
    ("gptq", {"group_size": 64}, "group_size 32 and 64", True),
    ("gptq", {"checkpoint_format": "gptq_v2"}, "checkpoint_format 'gptq' and 'gptq_v2'", True),
    ("gptq", {"sym": False}, "sym True and False", True),  # zero points of all kinds
    ("gptq", {"desc_act": True}, "desc_act False and True", False),  # groups are in order
    ("awq", {"q_group_size": 64}, "group_size 32 and 64", True),
]


@pytest.mark.parametrize(("dialect", "changed", "says", "weighs"), APART)
def test_a_contradiction_is_a_difference(
    dialect: str, changed: dict[str, Any], says: str, weighs: bool, tmp_path: Path
) -> None:
    """Of what loaders read; the command that is said takes it away. Seen red: "same", PASS."""
    sound, wrong = folder(tmp_path / "a", dialect), folder(tmp_path / "b", dialect, **changed)
    told = command("validate", wrong, "--json").json
    failed = [row for row in told["checks"] if row["outcome"] == "FAIL"]
    assert says in json.dumps(failed if weighs else told) and bool(failed) is weighs
    for question in ("diff", "diagnose"):
        for side, pair in (("B", (sound, wrong)), ("A", (wrong, sound))):
            asked = command(question, *pair, "--json")
            assert asked.code == int(weighs), asked.out
            found = {row["cause"]: row for row in asked.json["causes"]}
            assert set(found) == ({"packing_file"} if weighs else set())
            assert not weighs or f"{NAMES[dialect]} of {side} differ: {says}" in asked.out
        assert command(question, wrong, wrong).code == 0
    if weighs:
        said = shlex.split(found["packing_file"]["remedy"]["command"])
        assert command(*said[1:-2], "-o", tmp_path / "c").code == 0
        assert command("diagnose", sound, tmp_path / "c").code == 0


def test_another_config_is_not_laid_on_the_file(tmp_path: Path) -> None:
    """Where the other side's config.json agrees with the file, config.json is what departs."""
    sound, wrong = folder(tmp_path / "a", "gptq"), folder(tmp_path / "b", "gptq")
    config = json.loads((wrong / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (wrong / "config.json").write_text(json.dumps(config))
    causes = [row["cause"] for row in command("diagnose", sound, wrong, "--json").json["causes"]]
    assert causes and "packing_file" not in causes


@pytest.mark.parametrize("dialect", NAMES)
def test_a_decoded_copy_does_not_keep_it(dialect: str, tmp_path: Path) -> None:
    there = folder(tmp_path / "a", dialect)
    aprfmt.convert(there, tmp_path / "b", to="safetensors", encoding="F32")
    assert not (tmp_path / "b" / NAMES[dialect]).exists()
    aprfmt.convert(there, tmp_path / "c", to="safetensors")
    assert (tmp_path / "c" / NAMES[dialect]).exists()
