"""What became of things that nothing reads, and what scales a source implies, each by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.conversion import accounting, dialects
from aprfmt.conversion.accounting import Account, SourceItem, describe_losses
from aprfmt.errors import ArchError
from aprfmt.model.ledger import Item

# --- an account -----------------------------------------------------------------------------------


def unread(
    monkeypatch: pytest.MonkeyPatch,
    states: dict[tuple[str, str], str],
    items: list[tuple[str, str]],
    *,
    excused: str = "",
    edited: frozenset[tuple[str, str]] = frozenset(),
    unreadable: tuple[str, ...] = (),
) -> list[SourceItem]:
    rows = [
        SimpleNamespace(kind=kind, name=name, state=state) for (kind, name), state in states.items()
    ]
    monkeypatch.setattr(accounting, "make_ledger", lambda model, kinds: None)
    monkeypatch.setattr(accounting, "list_not_compared", lambda mine, other, kinds: rows)
    held: Any = SimpleNamespace(
        mine=SimpleNamespace(
            items=[
                Item(kind, name, "unread")  # type: ignore[arg-type]
                for kind, name in items
            ]
        ),
        copy=None,
        edited=edited,
        excused=lambda name: f"left out: {name}" if name == excused else "",
        unreadable=[
            SimpleNamespace(kind="file", name=name, why="is torn", state="unreadable")
            for name in unreadable
        ],
    )
    return list(accounting._Comparison.unread(held))


KEY = ("metadata key", "k")


def test_what_nothing_reads_is_told_by_what_the_copy_holds_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for state, fate, how in (
        ("equal", "copied", ""),
        ("unequal", "transformed", accounting._OTHER_VALUE),
        ("only in A", "dropped", accounting._NO_PLACE),
        ("unreadable", "transformed", accounting._NOT_READ),
    ):
        given = {KEY: state}
        assert unread(monkeypatch, given, [KEY]) == [
            SourceItem("k", "unread metadata key", fate, how, state)  # type: ignore[arg-type]
        ]
        (one,) = unread(monkeypatch, given, [KEY], edited=frozenset({KEY}))
        asked = how and "changed as asked"
        assert (one.how, one.state) == (asked, None if how else state)
        (one,) = unread(monkeypatch, given, [KEY], excused="k")
        assert (one.fate, one.how, one.state) == (fate, "left out: k", None)
    assert unread(monkeypatch, {}, [KEY]) == [SourceItem("k", "unread metadata key", "copied")]
    # Keys of a configuration are left out with their file; weights and companions have entries.
    (one,) = unread(monkeypatch, {}, [("config key", "x")], excused="config.json")
    assert one.how == "left out: config.json"
    assert unread(monkeypatch, {}, [("tensor", "t"), ("file", "tokenizer.json")]) == []
    torn = unread(monkeypatch, {}, [], unreadable=("f", "g"), excused="g")
    assert torn == [
        SourceItem("f", "unread file", "dropped", "is torn", "unreadable"),
        SourceItem("g", "unread file", "dropped", "left out: g"),
    ]


def test_a_file_that_other_loaders_need_has_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """`code.py` is read and needed, and the copy has no place for it."""
    gone = [SimpleNamespace(kind="file", name="code.py", state="only in A")]
    monkeypatch.setattr(accounting, "make_ledger", lambda model, kinds: None)
    for needed, lacking, entries in ((True, gone, 1), (True, [], 0), (False, gone, 0)):
        monkeypatch.setattr(
            accounting, "list_not_compared", lambda mine, other, kinds, rows=lacking: rows
        )
        file = Item("file", "code.py", "text", needed=needed)
        held: Any = SimpleNamespace(
            mine=SimpleNamespace(items=[file]), copy=None, edited=frozenset(), unreadable=[],
            excused=lambda name: "",
        )  # fmt: skip
        found = list(accounting._Comparison.unread(held))
        assert [(row.name, row.fate, row.state) for row in found] == [
            ("code.py", "dropped", "only in A")
        ] * entries


class _NoArchitecture:
    """A model whose hyperparameters cannot be read."""

    @property
    def hyper(self) -> Any:
        raise ArchError("no table lists it")


@pytest.mark.parametrize(
    ("copy", "ties"),
    [
        (_NoArchitecture(), True),
        (SimpleNamespace(hyper={"tied_embeddings": True}), True),
        (SimpleNamespace(hyper={"tied_embeddings": False}), False),
    ],
)
def test_a_copy_without_an_architecture_may_tie_its_head(copy: Any, ties: bool) -> None:
    held: Any = SimpleNamespace(copy=copy)
    assert accounting._Comparison._has_tied_head(held) is ties


def test_an_account_counts_its_entries_by_what_became_of_them() -> None:
    rows = [
        SourceItem("a", "tensor", "copied"),
        SourceItem("b", "tensor", "lost", "gone"),
        SourceItem("c", "unread file", "dropped", "no place", "only in A"),
        SourceItem("d", "unread metadata key", "transformed", "other", "unequal"),
        SourceItem("e", "unread metadata key", "copied", "", "equal"),
    ]
    account = Account(tuple(rows))
    assert account.counts == {"copied": 2, "transformed": 1, "dropped": 1, "lost": 1}
    assert account.lost == (rows[1],)
    assert account.says == "5 of the source: 2 copied, 1 transformed, 1 dropped, 1 lost"
    assert Account(()).says == "0 of the source: nothing"
    left = [(one.kind, one.name, one.state, one.why, one.side) for one in account.left]
    assert left == [
        ("file", "c", "only in A", "no place", "the source"),
        ("metadata key", "d", "unequal", "other", ""),
    ]
    body = account.to_json()
    assert (body["items"], body["lost"], len(body["entries"])) == (5, 1, 5)
    for count in (1, 5, 6):
        text = describe_losses([SourceItem(f"t{i}", "tensor", "lost") for i in range(count)])
        shown = ", ".join(f"t{i} (tensor)" for i in range(min(count, 5)))
        assert text == shown + " ..." * (count > 5)


# --- scales ---------------------------------------------------------------------------------------


def test_scales_have_the_encoding_that_the_source_implies() -> None:
    def part(encoding: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(encoding=encoding))

    def implied(encoding: str, runs: Any = None, *sources: dict[str, str]) -> str:
        held = [
            SimpleNamespace(parts={key: part(value) for key, value in one.items()})
            for one in sources
        ]
        output: Any = SimpleNamespace(source_encoding=encoding, runs=runs, sources=held)
        return dialects._scale_encoding(output)

    for name in ("F32", "F16", "BF16"):
        assert implied(name) == implied(name, [1], {".scales": "F32"}) == name
        for key in (".scales", ".weight_scale"):
            assert implied("GPTQ", None, {".qweight": "I32", key: name}) == name
    assert implied("Q4_0", [1]) == implied("Q8_0", [], {".scales": "BF16"}) == "F16"
    assert implied("FP8", None, {".weight_scale": "F8_E4M3", ".other_scale": "BF16"}) == "BF16"
    assert implied("FP8", None, {".weight": "F32", ".weight_scale": "F8_E4M3"}) == ""
    assert implied("FP8") == implied("FP8", None, {".scales": "F16"}, {".scales": "F16"}) == ""
