"""Items that nothing reads, and what a verdict says of them, each rule by itself.

Seen red: an entry of the index without its tensor as a part of the file, a parameter's second copy
without effect, a section that raises as an empty one, five items counted as two.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.errors import FormatError
from aprfmt.model import ledger, resolve
from aprfmt.model.ledger import Item, NotCompared, State
from aprfmt.model.verdict import Compared, VerdictWords, pronounce

WORDS = VerdictWords("equal", "different")
Builder: Any = ledger._LedgerBuilder


def builder(**fields: Any) -> Any:
    """Return a builder's fields without a file, and with the list of what it could not read."""
    model = SimpleNamespace(**{"path": Path("m"), "kind": None, **fields.pop("model", {})})
    made = SimpleNamespace(model=model, unreadable=[], **fields)
    made._add_unreadable = partial(Builder._add_unreadable, made)
    return made


def readings(items: Iterator[Item]) -> Mapping[str, str]:
    return {item.name: item.reading for item in items}


def test_an_entry_of_the_index_is_contradicted_where_its_tensor_is_not_there() -> None:
    source = SimpleNamespace(
        files=[Path("one.safetensors")], tensors={"a": None}, index_metadata={},
        weight_map={"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"},
    )  # fmt: skip
    items = list(Builder.index_entries(builder(model={"source": source})))
    assert [(item.name, item.reading, item.of) for item in items] == [
        ("a", "part of", "one.safetensors"),
        ("b", "contradicted", "one.safetensors does not hold it"),
        ("c", "contradicted", "two.safetensors is not there"),
    ]


def test_a_parameter_that_is_stored_again_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another layout, or beside its packed form."""
    view = SimpleNamespace(names=("first",))
    resolution = SimpleNamespace(
        stored_again={"second": "L0.ffn_up.weight"}, buffers=("buffer",), draft=(), unread=None,
        roles={"L0.ffn_up.weight": view},
    )  # fmt: skip
    names = ("first", "second", "buffer", "plain", "other")
    source = SimpleNamespace(tensors=dict.fromkeys(names))
    made = builder(
        model={
            "source": source, "resolution": resolution, "style": "hf",
            "plain_duplicates": ("plain",),
        },
        spec=SimpleNamespace(derived=()), towers=(),
    )  # fmt: skip
    made._readings_by_name = partial(Builder._readings_by_name, made)
    monkeypatch.setattr(ledger, "weights_of_parts", lambda model: {})
    assert readings(Builder.tensors(made)) == {
        "first": "role", "second": "unread", "buffer": "without effect", "plain": "unread",
        "other": "unread",
    }  # fmt: skip


def test_an_importance_matrix_has_sums_and_counts_alone() -> None:
    tensors = dict.fromkeys(("blk.0.ffn_up.weight.in_sum2", "blk.0.ffn_up.weight.counts", "other"))
    made = builder(model={"source": SimpleNamespace(tensors=tensors)})
    found = readings(Builder._special_tensors(made, "imatrix"))
    assert list(found.values()) == ["role", "role", "unread"]


def test_a_section_that_raises_is_unreadable() -> None:
    """What it gave before stays."""
    made = builder()

    def keys() -> Iterator[Item]:
        yield Item("config key", "first", "text")
        raise FormatError("m: no JSON")

    assert readings(Builder._yield_until_error(made, keys)) == {"first": "text"}
    assert made.unreadable == [NotCompared("section", "keys", "unreadable", "no JSON")]


def test_an_architecture_that_cannot_be_read_may_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(model: Any) -> Any:
        raise FormatError("no JSON")

    for names, stated in ((unreadable, True), (lambda model: (), False), (lambda m: ("x",), True)):
        monkeypatch.setattr(resolve, "architecture_names", names)
        assert Builder._states_architecture_or_kind(builder(spec=None)) is stated


@pytest.mark.parametrize("of_a_model", [False, True])
@pytest.mark.parametrize(("state", "code"), [("not reached", 2), ("unreadable", 2), ("unread", 0)])
def test_arrays_that_are_no_model_leave_a_verdict_open_too(
    state: State, code: int, of_a_model: bool
) -> None:
    left = (NotCompared("captured array", "L0.out", state),)
    assert (
        pronounce(WORDS, Compared(False, {"points": (3, 4)}, left, "", "", of_a_model)).exit == code
    )


def test_a_headline_counts_what_was_compared_and_every_item_that_was_not() -> None:
    assert Compared(False, {"tensors": (48, 50), "keys": (7, 7)}).counts_text == (
        "48 of 50 tensors, 7 keys"
    )
    kinds = ["file", "tensor", "config key", *["metadata key"] * 5]
    left = tuple(NotCompared(kind, f"n{i}", "unreadable") for i, kind in enumerate(kinds))
    said = pronounce(WORDS, Compared(False, {"tensors": (48, 50)}, left)).says
    assert said.startswith("not decided, 48 of 50 tensors; ") and said.endswith("; 5 more")
