"""Finds which rows of several tensors, read as one list, each row of a tensor equals.

The *source* of a row is the row of other tensors that it equals; a *place* is its number in the
list.

Equal values are found by a hash of their bits, at the cost of reading them; rows that were rounded
or quantized on the way by the nearest of some thousand rows. Rows that say nothing (all zeros) have
no source.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import ComputedRows, RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

MATCHED = 1 << 14  # rows up to which each is looked for
WINDOW = 1 << 20  # elements hashed at a time
_ODD = 0x9E3779B97F4A7C15  # multipliers of a row's values are odd numbers of 64 bits


class JoinedRows(ComputedRows):
    """The rows of several tensors with equal columns as one list, one tensor after the other."""

    def __init__(self, keys: Sequence[str], readers: Sequence[RowReader]) -> None:
        """Join the rows of `readers`, the tensors `keys`, in this order."""
        super().__init__(readers[0].side)
        self.keys, self.readers, self.columns = tuple(keys), tuple(readers), readers[0].columns
        self.starts = (0, *accumulate(reader.rows for reader in readers))
        self.rows = self.starts[-1]
        self.shape = (self.rows,) if self.columns == 1 else (self.rows, self.columns)
        self.encoding = "+".join(dict.fromkeys(reader.encoding for reader in readers))

    def take(self, index: "Array | list[int]") -> "Array":
        """Return the decoded rows with these numbers (int array, any order)."""
        index = np.asarray(index, np.int64)
        found = np.zeros((len(index), self.columns), np.float32)
        place = np.searchsorted(self.starts, index, side="right") - 1
        for i in np.unique(place).tolist():
            here = place == i
            values = self.readers[i].take(index[here] - self.starts[i])
            if values.dtype.itemsize > found.dtype.itemsize:
                found = found.astype(values.dtype)
            found[here] = values
        return found

    @cached_property
    def hashes(self) -> "Array":
        """Hash of every row's values (uint64 [rows])."""
        return np.concatenate([row_hashes(reader) for reader in self.readers])

    def owner(self, row: int) -> tuple[str, int]:
        """Return (key of the tensor, row number there) of a row of the joined list."""
        i = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.keys[i], row - self.starts[i]

    def drop(self) -> None:
        """Release decoded values and the mapped pages."""
        for reader in self.readers:
            reader.drop()


