"""Many rows of whole numbers, kept as columns: eight bytes a number, an object only when asked."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")
FEW = 16  # rows that stay a list


class Columns(Sequence[T], Generic[T]):
    """Rows of three numbers, as `make` turns them into objects; never changed."""

    def __init__(self, make: Callable[[int, int, int], T], columns: Sequence["array[int]"]) -> None:
        self._make = make
        self._columns = tuple(columns)

    @classmethod
    def of(
        cls, make: Callable[[int, int, int], T], rows: Sequence[tuple[int, int, int]]
    ) -> "Columns[T]":
        """Return these rows."""
        return cls(make, [array("q", column) for column in zip(*rows, strict=True)])

    @property
    def columns(self) -> tuple["array[int]", ...]:
        """The numbers of all rows, a column each, 64-bit integers."""
        return self._columns

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        first, second, third = self._columns
        return self._make(first[at], second[at], third[at])

    def __iter__(self) -> Iterator[T]:
        return map(self._make, *self._columns)
