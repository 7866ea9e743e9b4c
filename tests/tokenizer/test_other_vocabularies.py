"""Files that list tokens by id next to a tokenizer.json: those that give ids to other tokens."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprfmt.tokenizer import other_vocabularies as module
from aprfmt.tokenizer.other_vocabularies import other_vocabularies
from aprfmt.tokenizer.stored_tokenizer import read_tokenizer_parts
from tests.cli.run import aprfmt
from tests.tokenizer.fake import folder_model


@pytest.fixture
def folder(demo_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model, tmp_path / "m"))


def vocabulary(folder: Path) -> dict[str, int]:
    data = json.loads((folder / "tokenizer.json").read_text())
    return dict(data["model"]["vocab"])


def exchanged(vocab: dict[str, int]) -> dict[str, int]:
    names = {i: text for text, i in vocab.items()}
    return vocab | {names[300]: 301, names[301]: 300}


def scrambled(vocab: dict[str, int]) -> dict[str, int]:
    ids = [*vocab.values()]
    random.Random(0).shuffle(ids)
    return dict(zip(vocab, ids, strict=True))


def foreign(vocab: dict[str, int]) -> dict[str, int]:
    return {f"other{i}": i for i in vocab.values()}


def write_json(folder: Path, vocab: dict[str, int]) -> str:
    (folder / "vocab.json").write_text(json.dumps(vocab))
    return "vocab.json"


def write_lines(folder: Path, vocab: dict[str, int]) -> str:
    text = "\n".join(sorted(vocab, key=vocab.__getitem__)) + "\n"
    (folder / "vocab.txt").write_text(text)
    return "vocab.txt"


def write_sentencepiece(folder: Path, vocab: dict[str, int]) -> str:
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    model = proto.ModelProto()
    for text in sorted(vocab, key=vocab.__getitem__):
        model.pieces.add(piece=text, score=-1.0)
    model.trainer_spec.model_type = 2
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    return "tokenizer.model"


def found(folder: Path) -> list[tuple[str, list[int]]]:
    side = read_tokenizer_parts(folder_model(folder))
    assert side is not None
    return [(one.name, [*one.apart]) for one in other_vocabularies(side)]


WRITERS: list[Any] = [write_json, write_lines, write_sentencepiece]


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_of_the_same_ids_is_silent_and_of_others_named(
    write: Callable[[Path, dict[str, int]], str], folder: Path
) -> None:
    vocab = vocabulary(folder)
    write(folder, vocab)
    assert found(folder) == []
    name = write(folder, exchanged(vocab))
    assert found(folder) == [(name, [300, 301])]
    write(folder, scrambled(vocab))  # as fairseq's: the same tokens, numbered in another way
    assert found(folder) == []
    write(folder, foreign(vocab))
    assert found(folder) == [(name, sorted(vocab.values()))]


def test_names_of_unused_pieces_are_those_of_the_added_tokens(folder: Path) -> None:
    """A tuned model names pieces anew: its vocabulary's file has them by their old names."""
    vocab = vocabulary(folder)
    added = {row["content"]: row["id"] for row in json_of(folder)["added_tokens"]}
    first = min(added.values())
    write_json(folder, {**vocab, "<unused0>": first})
    assert found(folder) == []
    ids = [*added.values()]
    (folder / "added_tokens.json").write_text(json.dumps(added))
    assert found(folder) == []
    moved = dict(zip(added, [*ids[1:], ids[0]], strict=True))
    (folder / "added_tokens.json").write_text(json.dumps(moved))
    assert found(folder) == [("added_tokens.json", sorted(ids))]


@pytest.mark.parametrize("write", WRITERS)
def test_ids_past_the_table_count_where_their_tokens_have_others(
    write: Callable[[Path, dict[str, int]], str], folder: Path
) -> None:
    """Such a file gives a text ids that the table of tokens has no rows for."""
    vocab = vocabulary(folder)
    end = max(json_of(folder)["added_tokens"], key=lambda row: int(row["id"]))["id"] + 1
    filled = vocab | {f"new{i}": i for i in range(len(vocab), end + 1)}
    name = write(folder, filled)
    assert found(folder) == []  # tokens of its own
    text = next(text for text, i in vocab.items() if i == 300)
    listed = {("another text" if at == text else at): i for at, i in filled.items()} | {text: end}
    listed.pop(f"new{end}")
    write(folder, listed)
    side = read_tokenizer_parts(folder_model(folder))
    assert side is not None
    (one,) = other_vocabularies(side)
    assert (one.name, [*one.apart]) == (name, [300, end])
    assert one.moved == {end: 300}


def test_added_tokens_past_the_table_are_named_with_both_ids(folder: Path) -> None:
    added = {row["content"]: row["id"] for row in json_of(folder)["added_tokens"]}
    (folder / "added_tokens.json").write_text(json.dumps({text: 9000 for text in [*added][:1]}))
    done = aprfmt("validate", folder)
    text, own = next(iter(added.items()))
    assert f"the first 9000: {text!r}, there of id {own}" in done.out, done.out


def json_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "tokenizer.json").read_text()))


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x0a\xff\x01", b"\x0a\x80", b"[1, 2]", b"\x03"])
def test_what_cannot_be_read_is_left_out(data: bytes, folder: Path) -> None:
    for name in module._READERS:
        (folder / name).write_bytes(data)
    assert found(folder) == []


def test_validate_warns_of_the_file(folder: Path) -> None:
    write_json(folder, exchanged(vocabulary(folder)))
    done = aprfmt("validate", folder)
    assert done.code == 0 and "vocab.json: 2 ids have another token" in done.out, done.out
