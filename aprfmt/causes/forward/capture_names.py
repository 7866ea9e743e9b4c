"""Hypotheses about correct values recorded under the name of another point."""

from collections.abc import Iterator

import numpy as np

from aprfmt.causes.forward.cut_points import STREAM, recorded_values_are_used
from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Mismatch
from aprfmt.causes.row import Cause
from aprfmt.inference.capture import key_name
from aprfmt.inference.replay.recorded_trace import layer_keys
from aprfmt.inference.replay.shadow import run_shadow_pass, run_shadow_point

CAUSE_ROWS = (
    Cause(
        "capture_point", "capture", "same",
        "The values were taken at another point of the same computation: before the bias, "
        "before rope, without the residual.",
        "A point equals another point of the other side.",
        "Renaming the point makes it equal.",
        next="nothing",
        by_place=True,
    ),
    Cause(
        "capture_rows", "capture", "same",
        "The values belong to other rows of the same computation, such as the last token only, or "
        "are in another order.",
        "Other counts or positions; the shared rows are equal.",
        "Comparing the rows of equal positions, or in the other order, shows no difference.",
        next="nothing",
    ),
    Cause(
        "other_sequence", "capture", "bug",
        "A request of a batch has the rows of another request.",
        "No row agrees from the first point on; the other dump has the same rows under other ids.",
        "All points are, to the bit, those of the other sequence.",
    ),
)  # fmt: skip


def match_neighbour_points(case: Mismatch) -> Iterator[Change]:
    """Yield the change that the recorded value is that of another capture point, if one equals it.

    Yields at most one, and none if the engine computed on with the recorded values.
    """
    recorded = case.view.recorded
    if recorded_values_are_used(case) or recorded is None or np.ptp(recorded.values) == 0:
        return  # one number everywhere equals whatever is computed from it
    for name, value in neighbour_values(case):
        if value.size != case.view.mine.size:
            continue
        if not case.distance_from_trace(value) <= case.view.tolerance:
            continue
        here = case.view.key
        final = name.endswith("final_norm")  # only the last layer is followed by it
        same = frozenset([here] if final else _same_point_keys(case))
        elsewhere = {here} | keys_taken_elsewhere(case, same)
        yield Change(
            "capture_point",
            f"what is recorded as {case.view.point} was taken at another point: it is {name}",
            (here, *sorted(elsewhere - {here})),
            drop=frozenset(elsewhere),
            values={"recorded_as": case.view.point, "is": name},
            scoped=False,
            general=_records_other_point(case, name),
        )
        return


def _records_other_point(case: Mismatch, name: str) -> bool:
    """Return whether the trace also has the point called `name`.

    Then the values may be there because an operation was left out.
    """
    point = name.rpartition(" ")[2]
    key = point if case.layer < 0 or "." in point else key_name(point, case.layer)
    return case.recorded.trace.find_record(key) is not None


def _same_point_keys(case: Mismatch) -> Iterator[str]:
    """Yield the keys of the mismatching point in all layers, which engines record alike."""
    if case.layer < 0:
        yield case.view.key
        return
    for layer in range(case.patched.n_layers):
        yield key_name(case.view.point, layer)


def keys_taken_elsewhere(case: Mismatch, keys: frozenset[str]) -> set[str]:
    """Return those of the points `keys` whose recorded values differ from the model's own there.

    All of `keys` are ignored in the pass that computes the model's own values, since each may
    have been recorded elsewhere. Empty where `keys` is the mismatching point alone.
    """
    if keys <= {case.view.key}:
        return set()  # only other points are looked for
    full = run_shadow_pass(case.patched, case.without(keys)).views
    return {
        key
        for key in keys
        if key in full
        and (own := case.found.views.get(key)) is not None
        and own.recorded is not None
        and not own.distance(full[key].mine) <= own.whole_tolerance
    }


def neighbour_values(case: Mismatch) -> Iterator[tuple[str, Array]]:
    """Yield (name, values) of what may have been recorded by mistake under this point's name.

    They are the layer's other points, computed on the trace's inputs, and values one operation away
    from this point: with or without the residual stream, a scale, a softcap or a bias.
    """
    views, key = case.found.views, case.view.key
    # Other points of this layer, and those before and after it.
    keys = layer_keys(case.layer)
    keys += ["embd", "embd_scaled"] if case.layer == 0 else []
    layers = case.patched.n_layers
    before = key_name("out", (case.layer if case.layer >= 0 else layers) - 1)
    after = "final_norm" if case.layer == layers - 1 else f"L{case.layer + 1}.attn_norm"
    for other in (*keys, before, after):
        if other == key:
            continue
        name = other if other in (before, after) else other.rpartition(".")[2]
        for source in (views[other].mine if other in views else None, case.plain.get(other)):
            if source is not None:
                yield f"what belongs to {name}", np.asarray(source)
    # What comes next, from what this point of the stream should be and not from what was recorded.
    follows = case.view.point in STREAM
    made = run_shadow_point(case.patched, case.without({key}), after) if follows else None
    if made is not None:
        yield f"what belongs to {after}", np.asarray(made.mine)
    # This point with or without the residual stream.
    mine = case.view.mine
    stream = _residual_stream(case)
    if stream is not None and stream.size == mine.size:
        stream = stream.reshape(mine.shape)
        yield f"{case.view.point} plus the residual stream", mine + stream
        yield f"{case.view.point} less the residual stream", mine - stream
    # This point with or without its last operation: scale, cap, bias.
    call = case.call("scores")
    if call is not None and case.gives_point_value(call):
        q, k = (case.array(x).astype(np.float64) for x in call.args[:2])
        bare = np.einsum("thd,jhd->htj", q, np.repeat(k, q.shape[1] // k.shape[1], axis=1))
        yield "scores before the scale", bare
        yield "scores before the softcap", bare * call.args[2].scale
    call = case.call("rope")
    if call is not None and case.gives_point_value(call):
        scale = float(case.patched.hp["attn_scale"])
        yield f"{case.view.point} times the attention scale", mine * scale
    total = case.call("add") if case.view.point == "moe_out" else None
    if total is not None and case.gives_point_value(total):
        routed, shared = (case.array(x) for x in total.args[:2])
        yield "moe_out without the shared expert", routed
        yield "the shared expert alone", shared
    linear = case.call("linear", "router")
    if linear is not None and linear.args[2] is not None and case.gives_point_value(linear):
        bias = case.array(linear.args[2])
        yield f"{case.view.point} before its bias", mine - bias.reshape(mine.shape[1:])


def _residual_stream(case: Mismatch) -> Array | None:
    """Return the residual stream that the point's sublayer is added to; None if there is none.

    It is the trace's if recorded, else the model's own.
    """
    names = ("in", "embd_scaled", "embd") if "attn" in case.view.point else ("mid",)
    for name in names:
        keys = [f"L{case.layer}.{name}", name]
        keys += [f"L{case.layer - 1}.out"] if name == "in" else []
        for key in keys:
            view = case.found.views.get(key)
            if view is not None:
                return view.theirs if view.recorded is not None else view.mine
    return None


HYPOTHESES = (
    Hypothesis(
        "capture_point",
        match_neighbour_points,
        10,
        "a right value under another name is no fault of the operation",
    ),
)
