"""Lists in messages: up to a number all are named, beyond it the others are counted."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.errors import FormatError
from aprfmt.model import completeness, engine_state, verdict
from aprfmt.model.ledger import NotCompared


def test_what_may_be_missing_is_offered_and_beyond_five_left_out() -> None:
    for missing, vital, offered, more in ((4, 0, 4, 0), (5, 0, 5, 0), (6, 0, 5, 1), (6, 1, 5, 0)):
        keys = tuple(f"role_{at}.weight" for at in range(missing))
        coverage = SimpleNamespace(
            missing=keys, required=keys, vital=set(keys[:vital]), expected=missing + 1
        )
        found: Any = SimpleNamespace(
            coverage=coverage,
            unread=None,
            unread_roles=set(),
            spec=SimpleNamespace(name="x"),
            asked=False,
        )
        with pytest.raises(FormatError) as raised:
            completeness.require_complete(found, "m.gguf", FormatError)
        text = str(raised.value)
        assert text.startswith(f"m.gguf: {missing} of {missing + 1} tensors are missing that x")
        assert text.count(completeness.OPTION) == offered
        assert text.endswith(" ...") is bool(more)
        assert re.findall(rf"{completeness.OPTION} (\S+)", text) == list(keys[vital:][:offered])
    coverage.vital = set(keys)
    with pytest.raises(FormatError, match=r"; get the file again$"):
        completeness.require_complete(found, "m.gguf", FormatError)
    found.unread, found.unread_roles = SimpleNamespace(refusal="packed"), {keys[0], "other"}
    with pytest.raises(FormatError, match=r"^m[.]gguf: packed$"):
        completeness.require_complete(found, "m.gguf", FormatError)
    found.unread_roles = {"other"}
    with pytest.raises(FormatError, match="are missing"):
        completeness.require_complete(found, "m.gguf", FormatError)
    coverage.missing = ()
    completeness.require_complete(found, "m.gguf", FormatError)


def test_three_parameters_without_numbers_are_named() -> None:
    for count, said in ((1, "(p0)"), (3, "(p0, p1, p2)"), (4, "(p0, p1, p2 and 1 more)")):
        reader: Any = SimpleNamespace(_empty=[f"p{i}" for i in range(count)], notes=[], _path="s")
        engine_state._StateReader.note_released(reader)
        (note,) = reader.notes
        assert note.text.startswith(f"{count} parameters hold no numbers") and said in note.text
    reader = SimpleNamespace(_empty=[], notes=[], _path="s")
    engine_state._StateReader.note_released(reader)
    assert not reader.notes


def test_two_items_of_a_kind_are_named_and_of_more_the_count() -> None:
    def rows(count: int, kind: str = "tensor", side: str = "A") -> list[NotCompared]:
        return [NotCompared(kind, f"{kind[0]}{i}", "unread", "", side) for i in range(count)]

    assert verdict._list_items("left", []) == ""
    assert verdict._list_items("left", rows(1)) == "left: tensor t0 of A"
    assert verdict._list_items("left", rows(2)) == "left: tensor t0 of A; tensor t1 of A"
    assert verdict._list_items("left", rows(3)) == "left: 3 tensors of A: t0, t1, ..."
    many = [row for kind in ("tensor", "key", "scale") for row in rows(3, kind)]
    listed = (
        "left: 3 tensors of A: t0, t1, ...; 3 keys of A: k0, k1, ...; 3 scales of A: s0, s1, ..."
    )
    assert verdict._list_items("left", many) == listed
    assert verdict._list_items("left", [*many, *rows(5, "index entry")]) == f"{listed}; 5 more"
    assert verdict._list_items("left", [*rows(2), *rows(2, side="B")]).endswith("; 1 more")
