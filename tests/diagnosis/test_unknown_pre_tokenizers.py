"""Of a model whose architecture is not known the tokenizer is compared by what it does to texts.

Seen red: "no cause of the table fits - pre: A unknown 'BertPreTokenizer' ...", located, no remedy.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from tests.cli.run import aprfmt

PIECES = ["[PAD]", "[UNK]", *"LAGVSERTIDPKQNFYMHWC", *"lagvsertidpkqnfymhwc", *".,-"]
BERT, LETTERS = (pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Split(Regex("."), "isolated"))
LOWER = normalizers.BertNormalizer(lowercase=True)
KEPT = normalizers.BertNormalizer(lowercase=False)
# What differs -> (A's, B's (normalizer, pre-tokenizer), the cause).
CASES = {
    "a part of a sequence": (
        (KEPT, pre_tokenizers.Sequence([BERT, LETTERS])), (KEPT, BERT), "pre_tokenizer"),
    "another type": (
        (KEPT, pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), LETTERS])),
        (KEPT, pre_tokenizers.WhitespaceSplit()), "pre_tokenizer"),
    "a flag of the normalizer": (
        (KEPT, pre_tokenizers.Sequence([BERT, LETTERS])),
        (LOWER, pre_tokenizers.Sequence([BERT, LETTERS])), "normalizer"),
}  # fmt: skip


def folder(path: Path, normalizer: Any, pre: Any) -> Path:
    path.mkdir()
    made = Tokenizer(models.WordPiece({one: i for i, one in enumerate(PIECES)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizer, pre
    made.save(str(path / "tokenizer.json"))
    weight = np.random.default_rng(2).standard_normal((len(PIECES), 8)).astype(np.float32)
    save_file({"roformer.embeddings.weight": weight}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "roformer"}))
    return path


@pytest.mark.parametrize("case", CASES)
def test_the_part_is_named_with_a_text_and_a_command_that_mends_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine, theirs, cause = CASES[case]
    a, b = folder(tmp_path / "a", *mine), folder(tmp_path / "b", *theirs)
    told = aprfmt("diagnose", a, b, "--json")
    assert (told.code, told.json["verdict"]) == (1, "bug")
    (row,) = told.json["causes"]
    assert row["cause"] == cause and row["level"] != "located", row
    assert "first shown by" in row["says"] and "ids: " in row["says"]
    # The command that it prints gives A's tokenizer.
    command = row["remedy"]["command"].split()
    assert command[:3] == ["aprfmt", "convert", str(a)], command
    assert aprfmt(*command[1:]).code == 0
    assert aprfmt("diagnose", a, tmp_path / command[3]).out.startswith("same")


def test_the_same_tokenizer_is_no_finding(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", KEPT, BERT)
    shutil.copytree(a, tmp_path / "b")
    assert aprfmt("diagnose", a, tmp_path / "b").out.startswith("same")


def test_with_other_weights_no_command_takes_a_model_for_its_tokenizer(tmp_path: Path) -> None:
    mine, theirs, _ = CASES["a part of a sequence"]
    a, b = folder(tmp_path / "a", *mine), folder(tmp_path / "b", *theirs)
    weight = np.random.default_rng(3).standard_normal((len(PIECES), 8)).astype(np.float32)
    save_file({"roformer.embeddings.weight": weight}, b / "model.safetensors")
    found = {one["cause"]: one for one in aprfmt("diagnose", a, b, "--json").json["causes"]}
    assert found["pre_tokenizer"]["remedy"] is None
