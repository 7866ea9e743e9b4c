"""What two runs predict: logits, losses by three oracles, and tokens sent to other experts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.backends.base import Backend
from aprfmt.inference.capture import parse_key
from aprfmt.inference.loss import cross_entropy, log_probabilities
from aprfmt.inference.parity.records import ExpertFlip, Flip, LogitsDiff, Losses
from aprfmt.inference.trace import Trace
from aprfmt.outcome import Check, Outcome

Numbers = NDArray[Any]
TOP_K = 5
# Rows handled at a time: float64 copies of a large vocabulary are 2 MB a row.
_ROWS = 64
# Outer gates on quantized weights, in nats and relative L2, as observed on a toy with NF4: the
# loss 0.026 apart, full logits 0.047, own loss 0.0005 from a float64 loss.
MAX_CE_DIFFERENCE = 0.5
MAX_LOGITS = 0.10
MAX_OWN_LOSS = 0.05
# A text shorter than this says little about a loss.
MIN_LABELS = 16


def compare_logits(a: Numbers, b: Numbers, ids: Sequence[int], within: bool) -> LogitsDiff:
    """Compare logits [tokens, vocab] of the reference `a` and of `b`; losses are of ids[1:].

    `within` says whether the logits are within their tolerance, which explains flips.
    """
    k = min(TOP_K, a.shape[-1])
    agree = overlap = 0.0
    flips: list[Flip] = []
    kl: list[float] = []
    squares = norm = largest = 0.0
    for start in range(0, len(a), _ROWS):
        x = np.asarray(a[start : start + _ROWS], np.float64)
        y = np.asarray(b[start : start + _ROWS], np.float64)
        delta = np.abs(x - y)
        squares += float(np.sum(delta**2))
        norm += float(np.sum(x**2))
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
    rel = math.sqrt(squares / norm) if norm else math.inf * (squares > 0)
    return LogitsDiff(
        len(a), 0.0 if math.isnan(rel) else rel, largest, agree / count, k, overlap / count,
        tuple(flips), float(np.mean(kl)), float(np.max(kl)), loss(a, ids), loss(b, ids),
    )  # fmt: skip


def loss(logits: Numbers, ids: Sequence[int]) -> float | None:
    """Return the mean float64 loss of ids[1:] in nats; None where no label follows."""
    if len(ids) < 2 or len(logits) != len(ids):
        return None
    parts = [
        cross_entropy(logits[start : min(start + _ROWS, len(ids) - 1)],
                      ids[start + 1 : min(start + _ROWS, len(ids) - 1) + 1])
        for start in range(0, len(ids) - 1, _ROWS)
    ]  # fmt: skip
    return float(np.mean(np.concatenate(parts)))


def _numpy_loss(backend: Backend, logits: Numbers, labels: Numbers) -> float:
    """Return the loss with every step in the backend's own dtype."""
    x = backend.array(logits)
    wide = x - np.max(x, axis=-1, keepdims=True)
    logs = wide - np.log(np.sum(np.exp(wide), axis=-1, keepdims=True))
    return float(np.mean(-np.take_along_axis(logs, labels[:, None], -1)))


def _torch_loss(backend: Backend, logits: Numbers, labels: Numbers) -> float:
    """Return torch's fused loss of the logits in the backend's dtype, on its device."""
    import torch

    x = backend.array(logits)
    found = torch.nn.functional.cross_entropy(x, torch.as_tensor(labels, device=x.device))
    return float(found.item())


def _cupy_loss(backend: Backend, logits: Numbers, labels: Numbers) -> float:
    """Return the loss of the logits as the dtype holds them, on the device in float32 at least."""
    from aprfmt.inference.backends.cuda import memory

    arrays, x = memory.arrays(), memory.put(backend.to_numpy(backend.array(logits)))
    wide = x - x.max(axis=-1, keepdims=True)
    logs = wide - arrays.log(arrays.exp(wide).sum(axis=-1, keepdims=True))
    return float(-arrays.take_along_axis(logs, memory.put(labels)[:, None], -1).mean())


OWN_LOSS: Mapping[str, Callable[[Backend, Numbers, Numbers], float]] = {
    "numpy": _numpy_loss,
    "torch": _torch_loss,
    "cupy": _cupy_loss,
}


def own_loss(backend: Backend | None, logits: Numbers, ids: Sequence[int]) -> tuple[Any, str]:
    """Return (a run's loss by its own arithmetic in nats, ""), or (None, why not).

    A backend's method `cross_entropy(logits, labels)` comes before the functions here.
    """
    if backend is None:
        return None, "an engine's own loss is not called"
    if len(ids) < 2:
        return None, "a single token has no label"
    labels = np.asarray(ids[1:], np.int64)
    inner = np.ascontiguousarray(logits[:-1])
    method = getattr(backend, "cross_entropy", None)
    if method is not None:
        return float(method(backend.array(inner), labels)), ""
    if backend.name not in OWN_LOSS:
        return None, f"backend {backend.name!r} has no loss of its own"
    return OWN_LOSS[backend.name](backend, inner, labels), ""


