"""One value where several may be given, and the first of several as text."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

NAMED = 2  # places that a line names, of several; JSON has all

Value = TypeVar("Value", bound="str | Path")


def listed(values: Value | Iterable[Value]) -> list[Value]:
    """Return the values as a list; a text or a path is one value, and not its letters."""
    if isinstance(values, Iterable) and not isinstance(values, str):
        return list(values)
    return [values]


def join_first(items: Sequence[object], count: int) -> str:
    """Return the first `count` items joined with commas, with ", ..." if there are more."""
    return ", ".join(map(str, items[:count])) + (", ..." if len(items) > count else "")


def join_moves(
    moves: Sequence[tuple[int, int]], count: int, label: Callable[[int], str] = str
) -> str:
    """Return the first `count` of (number in A, number in B) as "3 of A is 7 of B and 2 more".

    `label` gives the words for a number.
    """
    shown = ", ".join(f"{label(i)} of A is {label(j)} of B" for i, j in moves[:count])
    return shown + (f" and {len(moves) - count} more" if len(moves) > count else "")
