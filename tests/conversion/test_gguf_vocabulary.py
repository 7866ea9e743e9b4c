"""Scores and types of a GGUF's tokens come back through formats that have no place for them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.base.protocols import TypedValue
from aprfmt.conversion.gguf_vocabulary import KEY, restored_vocabulary, vocabulary_record
from aprfmt.errors import FormatError
from aprfmt.model import open_model
from aprfmt.model.ledger import make_ledger
from aprfmt.tokenizer import keys
from tests.cli.run import aprfmt as command

TOKENS, SCORES, TYPES = (row.gguf for row in (keys.TOKENS, keys.SCORES, keys.TYPES))


def model(style: str, metadata: dict[str, Any]) -> Any:
    return SimpleNamespace(key_style=style, metadata=metadata, path=Path("m"))


def back(source: dict[str, Any], made: list[str], record: str | None = None) -> dict[str, Any]:
    text = vocabulary_record(model("gguf", source)) if record is None else record
    assert text is not None
    folder = model("safetensors", {KEY: text})
    assert vocabulary_record(folder) == text  # carried on, through an APR too
    found = restored_vocabulary(folder, {TOKENS: TypedValue(made, keys.TOKENS.type)})
    return {key: value.value for key, value in found.items() if isinstance(value, TypedValue)}


PIECES = st.lists(st.text("ab\u2581 é", max_size=4), min_size=1, max_size=8)


@given(PIECES, st.data())
def test_everything_comes_back(pieces: list[str], data: st.DataObject) -> None:
    pieces = [piece if "\u2581" not in piece else piece.replace(" ", "") for piece in pieces]
    floats = st.floats(width=32, allow_nan=False)
    size: dict[str, Any] = {"min_size": len(pieces), "max_size": len(pieces)}
    scores = data.draw(st.lists(floats, **size))
    types = data.draw(st.lists(st.integers(1, 6), **size))
    source = {TOKENS: pieces, SCORES: scores, TYPES: types}
    # What is made of a tokenizer.json has the blanks that its types ask for.
    made = [piece.replace(" ", "\u2581") for piece in pieces]
    assert back(source, made) == source


def test_only_the_very_tokens_get_them_back() -> None:
    source = {TOKENS: ["a", "b"], SCORES: [0.0, -1.0], TYPES: [1, 3]}
    assert back(source, ["a", "b"]) == source
    for other in (["a", "c"], ["b", "a"], ["a"], ["a", "b", "c"]):
        assert back(source, other) == {}


@pytest.mark.parametrize(
    "change", [{"spaced": 3}, {"spaced": ["x"]}, {"scores": "?"}, {"scores": "AAAA"}, {"types": ""}]
)
def test_a_damaged_record_is_named(change: dict[str, Any]) -> None:
    source = {TOKENS: ["a", "b"], SCORES: [0.0, -1.0], TYPES: [1, 3]}
    record = json.loads(vocabulary_record(model("gguf", source)) or "")
    with pytest.raises(FormatError, match=f"m: {KEY}"):
        back(source, ["a", "b"], json.dumps(record | change))


def test_without_lists_there_is_no_record() -> None:
    assert vocabulary_record(model("gguf", {TOKENS: ["a"]})) is None
    assert vocabulary_record(model("gguf", {TOKENS: ["a"], SCORES: [1.0, 2.0]})) is None
    assert vocabulary_record(model("gguf", {})) is None
    assert vocabulary_record(model("apr", {})) is None


@pytest.mark.parametrize("way", [["hf"], ["x.apr"], ["hf", "x.apr"], ["x.apr", "hf"]])
def test_a_file_keeps_its_types_on_every_way_back(
    way: list[str], demo_model: Path, tmp_path: Path
) -> None:
    """A type that no tokenizer.json makes: an ordinary token called unused."""
    import aprfmt

    at = tmp_path / "source.gguf"
    aprfmt.convert(demo_model, at, verify=False, carry=False)
    with aprfmt.open(at) as opened:
        types = list(opened.metadata[TYPES])
    types[7] = 5
    changed = tmp_path / "changed.gguf"
    metadata = {TYPES: TypedValue(types, keys.TYPES.type)}
    aprfmt.convert(at, changed, metadata=metadata, verify=False)
    at = changed
    for number, step in enumerate(way):
        target = tmp_path / f"{number}-{step}"
        to = "safetensors" if step == "hf" else "apr"
        aprfmt.convert(at, target, to=to, verify=False)
        at = target
    aprfmt.convert(at, tmp_path / "back.gguf", verify=False)
    with aprfmt.open(changed) as first, aprfmt.open(tmp_path / "back.gguf") as last:
        for key in (TOKENS, TYPES):
            assert list(first.metadata[key]) == list(last.metadata[key])


@pytest.mark.parametrize("way", [["hf"], ["hf", "hf2"], ["hf", "x.apr"], ["x.apr", "hf"]])
def test_nothing_that_came_of_a_gguf_is_called_unread_on_its_way_back(
    way: list[str], demo_model: Path, tmp_path: Path
) -> None:
    """The record of scores and types is ours: it is read, and the GGUF has a place for both."""
    at = tmp_path / "m.gguf"
    assert command("convert", demo_model, at).code == 0
    for name in [*way, "back.gguf"]:
        to = ["--to", "safetensors"] if "." not in name else []
        done = command("convert", at, tmp_path / name, *to)
        assert (done.code, "not compared" in done.out) == (0, False), done.out
        at = tmp_path / name
        assert make_ledger(open_model(at)).unread == ()
