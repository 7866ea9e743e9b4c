"""Finds recorded values that were captured at another point than their name says.

A bias that is really missing shows in what follows. So before an operation is blamed, the pass
is continued with the reference's own values at the differing points: if the next point through
which all of them act then agrees with the trace, and did not with the trace's own values, the
engine computed what the model says and recorded it at another place.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from aprfmt.base.sequences import join_first
from aprfmt.causes.forward.capture_names import keys_taken_elsewhere, neighbour_values
from aprfmt.causes.forward.cut_points import (
    STREAM,
    agrees_without,
    cut_keys,
    is_computed_from,
    keys_after,
    may_be_mistaken,
    recorded_values_are_used,
)
from aprfmt.causes.forward.joined_columns import find_other_column_order
from aprfmt.causes.forward.mismatch import Change, Mismatch
from aprfmt.causes.forward.rank_rounding import short_ranks
from aprfmt.causes.forward.rank_shares import order_text
from aprfmt.causes.forward.relations import certainty_of_relations, rank_order, relation_text
from aprfmt.errors import FormatError
from aprfmt.inference.capture import key_name, parse_key
from aprfmt.inference.points import POINTS
from aprfmt.inference.replay.shadow import ShadowPoint, run_shadow_pass, run_shadow_point

ROUNDED = "rounded to"  # how the relation of a rank's shorter type begins
UNKNOWN = "other values"  # that nothing relates to the reference's
NEARER = 0.25  # of the distance from a point's own values, where they are another point's
SHOWN = 4  # points that one sentence names


def find_other_capture_point(case: Mismatch) -> Change | None:
    """Return a Change that ignores points the run recorded elsewhere; None if it did not.

    They were recorded elsewhere if a later point that is computed from them agrees all the same.
    """
    key = case.view.key
    elsewhere = _equal_to_other_points(case) or find_other_column_order(case)
    if elsewhere is not None:
        return elsewhere
    if case.view.point in STREAM:
        return _stream_taken_elsewhere(case)
    # A later point that depends on this one must agree once this one is left out.
    cuts = cut_keys(key, case.found.views)
    cut = next((cut for cut in cuts if agrees_without(case, cut)), None)
    if cut is None:
        return None
    # Other points of the layer may have been recorded elsewhere too.
    names = [case.view.point]
    flagged = {case.view.point: case.view}  # each by the pass that lacks those before it
    order = {key: i for i, key in enumerate(case.patched.points)}
    while True:
        found = run_shadow_pass(case.patched, case.without(_keys_in_all_layers(case, names)), cut)
        view = next((view for view in found.flagged if view.layer == case.layer), None)
        if view is None or order.get(view.key, 0) <= order.get(key, 0) or view.one_sided_nonfinite:
            break
        names.append(view.point)
        flagged[view.point] = view
    # The cut must agree now, and have shown the trace's own values before.
    before = case.found.views.get(cut)
    after = found.views.get(cut)
    if after is None or after.flagged or before is None or not _recorded_values_show(case, before):
        return None
    # What the recorded values are, where a relation to the reference's says it.
    here, views = [key_name(name, case.layer) for name in names], case.found.views
    texts = {
        name: _relation_text(case, views[key]) or _relation_text(case, flagged[name])
        for name, key in zip(names, here, strict=True)
    }
    words = [text or UNKNOWN for text in texts.values()]
    # Other layers in which the same points differ, and what their values are.
    others = _differing_keys(case, names) - {*here}
    _refuse_rank_twice(case, [*here, *sorted(others)])
    known = list(texts.values())
    for other in sorted(others):
        text = _relation_text(case, views[other])
        first = _with_relative_layers(texts[other.partition(".")[2]], case.layer)
        known.append(text if _with_relative_layers(text, parse_key(other)[1]) == first else "")
    says = "; ".join(f"{name} is {text}" for name, text in zip(names, words, strict=True))
    clause = _first_clause(list(texts.values()))
    return Change(
        "capture_point",
        f"{clause}: {says}{_rows_text(case)}; {cut}, which is computed from it, agrees",
        tuple(k for k in (*here, *sorted(others)) if case.recorded.has_record(k)),
        drop=frozenset((*here, *others)),
        values={"recorded_as": case.view.point, "is": words[0], "agrees": cut},
        scoped=False,
        most=certainty_of_relations(known),
    )


def _equal_to_other_points(case: Mismatch) -> Change | None:
    """Return a Change that ignores points whose values the reference has elsewhere, or None.

    Elsewhere is at the same point in other layers and, for the residual stream, at any of its
    points. None where the first point equals no other, or where the run went on with these
    values. None also where it equals an earlier point, and a run without the operations between
    them would record the same.
    """
    key = case.view.key
    other = _equal_point(case, key)
    if not other or recorded_values_are_used(case):
        return None
    moved = {key: other}
    for name, view in case.found.views.items():
        if name != key and view.recorded is not None and (equal := _equal_point(case, name)):
            moved[name] = equal
    order = list(case.plain)
    if order.index(other) < order.index(key) and not _next_agrees_without(case, moved):
        return None
    names = [f"what is named {name} is the model's {at}" for name, at in moved.items()]
    if len(names) > SHOWN:
        names[SHOWN - 1 : -1] = [f"{len(names) - SHOWN} more"]
    return Change(
        "capture_point",
        f"{_first_clause(names)}: {'; '.join(names)}",
        tuple(moved),
        drop=frozenset(moved),
        values={"recorded_as": case.view.point, "is": f"what belongs to {other}"},
        scoped=False,
    )


def _next_agrees_without(case: Mismatch, moved: Collection[str]) -> bool:
    """Return whether the next recorded point agrees if the pass ignores the points `moved`."""
    keys = (key for key in keys_after(case) if key not in moved and case.recorded.has_record(key))
    cut = next(keys, "")
    found = run_shadow_point(case.patched, case.without(moved), cut) if cut else None
    return found is not None and found.residual is not None and not found.flagged


def _equal_point(case: Mismatch, key: str) -> str:
    """Return the key of the other point at which the reference has the values of `key`, or "".

    The recorded values are beyond the tolerance of whole runs from the reference at `key`, and
    much nearer, within that tolerance, to the reference at the other point.
    """
    view = case.found.views[key]
    own = case.plain.get(key)
    if view.recorded is None or own is None or np.ptp(view.recorded.values) == 0:
        return ""
    off = view.distance(own)
    if not off > view.whole_tolerance:
        return ""
    bound = min(view.whole_tolerance, NEARER * off)
    places = {name: place for place, name in enumerate(case.plain)}
    near = sorted(case.plain, key=lambda name: abs(places[name] - places[key]))
    best = ""
    for name in near:
        if not may_be_mistaken(key, name) or case.plain[name].size != own.size:
            continue
        if (distance := view.distance(case.plain[name].reshape(own.shape))) <= bound:
            best, bound = name, np.nextafter(distance, -1)
    return best


def _stream_taken_elsewhere(case: Mismatch) -> Change | None:
    """Return a Change that ignores a point of the residual stream, in one layer or all, or None.

    With it the next recorded point, which the recorded values do not give, agrees.
    """
    key = case.view.key
    if recorded_values_are_used(case):
        return None
    everywhere = _keys_in_all_layers(case, [case.view.point]) if case.layer >= 0 else {key}
    for drop in dict.fromkeys((frozenset({key}), frozenset(everywhere))):
        later = (k for k in keys_after(case) if k not in drop and case.recorded.has_record(k))
        cut = next(later, "")
        before = case.found.views.get(cut)
        if before is None or not before.flagged or before.one_sided_nonfinite:
            continue
        after = run_shadow_pass(case.patched, case.without(drop), cut).views.get(cut)
        if after is None or after.flagged or after.residual is None:
            continue
        elsewhere = {key} | keys_taken_elsewhere(case, drop)
        relation = _relation_text(case, case.view)
        known = relation or UNKNOWN
        return Change(
            "capture_point",
            f"{_first_clause([relation])}: {case.view.point} is {known}"
            f"{'' if relation else _rows_text(case)}; {cut}, which is computed from it, agrees",
            (key, *sorted(elsewhere - {key})),
            drop=frozenset(elsewhere),
            values={"recorded_as": case.view.point, "is": known, "agrees": cut},
            scoped=False,
            most=certainty_of_relations([relation]),
        )
    return None


def _keys_in_all_layers(case: Mismatch, names: Sequence[str]) -> set[str]:
    """Return the keys of the named points in every layer, as engines record all layers alike."""
    return {key_name(name, layer) for name in names for layer in range(case.patched.n_layers)}


def _refuse_rank_twice(case: Mismatch, keys: Sequence[str]) -> None:
    """Raise FormatError where a dump has one rank's values for another's at most of `keys`.

    Two points at least have to show it. Later points agree: the engine computed with the right
    shares, only the dump has one rank's twice.
    """
    if not case.recorded.trace.run.get("dump"):
        return
    orders = {key: tuple(_rank_order(case, key) or ()) for key in keys}
    twice = {key: order for key, order in orders.items() if len({*order}) < len(order)}
    if len(twice) < 2 or 2 * len(twice) <= len(keys) or len({*twice.values()}) > 1:
        return
    (order,) = {*twice.values()}
    lost = [str(rank) for rank in range(len(order)) if rank not in order]
    raise FormatError(
        f"the dump has {order_text(order)}, at {join_first([*twice], SHOWN)}; what follows agrees, "
        f"so that the values of rank {', '.join(lost)} were computed and are not in the dump: was "
        "one rank's file written twice?"
    )


def _rank_order(case: Mismatch, key: str) -> list[int] | None:
    """Return whose share of columns each rank has at a point, by its number; None if unclear.

    None, too, where the recorded values are not made of the ranks' shares.
    """
    view = case.found.views[key]
    if view.recorded is None or np.ptp(view.recorded.values) == 0:
        return None
    mine, theirs = view.recorded.comparable_values(view.mine, view.axis)
    return rank_order(mine, theirs, 10 * view.tolerance)


def _differing_keys(case: Mismatch, names: Sequence[str]) -> set[str]:
    """Return the keys of the named points, in all layers, whose recorded values disagree."""
    views = case.found.views
    return {key for key in _keys_in_all_layers(case, names) if key in views and views[key].flagged}


def _with_relative_layers(text: str, layer: int) -> str:
    """Return a relation's text with layers counted from `layer`: "L+1." is the next one.

    The final norm is treated as the next layer's first norm.
    """
    text = re.sub(r"\bL(\d+)\.", lambda found: f"L{int(found[1]) - layer:+d}.", text)
    return text.replace("final_norm", "L+1.attn_norm")


def _recorded_values_show(case: Mismatch, cut: ShadowPoint) -> bool:
    """Return whether the first wrong point's values make a point up to `cut` disagree.

    They do if a flagged point between the two is computed from the first wrong one.
    """
    order = {key: i for i, key in enumerate(case.found.views)}
    here = order[case.view.key]
    return any(
        view.flagged
        for view in case.found.views.values()
        if here < order[view.key] <= order[cut.key] and is_computed_from(view.key, case.view.key)
    )


def _first_clause(relations: Sequence[str]) -> str:
    """Return the clause that begins the finding of values recorded elsewhere.

    `relations` say what the values are by point, "" where that is not known.
    """
    known = [text for text in relations if text]
    if not known:
        return (
            "what is recorded is not what was computed there, and what it is instead is not known"
        )
    if all(text.startswith(ROUNDED) for text in known):
        return "some ranks recorded what was computed in a shorter type"
    return "what is recorded was taken at another point"


def _rows_text(case: Mismatch) -> str:
    """Return a clause on which rows of the first wrong point differ; "" where all do."""
    view = case.view
    if view.recorded is None or view.recorded.values.size != view.mine.size:
        return ""
    if POINTS[view.point].rows != "tokens":
        return ""
    far = case.distances_by_row(view) > view.tolerance
    rows = np.flatnonzero(far)
    if not 0 < len(rows) < len(far):
        return ""
    shown = join_first(rows.tolist(), 4)
    return f", in {'row' if len(rows) == 1 else 'rows'} {shown} of {len(far)}"


# --- what the values are -------------------------------------------------------------------------


def _relation_text(case: Mismatch, view: ShadowPoint) -> str:
    """Return how a point's recorded values follow from the reference's; "" if no relation fits.

    Where the trace has only some rows these are compared.
    """
    if view.recorded is None or np.ptp(view.recorded.values) == 0:
        return ""
    shorter = short_ranks(case, view)
    if shorter is not None:
        return f"{ROUNDED} {shorter.says}"
    for name, value in neighbour_values(replace(case, view=view)):
        if value.size == view.mine.size and view.distance(value.reshape(view.mine.shape)) <= (
            view.tolerance
        ):
            return name
    mine, theirs = view.recorded.comparable_values(view.mine, view.axis)
    return relation_text(mine, theirs, 10 * view.tolerance)
