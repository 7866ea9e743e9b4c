"""The kind of a tokenizer.json's vocabulary, of files from before the tag `type` too."""

from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.checks.file import vocabulary
from aprfmt.tokenizer.engine_defaults import kind_of_pieces
from aprfmt.tokenizer.hf_json import _vocabulary_kind

BLANKS = {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}}
METASPACE = {"pre_tokenizer": {"type": "Metaspace"}}


@pytest.mark.parametrize(
    ("data", "model", "kind"),
    [
        ({}, {"merges": [], "vocab": {}}, "bpe"),
        (BLANKS, {"merges": [], "vocab": {}}, "spm"),
        (METASPACE, {"type": "BPE"}, "spm"),
        ({}, {"vocab": [["a", 0.0]]}, "unigram"),
        (BLANKS, {"vocab": [["a", 0.0]]}, "unigram"),
        ({}, {"vocab": {"a": 0}}, "wordpiece"),
        ({}, {"type": "WordPiece", "merges": []}, "wordpiece"),
        ({}, {"type": "BPE"}, "bpe"),
    ],
)
def test_a_vocabulary_has_the_kind_of_its_parts(data: Any, model: Any, kind: str) -> None:
    assert _vocabulary_kind(data, model) == kind


WORDS = [f"\u2581w{i}" for i in range(9)]


@pytest.mark.parametrize(
    ("tokens", "types", "kind"),
    [
        (["[UNK]", *WORDS, "s"], [1] * 11, "wordpiece"),
        (["[CLS]", *WORDS, "s"], [3] + [1] * 10, "wordpiece"),
        (["<unk>", *WORDS, "s"], [1] * 11, "spm"),
        (["[UNK]", "\u2581", *WORDS], [1] * 11, "spm"),  # as DeBERTa's
        (["[UNK]", "<0x00>", *WORDS], [1, 6] + [1] * 9, "spm"),
        (["[UNK]", *(f"\u0120w{i}" for i in range(9))], [1] * 10, "bpe"),
        (["[UNK]", "a", "b"], [1] * 3, ""),
    ],
)
def test_the_kind_of_a_vocabulary_shows_in_its_pieces(
    tokens: list[str], types: list[int], kind: str
) -> None:
    assert kind_of_pieces(tokens, types) == kind


@pytest.mark.parametrize(
    ("kind", "lists", "count", "types", "found"),
    [
        ("spm", True, 256, {}, ""),
        ("spm", True, 256, {3: 1}, "1 of the 256 pieces of bytes are not of type BYTE"),
        ("spm", True, 256, dict.fromkeys(range(256), 1), "256 of the 256"),
        ("spm", True, 255, {3: 1}, ""),  # some such pieces are words of a text on them
        ("bpe", True, 256, {3: 1}, ""),  # byte-level pieces need no others
        ("spm", False, 256, {3: 1}, ""),
    ],
)
def test_pieces_of_bytes_have_their_type(
    kind: str, lists: bool, count: int, types: dict[int, int], found: str
) -> None:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(count))]
    own = SimpleNamespace(
        kind=kind, tokens=tokens, types=[2, *(types.get(i, 6) for i in range(count))]
    )
    ctx: Any = SimpleNamespace(
        readable=SimpleNamespace(uses_lists=lists, vocabulary=own),
        carried=SimpleNamespace(key_text=lambda key: key.gguf),
    )
    said = vocabulary._find_untyped_bytes(ctx)
    assert [one.where for one in said] == ["tokenizer.ggml.token_type"] * bool(found)
    assert all(found in one.found and one.level == "fail" for one in said)
