"""Comparing two traces point by point: equal tokens, positions and counts, or a refusal."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from aprfmt.errors import UsageError
from aprfmt.thresholds import DISCRETE, tolerance


class RecordLike(Protocol):
    """What is used of a record: where it was taken, its shape, positions and arithmetic."""

    @property
    def key(self) -> str:
        """`L3.attn_out`."""
        ...

    @property
    def point(self) -> str:
        """`attn_out`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the recorded values."""
        ...

    @property
    def positions(self) -> tuple[int, ...] | None:
        """Token positions of the rows, None where not known."""
        ...

    @property
    def dtype(self) -> str:
        """Of the arithmetic."""
        ...


class TraceLike(Protocol):
    """What is used of a trace."""

    @property
    def run(self) -> Mapping[str, Any]:
        """Ids, prompt, model."""
        ...

    @property
    def records(self) -> Mapping[str, RecordLike]:
        """By key, in execution order."""
        ...

    def find(self, key: str) -> RecordLike | None:
        """Return the record of a key or of the key it equals."""
        ...

    def values(self, key: str) -> Any:
        """Return the recorded values, None where only statistics were kept."""
        ...


@dataclass(frozen=True, slots=True)
class PointDiff:
    """One point of both traces. `why` says what keeps it from being compared, else "".

    `rel_l2` is ||a-b|| / ||b||, b being the reference; `max_abs_diff` stands with the index.
    """

    key: str
    rel_l2: float | None
    max_abs_diff: float | None
    max_at: tuple[int, ...] | None
    tolerance: float
    beyond: bool
    why: str = ""


@dataclass(frozen=True)
class TraceDiff:
    """All points in execution order, and the first one beyond its tolerance."""

    points: tuple[PointDiff, ...]
    first: str | None
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]

    @property
    def compared(self) -> int:
        """How many points had numbers on both sides."""
        return sum(point.rel_l2 is not None for point in self.points)

    @property
    def exit_code(self) -> int:
        """0 all within, 1 one beyond, 2 nothing could be compared."""
        if not self.compared:
            return 2
        return 1 if self.first is not None else 0

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "first": self.first,
            "compared": self.compared,
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
            "points": [asdict(point) for point in self.points],
        }


def compare_traces(a: TraceLike, b: TraceLike, *, moe: bool = False) -> TraceDiff:
    """Compare `a` with the reference `b`; UsageError where their tokens are not the same."""
    ids_a, ids_b = a.run.get("ids"), b.run.get("ids")
    if ids_a is not None and ids_b is not None and list(ids_a) != list(ids_b):
        at = next(
            (i for i, pair in enumerate(zip(ids_a, ids_b, strict=False)) if pair[0] != pair[1]),
            min(len(ids_a), len(ids_b)),
        )
        raise UsageError(
            f"the traces are of other tokens: {len(ids_a)} against {len(ids_b)} ids, the first "
            f"difference at {at}; give both the same --ids"
        )
    points = [_point(key, a, b, moe) for key in a.records if b.find(key) is not None]
    first = next((point.key for point in points if point.beyond), None)
    return TraceDiff(
        tuple(points),
        first,
        tuple(key for key in a.records if b.find(key) is None),
        tuple(key for key in b.records if a.find(key) is None),
    )


def _point(key: str, a: TraceLike, b: TraceLike, moe: bool) -> PointDiff:
    import numpy as np

    mine, other = a.find(key), b.find(key)
    assert mine is not None and other is not None
    bound = tolerance(mine.dtype, other.dtype, moe=moe).rel_l2
    why = _unlike(mine, other)
    x, y = a.values(key), b.values(key)
    if not why and (x is None or y is None):
        why = "only statistics were kept; save the values"
    if why:
        return PointDiff(key, None, None, None, bound, False, why)
    x, y = np.asarray(x, np.float64).reshape(-1), np.asarray(y, np.float64).reshape(-1)
    finite = np.isfinite(x) & np.isfinite(y)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    delta = np.where(finite, np.abs(x - y), np.where(same, 0.0, np.inf))
    norm = float(np.sqrt(np.sum(np.where(finite, y, 0.0) ** 2)))
    distance = float(np.sqrt(np.sum(np.where(finite, delta, 0.0) ** 2)))
    rel = np.inf if np.isinf(delta).any() else distance / norm if norm else np.inf * (distance > 0)
    rel = 0.0 if np.isnan(rel) else float(rel)
    at = int(np.argmax(delta)) if delta.size else 0
    index = tuple(int(i) for i in np.unravel_index(at, mine.shape)) if delta.size else None
    beyond = rel > bound and mine.point not in DISCRETE
    largest = float(delta[at]) if delta.size else 0.0
    return PointDiff(key, rel, largest, index, bound, beyond)


def _unlike(a: RecordLike, b: RecordLike) -> str:
    """Say why two records cannot be compared, "" if they can."""
    if a.positions is not None and b.positions is not None and a.positions != b.positions:
        return f"rows of {len(a.positions)} positions against {len(b.positions)}"
    count_a, count_b = 1, 1
    for size in a.shape:
        count_a *= size
    for size in b.shape:
        count_b *= size
    if count_a != count_b:
        return f"{count_a} values {list(a.shape)} against {count_b} {list(b.shape)}"
    return ""
