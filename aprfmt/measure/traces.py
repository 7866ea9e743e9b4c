"""Compares two traces point by point, and judges each point by its tolerance.

A and B are the two traces; a *side* is one of them, and B the reference. A *slot* is a name for
several points that are joined, as `qkv` for q, k and v.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.arch import ARCHS
from aprfmt.codecs.base import Array
from aprfmt.errors import UsageError
from aprfmt.measure import log_softmax, unit_lengths
from aprfmt.measure.distances import PointDistance, measure_blocks, measure_values
from aprfmt.measure.nonfinite import HasNonFinite, NonFinite
from aprfmt.measure.repeated_tokens import RepeatedTokens, repeated_tokens
from aprfmt.measure.tolerances import (
    DISCRETE,
    UNIT,
    CalibratedBound,
    Threshold,
    point_threshold,
    ratio_band,
)
from aprfmt.measure.trace_rows import TraceOnSharedRows, rows_of_one_side
from aprfmt.measure.trace_view import (
    RecordLike,
    TraceLike,
    backend_name,
    finer_weights_class,
    other_sequences,
    records_token_ids,
    run_arithmetic,
    shows_routing,
    unequal_rank_sentences,
)
from aprfmt.measure.unread_arrays import compare_unread_arrays
from aprfmt.model.ledger import NotCompared
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, pronounce

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array


@dataclass(frozen=True, slots=True)
class PointDiff(HasNonFinite):
    """The comparison of one point of two traces.

    `why` says what prevents the comparison, else "".
    `rel_l2` is ||a-b|| / ||b||, b being the reference, and `rel_l2_finite` the same over what is
    finite on both sides; `max_at` is the index of `max_abs_diff`; `max_over_rms` is it over the
    root mean square of the reference. `values` says how many were compared, `rows` of which token
    positions where the two hold others, or that rows are log-probabilities. `bits` says whether all
    are equal. `tolerance` bounds `rel_l2`, `max_tolerance` bounds `max_over_rms`, both for
    `reason`. `std_ratio` is a's deviation over b's on equal rows, `outside` whether it leaves its
    band: a hint where only statistics were recorded, and never a verdict. `nonfinite` locates NaN
    and infinities, indices in a's shape; one side alone having them is beyond every tolerance.
    `by_position` is `rel_l2` of each token position's values alone, where that was asked for: None
    for a position none of whose values are compared.
    """

    key: str
    rel_l2: float | None
    max_abs_diff: float | None
    max_at: tuple[int, ...] | None
    tolerance: float
    beyond: bool
    why: str = ""
    max_over_rms: float | None = None
    max_tolerance: float | None = None
    bits: bool = False
    values: int = 0
    reason: str = ""
    unit: str = UNIT
    std_ratio: float | None = None
    outside: bool = False
    nonfinite: NonFinite | None = None
    rel_l2_finite: float | None = None
    rows: str = ""
    by_position: tuple[float | None, ...] | None = None

    @property
    def with_sides_exchanged(self) -> "PointDiff":
        """The same distances, with the counts of NaN and infinities of A and B exchanged.

        For points where B was measured against A.
        """
        odd = self.nonfinite
        return self if odd is None else replace(self, nonfinite=odd.with_sides_exchanged)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The earliest token at which a point is beyond its tolerance, and the first such point.

    `dump_pass` is the pass of a dump that computed it, None where that is not known.
    """

    position: int
    key: str
    rel_l2: float
    dump_pass: int | None = None

    @property
    def text(self) -> str:
        """The first differing token in words: its position, the point and the distance."""
        where = "" if self.dump_pass is None else f" (pass {self.dump_pass})"
        return (
            f"first token: position {self.position}{where}, at {self.key}, {self.rel_l2:.3g} apart"
        )


_ROWS_TOGETHER = 1 << 18  # elements of token positions whose distances are computed at a time
_WORDS = VerdictWords("within tolerance", "beyond tolerance", "no verdict")
_EXACT = VerdictWords("every value equal", "values differ", "no verdict")


