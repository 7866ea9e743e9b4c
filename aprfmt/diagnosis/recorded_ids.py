"""The token ids of a diagnosis: whether both sides ran on the same ids, and what these show.

A and B are the two models, runs or traces that are compared; a *side* is one of them.

Findings on the ids that a trace recorded: their frame, and padding that no row sees.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.deferred import Deferred
from aprfmt.base.protocols import Value
from aprfmt.base.sequences import first_and_more
from aprfmt.causes.tokenizer.recorded_ids import leading_padding, padding_sentence, wrong_frame
from aprfmt.diagnosis.sides import trace_ids
from aprfmt.errors import AprfmtError
from aprfmt.inference.points import POINTS
from aprfmt.inference.probe_ids import TILE, critical_lengths
from aprfmt.inference.record import Record
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import ShadowPoint, run_shadow_pass
from aprfmt.inference.trace import Trace, no_blocks
from aprfmt.inference.weights import Weight, model_weights
from aprfmt.measure.distances import row_order
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import cap_proof, unfitted_proof
from aprfmt.model import Model
from aprfmt.tokenizer.base import Tokenizer

_MOST_IDS = 64  # of a command
# The axes of a point's values that count tokens, by the meaning of its rows.
_AXES = {"tokens": (0,), "logits": (0,), "keys": (0,), "scores": (1, 2)}


def id_mismatch_sentence(
    given_ids: Sequence[int] | None, recorded: Mapping[str, Sequence[int]]
) -> str:
    """Return a sentence if the given ids and those of the traces differ; "" if they are equal.

    `recorded` has the ids of each side ("A", "B") whose trace has them.
    """
    for label, ids in recorded.items():
        if given_ids is not None and tuple(given_ids) != tuple(ids):
            return (
                f"{label} was run on other token ids than those given "
                f"({_first_difference_text(given_ids, ids)})"
            )
    if len(recorded) == 2 and tuple(recorded["A"]) != tuple(recorded["B"]):
        return "the traces are of other token ids: " + _first_difference_text(
            recorded["A"], recorded["B"]
        )
    return ""


def _first_difference_text(a: Sequence[int], b: Sequence[int]) -> str:
    """Return the lengths of two sequences of ids and where they first differ, as text."""
    at = next(
        (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
        min(len(a), len(b)),
    )
    return f"{len(a)} and {len(b)} ids, the first difference at {at}"


def hidden_causes(hp: Mapping[str, Value], tokens: int) -> Iterator[str]:
    """Yield sentences about causes that a pass over `tokens` tokens cannot show."""
    rotates = any(hp["rope_layers"])
    if tokens < 2:
        yield "mask, positions and rope: one token at position 0 does not show them"
    elif tokens < 4 and rotates:
        yield f"rope: {tokens} tokens hardly tell a base from a scaling"
    window = hp["sliding_window"]
    if window is not None and any(hp["window_layers"]) and tokens <= int(window):
        yield f"sliding_window: {tokens} tokens; more than {window} would show it, give --ids"
    if tokens <= TILE:
        yield f"softmax_reduction: {tokens} tokens; more than {TILE} would show tiles of {TILE}"
    scaling = hp["rope_scaling"]
    if scaling is not None and scaling["type"] in ("dynamic", "longrope"):
        for reach in critical_lengths({**hp, "sliding_window": None}):
            if tokens <= reach:
                yield f"rope_scaling: {tokens} tokens; beyond {reach} other frequencies apply"


_WINDOW = 8192  # rows of the embedding that are held at a time
_OWN = 0.01  # a row's distance from its token's, of its length: bfloat16 rounds by 0.004


def ids_of_embedding(trace: Trace, model: Model | None) -> tuple[int, ...] | None:
    """Return the token ids whose rows of the model's embedding a trace recorded.

    None where the trace has no embedding, a row of it is none of the model's, or several tokens
    have that row.
    """
    if model is None or "embd" not in trace.records:
        return None
    held = trace.fetch("embd")
    if held is None:
        return None
    table = model_weights(model).get_role(None, "token_embd.weight")
    rows = np.asarray(held, np.float64).reshape(-1, np.shape(held)[-1])
    if table is None or table.n_columns != rows.shape[1] or not np.isfinite(rows).all():
        return None
    for scale in dict.fromkeys((1.0, float(model.hyper["embedding_scale"]))):
        found = _nearest_rows(rows / scale, table)
        if found is not None:
            return found
    return None


def _nearest_rows(rows: NDArray[np.float64], table: Weight) -> tuple[int, ...] | None:
    """Return the number of the table's row that each of `rows` is; None if one is unclear.

    A row is clear if one row of the table is near it and no other.
    """
    best = np.full((2, len(rows)), np.inf)  # squared distances of the nearest and the next
    nearest = np.zeros(len(rows), np.int64)
    square = (rows**2).sum(1)
    for start in range(0, table.n_rows, _WINDOW):
        part = np.asarray(table.rows(start, min(start + _WINDOW, table.n_rows)), np.float64)
        far = square[:, None] - 2 * rows @ part.T + (part**2).sum(1)
        two = np.argpartition(far, min(1, far.shape[1] - 1), 1)[:, :2]
        for column in two.T:
            apart = far[np.arange(len(rows)), column]
            nearer = apart < best[0]
            best[1] = np.where(nearer, best[0], np.minimum(best[1], apart))
            best[0] = np.where(nearer, apart, best[0])
            nearest = np.where(nearer, start + column, nearest)
    bound = _OWN**2 * square
    if (square == 0).any() or (best[0] > bound).any() or (best[1] < 16 * bound).any():
        return None
    return tuple(int(one) for one in nearest)


def tokenizer_of(model: Model | None) -> Tokenizer | None:
    """Return a model's tokenizer; None where it has none that can be read."""
    try:
        return None if model is None else model.tokenizer
    except AprfmtError:
        return None


