"""Chat templates and generation configs of two sides, as a person reads what differs."""

import difflib
import json
import shutil
from pathlib import Path

import pytest

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
    text = aprfmt("diff", demo_model, side).out
    assert "chat template" in text and "\x1b[31m" not in text
    assert "temperature: - | 0.3 (how evenly tokens are drawn)" in text


def test_equal_texts_are_not_shown(demo_model: Path, tmp_path: Path) -> None:
    assert aprfmt("convert", demo_model, tmp_path / "c.gguf", "--quiet").code == 0
    found = aprfmt("diff", demo_model, tmp_path / "c.gguf", "--json").json
    assert (found["template"], found["generation"]) == ([], [])
