"""Parts of the tokenizers, each by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.errors import FormatError
from aprfmt.tokenizer import isolated, keys
from aprfmt.tokenizer.carried import Carried
from aprfmt.tokenizer.carriers import scores_from_merges
from aprfmt.tokenizer.vocabulary import Vocabulary


def test_scores_fall_in_the_order_of_merges_then_of_ids() -> None:
    tokens = ["zz", "ab", "y", "abc", "x"]
    found = scores_from_merges(
        Vocabulary("bpe", tokens, [keys.NORMAL] * len(tokens), merges=["a b", "ab c", "q q"])
    )
    ordered = sorted(zip(found, tokens, strict=True), reverse=True)
    assert [token for _, token in ordered] == ["ab", "abc", "zz", "y", "x"]
    assert len(set(found)) == len(found)


def test_the_named_template_that_is_a_text_counts() -> None:
    rows = [
        {"name": "tool_use"}, {"template": "nameless"}, {"name": 3, "template": "x"}, "text",
        {"name": "rag", "template": ["no text"]}, {"name": "other", "template": "other's"},
        {"name": "default", "template": "default's"},
    ]  # fmt: skip
    for last, expected in ((7, "default's"), (6, "other's"), (5, None)):
        carried: Any = SimpleNamespace(where="m", _templates=lambda n=last: iter([(rows[:n], "f")]))
        assert Carried.template_and_origin(carried)[0] == expected


def test_the_process_of_an_engine_that_ended_is_waited_for() -> None:
    engine = isolated.IsolatedEngine(
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "t", "why"
    )
    child = engine._child
    child.kill()
    with pytest.raises(FormatError, match=r"t: the tokenizer needs more than .* \(why\)"):
        engine.encode("text", False, False)
    assert child.returncode is not None, "left as a zombie"
    assert child.stdin is not None and child.stdin.closed
