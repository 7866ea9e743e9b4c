"""Padding that a recorded attention mask hides, and that a run counted all the same.

Tokens of a text attend to padding before or behind it, or the text's one embedding is made of rows
of padding too. The ids of the padding are in the trace, so that a pass over them shows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.forward.attention import hide_keys
from aprfmt.inference.points import POINTS
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import ShadowPass, run_shadow_pass
from aprfmt.inference.trace import Trace, no_blocks
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.model import Model

POOLED = "pooled"


def seen_padding(
    model: Model | None, trace: Trace, label: str, ids: Sequence[int], dtype: str
) -> Finding | None:
    """Return the finding that rows attend to the padding before them, which a recorded mask hides.

    All points differ from a pass without the padding, and agree with one whose rows see it: with
    positions counted from the padding on, or from the text on. None where there is no such
    padding, and where the rows do not show it. `label` is the side, `ids` are the text's.
    """
    dump = trace.run.get("dump")
    before = dump.get("masked", ()) if isinstance(dump, Mapping) else ()
    if model is None or not before:
        return None
    count, whole = len(before), (*before, *ids)
    patched = PatchedModel.unpatched(model, ids, dtype)
    try:
        if not run_shadow_pass(patched, RecordedTrace(trace, tuple(ids), {})).flagged:
            return None
        patched = replace(patched, ids=whole)
        recorded = RecordedTrace(_placed(trace, len(ids), count), whole, {})
        for first in (0, -count):
            at = [max(0, place + first) for place in range(len(whole))]
            found = run_shadow_pass(patched.with_positions(at), recorded)
            if found.compared_count and not found.flagged:
                where = "text" if first else "padding"
                counted = f"; positions count from the {where}"
                return _visible_padding(label, count, "before", counted, found.compared_count)
    finally:
        patched.weights.close()
    return None


def counted_padding(
    model: Model | None, trace: Trace, label: str, ids: Sequence[int], dtype: str
) -> Finding | None:
    """Return the finding that a run counts padding that its recorded mask hides; None if not.

    Its tokens attend to the padding behind them, or its embedding has rows of padding in it. `ids`
    are the text's, `label` is the side.
    """
    dump = trace.run.get("dump")
    said = dump if isinstance(dump, Mapping) else {}
    behind = tuple(said.get("behind", ()))
    if model is None or not behind or said.get("masked"):
        return None
    patched = PatchedModel.unpatched(model, ids, dtype)
    try:
        plain = run_shadow_pass(patched, RecordedTrace(trace, tuple(ids), {}))
        flagged = {view.point for view in plain.flagged}
        if not flagged:
            return None
        whole = replace(patched, ids=(*ids, *behind))
        recorded = RecordedTrace(_placed(trace, len(ids), 0), whole.ids, {})
        if flagged == {POOLED}:
            return _pooled_padding(plain, whole, recorded, label, len(ids))
        if POOLED not in flagged:
            return _seen_behind(whole, recorded, label, len(behind))
    finally:
        patched.weights.close()
    return None


def _placed(trace: Trace, count: int, first: int) -> Trace:
    """Return a trace of the text's `count` tokens as those of a longer pass, from `first` on.

    Records of other rows are left out.
    """
    moved = {
        key: replace(record, positions=tuple(range(first, first + count)))
        for key, record in trace.records.items()
        if POINTS[record.point].rows in ("tokens", "logits")
        and (record.positions is None or len(record.positions) == count)
        and len(record.shape) > 1
        and record.shape[0] == count
    }
    return replace(trace, records=moved, blocks=no_blocks)


def _visible_padding(label: str, count: int, side: str, counted: str, compared: int) -> Finding:
    """Return the finding that tokens see the `count` tokens of padding before or behind them.

    `side` is "before" or "behind", `counted` a clause on positions, `compared` the values that a
    pass gave.
    """
    what = f"{count} tokens of padding" if count > 1 else "token of padding"
    return Finding(
        "visible_padding",
        f"{label}: the text's tokens see the {what} {side} them, which the recorded attention "
        f"mask hides{counted}",
        "capture",
        "bug",
        ("attention_mask",),
        True,
        values={"padding": count},
        side=label,
        proof=unfitted_proof(compared),
    )


def _seen_behind(
    whole: PatchedModel, recorded: RecordedTrace, label: str, count: int
) -> Finding | None:
    """Return the finding that tokens attend to the `count` tokens behind them, if a pass agrees."""
    found = run_shadow_pass(whole, recorded)
    if not found.compared_count or found.flagged:
        return None
    return _visible_padding(label, count, "behind", "", found.compared_count)


def _pooled_padding(
    plain: ShadowPass, whole: PatchedModel, recorded: RecordedTrace, label: str, count: int
) -> Finding | None:
    """Return the finding that the embedding has rows of padding in it, or counts them.

    `plain` is the pass of the text alone, `whole` has the padding too. The text has
    `count` tokens. The rows of padding are computed anew, where the text's keys alone are seen.
    """
    view, total = plain.views[POOLED], len(whole.ids)
    kind, padding = str(whole.hp["pooling"]), total - count
    shown = np.zeros((total, total), np.bool_)
    shown[:, :count] = True
    padded = run_shadow_pass(hide_keys(shown)(whole, None), recorded).views.get(POOLED)
    tried: list[tuple[str, NDArray[np.float64]]] = []
    if kind == "mean":
        says = f"the sum of the text's {count} rows is divided by {total}, the padded length"
        tried.append((says, np.asarray(view.mine, np.float64) * count / total))
        says = f"the mean is of {total} rows: the {padding} of padding are counted too"
    else:
        says = "the last row is one of padding, not of the text"
    if padded is not None:
        tried.append((says, np.asarray(padded.mine, np.float64)))
    for says, given in tried:
        left = view.distance(given.reshape(view.mine.shape))
        if left <= view.tolerance:
            return Finding(
                "pooling",
                f"{label}: {says}; the recorded attention mask hides the padding",
                "forward",
                "bug",
                ("attention_mask",),
                True,
                POOLED,
                view.residual,
                left,
                POOLED,
                values={"padding": padding},
                side=label,
                proof=unfitted_proof(view.mine.size),
            )
    return None
