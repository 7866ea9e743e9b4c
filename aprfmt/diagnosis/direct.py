"""Two traces side by side: every point both have, rows by position, neighbours before a verdict."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.compare.nonfinite import NonFinite, census
from aprfmt.compare.rows import spans
from aprfmt.compare.thresholds import BASE, DISCRETE, tolerance
from aprfmt.compare.traces import TraceLike
from aprfmt.diagnosis.measure import (
    NO_VALUES,
    apart,
    axis_of,
    fit,
    near_keys,
    rel,
    takes_masks,
)
from aprfmt.diagnosis.records import Evidence, Finding
from aprfmt.errors import UsageError
from aprfmt.inference.capture import key_name, parse_key
from aprfmt.inference.points import POINTS

Array = NDArray[Any]
OTHER_ROWS = "no row of it is of the same position"
SHOWN = 8  # points that are named where both sides are not finite
NO_POINT = (1 << 30, 0)  # the place of what is no point of its own


@dataclass(frozen=True)
class Pair:
    """One point of both traces: how far apart, on which rows; `why` where it is not comparable.

    `odd` places what is not finite, and `rest` is the distance of all else.
    """

    key: str
    residual: float | None
    tolerance: float
    rows: str = ""
    why: str = ""
    odd: NonFinite | None = None
    rest: float = 0.0

    @property
    def alone(self) -> bool:
        """One side is not finite where the other holds something else."""
        return self.odd is not None and self.odd.alone > 0

    @property
    def beyond(self) -> bool:
        """The distance is outside the tolerance of whole runs, or one side alone is no number."""
        point = self.key.rpartition(".")[2]
        return self.alone or (
            self.residual is not None
            and not self.residual <= self.tolerance
            and point not in DISCRETE
        )


def keys_of(a: TraceLike, b: TraceLike) -> list[str]:
    """Return the keys both traces have, in execution order."""
    both = [key for key in a.records if b.find(key) is not None]
    both += [key for key in b.records if key not in a.records and a.find(key) is not None]
    return sorted({key for key in both if place_of(key) != NO_POINT}, key=place_of)


def joined(a: TraceLike, b: TraceLike) -> list[str]:
    """Say which stages of several points (an APRT folder's qkv) were left out."""
    keys = [key for key in dict.fromkeys((*a.records, *b.records)) if place_of(key) == NO_POINT]
    return [f"{key}: several points in one; give --model to take them apart" for key in keys]


def place_of(key: str) -> tuple[int, int]:
    """Return where a key stands in the order of execution; keys of no point come last."""
    order = {name: i for i, name in enumerate(POINTS)}
    try:
        point, layer = parse_key(key)
    except UsageError:
        return NO_POINT
    if layer < 0:
        return (-1 if point.startswith("embd") else 1 << 29, order[point])
    return (layer, order[point])


def compared(a: TraceLike, b: TraceLike, moe: bool) -> list[Pair]:
    """Return every point that both traces have, in execution order."""
    return [one(key, a, b, moe) for key in keys_of(a, b)]


def bounds(pairs: Sequence[Pair], a: TraceLike, b: TraceLike) -> Iterator[tuple[float, str]]:
    """Yield the tolerance of every compared point, with the coarser arithmetic's dtype."""
    for pair in pairs:
        mine, other = a.find(pair.key), b.find(pair.key)
        if pair.residual is not None and mine is not None and other is not None:
            both = (mine.dtype, other.dtype)
            yield pair.tolerance, max(both, key=lambda dtype: BASE[dtype].rel_l2)


def one(key: str, a: TraceLike, b: TraceLike, moe: bool) -> Pair:
    """Compare one point on the rows both have, which go by token position where both say it."""
    mine, other = a.find(key), b.find(key)
    assert mine is not None and other is not None
    bound = tolerance(mine.dtype, other.dtype, moe=moe).rel_l2
    x, y = a.values(key), b.values(key)
    if x is None or y is None:
        return Pair(key, None, bound, why="only statistics were kept")
    x, y = np.asarray(x), np.asarray(y)
    if x.size and y.size and not (x.any() or y.any()) and mine.point not in DISCRETE:
        return Pair(key, None, bound, why=NO_VALUES)
    axis, note = axis_of(key), ""
    if mine.positions and other.positions and mine.positions != other.positions:
        both = sorted(set(mine.positions) & set(other.positions))
        cut = [_rows_of(each, record.positions, both, axis)
               for each, record in ((x, mine), (y, other))]  # fmt: skip
        uncut = POINTS[mine.point].rows != "keys" and any(each is None for each in cut)
        if not both or (uncut and x.size == y.size):
            return Pair(key, None, bound, why=OTHER_ROWS)
        if cut[0] is not None and cut[1] is not None:
            (x, y), note = cut, f"rows of positions {spans(both)}"
    if x.size == y.size and not note:
        odd = None if mine.point in DISCRETE else census(x, y)
        rest = rel(x, y) if odd is None else apart(x, y)
        return Pair(key, rel(x, y.reshape(x.shape)), bound, odd=odd, rest=rest)
    small, large = (x, y) if x.size < y.size else (y, x)
    few, many = (mine, other) if x.size < y.size else (other, mine)
    positions = few.positions
    if positions is not None and many.positions is not None and not note:
        index = {position: row for row, position in enumerate(many.positions)}
        if not all(position in index for position in positions):
            return Pair(key, None, bound, why=OTHER_ROWS)
        positions = tuple(index[position] for position in positions)
    shape = large.shape
    if axis >= len(shape) or (len(shape) == 1 and small.ndim == 1):
        return Pair(key, None, bound, why=f"{x.size} values against {y.size}")
    masked = takes_masks(key, a if x.size < y.size else b)
    given = None if note else positions
    seen = fit(small, given, few.dtype, shape, axis, shape[axis], masked)
    if seen is None:
        return Pair(key, None, bound, why=f"shape {list(x.shape)} against {list(y.shape)}")
    full, held = seen.both(large, axis)
    sides = (held, full) if x.size < y.size else (full, held)
    return Pair(key, seen.distance(large, axis), bound, note or seen.note, "", census(*sides),
                apart(*sides))  # fmt: skip


def _rows_of(
    values: Array, positions: Sequence[int] | None, wanted: Sequence[int], axis: int
) -> Array | None:
    """Return the rows of token positions; None where the values have no row for each."""
    if positions is None or axis >= values.ndim or values.shape[axis] != len(positions):
        return None
    row = {position: at for at, position in enumerate(positions)}
    return np.take(values, [row[position] for position in wanted], axis=axis)


def no_row_in_common(pairs: Sequence[Pair], a: TraceLike, b: TraceLike) -> str:
    """Say that two traces are of other token positions altogether, "" where they are not."""
    if not pairs or any(pair.why != OTHER_ROWS for pair in pairs):
        return ""
    mine, other = a.find(pairs[0].key), b.find(pairs[0].key)
    assert mine is not None and other is not None
    return (
        f"the traces have no row in common: {pairs[0].key} is of positions "
        f"{spans(mine.positions or ())} in A, {spans(other.positions or ())} in B; record both "
        "with the same --positions"
    )


def of_distances(
    found: Mapping[str, float], odd: Mapping[str, NonFinite], bound: float
) -> list[Pair]:
    """Return the points of two models' passes, from their distances and what is not finite."""
    return [
        Pair(key, value, bound, odd=odd.get(key), rest=math.inf) for key, value in found.items()
    ]


def neighbour(key: str, a: TraceLike, b: TraceLike, bound: float) -> str:
    """Return the point of A that B's value of `key` equals, "" where there is none.

    Sums with the residual stream count: `out` less `in` is what the layer added.
    """
    theirs = b.values(key)
    if theirs is None:
        return ""
    theirs = np.asarray(theirs)
    if not np.isfinite(theirs).all():
        return ""  # what is no number is like any other that is none
    for name, value in _around(key, a):
        if value.size == theirs.size and rel(value, theirs) <= bound:
            return name
    return ""


def _around(key: str, a: TraceLike) -> Iterator[tuple[str, Array]]:
    point, layer = parse_key(key)
    others = near_keys(key, layer)
    if layer >= 0:
        others += [key_name("out", layer - 1)] if layer else ["embd", "embd_scaled"]
    for other in others:
        if other != key and a.find(other) is not None:
            value = a.values(other)
            if value is not None:
                yield other, np.asarray(value)
    own = a.values(key)
    for stream in ("in", "mid"):
        if layer < 0 or own is None:
            continue
        value = a.values(key_name(stream, layer))
        if value is None and stream == "in" and layer:
            value = a.values(key_name("out", layer - 1))
        if value is not None and np.asarray(value).size == np.asarray(own).size:
            added = np.asarray(value).reshape(np.asarray(own).shape)
            yield f"{point} plus the residual stream", np.asarray(own) + added
            yield f"{point} less the residual stream", np.asarray(own) - added


def guess(key: str, a: TraceLike, b: TraceLike) -> tuple[str, str]:
    """Return the likeliest cause of a first divergence by its signature alone, and why."""
    x, y = a.values(key), b.values(key)
    point = key.rpartition(".")[2]
    if x is None or y is None or np.asarray(x).size != np.asarray(y).size:
        return "", ""
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return "", ""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64).reshape(np.asarray(x).shape)
    rows = x.reshape(len(x), -1)
    away = y.reshape(rows.shape) - rows
    if point in ("q", "k", "v", "attn_out", "ffn_gate", "ffn_up", "ffn_out", "router"):
        if len(rows) > 1 and np.linalg.norm(away - away.mean(0)) < 1e-3 * np.linalg.norm(away):
            return "missing_bias", "the difference is the same vector in every row"
    if point in ("probs",):
        upper = np.triu(np.ones(y.shape[-2:]), 1) > 0
        if np.abs(y[..., upper]).sum() > 1e-6:
            return "mask", "probabilities of later tokens are not zero"
        sums = y.sum(-1)
        if np.abs(sums - 1).max() > 1e-3:
            return "softmax_reduction", "rows of the probabilities do not sum to 1"
    if point.endswith("_rope") and rel(_lengths(x), _lengths(y)) < 1e-4:
        return "rope_theta", "the rotated vectors have equal lengths and other angles"
    factor = float(np.sum(x * y) / max(float(np.sum(x * x)), 1e-300))
    if rel(x * factor, y) < 1e-4:
        cause = "attention_scale" if point == "scores" else "multiplier"
        return cause, f"all values differ by the factor {factor:.6g}"
    if point.endswith("norm"):
        ratio = np.sum(rows * (rows + away), 1) / np.maximum(np.sum(rows * rows, 1), 1e-300)
        if rel(rows * ratio[:, None], rows + away) < 1e-4:
            return "norm_eps", "each row differs by a factor of its own"
    return "", ""


