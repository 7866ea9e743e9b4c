"""The kind of a tokenizer.json's vocabulary, of files from before the tag `type` too."""

from typing import Any

import pytest

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
