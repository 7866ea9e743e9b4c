"""One value where several may be given: Python would read a text as its letters."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value", bound="str | Path")


def listed(values: Value | Iterable[Value]) -> list[Value]:
    """Return the values as a list; a text or a path is one value."""
    return [values] if isinstance(values, str | Path) else list(values)
