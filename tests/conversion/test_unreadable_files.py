"""A copy is not verified where a file of the tokenizer or of settings cannot be read."""

import shutil
from pathlib import Path

import pytest

from tests.cli.run import aprfmt as command

READ_FILES = {
    "tokenizer.json": "tokenizer part", "special_tokens_map.json": "tokenizer part",
    "chat_template.json": "tokenizer part", "generation_config.json": "generation setting",
}  # fmt: skip


@pytest.mark.parametrize("file", READ_FILES)
def test_a_copied_file_that_cannot_be_read_leaves_a_copy_undecided(
    file: str, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: "verified" for a folder whose generation_config.json is no JSON."""
    source = Path(shutil.copytree(demo_model, tmp_path / "a"))
    (source / file).write_text('{"a": ')
    made = tmp_path / "b"
    asked = ("convert", source, made, "--to", "safetensors", "--force")
    done = command(*asked)
    assert done.code == 2 and "not decided: 50 byte-equal" in done.out
    assert f"could not be compared: {READ_FILES[file]} {file} (" in done.out
    assert (made / file).read_bytes() == (source / file).read_bytes()
    assert command("diff", source, made).code == 2  # which says the same of the two
    for more in (("--drop", file), ("--accept", f"unread:{file}")):
        assert command(*asked, *more).code == 0


@pytest.mark.parametrize("file", ["merges.txt", "preprocessor_config.json"])
def test_a_copied_file_that_is_not_read_is_held_by_its_bytes(
    file: str, demo_model: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(demo_model, tmp_path / "a"))
    (source / file).write_text('{"a": ')
    done = command("convert", source, tmp_path / "b", "--to", "safetensors")
    assert done.code == 0 and (tmp_path / "b" / file).is_file()
    assert command("diff", source, tmp_path / "b").code == 0
