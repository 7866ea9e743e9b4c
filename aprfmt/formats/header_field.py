"""Header fields with their bytes, as `aprfmt hex` prints them, one row each."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeaderField:
    """`nbytes` bytes at `offset` of the (expanded) file: the field's name and its value."""

    offset: int
    nbytes: int
    name: str
    value: str


def sequential_fields(
    rows: Iterator[tuple[str, int, object]] | list[tuple[str, int, object]],
) -> Iterator[HeaderField]:
    """Yield fields that follow one another from byte 0; rows are (name, bytes, value)."""
    at = 0
    for name, size, value in rows:
        yield HeaderField(at, size, name, str(value))
        at += size