def row_hashes(reader: RowReader) -> "Array":
    """Return a hash of every row's values, uint64 [rows]; 0 for a row of zeros."""
    rng = np.random.default_rng(_ODD)
    by = rng.integers(0, 1 << 63, reader.columns, np.uint64) * np.uint64(2) + np.uint64(1)
    step = max(1, WINDOW // max(1, reader.columns))
    found = np.zeros(reader.rows, np.uint64)
    for start in range(0, reader.rows, step):
        stop = min(reader.rows, start + step)
        values = np.ascontiguousarray(reader.take(np.arange(start, stop)), np.float32)
        bits = (values + np.float32(0)).view(np.uint32).astype(np.uint64)  # -0 is 0
        bits ^= bits << np.uint64(29)
        found[start:stop] = (bits * by).sum(axis=1, dtype=np.uint64)
    reader.drop()
    return found


def find_sources(pool: RowReader, rows: RowReader, own: int, slack: float) -> "Array | None":
    """Return, for every row of `rows`, the equal row of `pool`, int64; -1 if there is none.

    Row i is expected at `own` + i, which is preferred. Among several equal rows the one that
    follows the row before is taken. `slack` is the relative distance that counts as equal. None
    where it is not 0 and there are too many rows to search for the nearest.
    """
    expected = own + np.arange(rows.rows)
    if slack == 0:
        theirs = pool.hashes if isinstance(pool, JoinedRows) else row_hashes(pool)
        return _match_hashes(row_hashes(rows), theirs, expected)
    if max(pool.rows, rows.rows) > MATCHED:
        return None
    x, y = to_float64(rows.whole), to_float64(pool.whole)
    rows.drop()
    pool.drop()
    if pool.columns == 1:
        return _nearest_values(x.reshape(-1), y.reshape(-1), expected, 2 * slack + 1e-6)
    if rows.columns > 64:  # as many random projections say as much, and cost less
        onto = np.random.default_rng(16).standard_normal((rows.columns, 32))
        x, y = np.nan_to_num(x) @ onto, np.nan_to_num(y) @ onto
    found = match_rows(x, y, slack)
    stays = (expected < pool.rows) & (found >= 0)
    near = np.zeros(len(found), bool)
    near[stays] = np.linalg.norm(x[stays] - y[expected[stays]], axis=1) <= (
        2 * slack + 1e-6
    ) * np.linalg.norm(x[stays], axis=1)
    return np.where(near, expected, found)


def _nearest_values(x: "Array", y: "Array", expected: "Array", slack: float) -> "Array":
    """Return the place in `y` of the nearest value for each of `x`; -1 if none is near enough.

    `slack` is relative. `expected` are preferred places, the only ones where zeros are found.
    """
    order = np.argsort(y, kind="stable")
    at = np.clip(np.searchsorted(y[order], x), 1, len(y) - 1)
    below, above = order[at - 1], order[at]
    found = np.where(np.abs(y[below] - x) <= np.abs(y[above] - x), below, above)
    limit = slack * np.abs(x)
    found = np.where((np.abs(y[found] - x) <= limit) & (x != 0), found, -1)
    inside = expected < len(y)
    stays = inside & (np.abs(y[np.minimum(expected, len(y) - 1)] - x) <= limit)
    return np.where(stays, expected, found)


def _match_hashes(mine: "Array", theirs: "Array", expected: "Array") -> "Array":
    """Return the place in `theirs` of every hash of `mine`; -1 if it is not there.

    `expected` are preferred places; else, of several, the one after the place before is taken. A
    hash of 0 (a row of zeros) is found only at its expected place.
    """
    # Look up every hash among the sorted ones.
    order = np.argsort(theirs, kind="stable")
    ordered = theirs[order]
    at = np.searchsorted(ordered, mine)
    there = at < len(ordered)
    equal = np.zeros(len(mine), bool)
    equal[there] = ordered[at[there]] == mine[there]
    found = np.where(equal, order[np.minimum(at, len(order) - 1)], -1)
    # Prefer the expected place, then the row after the one before.
    inside = expected < len(theirs)
    stays = np.zeros(len(mine), bool)
    stays[inside] = theirs[expected[inside]] == mine[inside]
    found = np.where(stays, expected, np.where(mine == 0, -1, found))
    for i in np.flatnonzero(~stays & (found >= 0)).tolist():
        following = found[i - 1] + 1 if i else -1
        if i and found[i - 1] >= 0 and following < len(theirs) and theirs[following] == mine[i]:
            found[i] = following
    return found.astype(np.int64)


def source_runs(at: "Array") -> list[tuple[int, int, int]]:
    """Return (first row, its source row, length) for every run of consecutive sources.

    `at` is the source of each row. A run of unknown rows has the source -1. [] without rows.
    """
    if not len(at):
        return []
    follows = np.where(at[:-1] < 0, at[1:] < 0, at[1:] == at[:-1] + 1)
    starts = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(at)]
    return [(first, int(at[first]), stop - first) for first, stop in pairwise(starts)]


def match_rows(a: "Array", b: "Array", slack: float) -> "Array":
    """Return for every row of `a` its row in `b` (both [n, columns]); -1 if there is none."""
    a, b = np.nan_to_num(to_float64(a)), np.nan_to_num(to_float64(b))
    return nearest_rows(a, b, 2 * slack + 1e-6, np.arange(len(a)))


def nearest_rows(a: "Array", b: "Array", slack: float, own: "Array") -> "Array":
    """Return for every row of `a` the nearest row of `b`; -1 if none is near enough.

    Near is a distance of at most `slack` times the row's norm. `own` are the rows' own numbers in
    `b`, which are preferred if near enough.
    """
    found = np.full(len(a), -1, np.int64)
    norm = np.einsum("ij,ij->i", b, b)
    for start in range(0, len(a), 1024):
        part = a[start : start + 1024]
        mine = np.einsum("ij,ij->i", part, part)
        away = mine[:, None] + norm[None, :] - 2.0 * (part @ b.T)
        at = away.argmin(axis=1)
        limit = np.maximum(slack**2, 1e-9) * mine
        near = away[np.arange(len(part)), at] <= limit
        found[start : start + 1024] = np.where(near, at, -1)
        mine_at = own[start : start + 1024]
        stays = away[np.arange(len(part)), mine_at] <= limit
        found[start : start + 1024][stays] = mine_at[stays]
    return found
