"""Files and folders beside the weights: what they are read for, and when two of them are equal."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from aprfmt.model import open_model
from aprfmt.model.ledger import Ledger, make_ledger, same_content
from tests.conversion.folders import llama_folder

MODELS = "sentence_transformers.models"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llama_folder(tmp_path / "m", "F32", hidden=16, layers=1, ffn=24, vocab=16)


def ledger_of(folder: Path) -> Ledger:
    with open_model(folder) as model:
        return make_ledger(model)


def items_of(folder: Path) -> dict[str, tuple[str, str]]:
    return {
        item.name: (item.reading, item.of)
        for item in ledger_of(folder).items
        if item.kind == "file"
    }


def test_folders_of_modules_are_read_by_their_type(folder: Path) -> None:
    modules = [
        {"path": "1_Pooling", "type": f"{MODELS}.Pooling"},
        {"path": "2_Normalize", "type": f"{MODELS}.Normalize"},
        {"path": "3_Dense", "type": f"{MODELS}.Dense"},
        {"path": "4_Odd"},
        {"path": "", "type": f"{MODELS}.Pooling"},
        "no row",
    ]
    for name in ("1_Pooling", "2_Normalize", "3_Dense", "4_Odd", "5_Other"):
        (folder / name).mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    found = items_of(folder)
    assert found["1_Pooling"] == ("hyperparameter", "how a text's rows become one")
    assert found["2_Normalize"] == ("without effect", "Normalize has no weights")
    assert found["3_Dense"] == ("unread", "modules.json: Dense")
    assert found["4_Odd"] == ("unread", "modules.json: a module")
    other = found["5_Other"]
    assert "modules.json" not in other[1]
    for said in ({"path": "1_Pooling"}, 7):
        (folder / "modules.json").write_text(json.dumps(said))
        assert items_of(folder)["1_Pooling"] == other
    (folder / "modules.json").write_text("[")
    made = ledger_of(folder)
    assert [item.name for item in made.unreadable] == ["modules.json"]


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return what puts something else in the place of a.txt."""

    def change(folder: Path) -> None:
        (folder / "a.txt").unlink()
        make(folder / "a.txt")

    return change


Change = Callable[[Path], object]
# What makes another folder of an equal one.
CHANGES: dict[str, Change] = {
    "a byte": lambda f: (f / "a.txt").write_bytes(b"onE"),
    "a size": lambda f: (f / "a.txt").write_bytes(b"one "),
    "a byte below": lambda f: (f / "d" / "b.txt").write_bytes(b"tvo"),
    "a file more": lambda f: (f / "d" / "c.txt").write_bytes(b""),
    "a file less": lambda f: (f / "d" / "b.txt").rename(f / "b.txt"),
    "another name": lambda f: (f / "a.txt").rename(f / "A.txt"),
    "a folder for a file": replaced(os.mkdir),
    "a broken link": replaced(partial(os.symlink, "none")),
}


@pytest.mark.parametrize("change", ["", *CHANGES])
def test_folders_are_equal_by_names_and_bytes(change: str, tmp_path: Path) -> None:
    sides = tmp_path / "x", tmp_path / "y"
    for side in sides:
        (side / "d").mkdir(parents=True)
        (side / "a.txt").write_bytes(b"one")
        (side / "d" / "b.txt").write_bytes(b"two")
    if change:
        CHANGES[change](sides[1])
    for x, y in (sides, sides[::-1]):
        assert same_content(x, y) == (not change)
        assert same_content(x, x) or change == "a broken link"
        assert not same_content(x, y / "d" / "b.txt") and not same_content(y / "d", x)


def test_a_file_is_equal_to_its_text(tmp_path: Path) -> None:
    """As a container embeds it; what is read on demand is read first."""
    path = tmp_path / "x.txt"
    path.write_text("é\n")
    for text, equal in (("é\n", True), ("é", False), (["é\n"], False), (None, False)):
        assert same_content(path, text) == same_content(text, path) == equal
        assert same_content(partial(str, "é\n"), path)
    assert not same_content(tmp_path / "none", "é\n") and not same_content(tmp_path, "")
    assert same_content([1, "a"], [1, "a"]) and not same_content([1, "a"], [1, "b"])