def frame_finding(
    model: Model | None, label: str, ids: Sequence[int], *, chosen: bool
) -> Finding | None:
    """Return the finding on wrong special tokens or padding around recorded ids; None if right.

    `model` is the one that was run, `label` the side. Padding that the run attends to counts;
    padding that no row sees has been removed before. If the ids were `chosen` by aprfmt, no token
    is reported as missing.
    """
    tokenizer = tokenizer_of(model)
    if tokenizer is None or model is None:
        return None
    wrong = wrong_frame(tokenizer, ids)
    wrong = None if chosen and wrong is not None and wrong.missing else wrong
    padding = 0 if wrong is not None else leading_padding(tokenizer, ids)
    if wrong is None and not padding:
        return None
    if wrong is None:
        cause, right = "visible_padding", tuple(ids[padding:])
        says = f"{padding_sentence(tokenizer, ids, padding)}, and the run attends to it"
    else:
        cause, says, right = wrong.cause, wrong.says, wrong.right
    given = ",".join(map(str, right[:_MOST_IDS]))
    command = f"aprfmt trace {model.path} --payload --ids {given}"
    return Finding(
        cause,
        f"{label}: {says}",
        "capture",
        "bug",
        ("input_ids",),
        True,
        values={"ids": {"right": list(right), label.lower(): list(ids)}},
        side=label,
        next=command if len(right) <= _MOST_IDS else "",
        proof=cap_proof(
            unfitted_proof(len(ids)),
            "explained" if wrong is not None and wrong.missing else "confirmed",
        ),
    )


def hidden_padding(
    model: Model | None, traces: Mapping[str, Trace], ids: Sequence[int], dtype: str
) -> tuple[int, Finding] | None:
    """Return (count, finding) of padding before the text that no later row of a trace sees.

    None where there is none, or later rows differ from those of a pass without padding.
    """
    tokenizer = tokenizer_of(model)
    count = 0 if tokenizer is None else leading_padding(tokenizer, ids)
    if model is None or tokenizer is None or not count:
        return None
    compared = 0
    for trace in traces.values():
        cut = without_leading_rows(trace, len(ids), count)
        patched = PatchedModel.unpatched(model, ids[count:], dtype)
        found = run_shadow_pass(patched, RecordedTrace(cut, tuple(ids[count:]), {}))
        patched.weights.close()
        if found.flagged or not found.compared_count:
            return None
        compared += found.compared_count
    says = f"{padding_sentence(tokenizer, ids, count)}, which the rows after it do not see; these "
    return count, Finding(
        "capture_rows",
        f"{says}{len(ids) - count} rows are those of a pass without it",
        "capture",
        "same",
        ("input_ids",),
        True,
        residual_after=0.0,
        of="the rows after the padding",
        proof=unfitted_proof(compared),
    )


def exchanged_rows(
    model: Model | None, trace: Trace, ids: Sequence[int], dtype: str
) -> tuple[Trace, Finding] | None:
    """Return (trace with its rows put in the order of `ids`, finding); None if they are in order.

    The order is found on the first captured point and tested on all: reordered, the rows must
    agree with a pass on `ids` everywhere. None too where they do not, or where no point after an
    attention was captured: before it, exchanged tokens would look like exchanged rows.
    """
    if model is None:
        return None
    patched = PatchedModel.unpatched(model, ids, dtype)
    try:
        recorded = RecordedTrace(trace, tuple(ids), {})
        keys = [key for key in patched.points if key in trace.records]
        first = next((key for key in keys if _rows_of(key) == "tokens"), "")
        if not first or len(ids) < 2 or not any(map(_is_after_attention, keys)):
            return None
        view = run_shadow_pass(patched, recorded, first).views.get(first)
        order = None if view is None or not view.flagged else _order_of_rows(view, len(ids))
        if order is None:
            return None
        for axes in ((), (1,), (1, 2)):  # of scores: they may have been dumped apart
            restored = _with_rows_in_order(trace, order, axes)
            found = run_shadow_pass(patched, RecordedTrace(restored, tuple(ids), {}))
            judged = [key for key, one in found.views.items() if one.residual is not None]
            if not found.flagged and any(_is_after_attention(key) for key in judged):
                return restored, _order_finding(order, judged)
    finally:
        patched.weights.close()
    return None