@dataclass(frozen=True)
class TraceDiff:
    """The comparison of two traces: all points in execution order, and the first one beyond."""

    points: tuple[PointDiff, ...]
    first: str | None
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    not_checked: tuple[str, ...] = ()  # what neither side says, so that it was taken on trust
    other_rows: tuple[str, ...] = ()  # points of other positions or counts: no verdict
    left: tuple[NotCompared, ...] = ()  # arrays of both that are no point
    unequal_ranks: tuple[str, ...] = ()  # what ranks of a dump should hold alike and do not
    first_token: "FirstToken | None" = None
    rounding_ratios: Mapping[str, float] = field(
        default_factory=dict
    )  # by key: see `rounding_ratios`
    accept: tuple[str, ...] = ()  # unread:PATTERN of those that the user accepts
    exact: bool = False  # values that differ within their tolerance differ all the same
    overflow: str = ""  # that the first point beyond exceeds a's float type: see `overflow_text`
    repeats: tuple[RepeatedTokens, ...] = ()  # requests of one dump with the same tokens

    @property
    def compared(self) -> int:
        """The number of points with values on both sides."""
        return sum(point.rel_l2 is not None for point in self.points)

    @property
    def unequal(self) -> tuple[str, ...]:
        """The keys of points with a value that differs, even within tolerance, in order."""
        return tuple(
            point.key
            for point in self.points
            if point.beyond or (point.rel_l2 is not None and bool(point.max_abs_diff))
        )

    @property
    def exit_code(self) -> int:
        """0 if all points are within tolerance, 1 if one is beyond, 2 if nothing could be compared.

        1 too where `exact` was asked for and a value differs.
        """
        return self.pronounced.exit

    @property
    def pronounced(self) -> Pronounced:
        """The verdict and exit code of two traces, with what was not compared.

        They differ where a point is beyond its tolerance (with `exact`: where any value differs),
        where ranks disagree, or where a repeated request does. Points recorded at other positions
        and arrays that belong to no capture point count as not compared.
        """
        why = {point.key: point.why for point in self.points}
        apart = [NotCompared("point", key, "unreadable", why[key]) for key in self.other_rows]
        counts = {"points": (self.compared, len(self.points))}
        differs = bool(self.unequal_ranks) or (self.first is not None and not apart)
        differs |= self.exact and bool(self.unequal) and not apart
        differs |= any(one.differs(self.exact) for one in self.repeats)
        left = self.left
        if not self.compared:  # equal arrays that are no point do not stand in for points
            left = tuple(
                replace(row, state="unread") if row.state == "equal" else row for row in left
            )
        return pronounce(
            _EXACT if self.exact else _WORDS,
            Compared(differs, counts, (*apart, *left)),
            self.accept,
        )

    def to_json(self) -> dict[str, object]:
        """Return the comparison as the object of `--json`: the summary and a row of every point."""
        return {
            "first": self.first,
            "compared": self.compared,
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
            "not_checked": list(self.not_checked),
            "other_rows": list(self.other_rows),
            "unequal_ranks": list(self.unequal_ranks),
            "first_token": None if self.first_token is None else asdict(self.first_token),
            "rounding_ratios": dict(self.rounding_ratios),
            "overflow": self.overflow,
            "exact": self.exact,
            "repeats": [asdict(one) for one in self.repeats],
            "points": [asdict(point) for point in self.points],
        }


def check_ids(a: TraceLike, b: TraceLike) -> None:
    """Raise UsageError where two traces are known to be of different token ids."""
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


def unrecorded_tokens_sentences(a: TraceLike, b: TraceLike) -> tuple[str, ...]:
    """Return a sentence for each side that does not record its token ids."""
    return tuple(
        f"token ids: {label} does not record them, so they were not checked"
        for label, trace in (("this trace", a), ("the reference", b))
        if not records_token_ids(trace)
    )


def common_keys(a: TraceLike, b: TraceLike) -> list[str]:
    """Return the keys of points that both traces have, in a's order.

    A key that only `b` records, and that `a` has under other names (an alias, or the points of a
    slot), comes after the last of these names.
    """
    order = {key: place for place, key in enumerate(a.records)}
    places = {key: (order[key], 0) for key in a.records if b.find_record(key) is not None}
    for key in b.records:
        if key not in order and a.find_record(key) is not None:
            named = [
                found.key
                for part in a.slot_parts(key)
                if (found := a.find_record(part)) is not None
            ]
            places[key] = (max((order[name] for name in named if name in order), default=-1), 1)
    return sorted(places, key=places.__getitem__)