def other_rows(pairs: Sequence[Pair]) -> Finding | None:
    """Say that two traces which agree were compared on some of their rows only."""
    rows = [pair for pair in pairs if pair.rows]
    rows = [pair for pair in rows if POINTS[parse_key(pair.key)[0]].rows != "logits"]
    if not rows or any(pair.beyond for pair in pairs):
        return None
    return Finding(
        "capture_rows", f"the traces hold other rows ({rows[0].rows}); these agree",
        "capture", "same", tuple(pair.key for pair in rows[:8]), True, rows[0].key,
        max(pair.residual or 0.0 for pair in rows), None, "the rows both have",
    )  # fmt: skip


def by_signature(pairs: Sequence[Pair], a: TraceLike, b: TraceLike) -> Finding | None:
    """Name what two traces show without weights: neighbours first, then signatures."""
    broken = not_finite(pairs)
    if broken is not None:
        return broken
    beyond = [pair for pair in pairs if pair.beyond]
    if not beyond:
        return other_rows(pairs)
    first = beyond[0]
    moved = {
        pair.key: name for pair in beyond if (name := neighbour(pair.key, a, b, pair.tolerance))
    }
    if len(moved) == len(beyond):
        point, other = parse_key(first.key)[0], moved[first.key]
        return Finding(
            "capture_point",
            f"what B records as {point} is A's {other}; every other point agrees",
            "capture", "same", tuple(moved), True, first.key, first.residual, 0.0, first.key,
            {"recorded_as": point, "is": other},
        )  # fmt: skip
    cause, why = guess(first.key, a, b)
    return Finding(
        cause, why or f"{first.key} is the first point beyond its tolerance", "forward", "bug",
        (first.key,), False, first.key, first.residual, None, first.key,
    )  # fmt: skip


