"""Chat templates and generation configs of two sides, as a person reads what differs."""

import difflib
import json
import shutil
from pathlib import Path

import pytest

from aprfmt.compare import diff
from aprfmt.measure.texts import SideVerdicts
from tests.cli.run import aprfmt


@pytest.fixture
def edited(demo_model: Path, tmp_path: Path) -> Path:
    """The demo model with a line of its template and two keys of its generation config changed."""
    shutil.copytree(demo_model, tmp_path / "b")
    place = tmp_path / "b" / "chat_template.jinja"
    place.write_text(place.read_text().replace("assistant", "bot\x1b[31m"))
    config = tmp_path / "b" / "generation_config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps(said | {"temperature": 0.3, "transformers_version": "0"}))
    return tmp_path / "b"


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_what_differs_is_shown_line_by_line_and_key_by_key(
    demo_model: Path, edited: Path, tmp_path: Path, form: str
) -> None:
    side = edited
    if form == "gguf":
        side = tmp_path / "b.gguf"
        assert aprfmt("convert", edited, side, "--quiet").code == 0
    done = aprfmt("diff", demo_model, side, "--json")
    assert done.code == 1
    before = (demo_model / "chat_template.jinja").read_text().splitlines()
    after = (edited / "chat_template.jinja").read_text().splitlines()
    changed = [line for line in difflib.ndiff(before, after) if line[:2] in ("+ ", "- ")]
    shown = [line for line in done.json["template"] if line[:3] not in ("---", "+++")]
    assert sorted(line[1:] for line in shown if line[:1] in "+-") == sorted(
        line[2:] for line in changed
    )
    rows = {row["name"]: row for row in done.json["generation"]}
    assert rows["temperature"]["b"] == 0.3
    assert rows["temperature"]["effect"] == "how evenly tokens are drawn"
    assert "transformers_version" not in rows
    text = aprfmt("diff", demo_model, side, "-v").out
    assert "chat template" in text and "\x1b[31m" not in text
    assert "temperature: - | 0.3 (how evenly tokens are drawn)" in text


def test_equal_texts_are_not_shown(demo_model: Path, tmp_path: Path) -> None:
    assert aprfmt("convert", demo_model, tmp_path / "c.gguf", "--quiet").code == 0
    found = aprfmt("diff", demo_model, tmp_path / "c.gguf", "--json").json
    assert (found["template"], found["generation"]) == ([], [])


def test_a_verdict_says_how_much_of_it_differs(demo_model: Path, edited: Path) -> None:
    place = edited / "tokenizer.json"
    said = json.loads(place.read_text())
    vocab, merges = said["model"]["vocab"], said["model"]["merges"]
    names = list(vocab)
    vocab[names[300]], vocab[names[301]] = vocab[names[301]], vocab[names[300]]
    merges[10:13] = [merges[12], *merges[10:12]]  # one moved, two behind it in their order
    del merges[-1]
    place.write_text(json.dumps(said))
    counts = {
        "tokens_changed": 2,
        "merges_only_in_a": 1,
        "merges_moved": 1,
        "lines_only_in_a": 1,
        "lines_only_in_b": 1,
        "keys_changed": 1,
    }
    done = aprfmt("diff", demo_model, edited, "--only", "tokenizer")
    assert (
        "tokenizer different (2 tokens changed, 1 merges only in A, 1 merges moved); "
        "chat template different (1 lines only in A, 1 lines only in B); "
        "generation config different (1 keys changed)"
    ) in done.out
    assert found(demo_model, edited) == SideVerdicts("different", "different", "different", counts)


def found(a: Path, b: Path) -> SideVerdicts:
    made = diff(a, b, only=["tokenizer"]).beside
    assert made is not None
    return made


def test_what_one_side_lacks_is_said(demo_model: Path, tmp_path: Path) -> None:
    done = aprfmt("diff", demo_model, demo_model, "--only", "tokenizer", "--json")
    equal = {"tokenizer": "equal", "template": "equal", "generation": "equal", "counts": {}}
    assert done.json["beside"] == equal and found(demo_model, demo_model).text == ""
    shutil.copytree(demo_model, tmp_path / "b")
    for name in ("chat_template.jinja", "generation_config.json"):
        (tmp_path / "b" / name).unlink()
    for a, b, word in ((demo_model, tmp_path / "b", "A"), (tmp_path / "b", demo_model, "B")):
        assert found(a, b) == SideVerdicts("equal", f"only in {word}", f"only in {word}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "b" / name).unlink()
    assert found(tmp_path / "b", demo_model).tokenizer == "only in B"
    assert found(tmp_path / "b", tmp_path / "b") == SideVerdicts("none", "none", "none")
    assert diff(demo_model, demo_model, only=["tensors"]).beside is None
