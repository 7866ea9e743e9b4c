"""What two runs predict: logits, losses computed in three ways, tokens sent to other experts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.backends.base import Backend
from aprfmt.inference.capture import parse_key
from aprfmt.inference.loss import cross_entropy, log_probabilities
from aprfmt.inference.parity.parity_records import ExpertFlip, Flip, LogitsDiff, Outcomes
from aprfmt.inference.trace import Trace
from aprfmt.measure.nonfinite import equal_or_both_nan
from aprfmt.measure.tolerances import label_loss_bound
from aprfmt.measure.traces import PointDiff

Numbers = NDArray[Any]
TOP_K = 5
# Rows handled at a time: float64 copies of a large vocabulary are 2 MB a row.
_ROWS = 64


@np.errstate(all="ignore")  # what is not finite is judged, not warned of
def compare_logits(a: Numbers, b: Numbers, ids: Sequence[int], within: bool) -> LogitsDiff:
    """Return the comparison of logits [tokens, vocab] of the reference `a` and of `b`.

    Losses are those of ids[1:]. `within` says whether the logits are within their tolerance, which
    explains flips.
    """
    k = min(TOP_K, a.shape[-1])
    agree = overlap = 0.0
    flips: list[Flip] = []
    kl: list[float] = []
    squares = norm = largest = 0.0
    for start in range(0, len(a), _ROWS):
        x = np.asarray(a[start : start + _ROWS], np.float64)
        y = np.asarray(b[start : start + _ROWS], np.float64)
        delta = np.where(equal_or_both_nan(x, y), 0.0, np.abs(x - y))
        delta[np.isnan(delta)] = np.inf  # one side alone is no number
        squares += float(np.sum(delta**2))
        norm += float(np.sum(np.where(np.isfinite(x), x, 0.0) ** 2))
        largest = max(largest, float(np.max(delta, initial=0.0)))
        p, q = log_probabilities(x), log_probabilities(y)
        kl += [float(value) for value in np.sum(np.exp(p) * (p - q), axis=-1)]
        best_x, best_y = np.argmax(x, -1), np.argmax(y, -1)
        agree += float(np.sum(best_x == best_y))
        for row in range(len(x)):
            top = np.argpartition(-x[row], k - 1)[:k], np.argpartition(-y[row], k - 1)[:k]
            overlap += len(set(top[0].tolist()) & set(top[1].tolist())) / k
            i, j = int(best_x[row]), int(best_y[row])
            if i != j:
                margins = float(x[row, i] - x[row, j]), float(y[row, j] - y[row, i])
                flips.append(Flip(start + row, i, j, *margins, float(delta[row].max()), within))
    count = max(len(a), 1)
    rel = 0.0 if squares == 0 else math.sqrt(squares / norm) if norm else math.inf
    return LogitsDiff(
        len(a),
        rel,
        largest,
        agree / count,
        k,
        overlap / count,
        tuple(flips),
        float(np.mean(kl)),
        float(np.max(kl)),
        mean_label_loss(a, ids),
        mean_label_loss(b, ids),
    )


def mean_label_loss(logits: Numbers, ids: Sequence[int]) -> float | None:
    """Return the mean float64 loss of ids[1:] in nats by logits [tokens, vocab].

    None for fewer than two ids, or if there are not as many rows as ids.
    """
    if len(ids) < 2 or len(logits) != len(ids):
        return None
    return float(np.mean(_label_losses(logits, ids)))


def make_outcomes(
    a: Numbers, b: Numbers, ids: Sequence[int], point: PointDiff, before: int | None
) -> Outcomes:
    """Return the Outcomes of two runs' logits [tokens, vocab]: their distance and their losses.

    Only rows before `before` count; None: all rows. `point` is the comparison of these rows'
    logits. `check_outcomes` judges the result.
    """
    count = len(a) if before is None else before
    cut = ids[: count + 1]
    size = math.sqrt(float(np.mean(np.square(a[:count], dtype=np.float64)))) if count else 0.0
    return Outcomes(
        before,
        point.rel_l2 if count else None,
        point.tolerance,
        size,
        mean_label_loss(a[: len(cut)], cut),
        mean_label_loss(b[: len(cut)], cut),
        len(cut) - 1,
    )


def _label_losses(logits: Numbers, ids: Sequence[int]) -> Numbers:
    """Return the float64 loss of each of ids[1:] in nats."""
    parts = [
        cross_entropy(
            logits[start : min(start + _ROWS, len(ids) - 1)],
            ids[start + 1 : min(start + _ROWS, len(ids) - 1) + 1],
        )
        for start in range(0, len(ids) - 1, _ROWS)
    ]
    found: Numbers = np.concatenate(parts)
    return found


@dataclass(frozen=True)
class BackendLoss:
    """A run's loss in its backend's arithmetic: the mean in nats, None with `why`.

    `off` is how far the label whose loss is furthest beyond rounding is from its float64 loss, in
    nats (infinite where either is not finite), `bound` what rounding may do to it.
    """

    nats: float | None
    off: float | None = None
    bound: float | None = None
    why: str = ""


def measure_backend_loss(
    backend: Backend | None, logits: Numbers, ids: Sequence[int]
) -> BackendLoss:
    """Return a run's loss of ids[1:] in its backend's arithmetic, and how far that is off.

    A backend's `cross_entropy` that gives a mean is judged as the loss of one label.
    """
    if backend is None:
        return BackendLoss(None, why="an engine's own loss is not called")
    if len(ids) < 2:
        return BackendLoss(None, why="a single token has no label")
    labels = np.asarray(ids[1:], np.int64)
    inner = np.ascontiguousarray(logits[:-1])
    expected = _label_losses(logits, ids)
    found = np.asarray(backend.cross_entropy(backend.array(inner), labels), np.float64)
    if not found.ndim:
        found, expected = found[None], np.array([float(np.mean(expected))])
    vocab = int(logits.shape[-1])
    pairs = [
        (
            abs(mine - true) if math.isfinite(mine - true) else math.inf,
            label_loss_bound(true if math.isfinite(true) else 0.0, backend.dtype, vocab),
        )
        for mine, true in zip(found.tolist(), expected.tolist(), strict=True)
    ]
    off, bound = max(pairs, key=lambda pair: pair[0] / pair[1])
    return BackendLoss(float(np.mean(found)), off, bound)


def compare_experts(a: Trace, b: Trace) -> list[ExpertFlip]:
    """Return every token that went to other experts in `b`, in execution order."""
    found = []
    for key, record in a.records.items():
        if record.point != "experts" or b.find_record(key) is None:
            continue
        mine, other = a.recorded_values(key), b.recorded_values(key)
        if mine is None or other is None or mine.shape != other.shape:
            continue
        layer = parse_key(key)[1]
        routers = [trace.recorded_values(f"L{layer}.router") for trace in (a, b)]
        margins = a.recorded_values(f"L{layer}.router_margin")
        for row in range(len(mine)):
            gone = sorted(set(mine[row].tolist()) - set(other[row].tolist()))
            came = sorted(set(other[row].tolist()) - set(mine[row].tolist()))
            if gone:
                margin = None if margins is None else float(margins[row])
                position = record.positions[row] if record.positions else row
                found.append(_expert_flip(key, position, row, gone, came, routers, margin))
    return found


def _expert_flip(
    key: str,
    position: int,
    row: int,
    lost: list[int],
    gained: list[int],
    routers: Sequence[Numbers | None],
    margin: float | None,
) -> ExpertFlip:
    """Return the record of a token that went to other experts, and whether rounding explains it.

    `key` and `row` say where in the trace, `lost` and `gained` are the experts that it lost and
    got, `routers` both runs' router logits, `margin` the router's margin (None: not recorded).
    """
    x, y = routers
    if x is None or y is None or x.shape != y.shape:
        return ExpertFlip(key, position, tuple(lost), tuple(gained), margin, None, False)
    largest = float(np.max(np.abs(np.asarray(x[row], np.float64) - y[row])))
    gap = float(np.min(x[row][lost]) - np.max(x[row][gained])) if gained else 0.0
    if not math.isfinite(largest):
        return ExpertFlip(key, position, tuple(lost), tuple(gained), margin, largest, False)
    # The router may choose by something else than its logits (groups, a correction): then its own
    # margin, in scores, which move less than the logits do, is what rounding has to close.
    closed = gap <= 2 * largest or (margin is not None and margin <= 2 * largest)
    return ExpertFlip(key, position, tuple(lost), tuple(gained), gap, largest, closed)
