"""Cut points: later capture points that all effects of a point pass through, and tests on them."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from aprfmt.causes.forward.mismatch import Mismatch
from aprfmt.inference.capture import POINTS, key_name, parse_key
from aprfmt.inference.replay.shadow import ShadowPoint, run_shadow_point
from aprfmt.measure.tolerances import DISCRETE

# Points through which all earlier points of their sublayer act.
ATTENTION = ("attn", "attn_out", "attn_contrib", "mid")
MLP = ("ffn_mul", "ffn_out", "moe_out", "ffn_contrib", "out")
STREAM = ("embd", "embd_scaled", "in", "mid", "out", "final_norm", "logits_raw", "logits")
# Points side by side: what is computed from one is not computed from the others.
BRANCHES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        ("q_a", "q_a_norm", "q_mm", "q_b", "q", "q_norm", "q_rope", "q_attn"),
        ("k_mm", "k", "k_norm", "k_pe", "k_pe_rope", "k_nope", "k_rope", "k_attn", "k_cache"),
        ("v_mm", "v", "v_cache"),
    ),
    (("ffn_gate", "ffn_act"), ("ffn_up",)),
    (("ssm_gate",), ("ssm_conv_in", "conv", "ssm_x", "ssm_dt", "ssm_step", "ssm_scan")),
    (
        ("ssm_gate", "ssm_conv_in", "conv", "ssm_x", "ssm_dt", "ssm_step", "ssm_scan", "ssm_gated"),
        ("q_mm", "q", "q_norm", "q_rope", "k_mm", "k", "k_norm", "k_rope", "v_mm", "v", "scores",
         "probs", "attn"),
    ),
)  # fmt: skip
# Points of a state space mixer that runs parallel to attention: `ssm_out` is its last.
PARALLEL_MIXER = (
    "ssm_gate", "ssm_conv_in", "conv", "ssm_x", "ssm_dt", "ssm_step", "ssm_scan", "ssm_gated",
    "ssm_out",
)  # fmt: skip
# A dense MLP's points where experts run parallel to it.
DENSE = ("ffn_gate", "ffn_up", "ffn_act", "ffn_mul", "ffn_out", "ffn_mlp")


def may_be_mistaken(key: str, other: str) -> bool:
    """Return whether a recorder that is off by some points may confuse `other` with `key`.

    They are the same point in two layers, or two points of the residual stream. False for whole
    numbers, which may be equal by chance.
    """
    point, its = parse_key(key)[0], parse_key(other)[0]
    if key == other or point in DISCRETE:
        return False
    return point == its or {point, its} <= {*STREAM}


def cut_keys(key: str, points: Collection[str] = ()) -> Iterator[str]:
    """Yield the keys, nearest first, of points through which all effects of a point pass.

    Yields nothing for points outside the layers, of the residual stream, or of whole numbers
    (experts). `points` are the keys of all points of the model's pass: with these a point of a
    branch that runs parallel to the point's own is left out, since it is not computed from it.
    """
    point, layer = parse_key(key)
    if layer < 0 or point in STREAM or point in DISCRETE:
        return
    order = list(POINTS)
    others = _points_of_other_branches(point, layer, points)
    for name in ("ssm_out", *ATTENTION, *MLP):
        if order.index(name) > order.index(point) and name not in others:
            if name != "ssm_out" or key_name(name, layer) in points:
                yield key_name(name, layer)
    yield from ("final_norm", "logits")


def _points_of_other_branches(point: str, layer: int, points: Collection[str]) -> tuple[str, ...]:
    """Return the cut points of a layer that are not computed from `point`, though after it.

    () where the model's points are not known. Branches run side by side in three kinds of layer:
    attention and a state space mixer, attention and the MLP, experts and a dense MLP.
    """
    if not points:
        return ()

    def has(name: str) -> bool:
        """Return whether the model has this point in the layer."""
        return key_name(name, layer) in points

    if point in PARALLEL_MIXER and has("ssm_out"):
        return "attn", "attn_out"
    in_mixer = [*POINTS].index(point) <= [*POINTS].index("attn_contrib")
    found: tuple[str, ...] = ()
    if has("attn_out") and has("ffn_out") and not has("mid") and in_mixer:
        found = MLP[: MLP.index("out")]
    if has("moe_out") and has("ffn_mlp") and point in DENSE:
        found = ("moe_out",)
    return found


def stream_keys_after(key: str, keys: Sequence[str]) -> Iterator[str]:
    """Yield the keys of later stream points, through which all effects of a stream point pass.

    `keys` are points in execution order, the point among them. Nothing is yielded for a point that
    is not of the residual stream.
    """
    if parse_key(key)[0] in STREAM:
        later = keys[keys.index(key) + 1 :]
        yield from (other for other in later if parse_key(other)[0] in STREAM)


def deciding_key(key: str, keys: Sequence[str]) -> str:
    """Return the next point through which all effects of a point pass; "" for the last one.

    Its recorded value tells whether a run went on with what is recorded at `key`. `keys` are the
    points of a pass in execution order, `key` among them.
    """
    return next((cut for cut in cut_keys(key, keys) if cut in keys), "") or next(
        stream_keys_after(key, keys), ""
    )


def agrees_without(case: Mismatch, cut: str) -> bool:
    """Return whether point `cut` agrees if the trace's values up to it are ignored.

    The points from the mismatch up to `cut` are then computed by the model. False if the trace
    lacks `cut`, or the model does not compute it from the differing point, as in a parallel branch.
    """
    view = _view_without(case, cut, 0)
    if view is None or view.residual is None or view.flagged:
        return False
    return depends_on_mismatch(case, cut)


def depends_on_mismatch(case: Mismatch, cut: str) -> bool:
    """Return whether the model computes point `cut` from the values of the differing point.

    False for a point of a parallel branch, and where the trace lacks `cut`.
    """
    used, left = (_view_without(case, cut, first) for first in (1, 0))
    return used is not None and left is not None and not np.array_equal(used.mine, left.mine)


def _view_without(case: Mismatch, cut: str, first: int) -> ShadowPoint | None:
    """Return point `cut` of a pass that ignores the trace's values up to it.

    The values of the differing point are ignored, too, unless `first` is 1. None if the trace lacks
    `cut`, or the model has no such points.
    """
    if not case.recorded.has_record(cut) or not {cut, case.view.key} <= case.patched.points.keys():
        return None
    keys = list(case.patched.points)
    inner = keys[keys.index(case.view.key) : keys.index(cut)]
    return run_shadow_point(case.patched, case.without(inner[first:]), cut)


def is_computed_from(later: str, earlier: str) -> bool:
    """Return whether point `later` is computed from `earlier`; False for parallel branches."""
    (a, layer), (b, own) = parse_key(later), parse_key(earlier)
    if layer != own:
        return True
    if b in ("v_mm", "v", "v_cache") and a in ("scores", "probs"):
        return False
    return not any(
        a in side and b in other
        for group in BRANCHES
        for side in group
        for other in group
        if side is not other
    )


def recorded_values_are_used(case: Mismatch) -> bool:
    """Return whether the nearest later recorded point was computed from the recorded values.

    If so, the engine really computed with them, and they were not captured at another point.
    """
    key = case.view.key
    points = case.found.views
    for cut in cut_keys(key, points) if parse_key(key)[0] not in STREAM else keys_after(case):
        view = case.found.views.get(cut)
        if view is None or view.residual is None:
            continue
        if view.flagged or depends_on_mismatch(case, cut):
            return not view.flagged and not agrees_without(case, cut)
    return False


def keys_after(case: Mismatch) -> Iterator[str]:
    """Yield the keys of all points after the mismatching one, in execution order.

    Points of whole numbers (experts) are left out.
    """
    keys = list(case.patched.points)
    later = keys[keys.index(case.view.key) + 1 :] if case.view.key in keys else []
    yield from (key for key in later if parse_key(key)[0] not in DISCRETE)
