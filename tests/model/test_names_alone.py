"""Renames of tensors, by themselves: what they give, and what they may not."""

import re
from typing import Any

import pytest

from aprfmt.errors import UsageError
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
