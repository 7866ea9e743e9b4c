"""Store many rows of three integers as columns: eight bytes a number, objects only on request."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")
FEW = 16  # rows that stay a list


class Columns(Sequence[T], Generic[T]):
    """An immutable sequence of rows of three integers; `make` turns a row into an object."""

    def __init__(self, make: Callable[[int, int, int], T], columns: Sequence["array[int]"]) -> None:
        """Set the three columns, and the function that makes an object from a row's numbers."""
        self._make = make
        self._columns = tuple(columns)

    @classmethod
    def from_rows(
        cls, make: Callable[[int, int, int], T], rows: Sequence[tuple[int, int, int]]
    ) -> "Columns[T]":
        """Return the rows, given as tuples of three integers, as columns."""
        return cls(make, [array("q", column) for column in zip(*rows, strict=True)])

    @property
    def columns(self) -> tuple["array[int]", ...]:
        """The three columns, arrays of 64-bit integers."""
        return self._columns

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        """Return the object of row `at`, or the list of those of a slice."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        first, second, third = self._columns
        return self._make(first[at], second[at], third[at])

    def __iter__(self) -> Iterator[T]:
        return map(self._make, *self._columns)
