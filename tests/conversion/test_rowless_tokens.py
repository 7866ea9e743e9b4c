"""Tokens without a row of the embedding: a copy whose lists end with the rows says what it lacks.

Seen red: they were left out without a word.
"""

import json
from pathlib import Path

import pytest

import aprfmt as api
from tests.cli.run import aprfmt

TOKENS = ("<|startoftext|>", "<|unused115|>")


def folder(path: Path, where: str) -> Path:
    """Write the demo model with two tokens behind its rows, in a part of tokenizer.json."""
    assert aprfmt("demo", "--into", path, "--quiet").code == 0
    file = next(path.rglob("tokenizer.json"))
    data = json.loads(file.read_text())
    rows = json.loads((file.parent / "config.json").read_text())["vocab_size"]
    for i, token in enumerate(TOKENS if where else (), rows):
        if where == "added_tokens":
            data["added_tokens"].append({**data["added_tokens"][0], "id": i, "content": token})
        else:
            data["model"]["vocab"][token] = i
    file.write_text(json.dumps(data))
    return file.parent


@pytest.mark.parametrize("target", ["gguf", "apr"])
@pytest.mark.parametrize("where", ["added_tokens", "vocab"])
def test_a_copy_names_the_tokens_it_leaves_out(where: str, target: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "a", where)
    out = tmp_path / f"b.{target}"
    report = api.convert(source, out)
    (note,) = [note for note in report.notes if note.key == "rowless_tokens"]
    assert all(token in note.text for token in TOKENS)
    with api.open(out) as made:
        held = made.metadata.get("tokenizer.ggml.tokens") or made.metadata["tokenizer.vocabulary"]
        assert not {*TOKENS} & {*held}


@pytest.mark.parametrize("target", ["gguf", "apr", "safetensors"])
def test_nothing_is_said_where_nothing_is_left_out(target: str, tmp_path: Path) -> None:
    """A folder keeps its tokenizer.json, and a model with a row for every token needs no note."""
    where = "added_tokens" if target == "safetensors" else ""
    out = tmp_path / (f"b.{target}" if target != "safetensors" else "b")
    report = api.convert(folder(tmp_path / "a", where), out, to=target)
    assert not [note for note in report.notes if note.key == "rowless_tokens"]
