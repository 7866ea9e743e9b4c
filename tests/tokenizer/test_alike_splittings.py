"""Steps of two tokenizer.json that split every text alike are one splitting, others are not.

The oracle is the library tokenizers, which splits random texts by both.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from aprfmt.tokenizer.pre_tokenizers import GPT2, LLAMA3, pre_name_of, tokenizer_splitting

DIGITS = {"type": "Digits", "individual_digits": True}


def split(regex: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def byte_level(use_regex: bool, blank: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": blank,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


Steps = Sequence[Mapping[str, Any]]
# Two lists of steps, and whether they split every text alike.
PAIRS: dict[str, tuple[Steps, Steps, bool]] = {
    "the regex before": (
        [split(GPT2), byte_level(False)], [byte_level(True)], True
    ),
    "after digits": (
        [DIGITS, split(GPT2), byte_level(False)], [DIGITS, byte_level(True)], True
    ),
    "what matches is kept": (
        [split(GPT2, "Removed", True), byte_level(False)], [byte_level(True)], True
    ),
    "another regex": ([split(LLAMA3), byte_level(False)], [byte_level(True)], False),
    "no regex": ([byte_level(False)], [byte_level(True)], False),
    "joined to what is before": (
        [split(GPT2, "MergedWithPrevious"), byte_level(False)], [byte_level(True)], False
    ),
    "what matches is dropped": (
        [split(GPT2, "Removed"), byte_level(False)], [byte_level(True)], False
    ),
    "a blank before": ([split(GPT2), byte_level(False, True)], [byte_level(True)], False),
}  # fmt: skip


def tokenizer_json(steps: Steps) -> dict[str, Any]:
    """Return a tokenizer.json of no pieces with these steps."""
    data: dict[str, Any] = json.loads(Tokenizer(models.BPE()).to_str())
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(steps)}
    return data


@pytest.mark.parametrize("pair", PAIRS)
def test_alike_splittings_are_equal(pair: str) -> None:
    first, second, alike = PAIRS[pair]
    left, right = (tokenizer_splitting(tokenizer_json(steps)) for steps in (first, second))
    assert (left == right) == alike
    if alike:  # GGUF has one name for both
        names = {pre_name_of(tokenizer_json(steps), "here") for steps in (first, second)}
        assert len(names) == 1


@pytest.mark.parametrize("pair", [name for name, row in PAIRS.items() if row[2]])
@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_library_splits_such_texts_alike(pair: str, text: str) -> None:
    pieces = [
        [
            piece
            for piece, _ in Tokenizer.from_str(
                json.dumps(tokenizer_json(steps))
            ).pre_tokenizer.pre_tokenize_str(text)
        ]
        for steps in PAIRS[pair][:2]
    ]
    assert pieces[0] == pieces[1]
