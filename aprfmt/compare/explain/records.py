"""The guesses an explanation is made from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aprfmt.compare.records import Explanation

__all__ = ["Explanation", "Guess"]


@dataclass(frozen=True)
class Guess:
    """A hypothesis with its values filled in: both sides as they would be without the defect.

    `left` and `right` take row numbers (int array) of the tensor seen as [rows, last axis] and
    return values [n, columns]; they are equal where the guess is right. `rows` are the row
    numbers it speaks of, None for all. `slack` is the relative L2 distance that counts as equal.
    """

    cause: str
    says: tuple[str, ...]
    left: Callable[[Any], Any]
    right: Callable[[Any], Any]
    where: tuple[str, ...] = ()
    rows: Any = None
    slack: float = 0.0
