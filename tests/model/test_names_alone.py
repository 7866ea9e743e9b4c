"""Renames of tensors, by themselves: what they give, and what they may not."""

import re
from typing import Any

import pytest

from aprfmt.errors import UsageError
from aprfmt.model import manifest, renames
from aprfmt.model.renames import Rename, rename_names

NAMES = ("model.a.weight", "model.b.weight", "head")


def test_rules_are_applied_one_after_the_other_to_all_names() -> None:
    def renamed(*rules: Rename, **more: Any) -> list[str]:
        found = rename_names(NAMES, rules, "m", **more)
        assert list(found.values()) == list(NAMES)
        return list(found)

    assert renamed() == list(NAMES)
    assert renamed(Rename("model.", "")) == ["a.weight", "b.weight", "head"]
    both = renamed(Rename("model.", "x."), Rename("x.", "y."))
    assert both == ["y.a.weight", "y.b.weight", "head"]
    for strict in (False, True):
        if strict:
            with pytest.raises(UsageError, match=r"changes no name; near names: .*model[.]a"):
                renamed(Rename("modal.a.", "x."))
        else:
            assert renamed(Rename("modal.a.", "x."), strict=False) == list(NAMES)


def test_two_names_do_not_become_one_and_none_becomes_empty() -> None:
    for rule, said in (
        (Rename("model.b.", "model.a."), "'model.a.weight' and 'model.b.weight' the same name"),
        (Rename("head", ""), "leaves nothing of the name 'head'"),
    ):
        for strict in (False, True):
            with pytest.raises(UsageError, match=re.escape(said)):
                rename_names(NAMES, [rule], "m", strict=strict)


def test_files_beside_a_model_are_held_to_the_manifest_by_name_and_weights_by_order() -> None:
    def weights(name: str, size: int = 8, outside: str = "o", sha256: str = "s") -> dict[str, Any]:
        return {"name": name, "size": size, "outside": outside, "sha256": sha256}

    def text(name: str, sha256: str = "t") -> dict[str, Any]:
        return {"name": name, "sha256": sha256}

    def told(before: Any, now: Any, *, tensors: bool = False) -> list[tuple[str, str]]:
        found = manifest._file_differences(before, now, tensors)
        return [(one["key"], one["what"]) for one in found]

    good = [weights("a"), weights("b"), text("config.json"), text("t.json")]
    renamed = [weights("x"), weights("y"), *good[2:]]
    assert told(good, good) == told(good, renamed) == told([], []) == []
    assert told(good, good[1:]) == [("b", "the manifest has 2 files of weights, the model 1")]
    assert told(good[:1], []) == [("", "the manifest has 1 files of weights, the model 0")]
    for change, what in (
        ({"size": 9, "outside": "x", "sha256": "x"}, "has 9 bytes, the manifest says 8"),
        ({"outside": "x", "sha256": "x"}, manifest._OUTSIDE),
        ({"sha256": "x"}, "the file's bytes differ"),
    ):
        now = [weights("x", **change), *good[1:]]
        assert told(good, now) == [("x", what)]
        hidden = change.keys() == {"sha256"}
        assert told(good, now, tensors=True) == ([] if hidden else [("x", what)])
    assert told(good, good[:3]) == [("t.json", "missing beside the model")]
    assert told(good[:3], good) == [("t.json", "not in the manifest")]
    assert told(good, [*good[:3], text("t.json", "x")]) == [("t.json", "its text differs")]
    assert told([*good[:2], text("a.txt")], [*good[:2], text("b.txt")]) == [
        ("a.txt", "missing beside the model"),
        ("b.txt", "not in the manifest"),
    ]


def test_a_rule_leaves_out_the_components_that_both_prefixes_end_in() -> None:
    def rule(old: str, new: str) -> tuple[str, str] | None:
        found = renames._shortest_prefix_rule(old, new)
        return None if found is None else (found.old, found.new)

    assert rule("a.model.layers.", "model.layers.") == ("a.", "")
    assert rule("model.layers.", "a.model.layers.") == ("", "a.")
    assert rule("a.x.layers.", "b.x.layers.") == ("a.", "b.")
    assert rule("a.b.", "c.") == ("a.b.", "c.") and rule("a.b.", "b.a.") == ("a.b.", "b.a.")
    assert rule("a.b.", "a.b.") is None and rule("", "") is None