@dataclass(frozen=True)
class RunPair:
    """Two runs, `a` and the reference `b`: all that a tolerance depends on besides the point.

    All commands compare values of two runs by this class, so that they agree about a point.
    `coarse` is half a unit of the last decimal of values that were printed.
    """

    backends: tuple[str, str]
    weights: str = "exact"
    moe: bool = False
    calibrated: Sequence[CalibratedBound] = ()
    coarse: float = 0.0

    @classmethod
    def from_traces(
        cls,
        a: TraceLike,
        b: TraceLike,
        *,
        moe: bool = False,
        calibrated: Sequence[CalibratedBound] = (),
    ) -> "RunPair":
        """Return the pair of two traces; `moe` says that the model is known to choose experts."""
        coarse = max(a.resolution, b.resolution)
        names = backend_name(a), backend_name(b)
        mixture = moe or shows_routing(a) or shows_routing(b)
        return cls(names, finer_weights_class(a, b), mixture, calibrated, coarse)

    def threshold_of(self, key: str, dtypes: tuple[str, str], point: str = "") -> Threshold:
        """Return the bound of the distance at a key, whose values were computed in these dtypes.

        `dtypes` are those of a and b. `point` is the one that was recorded, where the key is an
        alias.
        """
        layer = key[1:].partition(".")[0]
        return point_threshold(
            point or key.rpartition(".")[2], self.backends, dtypes, self.weights, moe=self.moe,
            depth=int(layer) if "." in key and layer.isdigit() else 0, calibrated=self.calibrated,
        )  # fmt: skip

    def compare(
        self, key: str, dtypes: tuple[str, str], x: "Array", y: "Array",
        chosen: "Array | None" = None, shape: tuple[int, ...] | None = None, point: str = "",
    ) -> PointDiff:  # fmt: skip
        """Return the comparison of two values of a point, judged by the point's tolerance.

        `x` and `y` have one size, `y` is the reference. Only values that are `chosen` (bool array;
        None for all) count. Indices are of `shape`, x's own if None. `point` is the one that was
        recorded, where the key is an alias.
        """
        bound, shape = (
            self.threshold_of(key, dtypes, point),
            np.shape(x) if shape is None else shape,
        )
        name, rows = point or key.rpartition(".")[2], ""
        if name == log_softmax.POINT and len(shape) > 1:
            sides = np.reshape(x, shape), np.reshape(y, shape)
            given = [log_softmax.is_log_softmax(side) for side in sides]
            if given[0] != given[1]:
                if given[0]:
                    y = log_softmax.shift_logits_onto(sides[1], sides[0])
                else:
                    x = log_softmax.shift_logits_onto(sides[0], sides[1])
                rows = log_softmax.NOTE
        if name == unit_lengths.POINT:
            given = [unit_lengths.has_length_one(side) for side in (x, y)]
            if given[0] != given[1]:
                x, y = unit_lengths.divide_by_length(x), unit_lengths.divide_by_length(y)
                rows = unit_lengths.NOTE
        chosen = None if chosen is None else np.reshape(chosen, -1)
        apart = measure_values(np.reshape(x, -1), np.reshape(y, -1), chosen, shape)
        if apart is None:
            return _uncompared_point(key, bound, "no value is on both sides")
        return replace(_judge_point(apart, key, name in DISCRETE, bound, self.coarse), rows=rows)

    def compare_blocks(
        self, key: str, dtypes: tuple[str, str], a: TraceLike, b: TraceLike,
        shape: tuple[int, ...], point: str,
    ) -> PointDiff | None:  # fmt: skip
        """Return the comparison of all values of a key, which are read some at a time.

        `dtypes` are those of a and of the reference b, `shape` is that of the values. `point` is
        the one that was recorded, where the key is an alias. None where the values have to be read
        as whole arrays.
        """
        name = point or key.rpartition(".")[2]
        if name == log_softmax.POINT:
            return None
        x, y = a.value_blocks(key), b.value_blocks(key)
        apart = None if x is None or y is None else measure_blocks(x, y, shape)
        if apart is None:
            return None
        bound = self.threshold_of(key, dtypes, point)
        return _judge_point(apart, key, name in DISCRETE, bound, self.coarse)


