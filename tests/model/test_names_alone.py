"""Renames of tensors, by themselves: what they give, and what they may not."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import UsageError
from aprfmt.model import engine_state, manifest, rank_tensors, renames
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
    assert told(good, good[:3]) == [("t.json", "missing next to the model")]
    assert told(good[:3], good) == [("t.json", "not in the manifest")]
    assert told(good, [*good[:3], text("t.json", "x")]) == [("t.json", "its text differs")]
    assert told([*good[:2], text("a.txt")], [*good[:2], text("b.txt")]) == [
        ("a.txt", "missing next to the model"),
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


@pytest.mark.parametrize(
    ("published", "shares", "told"),
    [
        ([1, 2, 3, 4], [[1, 2], [0, 0]], "1"),
        ([1, 2, 3, 0], [[1, 2], [0, 0]], "1"),  # less than a share of it is zeros
        ([1, 2, 0, 0], [[1, 2], [0, 0]], ""),  # as much is
        ([0, 2, 0, 4, 5, 6], [[0, 0], [0, 4], [0, 0]], ""),
        ([0, 2, 3, 4, 5, 6], [[0, 0], [0, 4], [0, 0]], "0, 2"),
        ([1, 2, 3, 4], [[1, 2], [3, 4]], ""),
        ([1, 2, 3, 4], [[0, 0], [0, 0]], ""),  # all ranks: nothing was loaded at all
    ],
)
def test_a_share_of_zeros_is_one_that_its_rank_did_not_load(
    published: list[int], shares: list[list[int]], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(values: list[int]) -> Any:
        held = np.array(values, np.float32).tobytes()

        def raw(start: int = 0, stop: int | None = None) -> bytes:
            return held[start:stop]

        return SimpleNamespace(info=SimpleNamespace(nbytes=len(held)), raw=raw)

    monkeypatch.setattr(engine_state, "element_array", lambda x: np.array(x, np.float32))
    parts = tuple(map(part, shares))
    whole = rank_tensors.RankTensor("w", parts, tuple(range(len(parts))))
    reader: Any = SimpleNamespace(notes=[], _path=Path("state"))
    engine_state._StateReader._note_zeros(reader, whole, published)  # type: ignore[arg-type]
    says = [f"w: the share of rank {told} is zeros: not loaded"] if told else []
    assert [note.text for note in reader.notes] == says
