"""Compares two traces point by point, without a model.

A and B are the two models, runs or traces that are compared; a *side* is one of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.forward.cut_points import cut_keys, may_be_mistaken, stream_keys_after
from aprfmt.causes.forward.point_signatures import likely_cause
from aprfmt.causes.forward.relations import certainty_of_relations, relation_text
from aprfmt.diagnosis.records import Evidence, PointRow
from aprfmt.errors import UsageError
from aprfmt.inference.capture import key_name, parse_key
from aprfmt.inference.points import POINTS
from aprfmt.inference.replay.recorded_trace import (
    NO_VALUES,
    fit_values,
    layer_keys,
    may_be_masked,
    positions_before_padding,
    token_axis,
)
from aprfmt.inference.replay.shadow import ShadowPass, ShadowPoint
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import cap_proof, unfitted_proof
from aprfmt.measure.tolerances import BASE, DISCRETE
from aprfmt.measure.trace_rows import positions_differ, positions_text
from aprfmt.measure.trace_view import TraceLike
from aprfmt.measure.traces import PointDiff, RunPair, compare_point, record_dtypes

Array = NDArray[Any]
OTHER_ROWS = "no row of it is of the same position"
SHOWN = 8  # points that are named where both sides are not finite
NO_POINT = (1 << 30, 0)  # sort key of what is no capture point


def shared_keys(a: TraceLike, b: TraceLike) -> list[str]:
    """Return the keys of points that both traces have, in execution order."""
    both = [key for key in a.records if b.find_record(key) is not None]
    both += [key for key in b.records if key not in a.records and a.find_record(key) is not None]
    return sorted({key for key in both if execution_order(key) != NO_POINT}, key=execution_order)


def joined_stage_sentences(a: TraceLike, b: TraceLike) -> list[str]:
    """Return a sentence for each recorded key that is several capture points in one.

    Such keys are not compared, for example qkv of an APRT folder, which joins three points.
    """
    keys = [
        key for key in dict.fromkeys((*a.records, *b.records)) if execution_order(key) == NO_POINT
    ]
    return [f"{key}: several points in one; give --model to take them apart" for key in keys]


def execution_order(key: str) -> tuple[int, int]:
    """Return the sort key (layer, number in the layer) of a point; NO_POINT for unknown keys."""
    order = {name: i for i, name in enumerate(POINTS)}
    try:
        point, layer = parse_key(key)
    except UsageError:
        return NO_POINT
    if layer < 0:
        return (-1 if point.startswith("embd") else 1 << 29, order[point])
    return (layer, order[point])


def compare_points(a: TraceLike, b: TraceLike, moe: bool, reference: str = "A") -> list[PointDiff]:
    """Return the comparison of every point that both traces have, in execution order.

    Distances are relative L2 by the norm of the `reference`, "A" or "B". NaN and infinities are
    counted as A's and B's in either case. `moe`: the model has experts.
    """
    actual, right = (b, a) if reference == "A" else (a, b)
    between = RunPair.from_traces(actual, right, moe=moe)
    rows = [compare_shared_rows(key, actual, right, between) for key in shared_keys(a, b)]
    return [row.with_sides_exchanged for row in rows] if reference == "A" else rows


def point_tolerances(
    pairs: Sequence[PointDiff], a: TraceLike, b: TraceLike
) -> Iterator[tuple[float, str]]:
    """Yield (tolerance in relative L2, dtype of the coarser arithmetic) of every compared point."""
    for pair in pairs:
        mine, other = a.find_record(pair.key), b.find_record(pair.key)
        if pair.rel_l2 is not None and mine is not None and other is not None:
            both = (mine.dtype, other.dtype)
            yield pair.tolerance, max(both, key=lambda dtype: BASE[dtype].rel_l2)


def compare_shared_rows(key: str, a: TraceLike, b: TraceLike, between: RunPair) -> PointDiff:
    """Return the comparison of one point of `a` with the reference `b`, on shared rows.

    Rows are matched by token position where both records have positions.
    """
    mine, other = a.find_record(key), b.find_record(key)
    assert mine is not None and other is not None
    x, y = a.recorded_values(key), b.recorded_values(key)
    apart = positions_differ(mine, other) and bool(mine.positions and other.positions)
    if x is None or y is None or (np.size(x) == np.size(y) and not apart):
        return compare_point(key, a, b, between)
    dtypes = record_dtypes(mine, other, a, b)
    found = _on_shared_rows(key, a, b, np.asarray(x), np.asarray(y))
    if isinstance(found, str):
        return PointDiff(
            key, None, None, None, between.threshold_of(key, dtypes).rel_l2, False, found
        )
    x, y, chosen, rows = found
    return replace(between.compare(key, dtypes, x, y, chosen), rows=rows)


def _on_shared_rows(
    key: str, a: TraceLike, b: TraceLike, x: Array, y: Array
) -> tuple[Array, Array, Array | None, str] | str:
    """Return (a's values, b's values, mask of rows that count, words for the rows).

    `x` and `y` are all values of the point. Where they cannot be brought to the same rows, a
    string says why.
    """
    mine, other = a.find_record(key), b.find_record(key)
    assert mine is not None and other is not None
    if not (x.any() or y.any()) and mine.point not in DISCRETE:
        return NO_VALUES
    axis = token_axis(key)
    if mine.positions and other.positions and positions_differ(mine, other):
        both = sorted(set(mine.positions) & set(other.positions))
        cut = [
            _rows_at_positions(each, record.positions, both, axis)
            for each, record in ((x, mine), (y, other))
        ]
        uncut = POINTS[mine.point].rows != "keys" and any(each is None for each in cut)
        if not both or (uncut and x.size == y.size):
            return OTHER_ROWS
        if cut[0] is not None and cut[1] is not None:
            x, y, note = cut[0], cut[1], f"rows of positions {positions_text(both)}"
            if x.size == y.size:
                return x, y.reshape(x.shape), None, note
            return _fit_shapes(key, a, b, x, y, note)
    return _fit_shapes(key, a, b, x, y, "")


def _fit_shapes(
    key: str, a: TraceLike, b: TraceLike, x: Array, y: Array, note: str
) -> tuple[Array, Array, Array | None, str] | str:
    """Return (x, y, mask of rows that count, words) with the smaller array in the other's shape.

    Where that fails a string says why. `note` names the rows if they were already cut.
    """
    axis, less = token_axis(key), x.size < y.size
    small, large = (x, y) if less else (y, x)
    sides = ((a, a.find_record(key)), (b, b.find_record(key)))
    (trace, few), (_, many) = sides if less else sides[::-1]
    assert few is not None and many is not None
    positions = None if note else few.positions
    if positions is None and not note and axis < len(large.shape):
        ids = [int(i) for i in trace.run.get("ids") or ()]
        positions = positions_before_padding(small.size, large.shape, axis, ids)
    if positions is not None and many.positions is not None:
        index = {position: row for row, position in enumerate(many.positions)}
        if not all(position in index for position in positions):
            return OTHER_ROWS
        positions = tuple(index[position] for position in positions)
    shape = large.shape
    if axis >= len(shape) or (len(shape) == 1 and small.ndim == 1):
        return f"{x.size} values against {y.size}"
    seen = fit_values(
        small, positions, few.dtype, shape, axis, shape[axis], may_be_masked(key, trace)
    )
    if seen is None:
        return f"shape {list(x.shape)} against {list(y.shape)}"
    full, held = seen.reference_rows(large, axis), seen.values
    chosen = seen.mask if full.shape == held.shape else None
    return (*((held, full) if less else (full, held)), chosen, note or seen.note)


def _rows_at_positions(
    values: Array, positions: Sequence[int] | None, wanted: Sequence[int], axis: int
) -> Array | None:
    """Return the rows of the `wanted` token positions; None unless there is a row per position."""
    if positions is None or axis >= values.ndim or values.shape[axis] != len(positions):
        return None
    row = {position: at for at, position in enumerate(positions)}
    return np.take(values, [row[position] for position in wanted], axis=axis)


def no_common_row_sentence(pairs: Sequence[PointDiff], a: TraceLike, b: TraceLike) -> str:
    """Return a sentence that two traces share no token position; "" where they share one."""
    if not pairs or any(pair.why != OTHER_ROWS for pair in pairs):
        return ""
    mine, other = a.find_record(pairs[0].key), b.find_record(pairs[0].key)
    assert mine is not None and other is not None
    return (
        f"the traces have no row in common: {pairs[0].key} is of positions "
        f"{positions_text(mine.positions or ())} in A, "
        f"{positions_text(other.positions or ())} in B; record both "
        "with the same --positions"
    )


def equal_neighbour(key: str, a: TraceLike, b: TraceLike, bound: float) -> str:
    """Return the name of A's other point whose value equals B's value of `key`; "" if none does.

    That value plus or minus the residual stream counts too. `bound` is the largest relative L2;
    values of another layer must also be NEARER than those of the point itself.
    """
    theirs = b.recorded_values(key)
    if theirs is None:
        return ""
    from aprfmt.causes.forward.capture_point import NEARER

    theirs = np.asarray(theirs)
    if not np.isfinite(theirs).all() or np.ptp(theirs) == 0:
        return ""  # such values equal any others
    for name, value in _neighbour_values(key, a):
        if value.size == theirs.size and rel_l2(value, theirs) <= bound:
            return name
    own = a.recorded_values(key)
    if own is None or np.size(own) != theirs.size:
        return ""
    # A recorder that counts wrong takes points of other layers.
    bound, best = min(bound, NEARER * rel_l2(np.asarray(own), theirs)), ""
    for other in a.records:
        if may_be_mistaken(key, other) and (held := a.recorded_values(other)) is not None:
            if np.size(held) == theirs.size and (off := rel_l2(np.asarray(held), theirs)) <= bound:
                bound, best = off, other
    return best


def _neighbour_values(key: str, a: TraceLike) -> Iterator[tuple[str, Array]]:
    """Yield (name, values of A) of other points of the layer, and of sums with the residual."""
    point, layer = parse_key(key)
    others = layer_keys(layer)
    if layer >= 0:
        others += [key_name("out", layer - 1)] if layer else ["embd", "embd_scaled"]
    for other in others:
        if other != key and a.find_record(other) is not None:
            value = a.recorded_values(other)
            if value is not None:
                yield other, np.asarray(value)
    own = a.recorded_values(key)
    for stream in ("in", "mid"):
        if layer < 0 or own is None:
            continue
        value = a.recorded_values(key_name(stream, layer))
        if value is None and stream == "in" and layer:
            value = a.recorded_values(key_name("out", layer - 1))
        if value is not None and np.asarray(value).size == np.asarray(own).size:
            added = np.asarray(value).reshape(np.asarray(own).shape)
            yield f"{point} plus the residual stream", np.asarray(own) + added
            yield f"{point} less the residual stream", np.asarray(own) - added


def partial_rows_finding(pairs: Sequence[PointDiff]) -> Finding | None:
    """Return the finding that two traces share only some rows, which agree.

    None where they share all rows, or a point is beyond its tolerance.
    """
    rows = [pair for pair in pairs if pair.rows]
    rows = [pair for pair in rows if POINTS[parse_key(pair.key)[0]].rows != "logits"]
    if not rows or any(pair.beyond for pair in pairs):
        return None
    return Finding(
        "capture_rows", f"the traces hold other rows ({rows[0].rows}); these agree",
        "capture", "same", tuple(pair.key for pair in rows), True, rows[0].key,
        max(pair.rel_l2 or 0.0 for pair in rows), None, "the rows both have",
        proof=unfitted_proof(len(rows)),
    )  # fmt: skip


def signature_finding(pairs: Sequence[PointDiff], a: TraceLike, b: TraceLike) -> Finding | None:
    """Return the finding on two traces without a model: recorded elsewhere, or a likely cause.

    None where nothing is beyond its tolerance and the same rows were compared.
    """
    broken = nonfinite_finding(pairs)
    if broken is not None:
        return broken
    beyond = [pair for pair in pairs if pair.beyond]
    if not beyond:
        return partial_rows_finding(pairs)
    first = beyond[0]
    moved = {
        pair.key: name
        for pair in beyond
        if (name := equal_neighbour(pair.key, a, b, pair.tolerance))
    }
    dead = {pair.key: cut for pair in beyond if (cut := _agreeing_later_point(pair, pairs))}
    if all(pair.key in moved or pair.key in dead for pair in beyond):
        return _capture_point_finding(beyond, moved, dead, a, b)
    cause, why = likely_cause(first.key, a, b)
    says = why or f"{first.key} is the first point beyond its tolerance"
    says += _first_row_clause(first, a, b)
    return Finding(
        cause, says, "forward", "bug",
        (first.key,), False, first.key, first.rel_l2, None, first.key,
    )  # fmt: skip


def _first_row_clause(pair: PointDiff, a: TraceLike, b: TraceLike) -> str:
    """Return the end of a sentence on the first row that differs; "" where all rows differ."""
    x, y = a.recorded_values(pair.key), b.recorded_values(pair.key)
    if x is None or y is None or pair.rows or np.size(x) != np.size(y):
        return ""
    if POINTS[parse_key(pair.key)[0]].rows != "tokens" or np.ndim(x) < 2:
        return ""
    rows = np.asarray(x, np.float64).reshape(len(x), -1)
    others = np.asarray(y, np.float64).reshape(rows.shape)
    apart = np.array(
        [not rel_l2(*each) <= pair.tolerance for each in zip(others, rows, strict=True)]
    )
    record = a.find_record(pair.key)
    positions = None if record is None else record.positions
    places = positions if positions and len(positions) == len(rows) else range(len(rows))
    wrong = [place for place, far in zip(places, apart, strict=True) if far]
    if not wrong or len(wrong) == len(rows):
        return ""
    if apart[np.argmax(apart) :].all():
        return f"; the rows before position {wrong[0]} agree, those from it on do not"
    return f"; of {len(rows)} positions {len(wrong)} differ: {positions_text(wrong)}"


FAR = 1e-3  # points nearer than this share of a difference were not computed from it


def _agreeing_later_point(pair: PointDiff, pairs: Sequence[PointDiff]) -> str:
    """Return the nearest later point that depends on this one and agrees; "" if there is none.

    A difference of the computation would show there, so the point was recorded elsewhere.
    """
    later = {other.key: other for other in pairs}
    for cut in (*cut_keys(pair.key), *stream_keys_after(pair.key, [*later])):
        other = later.get(cut)
        if other is None or other.rel_l2 is None or pair.rel_l2 is None:
            continue
        if not other.beyond and other.rel_l2 <= FAR * pair.rel_l2:
            return cut
    return ""


def _capture_point_finding(
    beyond: Sequence[PointDiff], moved: Mapping[str, str], dead: Mapping[str, str],
    a: TraceLike, b: TraceLike,
) -> Finding:  # fmt: skip
    """Return the finding that both sides computed the same and recorded it at different points.

    `beyond` are the differing points. `moved` is {point: the point of A that it equals}, `dead`
    {point: a later point that agrees}. It is confirmed as far as a relation gives B's values;
    that a later point agrees only locates it.
    """
    known = {pair.key: moved.get(pair.key) or _point_relation(pair, a, b) for pair in beyond}
    says = {key: text or f"{parse_key(key)[0]}: other values" for key, text in known.items()}
    by_point = {parse_key(key)[0]: text for key, text in reversed(known.items())}
    first = beyond[0]
    point = parse_key(first.key)[0]
    words = "; ".join(
        f"{name} is A's {text}" if text else f"{name} has other values"
        for name, text in reversed(by_point.items())
    )
    agrees = dead.get(first.key, "")
    why = f"; {agrees}, which is computed from it, agrees" if agrees else ""
    return Finding(
        "capture_point", f"B recorded at another point: {words}; every other point agrees{why}",
        "capture", "same", tuple(says), True, first.key, first.rel_l2, 0.0, first.key,
        {"recorded_as": point, "is": says[first.key], "agrees": agrees},
        proof=cap_proof(unfitted_proof(len(says)), certainty_of_relations([*known.values()])),
    )  # fmt: skip


def _point_relation(pair: PointDiff, a: TraceLike, b: TraceLike) -> str:
    """Return in words how B's value of a point follows from A's; "" where no relation gives it."""
    x, y = a.recorded_values(pair.key), b.recorded_values(pair.key)
    if x is None or y is None or np.size(x) != np.size(y):
        return ""
    found = relation_text(np.asarray(x), np.asarray(y), 10 * pair.tolerance)
    return f"{parse_key(pair.key)[0]}: {found}" if found else ""


def nonfinite_finding(pairs: Sequence[PointDiff]) -> Finding | None:
    """Return the finding that only one side has NaN or infinities at a point; None without any.

    Confirmed where the first such point's other values are within the tolerance of whole runs.
    """
    alone = [pair for pair in pairs if pair.alone and not _is_discrete_point(pair)]
    if not alone:
        return None
    first = alone[0]
    assert first.nonfinite is not None
    more = f"; {len(alone) - 1} more points" if len(alone) > 1 else ""
    rest = first.rel_l2_finite
    sure = rest is not None and rest <= first.tolerance
    side = first.nonfinite.side if first.nonfinite.side in ("A", "B") else ""
    return Finding(
        "nonfinite", f"{first.key}: {first.nonfinite.text()}{more}", "forward", "bug",
        tuple(pair.key for pair in alone), sure, first.key, first.rel_l2,
        rest if sure else None, f"{first.key}; after: its other values",
        {"nonfinite": {pair.key: asdict(pair.nonfinite) for pair in alone if pair.nonfinite}}, side,
    )  # fmt: skip


def _is_discrete_point(pair: PointDiff) -> bool:
    """Return whether a point is a choice, such as of experts, whose values are no measurements."""
    return pair.key.rpartition(".")[2] in DISCRETE


def nonfinite_on_both_sides(pairs: Sequence[PointDiff]) -> Iterator[Evidence]:
    """Yield evidence of points at which both sides have the same NaN or infinities."""
    alike = [
        pair
        for pair in pairs
        if pair.nonfinite is not None and pair.nonfinite.both and not _is_discrete_point(pair)
    ]
    for pair in alike[:SHOWN]:
        assert pair.nonfinite is not None
        more = f" (and {len(alike) - SHOWN} more points)" if len(alike) > SHOWN else ""
        yield Evidence("forward", f"{pair.key}: {pair.nonfinite.text()}{more}", (pair.key,),
                       float(pair.nonfinite.both))  # fmt: skip


def point_rows(pairs: Sequence[PointDiff], passes: Mapping[str, ShadowPass]) -> list[PointRow]:
    """Return one PointRow per point, in execution order.

    `pairs` are the comparisons of both runs, `passes` the shadow passes by side.
    """
    by_key = {pair.key: pair for pair in pairs}
    shadows = {
        key: (label, view)
        for label, found in passes.items()
        for key, view in found.views.items()
        if view.residual is not None
    }
    entering: dict[int, float] = {}
    for pair in pairs:
        point, layer = parse_key(pair.key)
        if point in ("embd", "embd_scaled", "out") and pair.rel_l2 is not None:
            entering[layer + 1 if point == "out" else 0] = pair.rel_l2
    rows = []
    for key in sorted({*by_key, *shadows}, key=execution_order):
        label, view = shadows.get(key, ("", None))
        rows.append(_point_row(key, by_key.get(key), label, view, entering))
    return rows


def _point_row(
    key: str,
    pair: PointDiff | None,
    label: str,
    view: ShadowPoint | None,
    entering: Mapping[int, float],
) -> PointRow:
    """Return the PointRow of a key, from both runs (`pair`) and from the shadow pass (`view`).

    `label` is the shadow pass's side. `entering` is {layer: relative L2 of what enters it}.
    """
    point, layer = parse_key(key)
    away = None if pair is None else pair.rel_l2
    before = entering.get(layer)
    bound = pair.tolerance if pair is not None else view.tolerance if view is not None else 0.0
    apart = pair is not None and pair.beyond
    odd = None if pair is None else pair.nonfinite
    return PointRow(
        key,
        point,
        None if layer < 0 else layer,
        away,
        None if view is None else view.residual,
        bound,
        away / before if away is not None and before else None,
        label,
        apart or (view is not None and view.flagged),
        "" if pair is None else pair.why or pair.rows,
        odd if odd is not None or view is None else view.nonfinite,
        apart,
    )