def compare_traces(
    a: TraceLike, b: TraceLike, *, moe: bool = False, calibrated: Sequence[CalibratedBound] = (),
    before: Mapping[str, int] | None = None, positions: bool = False,
    same_dtype: TraceLike | None = None,
) -> TraceDiff:  # fmt: skip
    """Return the comparison of `a` with the reference `b`; UsageError for other token ids.

    `before` maps keys to a token position: only rows of earlier positions are compared. `positions`
    asks for each token position's distance. `same_dtype` is a run of the reference in a's dtype,
    from which `rounding_ratios` are computed.
    """
    check_ids(a, b)
    if same_dtype is not None:
        check_ids(same_dtype, b)
    keys = common_keys(a, b)
    mine, other = TraceOnSharedRows(a, b), TraceOnSharedRows(b, a)
    between = RunPair.from_traces(a, b, moe=moe, calibrated=calibrated)
    points = [
        compare_point(key, mine, other, between, (before or {}).get(key), positions) for key in keys
    ]
    first = next((point.key for point in points if point.beyond), None)
    other_rows = [
        key for key in keys if _have_other_rows(mine.find_record(key), other.find_record(key))
    ]
    compared = [key for key in keys if key not in other_rows]
    return TraceDiff(
        tuple(points),
        first,
        tuple(key for key in a.records if b.find_record(key) is None),
        tuple(key for key in b.records if a.find_record(key) is None),
        unrecorded_tokens_sentences(a, b),
        tuple(other_rows),
        (*rows_of_one_side(a, b, compared), *compare_unread_arrays(a, b), *other_sequences(a, b)),
        unequal_rank_sentences(a, b),
        find_first_token(points, mine, other),
        {} if same_dtype is None else rounding_ratios(keys, mine, other, same_dtype),
        overflow=overflow_text(next((one for one in points if one.beyond), None), mine, other),
        repeats=repeated_tokens(a, b),
    )


BEFORE_MASK = ("scores", "index_scores")  # of every key, those that a token does not see too


def find_first_token(points: Sequence[PointDiff], a: TraceLike, b: TraceLike) -> FirstToken | None:
    """Return the earliest token at which a point is beyond its tolerance; None if none is.

    If several points differ at that token, it is the first in the order of `points`. Of attention
    scores recorded before the causal mask, only those of visible keys are compared.
    """
    found: FirstToken | None = None
    for point in points:
        record = a.find_record(point.key)
        if not point.beyond or point.why or record is None:
            continue
        # Only rows up to the earliest that was found are of interest.
        before = math.inf if found is None else found.position
        positions = tuple(takewhile(before.__gt__, record.positions or ()))
        if not positions:
            continue
        x, y = a.recorded_values(point.key), b.recorded_values(point.key)
        if x is None or y is None or np.size(x) != np.size(y):
            continue
        masks = (a.values_mask(point.key), b.values_mask(point.key), _seen_keys(record, a, b))
        rows = _distances_of_positions(record, x, y, _present_values(*masks))
        for position, apart in zip(positions, rows, strict=False):
            if apart is not None and not apart <= point.tolerance:
                step = _pass_of_token(a, position)
                found = FirstToken(
                    position,
                    point.key,
                    apart,
                    _pass_of_token(b, position) if step is None else step,
                )
                break
    return found


def _seen_keys(record: RecordLike, a: TraceLike, b: TraceLike) -> "Array | None":
    """Return a bool array of a record's shape: True at the keys that each token sees; None for all.

    It is for scores that are recorded before the mask. A key whose probability is zero on both
    sides is not seen; without probabilities, in a causal architecture, a later one is not.
    """
    queries, keys = np.asarray(record.positions or ()), record.shape[-1]
    if record.point not in BEFORE_MASK or record.shape[-2:-1] != queries.shape:
        return None
    if record.point == "scores":
        key = record.key.removesuffix("scores") + "probs"
        held = [one.recorded_values(key) for one in (a, b) if one.find_record(key) is not None]
        size = math.prod(record.shape)
        weights = [
            np.reshape(one, record.shape)
            for one in held
            if one is not None and np.size(one) == size
        ]
        if len(weights) == 2:
            seen: Array = (weights[0] != 0) | (weights[1] != 0)
            return seen
    names = {str(one.run.get("architecture")) for one in (a, b)} - {"None"}
    if not names or any(n not in ARCHS or ARCHS[n].block.attends != "causal" for n in names):
        return None
    places = queries if len(queries) == keys else np.arange(keys)
    return np.broadcast_to(places <= queries[:, None], record.shape)