def not_finite(pairs: Sequence[Pair]) -> Finding | None:
    """Return the finding that one side alone has NaN or infinities, None where none has.

    Confirmed where the first such point's other values are within the tolerance of whole runs.
    """
    alone = [pair for pair in pairs if pair.alone]
    if not alone:
        return None
    first = alone[0]
    assert first.odd is not None
    more = f"; {len(alone) - 1} more points" if len(alone) > 1 else ""
    sure = first.rest <= first.tolerance
    side = first.odd.side if first.odd.side in ("A", "B") else ""
    return Finding(
        "nonfinite", f"{first.key}: {first.odd.says()}{more}", "forward", "bug",
        tuple(pair.key for pair in alone), sure, first.key, first.residual,
        first.rest if sure else None, f"{first.key}; after: its other values",
        {"nonfinite": {pair.key: asdict(pair.odd) for pair in alone if pair.odd}}, side,
    )  # fmt: skip


def both_sides(pairs: Sequence[Pair]) -> Iterator[Evidence]:
    """Yield the points at which both sides are not finite alike: no difference, and no number."""
    alike = [pair for pair in pairs if pair.odd is not None and pair.odd.both]
    for pair in alike[:SHOWN]:
        assert pair.odd is not None
        more = f" (and {len(alike) - SHOWN} more points)" if len(alike) > SHOWN else ""
        yield Evidence("forward", f"{pair.key}: {pair.odd.says()}{more}", (pair.key,),
                       float(pair.odd.both))  # fmt: skip


def _lengths(x: Array) -> Array:
    return np.asarray(np.linalg.norm(x, axis=-1))
