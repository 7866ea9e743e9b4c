"""A table of kernels that are checked when they are first asked for."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

DISABLED: dict[str, str] = {}
"""Kernels that failed their check: name -> why. Complete once all tables have been iterated."""


class CheckedTable(Mapping[K, V], Generic[K, V]):
    """A mapping of kernels, each checked by `check` on its first use.

    `check` returns "" for a kernel that passes. One that fails is absent from the mapping and named
    in DISABLED. `make` returns the rows when the first one is asked for.
    """

    def __init__(
        self, make: Callable[[], Mapping[K, V]], check: Callable[[K, V], str], label: str
    ) -> None:
        """Set how rows are made and checked; nothing is made yet.

        `make()` returns all rows, `check(key, row)` returns "" or what is wrong with a row. `label`
        formats a key as the name in DISABLED.
        """
        self._make = make
        self._check = check
        self._label = label
        self._passed: dict[K, bool] = {}

    @cached_property
    def rows(self) -> Mapping[K, V]:
        """All rows, checked or not."""
        return self._make()

    def __getitem__(self, key: K) -> V:
        """Return a row that passed its check; KeyError for every other key."""
        row = self.rows[key]
        if key not in self._passed:
            why = self._check(key, row)
            if why:
                DISABLED[self._label.format(key)] = why
            self._passed[key] = not why
        if not self._passed[key]:
            raise KeyError(key)
        return row

    def __iter__(self) -> Iterator[K]:
        """Return an iterator over the keys that pass; runs the checks that have not run."""
        return (key for key in self.rows if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def forget(self) -> None:
        """Forget which rows passed, so that each is checked again before its next use."""
        self._passed.clear()
