"""Joined tensors (gate and up; q, k and v) that were written transposed as a whole.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

The roles are split from one stored tensor before they are compared. If its rows and columns were
exchanged, values cross from one projection into another, and no order of rows explains a projection
alone. So the exchange is tried on the joined values, in every order in which writers join them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.fused_layouts import fused_orders
from aprfmt.causes.tensor.row_sources import JoinedRows
from aprfmt.causes.tensor.transposition import samples_agree
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

MOST = 1 << 27  # values of one joined matrix, or of all experts' together, that are decoded
PROBES = 256  # values that are compared before all
WINDOW = 1 << 20  # values compared at a time


@dataclass(frozen=True)
class JoinedExchange:
    """Which axes of a joined tensor were exchanged, in words, and the relative distance left."""

    says: str
    residual: float


@dataclass(frozen=True)
class _StoredStack:
    """One way in which `count` joined matrices may be stored as a stack, with axes exchanged.

    `rows` has, for each stored row, its number in the joined matrix; `across`: its rows are the
    last axis. Axis i of the values under the stored shape is axis `axes[i]` of what was meant.
    """

    count: int
    rows: "Array"
    columns: int
    across: bool
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The stored shape: the stack's axis, then the two axes of a matrix."""
        sides = (self.columns, len(self.rows)) if self.across else (len(self.rows), self.columns)
        return (self.count, *sides)

    def number(self, places: "Array") -> "Array":
        """Return the index in the joined matrices of the value at each flat index in the file."""
        return self._number(np.unravel_index(places, self.shape))

    def source(self, places: "Array") -> "Array":
        """Return the flat index in the file that holds the value of each index, axes put right."""
        turned = np.unravel_index(places, [self.shape[axis] for axis in self.axes])
        return self._number([turned[self.axes.index(axis)] for axis in range(3)])

    def _number(self, at: "Sequence[Array]") -> "Array":
        """Return the flat index in the joined matrices of the values at three stored indices."""
        stack, first, second = at
        row, column = (second, first) if self.across else (first, second)
        found: Array = (stack * len(self.rows) + self.rows[row]) * self.columns + column
        return found


def find_joined_exchange(
    case: DifferingPair, parts: Sequence[tuple[str, int]], kv_heads: int, outer: int
) -> JoinedExchange | None:
    """Return the exchange of axes of the joined tensor that makes both sides equal, or None.

    `parts` are (name, rows) of what is joined, with the rows of all `outer` stacked matrices.
    `kv_heads` groups q, k and v, 0 for other parts.
    """
    assert isinstance(case.a, JoinedRows)
    inner = [(name, size // outer) for name, size in parts]
    count, columns = sum(size for _, size in inner), case.a.columns
    if columns == 1 or count * columns > MOST:
        return None
    # The rows of each stacked matrix, in the list of all parts' rows.
    places = np.concatenate(
        [
            start + np.arange(outer)[:, None] * size + np.arange(size)
            for start, (_, size) in zip(case.a.starts, inner, strict=False)
        ],
        axis=1,
    )
    names = f"[{' '.join(name for name, _ in parts)}]"
    for order, rows in (("", np.arange(count)), *fused_orders(inner, kv_heads)):
        for stored in _exchanges(outer, rows, columns):
            residual = _remaining_distance(case, places, stored)
            if residual is not None:
                whole = stored.axes[0] == 0
                each = " of each expert" if outer > 1 and whole else ""
                what = (
                    "rows and columns exchanged"
                    if whole
                    else f"the axes of the stack in the order {stored.axes}"
                )
                held = f"stored as {order}" if order else "stored as one"
                text = f"{names}{each}, {held}: B's joined tensor is A's with {what}"
                return JoinedExchange(text, residual)
    return None


def _exchanges(outer: int, rows: "Array", columns: int) -> Iterator[_StoredStack]:
    """Yield each possible exchange of axes of a stack of `outer` matrices.

    `rows` is the order of a matrix's rows, `columns` their length.
    """
    for across in (False, True):
        if not (across and len(rows) == columns):
            yield _StoredStack(1, rows, columns, across, (0, 2, 1))
    if outer < 2 or outer * len(rows) * columns > MOST:
        return
    for across in (False, True):
        for axes in permutations(range(3)):
            if axes[0] != 0:
                yield _StoredStack(outer, rows, columns, across, axes)


def _remaining_distance(case: DifferingPair, places: "Array", stored: _StoredStack) -> float | None:
    """Return the relative distance of the sides once B's exchange is undone; None if they differ.

    `places` are the joined rows of each stacked matrix, [experts, rows].
    """
    slack = case.slack()
    groups = places if stored.count == 1 else places.reshape(1, -1)
    size = math.prod(stored.shape)
    probe = np.unique(np.linspace(0, size - 1, min(PROBES, size)).astype(np.int64))
    there = _values_at(case.a, groups[0], stored.source(probe), stored.columns)
    here = _values_at(case.b, groups[0], stored.number(probe), stored.columns)
    if not samples_agree(there, here, slack):
        return None
    apart = whole = 0.0
    for rows in groups:
        x, y = (side.take(rows).reshape(-1) for side in (case.a, case.b))
        for start in range(0, size, WINDOW):
            window = np.arange(start, min(size, start + WINDOW))
            left, right = x[stored.source(window)], y[stored.number(window)]
            if not samples_agree(left, right, slack):
                return None
            delta = norms.exact_norm(to_float64(left) - to_float64(right))
            apart, whole = apart + delta**2, whole + norms.exact_norm(to_float64(left)) ** 2
    case.a.drop()
    case.b.drop()
    return math.sqrt(apart / whole) if whole else 0.0


def _values_at(side: RowReader, rows: "Array", numbers: "Array", columns: int) -> "Array":
    """Return a side's values at flat `numbers` in the matrix of the joined `rows`."""
    lines, at = np.unique(numbers // columns, return_inverse=True)
    found: Array = side.take(rows[lines])[at, numbers % columns]
    side.drop()
    return found