def _pass_of_token(trace: TraceLike, position: int) -> int | None:
    """Return the number of the forward pass, in a dump, that computed a token.

    None for a trace that is no dump, or a token that no pass computed.
    """
    dump = trace.run.get("dump")
    if not isinstance(dump, Mapping) or position not in dump.get("positions", ()):
        return None
    step = dump["steps"][list(dump["positions"]).index(position)]
    return int(step) if step >= 0 else None


def rounding_ratios(
    keys: Sequence[str], a: TraceLike, b: TraceLike, same_dtype: TraceLike
) -> dict[str, float]:
    """Return {key: |a - b| / |s - b|}, `b` in float32 and `s` the same computation in a's dtype.

    About 1: as far off as rounding makes a right implementation. Source of the measure: the
    three-tensor comparison of AWS Neuron's equivalence framework. Infinite where `s` is exact and
    `a` is not. Points that `s` lacks are left out.
    """
    found = {}
    for key in keys:
        values = [
            value for one in (a, b, same_dtype) if (value := one.recorded_values(key)) is not None
        ]
        if len(values) < 3 or len({np.size(one) for one in values}) > 1:
            continue
        x, y, s = (np.asarray(one, np.float64).reshape(-1) for one in values)
        apart, usual = float(np.linalg.norm(x - y)), float(np.linalg.norm(s - y))
        found[key] = apart / usual if usual else float("inf") if apart else 0.0
    return found


def compare_point(
    key: str, a: TraceLike, b: TraceLike, between: RunPair, before: int | None = None,
    positions: bool = False,
) -> PointDiff:  # fmt: skip
    """Return the comparison of one key of both traces.

    `before` restricts it to rows of earlier token positions. `positions` adds each token position's
    distance.
    """
    mine, other = a.find_record(key), b.find_record(key)
    assert mine is not None and other is not None
    dtypes = record_dtypes(mine, other, a, b)
    why = _reason_not_comparable(mine, other)
    # Statistics come last: of a dump they are known once its values were read.
    if not why and before is None and not positions:
        shape = mine.shape or other.shape
        read = between.compare_blocks(key, dtypes, a, b, shape, mine.point)
        if read is not None:
            return _with_std_ratio(read, mine, other)
    x, y = (None, None) if why else (a.recorded_values(key), b.recorded_values(key))
    if x is None or y is None:
        why, beyond = (why, False) if why else _reason_not_numbers(mine, other)
        found = _uncompared_point(key, between.threshold_of(key, dtypes, mine.point), why, beyond)
    else:
        chosen = _present_values(a.values_mask(key), b.values_mask(key))
        if before is not None:
            earlier = _values_before(mine, before)
            chosen = earlier if chosen is None else chosen & earlier
        shape = mine.shape or other.shape
        found = between.compare(key, dtypes, x, y, chosen, shape, mine.point)
        if positions:
            found = replace(found, by_position=_distance_by_position(mine, x, y, chosen))
    return _with_std_ratio(found, mine, other)


def _with_std_ratio(found: PointDiff, a: RecordLike, b: RecordLike) -> PointDiff:
    """Return a comparison with the ratio of both records' standard deviations.

    The ratio is None where the records are not comparable or a deviation is unknown or 0.
    """
    ratio = None if _reason_not_comparable(a, b) else _std_ratio(a, b)
    low, high = ratio_band(a.point)
    outside = ratio is not None and not low <= ratio <= high
    return replace(found, std_ratio=ratio, outside=outside)


def position_axis(point: str) -> int:
    """Return the axis of a point's values that is the token position: 1 for scores, else 0."""
    return 1 if point in ("scores", "probs") else 0  # [heads, tokens, keys]


def _distance_by_position(
    record: RecordLike, x: Array, y: Array, chosen: Array | None
) -> tuple[float | None, ...] | None:
    """Return the relative L2 of each token position, None for a position without values.

    The result itself is None where rows belong to no positions. `chosen` is a bool array of the
    values that count, None for all.
    """
    return tuple(_distances_of_positions(record, x, y, chosen)) or None