def compare_experts(a: Trace, b: Trace) -> list[ExpertFlip]:
    """Return every token that went to other experts in `b`, in execution order."""
    found = []
    for key, record in a.records.items():
        if record.point != "experts" or b.find(key) is None:
            continue
        mine, other = a.values(key), b.values(key)
        if mine is None or other is None or mine.shape != other.shape:
            continue
        layer = parse_key(key)[1]
        routers = [trace.values(f"L{layer}.router") for trace in (a, b)]
        margins = a.values(f"L{layer}.router_margin")
        for row in range(len(mine)):
            gone = sorted(set(mine[row].tolist()) - set(other[row].tolist()))
            came = sorted(set(other[row].tolist()) - set(mine[row].tolist()))
            if gone:
                margin = None if margins is None else float(margins[row])
                position = record.positions[row] if record.positions else row
                found.append(_flip(key, position, row, gone, came, routers, margin))
    return found


def _flip(
    key: str,
    position: int,
    row: int,
    gone: list[int],
    came: list[int],
    routers: Sequence[Numbers | None],
    margin: float | None,
) -> ExpertFlip:
    x, y = routers
    if x is None or y is None or x.shape != y.shape:
        return ExpertFlip(key, position, tuple(gone), tuple(came), margin, None, False)
    largest = float(np.max(np.abs(np.asarray(x[row], np.float64) - y[row])))
    gap = float(np.min(x[row][gone]) - np.max(x[row][came])) if came else 0.0
    # The router may choose by something else than its logits (groups, a correction): then its own
    # margin, in scores, which move less than the logits do, is what rounding has to close.
    closed = gap <= 2 * largest or (margin is not None and margin <= 2 * largest)
    return ExpertFlip(key, position, tuple(gone), tuple(came), gap, largest, closed)


def gates(
    logits: LogitsDiff | None,
    losses: Losses,
    experts: Sequence[ExpertFlip],
    *,
    quantized: bool,
    text: bool,
    labels: int,
    vocab: int,
    where: str,
) -> list[Check]:
    """Return the outer gates of a pair: on quantized weights, and where the weights are text."""

    def check(name: str, passed: bool | None, found: str, expected: str, todo: str = "") -> Check:
        outcome: Outcome = "NOT_RUN" if passed is None else "PASS" if passed else "FAIL"
        return Check(name, outcome, where, found, expected, todo if passed is False else "")

    checks = []
    unexplained = [flip for flip in experts if not flip.explained]
    if experts:
        checks.append(
            check("experts", not unexplained,
                  f"{len(experts)} tokens to other experts, {len(unexplained)} of them with a "
                  "margin that rounding cannot close",
                  "margins of at most twice the router's difference",
                  "compare the router's inputs and its rule")
        )  # fmt: skip
    if logits is None:
        return [*checks, check("logits", None, "no logits on both sides", "logits of every row")]
    if not quantized:
        return checks
    difference = logits.ce_difference
    checks += [
        check("quantized-logits", logits.rel_l2 < MAX_LOGITS, f"relative L2 {logits.rel_l2:.3g}",
              f"below {MAX_LOGITS} over all rows", "find the first point that is off"),
        check("quantized-loss", None if difference is None else abs(difference) < MAX_CE_DIFFERENCE,
              "a single token" if difference is None else f"{difference:+.4g} nats",
              f"below {MAX_CE_DIFFERENCE} nats apart", "find the first point that is off"),
    ]  # fmt: skip
    if losses.forward is None or not text or labels < MIN_LABELS:
        why = "ids that are not known to be text" if not text else f"{labels} labels"
        checks.append(check("quantized-loss-bounded", None, why,
                            f"a text of at least {MIN_LABELS} labels"))  # fmt: skip
    else:
        limit = math.log(vocab)
        checks.append(check("quantized-loss-bounded", losses.forward < limit,
                            f"{losses.forward:.4f} nats", f"below ln({vocab}) = {limit:.4f} nats",
                            "the run does worse than guessing"))  # fmt: skip
    gap = None if losses.own is None or losses.forward is None else losses.own - losses.forward
    checks.append(
        check("own-loss", None if gap is None else abs(gap) < MAX_OWN_LOSS,
              losses.why if gap is None else f"{gap:+.3g} nats from the float64 loss",
              f"below {MAX_OWN_LOSS} nats on the same logits", "the loss is wrong, not the forward")
    )  # fmt: skip
    return checks