def _rows_of(key: str) -> str:
    """Return what the rows of a point count, such as "tokens"; "" for a name that is no point."""
    row = POINTS.get(key.rpartition(".")[2])
    return "" if row is None else row.rows


def _is_after_attention(key: str) -> bool:
    """Return whether a point is computed from the rows of several tokens, for certain.

    No point of the first layer counts.
    """
    layer, _, point = key.rpartition(".")
    return layer not in ("", "L0") or point in ("logits", "final_norm")


def _order_of_rows(view: ShadowPoint, tokens: int) -> NDArray[np.int64] | None:
    """Return the number of the recorded row that belongs to each token, [tokens]; None if unclear.

    None too where each token has its own row.
    """
    if (
        view.recorded is None
        or len(view.mine) != tokens
        or view.recorded.values.size != (view.mine.size)
    ):
        return None
    return row_order(view.mine, view.recorded.values, 2 * view.tolerance)


def _with_rows_in_order(
    trace: Trace, order: NDArray[np.int64], axes_of_scores: Sequence[int]
) -> Trace:
    """Return a trace whose rows are `order` of the recorded ones, at points with a row per token.

    `axes_of_scores` are the axes of attention scores to reorder.
    """

    def fetch(key: str) -> NDArray[Any] | None:
        """Return a point's recorded values with the tokens' rows in `order`; None if not recorded.

        Unchanged where the values do not have a row for each token.
        """
        values = trace.fetch(key)
        rows = _rows_of(key)
        axes = axes_of_scores if rows == "scores" else _AXES.get(rows, ())
        if values is None or any(
            axis >= values.ndim or values.shape[axis] != len(order) for axis in axes
        ):
            return values
        for axis in axes:
            values = np.take(values, order, axis)
        return values

    held: Any = Deferred(lambda: trace.nonfinite)  # else `replace` would compute it
    return replace(trace, fetch=fetch, blocks=no_blocks, nonfinite=held)


def _order_finding(order: NDArray[np.int64], keys: Sequence[str]) -> Finding:
    """Return the finding that the rows of a trace are in another order than its tokens."""
    moved = np.flatnonzero(order != np.arange(len(order)))
    shown = first_and_more(moved.tolist(), 4, lambda at: f"{at} is stored as {order[at]}")
    return Finding(
        "capture_rows",
        f"rows are stored in another order than their tokens: row {shown}; in the tokens' "
        f"order all {len(keys)} points agree",
        "capture",
        "same",
        tuple(keys),
        True,
        values={"rows": order.tolist()},
        residual_after=0.0,
        of="the points, in the tokens' order",
        proof=unfitted_proof(len(keys) - 1),
    )


def without_leading_rows(trace: Trace, tokens: int, count: int) -> Trace:
    """Return a trace without the rows of its first `count` of `tokens` tokens.

    Points whose values do not have a row for each token are left out.
    """
    kept = dict(_cut_records(trace, tokens, count))

    def fetch(key: str) -> NDArray[Any] | None:
        """Return a point's recorded values without the first `count` tokens.

        None if not recorded.
        """
        values = trace.fetch(key)
        return None if values is None else _drop_first_tokens(key, values, tokens, count)

    run = {**trace.run, "ids": list((trace_ids(trace) or ())[count:])}
    return replace(trace, run=run, records=kept, fetch=fetch, blocks=no_blocks)


def _cut_records(trace: Trace, tokens: int, count: int) -> Iterator[tuple[str, Record]]:
    """Yield (key, record) of each point with a row per token, without its first `count` rows."""
    for key, record in trace.records.items():
        values = trace.fetch(key)
        cut = None if values is None else _drop_first_tokens(key, values, tokens, count)
        if cut is not None:
            yield key, replace(record, shape=cut.shape, positions=None, stats=None, sha256=None)


def _drop_first_tokens(
    key: str, values: NDArray[Any], tokens: int, count: int
) -> NDArray[Any] | None:
    """Return a point's values without the rows of the first `count` tokens.

    None where they do not have a row for each of `tokens` tokens.
    """
    row = POINTS.get(key.rpartition(".")[2])
    axes = () if row is None else _AXES.get(row.rows, ())
    if not axes or any(axis >= values.ndim or values.shape[axis] != tokens for axis in axes):
        return None
    return np.asarray(values)[
        tuple(slice(count if at in axes else 0, None) for at in range(values.ndim))
    ]
