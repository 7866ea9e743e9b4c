"""Rows that other packages offer come after ours and never replace them."""

from importlib import metadata
from typing import Any

import pytest

from aprfmt.base import registry
from aprfmt.base.registry import Registry, offered_items
from aprfmt.causes import CAUSES
from aprfmt.errors import AprfmtError, BackendUnavailableError


def offering(monkeypatch: pytest.MonkeyPatch, **rows: str) -> None:
    """Let an installed package offer rows to any table."""

    def points(kind: str) -> list[Any]:
        return [metadata.EntryPoint(name, value, kind) for name, value in rows.items()]

    monkeypatch.setattr(registry, "installed_entry_points", points)
    offered_items.cache_clear()


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    offered_items.cache_clear()


def test_a_row_that_is_held_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    offering(monkeypatch, mine="math:pi", theirs="math:tau")
    table = Registry[Any]("things", {"named": "math:e"}, held={"mine": 1})
    assert table.own == ("mine", "named")
    assert table["mine"] == 1 and 2 < table["named"] < 3 < 6 < table["theirs"]
    assert list(table) == ["mine", "named", "theirs"]


def test_rows_without_an_order_of_their_own_come_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offering(monkeypatch, b="math:e", a="math:pi")
    assert [round(row) for row in offered_items("things")] == [3, 3] and offered_items("things")[
        0
    ] > 3


def test_a_package_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    offering(monkeypatch, gone="no_such_module_anywhere:ROW")
    with pytest.raises(BackendUnavailableError, match="the package that offers 'gone'"):
        offered_items("things")


def test_an_unknown_cause_is_one_line() -> None:
    with pytest.raises(AprfmtError, match=r"causes 'bit_rott' is not known; known: bit_rot"):
        CAUSES["bit_rott"]
