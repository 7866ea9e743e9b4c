"""Matches the rows of two traces by token position."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from aprfmt.base.sequences import join_first
from aprfmt.codecs.base import Array
from aprfmt.measure.distances import ValueBlocks
from aprfmt.measure.trace_view import RecordLike, TraceLike, WrappedTrace
from aprfmt.model.ledger import NotCompared, State
from aprfmt.tensors.stats import Stats

CHOSEN = ("logits", "logits_raw")  # points with rows that were asked for


@dataclass(frozen=True)
class CutRecord:
    """A record cut to some of its token positions."""

    key: str
    point: str
    shape: tuple[int, ...]
    positions: tuple[int, ...] | None
    dtype: str
    stats: Stats | None = None


class TraceOnSharedRows(WrappedTrace):
    """A trace whose logits are cut to the token positions that another trace has too."""

    def __init__(self, trace: TraceLike, other: TraceLike) -> None:
        """Wrap `trace`, to be cut to the rows of `other`."""
        super().__init__(trace)
        self._other = other

    def find_record(self, key: str) -> RecordLike | None:
        """Return the record of a key, its shape and positions cut; None without one."""
        found, kept = self._trace.find_record(key), self._shared_positions(key)
        if found is None or kept is None:
            return found
        shape = (len(kept), *found.shape[1:])
        return CutRecord(found.key, found.point, shape, kept, found.dtype)

    def recorded_values(self, key: str) -> Array | None:
        """Return the values of a key, cut to the shared rows; None without values."""
        return self._cut_rows(key, self._trace.recorded_values(key))

    def values_mask(self, key: str) -> Array | None:
        """Return which of the values are present, cut to the shared rows; None for all."""
        return self._cut_rows(key, self._trace.values_mask(key))

    def value_blocks(self, key: str) -> ValueBlocks | None:
        """Return the values of a capture point, to be read in blocks.

        None if only some of its rows are in both traces, so that a block would have other rows.
        """
        whole = self._shared_positions(key) is None
        return self._trace.value_blocks(key) if whole else None

    def _cut_rows(self, key: str, values: Array | None) -> Array | None:
        """Return the values of a key cut to the shared rows; unchanged if its rows are all shared.

        None for `values` None.
        """
        found, kept = self._trace.find_record(key), self._shared_positions(key)
        if values is None or found is None or kept is None:
            return values
        row = {position: at for at, position in enumerate(found.positions or ())}
        return np.take(np.reshape(values, found.shape), [row[place] for place in kept], axis=0)

    def _shared_positions(self, key: str) -> tuple[int, ...] | None:
        """Return the token positions of a point that both traces have; None to cut nothing.

        Only points of which a run may record chosen rows are cut.
        """
        mine, other = self._trace.find_record(key), self._other.find_record(key)
        if (
            mine is None
            or other is None
            or mine.point not in CHOSEN
            or not positions_differ(mine, other)
        ):
            return None
        both = tuple(sorted(set(mine.positions or ()) & set(other.positions or ())))
        sized = all(each.shape[:1] == (len(each.positions or ()),) for each in (mine, other))
        return both if both and sized and mine.shape[1:] == other.shape[1:] else None


def rows_of_one_side(a: TraceLike, b: TraceLike, keys: Collection[str]) -> tuple[NotCompared, ...]:
    """Return the rows of points that only one trace has, where both have other rows in common.

    `keys` are the points. Rows of `a` had to be compared with the reference `b`, and are
    `unreadable`; rows of `b` alone are `unread`.
    """
    found: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
    for key in keys:
        mine, other = a.find_record(key), b.find_record(key)
        if mine is None or other is None or not (mine.positions and other.positions):
            continue
        own, theirs = set(mine.positions), set(other.positions)
        for here, lone in ((True, own - theirs), (False, theirs - own)):
            if lone and own & theirs:
                found.setdefault((here, tuple(sorted(lone))), []).append(key)
    rows = []
    for (here, positions), named in found.items():
        more = f" and {len(named) - 1} more points" if len(named) > 1 else ""
        name = f"{named[0]}{more} at positions {positions_text(positions)}"
        state: State = "unreadable" if here else "unread"
        why = "the reference has no such rows" if here else "of the reference alone"
        rows.append(NotCompared("captured rows", name, state, why))
    return tuple(rows)


def positions_differ(a: RecordLike, b: RecordLike) -> bool:
    """Return whether the token positions of two records are known and different."""
    return a.positions is not None and b.positions is not None and a.positions != b.positions


def positions_text(numbers: Sequence[int]) -> str:
    """Return token positions as text: a range, or the first eight of many."""
    if len(numbers) > 4 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return join_first(numbers, 8)
