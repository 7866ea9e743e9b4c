"""A diagnosis without the rows of a cause, or without any: it must not guess."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from aprfmt.causes.forward import table
from aprfmt.causes.forward.mismatch import Change
from aprfmt.diagnosis import search as searching


def without(monkeypatch: pytest.MonkeyPatch, cause: str = "") -> None:
    """Take away everything that can name a cause, or every cause ("")."""
    rows = tuple(row for row in table.TABLE if cause and row.cause != cause)
    monkeypatch.setattr(table, "TABLE", rows)
    for name in ("usual_mistakes", "single_layer_mistakes", "solve_masks", "solve_strided_masks"):
        monkeypatch.setattr(searching, name, _left(getattr(searching, name), cause))
    if cause in ("", "kv_cache", "positions"):
        monkeypatch.setattr(searching, "row_solvers", lambda case: ())


def _left(made: Callable[..., Iterable[Any]], cause: str) -> Callable[..., list[Any]]:
    def left(*args: Any) -> list[Any]:
        return [row for row in made(*args) if cause and _change(row).cause != cause]

    return left


def _change(row: Any) -> Change:
    found: Change = getattr(row, "change", row)
    return found
