"""One value where several may be given: Python would read a text as its letters."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

Value = TypeVar("Value", bound="str | Path")


def listed(values: Value | Iterable[Value]) -> list[Value]:
    """Return the values as a list; a text or a path is one value."""
    if isinstance(values, Iterable) and not isinstance(values, str):
        return list(values)
    return [values]
