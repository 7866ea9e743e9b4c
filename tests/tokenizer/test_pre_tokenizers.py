"""The table by `pre` name, against the tokenizer classes of transformers."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprfmt.errors import ConversionError, UnsupportedError
from aprfmt.tokenizer import pre_tokenizers as pre
from aprfmt.tokenizer.loading import load_tokenizer
from aprfmt.tokenizer.pre_tokenizers import (
    PRE_TOKENIZERS,
    normalizer_json,
    pre_name_of,
    pre_tokenizer_json,
)
from tests.tokenizer.fake import byte_level, fake, gguf_vocabulary
from tests.tokenizer.strings import STRINGS

# transformers' classes that split as the original tokenizer.json of these names
CLASSES: dict[str, str] = {
    "gpt-2": "models.gpt2.tokenization_gpt2:GPT2Tokenizer",
    "phi-2": "models.codegen.tokenization_codegen:CodeGenTokenizer",
    "command-r": "models.cohere.tokenization_cohere:CohereTokenizer",
    "olmo": "models.gpt_neox.tokenization_gpt_neox:GPTNeoXTokenizer",
    "mpt": "models.gpt_neox.tokenization_gpt_neox:GPTNeoXTokenizer",
    "qwen2": "models.qwen2.tokenization_qwen2:Qwen2Tokenizer",
    "qwen35": "models.qwen3_5.tokenization_qwen3_5:Qwen3_5Tokenizer",
}


def shell(row: pre.PreTokenizer) -> dict[str, Any]:
    """Return a tokenizer.json without vocabulary."""
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": normalizer_json(row), "pre_tokenizer": pre_tokenizer_json(row),
        "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": row.ignore_merges},
    }  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_same_ids_as_the_class(name: str, demo_model: Path) -> None:
    import importlib

    module, _, attribute = CLASSES[name].partition(":")
    made: Callable[..., Any] = getattr(importlib.import_module(f"transformers.{module}"), attribute)
    vocab, merges = byte_level(demo_model)
    oracle = made(vocab=vocab, merges=merges).backend_tokenizer
    ours = load_tokenizer(fake("gguf", gguf_vocabulary(demo_model, name)))
    for key, text in STRINGS.items():
        wanted = oracle.encode(text, add_special_tokens=False).ids
        if any(i >= len(vocab) for i in wanted):
            continue  # the class added special tokens of its own
        assert ours.encode(text) == wanted, key


def test_splits_as_transformers_has_them_by_name() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    assert set(GGUF_PRE_TOKENIZER_SPLITS) <= set(PRE_TOKENIZERS)
    for name, regex in GGUF_PRE_TOKENIZER_SPLITS.items():
        assert PRE_TOKENIZERS[name].steps == (("split", regex), ("bytes", "")), name


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_the_library_takes_it_and_its_name_comes_back(name: str) -> None:
    from tokenizers import Tokenizer

    row = PRE_TOKENIZERS[name]
    data = shell(row)
    read = Tokenizer.from_str(json.dumps(data))
    if row.style == "blank":
        return
    for text in STRINGS.values():
        pieces = read.pre_tokenizer.pre_tokenize_str(text)
        assert "".join(piece for piece, _ in pieces) or not text
    again = pre_name_of(json.loads(read.to_str()), "x")
    assert PRE_TOKENIZERS[again] == row


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("falcon", "12345", ["123", "45"]),
        ("smollm", "12345", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", "12345", ["123", "45"]),
        ("llama-bpe", "HTTPServer", ["HTTPServer"]),
        ("deepseek-v3", "a\u4f60b 1234", ["a", "ä½ł", "b", "Ġ", "123", "4"]),
        ("deepseek-llm", "a.b", ["a", ".", "b"]),
        ("gpt-4o", "I'm ok", ["I'm", "Ġok"]),
        ("tekken", "camelCase", ["camel", "Case"]),
        ("superbpe", "1234567", ["1", "234", "567"]),
    ],
)
def test_pieces(name: str, text: str, pieces: list[str]) -> None:
    from tokenizers import Tokenizer

    read = Tokenizer.from_str(json.dumps(shell(PRE_TOKENIZERS[name])))
    assert [piece for piece, _ in read.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_listed_letters_are_the_cased_ones() -> None:
    letters = pre._character_class(pre._CASED_LETTERS)
    ranges = [part.split("-") for part in pre._CASED_LETTERS.split()]
    points = {c for r in ranges for c in range(int(r[0], 16), int(r[-1], 16) + 1)}
    assert {unicodedata.category(chr(c)) for c in points} == {"Lu", "Ll", "Lt"}
    assert letters.startswith("A-Za-z\u00b5\u00c0-\u00d6")
    assert ord("\u1fbe") in points and ord("\u212a") in points


@pytest.mark.parametrize("name", ["", "no-such", "llama_bpe"])
def test_an_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(UnsupportedError, match="not known"):
        pre.find_pre_tokenizer(name, "x.gguf")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"normalizer": {"type": "NFKC"}}, "NFKC"),
        ({"pre_tokenizer": None}, "no pre-tokenizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "ByteLevel"),
        ({"model": {"type": "BPE", "ignore_merges": True}}, "ignore_merges"),
    ],
    ids=["normalizer", "none", "whitespace", "prefix-space", "ignore-merges"],
)
def test_a_splitting_without_a_name_is_an_error(change: dict[str, Any], found: str) -> None:
    with pytest.raises(ConversionError, match=found):
        pre_name_of({**shell(PRE_TOKENIZERS["qwen2"]), **change}, "x")


def test_spellings_that_mean_the_same() -> None:
    data = shell(PRE_TOKENIZERS["llama-bpe"])
    split = data["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"]["Regex"] = split["pattern"]["Regex"].replace(r"\r", "\r").replace(r"\n", "\n")
    split.update(behavior="Removed", invert=True)
    data["normalizer"] = {"type": "Sequence", "normalizers": []}
    assert pre_name_of(data, "x") == "llama-bpe"