def _distances_of_positions(
    record: RecordLike, x: Array, y: Array, chosen: Array | None
) -> Iterator[float | None]:
    """Yield the relative L2 of each token position, computed some rows at a time when asked for.

    None for a position without values. Nothing is yielded where rows belong to no positions.
    """
    axis = position_axis(record.point)
    count = len(record.positions or ())
    if len(record.shape) <= axis or not count or record.shape[axis] != count:
        return
    a, b = (np.moveaxis(np.reshape(v, record.shape), axis, 0) for v in (x, y))
    kept = None if chosen is None else np.moveaxis(np.reshape(chosen, record.shape), axis, 0)
    step = max(1, _ROWS_TOGETHER * count // max(math.prod(record.shape), 1))
    for first in range(0, count, step):
        rows = slice(first, min(first + step, count))
        yield from _distances_of_rows(a[rows], b[rows], None if kept is None else kept[rows])


def _distances_of_rows(x: Array, y: Array, kept: Array | None) -> list[float | None]:
    """Return the relative L2 of each row; None for a row without a value that is `kept`.

    `kept` is a bool array of the values that count, None for all.
    """
    count = len(x)
    a, b = np.float64(x.reshape(count, -1)), np.float64(y.reshape(count, -1))
    there = np.ones(a.shape, np.bool_) if kept is None else kept.reshape(count, -1).astype(np.bool_)
    with np.errstate(all="ignore"):
        apart = np.sqrt(np.where(there & (a != b), (a - b) ** 2, 0.0).sum(axis=1))
        size = np.sqrt(np.where(there, b * b, 0.0).sum(axis=1))
        found = np.where(apart == 0, 0.0, apart / size)
    told = np.where(np.isnan(found), np.inf, found).tolist()
    some = np.any(there, axis=1).tolist()
    return [value if one else None for value, one in zip(told, some, strict=True)]


def record_dtypes(
    a: RecordLike, b: RecordLike, of_a: TraceLike, of_b: TraceLike
) -> tuple[str, str]:
    """Return (a's dtype, b's dtype) of the arithmetic; "tf32" for float32 with TF32 products."""
    return run_arithmetic(of_a, a.dtype), run_arithmetic(of_b, b.dtype)


def _uncompared_point(key: str, bound: Threshold, why: str, beyond: bool = False) -> PointDiff:
    """Return the PointDiff of a point that was not compared, with the reason `why`.

    `beyond` says that it differs all the same.
    """
    return PointDiff(key, None, None, None, bound.rel_l2, beyond, why)


def _judge_point(
    found: PointDistance, key: str, discrete: bool, bound: Threshold, coarse: float
) -> PointDiff:
    """Return the PointDiff of measured distances, judged by the point's bound.

    Printed values may be off by `coarse` each. A `discrete` point (a choice of experts or tokens)
    is beyond its bound only where one side is not finite.
    """
    rms, odd = found.rms, found.nonfinite
    if found.count and not rms and not found.largest and not discrete:
        why = odd.text("this side", "the reference") if odd else "zero on both sides"
        return replace(_uncompared_point(key, bound, f"{why}: nothing was measured"), nonfinite=odd)
    peak = found.largest / rms if rms else float("inf") if found.largest else 0.0
    share = coarse / rms if rms else 0.0
    limit, max_limit = bound.rel_l2 + share, bound.max_over_rms + share
    if coarse and rms and found.largest <= coarse:
        limit = max(limit, found.rel)
    beyond = not (found.rel <= limit and peak <= max_limit) and not discrete
    beyond = beyond or (odd is not None and odd.alone > 0)
    return PointDiff(
        key, found.rel, found.largest, found.at, limit, beyond, "", float(peak), max_limit,
        found.bits, found.count, bound.reason, bound.unit, None, False, odd, found.finite,
    )  # fmt: skip


def _reason_not_numbers(a: RecordLike, b: RecordLike) -> tuple[str, bool]:
    """Return (why a point without values is not compared, whether it differs all the same).

    It differs where the recorded statistics of the two have different counts of NaN or infinities.
    """
    why = "only statistics were kept; save the values"
    if a.stats is None or b.stats is None:
        return why, False
    mine, other = a.stats.nan + a.stats.inf, b.stats.nan + b.stats.inf
    if mine == other and a.stats.nan == b.stats.nan:
        return why, False
    return f"{mine} values are NaN or infinite, {other} of the reference's; {why}", True


def _std_ratio(a: RecordLike, b: RecordLike) -> float | None:
    """Return a's standard deviation over b's, None where either is unknown or 0."""
    if a.stats is None or b.stats is None or not a.stats.std or not b.stats.std:
        return None
    return float(a.stats.std / b.stats.std)


def _present_values(*masks: "Array | None") -> "Array | None":
    """Return a flat bool array: the values that all masks have; None where all are there."""
    flat = [np.asarray(mask, np.bool_).reshape(-1) for mask in masks if mask is not None]
    return np.logical_and.reduce(flat) if flat else None


def _values_before(record: RecordLike, before: int) -> "Array":
    """Return a bool array: the values of token positions before the given one.

    All True where the rows have no positions.
    """
    size = int(np.prod(record.shape))
    if record.positions is None:
        return np.ones(size, np.bool_)
    axis = position_axis(record.point)
    by_key = axis == 1
    rows = np.asarray(record.positions) < before
    shape = [1] * len(record.shape)
    shape[axis] = len(rows)
    if record.shape[axis] != len(rows):
        return np.ones(size, np.bool_)
    chosen = np.broadcast_to(rows.reshape(shape), record.shape)
    if by_key:  # scores are taken before the mask: an early row sees the keys of later tokens
        chosen = chosen & (np.arange(record.shape[2]) < before)
    return chosen.reshape(-1)


def _other_rows_text(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    """Return how the token positions of two records' rows differ, as text."""
    if len(a) != len(b):
        return f"rows of {len(a)} positions against {len(b)}"
    row = next(i for i, (mine, other) in enumerate(zip(a, b, strict=True)) if mine != other)
    if len(a) == 1:
        return f"row of position {a[0]} against position {b[0]}"
    return f"{len(a)} rows each, but row {row} is of position {a[row]} against {b[row]}"


def _have_other_rows(a: RecordLike | None, b: RecordLike | None) -> bool:
    """Return whether both records are there and not comparable, as by other token positions."""
    return a is not None and b is not None and bool(_reason_not_comparable(a, b))


def _reason_not_comparable(a: RecordLike, b: RecordLike) -> str:
    """Return why two records cannot be compared; "" if they can."""
    if a.positions is not None and b.positions is not None and a.positions != b.positions:
        return _other_rows_text(a.positions, b.positions)
    count_a, count_b = 1, 1
    for size in a.shape:
        count_a *= size
    for size in b.shape:
        count_b *= size
    if count_a != count_b:
        return f"{count_a} values {list(a.shape)} against {count_b} {list(b.shape)}"
    return ""


LARGEST = {"float16": 65504.0}  # the largest finite number of a type that activations exceed


def overflow_text(point: "PointDiff | None", run: TraceLike, reference: TraceLike) -> str:
    """Return a sentence that a point overflows the type of `run`, and by how much.

    Wherever the run is not finite it has to be infinite with the sign of the reference's value, and
    that value has to be beyond the largest of the type, up to the point's tolerance. Else "", and
    "" too for points of which only statistics were recorded.
    """
    record = None if point is None else run.find_record(point.key)
    largest = LARGEST.get(record.dtype) if record is not None else None
    if point is None or record is None or largest is None:
        return ""
    mine, theirs = run.recorded_values(point.key), reference.recorded_values(point.key)
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return ""
    lost = ~np.isfinite(mine)
    values = theirs[lost].astype(np.float64)
    if not values.size or not np.isfinite(values).all():
        return ""
    infinite = mine[lost] == np.copysign(np.inf, values)
    beyond = np.abs(values) > largest * (1 - point.tolerance)
    most = float(np.abs(values).max())
    if not (infinite & beyond).all() or most <= largest:
        return ""
    first = np.argwhere(lost)[0].tolist()
    return (
        f"{point.key} overflows {record.dtype}: the reference has values up to {most:g} there, and "
        f"the largest number of the type is {largest:g}; {int(lost.sum())} of {mine.size} values, "
        f"the first at {first}"
    )
