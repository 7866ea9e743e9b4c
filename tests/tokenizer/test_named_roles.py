"""Special ids whose token is named as another role's, and files of one folder that disagree.

Seen red: `validate` silent on llama's ids beside a vocabulary of another order; a token that is
both begin and end called wrong; ids of config.json not held against the tokenizer's files.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.base.outcome import Check
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder

LLAMA = ("<unk>", "<s>", "</s>")
OTHER = ("<s>", "</s>", "<unk>")


def folder(path: Path, first: Sequence[str], config: dict[str, Any], **roles: str | None) -> Path:
    """Write a llama folder whose vocabulary begins with the special tokens `first`.

    `config` are keys of config.json, `roles` the tokens that tokenizer_config.json names.
    """
    llama_folder(path, "BF16", vocab=len(first) + 26)
    letters = [chr(ord("a") + i) for i in range(26)]
    vocab = {text: i for i, text in enumerate([*first, *letters])}
    added = [
        {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for i, text in enumerate(first)
    ]  # fmt: skip
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": vocab,
        "merges": [],
        "unk_token": None,
        "dropout": None,
    }
    (path / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "post_processor": None, "decoder": {"type": "ByteLevel"}, "model": model,
    }))  # fmt: skip
    stated = {f"{role}_token": text for role, text in roles.items()}
    (path / "tokenizer_config.json").write_text(json.dumps(stated))
    values = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(values))
    return path


def special_ids(path: Path) -> Check:
    """Return the answer of the check of special ids."""
    (row,) = [row for row in aprfmt.validate(path).checks if row.name == "special_ids"]
    return row


@pytest.mark.parametrize(
    ("first", "ids", "says"),
    [
        (OTHER, {"bos": 1, "eos": 2}, "bos is 1, '</s>', which ends a text; '<s>' (0) begins"),
        (LLAMA, {"bos": 2, "eos": 1}, "bos is 2, '</s>', which ends a text; '<s>' (1) begins"),
        (LLAMA, {"bos": 0, "eos": 2}, "bos is 0, '<unk>', which stands for unknown pieces"),
        (("<unk>", "<bos>", "<eos>"), {"bos": 1, "eos": 0}, "eos is 0, '<unk>'"),
        (("[UNK]", "[BOS]", "[EOS]"), {"bos": 1, "eos": 1}, "eos is 1, '[BOS]'"),
    ],
)
def test_ids_of_another_vocabulary_fail(
    first: tuple[str, ...], ids: dict[str, int], says: str, tmp_path: Path
) -> None:
    config = {f"{role}_token_id": i for role, i in ids.items()}
    found = special_ids(folder(tmp_path / "m", first, config))
    assert found.outcome == "FAIL" and says in found.found, found
    assert command(*found.todo.replace("aprfmt ", "").split()[:-1], tmp_path / "n").code == 0
    assert special_ids(tmp_path / "n").outcome == "PASS"


def test_a_gguf_alone_shows_it(tmp_path: Path) -> None:
    config = {"bos_token_id": 0, "eos_token_id": 1}
    made = folder(tmp_path / "m", OTHER, config, bos="<s>", eos="</s>", unk="<unk>")
    assert special_ids(made).outcome == "PASS"
    aprfmt.convert(made, tmp_path / "m.gguf", carry=False)
    assert special_ids(tmp_path / "m.gguf").outcome == "PASS"
    keys = [f"tokenizer.ggml.{name}_token_id={i}" for name, i in (("bos", 1), ("eos", 2))]
    assert command("set", tmp_path / "m.gguf", *keys, "-o", tmp_path / "b.gguf").code == 0
    found = special_ids(tmp_path / "b.gguf")
    assert found.outcome == "FAIL" and "tokenizer.ggml.bos_token_id=0" in found.todo, found
    assert "bos is 1, '</s>', which ends a text" in command("inspect", tmp_path / "b.gguf").out
    assert "ends a text" not in command("inspect", tmp_path / "m.gguf").out


@pytest.mark.parametrize(
    ("first", "ids", "roles"),
    [
        (LLAMA, {"bos": 1, "eos": 2, "pad": 0}, {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}),
        (OTHER, {"bos": 0, "eos": 1}, {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}),
        # OPT begins a text with its end.
        (("<s>", "<pad>", "</s>"), {"bos": 2, "eos": 2}, {"bos": "</s>", "eos": "</s>"}),
        # GPT-2 and CLIP have one token for the end and for unknown pieces.
        (("<|endoftext|>",), {"bos": 0, "eos": 0}, {"unk": "<|endoftext|>"}),
        (("<|startoftext|>", "<|endoftext|>"), {"bos": 0, "eos": 1}, {"unk": "<|endoftext|>"}),
        # Chat models end turns with another token than texts.
        ((*LLAMA, "<|im_end|>"), {"bos": 1, "eos": 3}, {"bos": "<s>", "eos": "<|im_end|>"}),
        ((*LLAMA, "<|im_end|>"), {"bos": 1, "eos": [2, 3]}, {"bos": "<s>", "eos": "<|im_end|>"}),
        # Qwen's config.json names a begin that its tokenizer does not have.
        (("<|endoftext|>", "<|im_end|>"), {"bos": 0, "eos": 1}, {"bos": None, "eos": "<|im_end|>"}),
    ],
)  # fmt: skip
def test_sound_vocabularies_pass(
    first: tuple[str, ...], ids: dict[str, Any], roles: dict[str, str | None], tmp_path: Path
) -> None:
    config = {f"{role}_token_id": i for role, i in ids.items()}
    found = special_ids(folder(tmp_path / "m", first, config, **roles))
    assert found.outcome == "PASS" and "warning" not in found.found, found


@pytest.mark.parametrize("role", ["bos", "eos"])
def test_config_and_tokenizer_that_disagree_are_a_warning(role: str, tmp_path: Path) -> None:
    first = ("<a>", "<b>", "<c>")
    made = folder(
        tmp_path / "m", first, {"bos_token_id": 0, "eos_token_id": 1}, bos="<a>", eos="<b>"
    )
    assert "warning" not in special_ids(made).found
    stated = json.loads((made / "tokenizer_config.json").read_text()) | {f"{role}_token": "<c>"}
    (made / "tokenizer_config.json").write_text(json.dumps(stated))
    done = command("validate", made)
    assert f"tokenizer_config.json: {role}_token says '<c>' (2)" in done.out, done.out
    assert special_ids(made).outcome == "PASS"
    if role == "eos":  # a model may have several ends
        (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
        assert "says '<c>'" not in command("validate", made).out
