"""One value where several may be given, and the first of several as text."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

NAMED = 2  # places that a line names, of several; JSON has all

Value = TypeVar("Value", bound="str | Path")
Item = TypeVar("Item")


def listed(values: Value | Iterable[Value]) -> list[Value]:
    """Return the values as a list; a text or a path is one value, and not its letters."""
    if isinstance(values, Iterable) and not isinstance(values, str):
        return list(values)
    return [values]


def join_first(items: Sequence[object], count: int) -> str:
    """Return the first `count` items joined with commas, with ", ..." if there are more."""
    return ", ".join(map(str, items[:count])) + (", ..." if len(items) > count else "")


def first_and_more(items: Sequence[Item], count: int, label: Callable[[Item], str] = str) -> str:
    """Return the first `count` items joined with commas, and how many more: "a, b and 3 more".

    `label` gives the words for an item.
    """
    shown = ", ".join(map(label, items[:count]))
    return shown + (f" and {len(items) - count} more" if len(items) > count else "")


def join_moves(
    moves: Sequence[tuple[int, int]], count: int, label: Callable[[int], str] = str
) -> str:
    """Return the first `count` of (number in A, number in B) as "3 of A is 7 of B and 2 more".

    `label` gives the words for a number.
    """
    return first_and_more(
        moves, count, lambda move: f"{label(move[0])} of A is {label(move[1])} of B"
    )
