"""The guess of a hypothesis."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprfmt.measure.records import Explanation

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

__all__ = ["Explanation", "Guess", "Take"]

# Arrays made of arrays: values [n, columns] of row numbers, or other values of values.
Take = Callable[["Array"], "Array"]


@dataclass(frozen=True)
class Guess:
    """A hypothesis with its values filled in: both sides with the defect removed or applied.

    `left` and `right` take row numbers (int array) of the tensor seen as [rows, last axis] and
    return values [n, columns]; they are equal if the guess is right. `rows` are the rows the guess
    concerns, None for all. `slack` is the relative L2 distance that counts as equal. `constant`
    says that the statement itself is that one value stands everywhere: any other guess that gives
    a single value explains nothing.
    """

    cause: str
    says: tuple[str, ...]
    left: Take
    right: Take
    where: tuple[str, ...] = ()
    rows: "Array | None" = None
    slack: float = 0.0
    constant: bool = False
