"""A folder that lost its config.json is not equal to the one that has it."""

import shutil
from pathlib import Path

import pytest

from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder


@pytest.fixture
def lost(demo_model: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(demo_model, tmp_path / "lost"))
    (folder / "config.json").unlink()
    return folder


@pytest.mark.parametrize("asked", ["diff", "diagnose"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_lost_configuration_is_a_difference(
    asked: str, turned: bool, demo_model: Path, lost: Path
) -> None:
    """Seen red: "equal, 50 tensors", of a folder that no loader opens."""
    pair = (lost, demo_model) if turned else (demo_model, lost)
    done = command(asked, *pair, "--json")
    side = "only in B" if turned else "only in A"
    left = done.json["pronounced"]["not_compared"]
    assert done.code == 1, done.json["pronounced"]["says"]
    assert [row["state"] for row in left if row["name"] == "config.json"] == [side]
    took = command(asked, *pair, "--accept", "unread:config.json")
    assert took.code == 0, took.out


def test_weights_alone_have_no_place_for_a_configuration(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    bare = tmp_path / "bare" / "model.safetensors"
    shutil.copy(demo_model / "model.safetensors", bare)
    said = command("diff", demo_model, bare, "--json").json["pronounced"]
    assert "config.json" not in {row["name"] for row in said["not_compared"]}
    plain = llama_folder(tmp_path / "plain", "BF16")  # a model without a tokenizer
    (tmp_path / "copy").mkdir()
    shutil.copy(plain / "model.safetensors", tmp_path / "copy" / "model.safetensors")
    assert command("diff", plain, tmp_path / "copy").code == 0


def test_two_folders_without_a_configuration_are_equal(lost: Path, tmp_path: Path) -> None:
    again = Path(shutil.copytree(lost, tmp_path / "again"))
    assert command("diff", lost, again).code == 0


@pytest.mark.parametrize("name", ["m.gguf", "m.apr"])
def test_a_file_has_the_configuration_in_its_own_keys(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    assert command("convert", demo_model, tmp_path / name).code == 0
    assert command("diff", demo_model, tmp_path / name).code == 0
