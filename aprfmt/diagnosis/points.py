"""The table of capture points: for each the distance of both runs and of the shadow passes."""

from collections.abc import Mapping, Sequence

from aprfmt.diagnosis.direct import execution_order
from aprfmt.diagnosis.found import PointRow
from aprfmt.inference.capture import parse_key
from aprfmt.inference.replay.shadow import ShadowPass, ShadowPoint
from aprfmt.measure.traces import PointDiff


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

    `label` is the shadow pass's side. `entering` is the relative L2 of what enters each layer.
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
