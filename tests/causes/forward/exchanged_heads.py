"""Seeded faults of `aprfmt/causes/forward/exchanged_heads.py`.

Seen red: without their hypotheses these are placed, and not named; without the limit to later
passes, a head that is wrong in these alone is placed only.
"""

from typing import Any

import numpy as np

from tests.diagnosis.engine_changes import DELTA, THREE, How, heads, placed, traced
from tests.diagnosis.engines import COARSE, broken, broken_here
from tests.diagnosis.making import engine


def one_head(keys: bool = True, values: bool = True, since: int = 0) -> How:
    """Let query head 3 of 6 read key head 0 of 3, from a token on."""

    def read(x: Any, chosen: bool) -> Any:
        x = np.repeat(x, 2, axis=1)
        return np.concatenate([x[:, :3], x[:, :1], x[:, 4:]], axis=1) if chosen else x

    def scores(here: Any, op: Any, q: Any, k: Any, own: Any) -> Any:
        found = op(q, k, own)
        found[:, since:] = op(q, read(k, keys), own)[:, since:]
        return found

    def mix(here: Any, op: Any, probs: Any, v: Any) -> Any:
        found = op(probs, v)
        found[since:] = op(probs, read(v, values))[since:]
        return found

    return broken_here(scores=scores, mix=mix)


def sinks(order: list[int]) -> Any:
    """Return a backend whose heads take the sinks of other heads."""
    return lambda: broken("probs", heads(sinks=lambda own: own.sinks[order]))


def sinks_by_row(here: Any, op: Any, scores: Any, own: Any) -> Any:
    """Give every row the sink of the head of its number, in all heads."""
    masked, at = np.where(own.mask, scores, -np.inf), np.arange(scores.shape[1])
    sink = own.sinks[at % len(own.sinks)][None, :, None]
    highest = np.maximum(masked.max(-1, keepdims=True), sink)
    e = np.exp(masked - highest)
    return (e / (e.sum(-1, keepdims=True) + np.exp(sink - highest))).astype(scores.dtype)


def decays(shift: list[int], rate: list[int]) -> How:
    """Give a delta net's heads dt_bias and A_log of other heads."""

    def change(here: Any, op: Any, a: Any, rates: Any, shifts: Any) -> Any:
        return op(a, rates[rate], shifts[shift])

    return broken_here(decay=change)


def scanned(place: int, order: list[int]) -> How:
    """Give a scan's heads the numbers of other heads."""

    def change(here: Any, op: Any, *given: Any) -> Any:
        return op(*given[:place], given[place][order], *given[place + 1 :])

    return broken_here(scan=change)


def slopes(here: Any, op: Any, a: Any, b: Any) -> Any:
    """Exchange the biases of heads 1 and 4 of 6."""
    return op(a, b[[0, 4, 2, 3, 1, 5]] if b.ndim == 3 else b)


ENGINE_FAULTS = (
    traced("one-head", "llama", "query head 3 reads key head 0", ["gqa_mapping"], ["n_kv_heads"],
           COARSE, THREE, **one_head()),
    traced("one-head-keys", "llama", "it reads the keys of head 0", ["gqa_mapping"],
           ["n_kv_heads"], COARSE, THREE, **one_head(values=False)),
    traced("one-head-late", "llama", "the same in later passes alone", ["gqa_mapping"],
           ["n_kv_heads"], COARSE, THREE, **one_head(since=20)),
    engine("sinks-exchanged", "gpt_oss", "sinks of heads 1 and 2 exchanged", "softmax_reduction",
           "softmax", backend=sinks([0, 2, 1, 3])),
    engine("sinks-one", "gpt_oss", "head 3 has the sink of head 0", "softmax_reduction",
           "softmax", backend=sinks([0, 1, 2, 0])),
    placed("sinks-by-row", "gpt_oss", "the sink of the row's number", "softmax_reduction",
           "softmax", broken_here(probs=sinks_by_row)),
    placed("delta-dt-heads", DELTA, "dt_bias of heads 1 and 4 exchanged", "recurrence", "decay",
           decays([0, 4, 2, 3, 1, 5], [0, 1, 2, 3, 4, 5])),
    placed("delta-rate-head", DELTA, "head 2 has the A_log of head 0", "recurrence", "decay",
           decays([0, 1, 2, 3, 4, 5], [0, 1, 0, 3, 4, 5])),
    placed("mamba2-skip-heads", "mamba2", "D of the first heads in turn", "ssm_scan", "ssm_d",
           scanned(5, [0, 1, 2, 0, 1, 2])),
    placed("mamba2-rate-heads", "mamba2", "A of a table of heads by its columns", "ssm_decay",
           "ssm_a", scanned(2, [0, 3, 1, 4, 2, 5])),
    placed("bloom-slopes-heads", "bloom", "slopes of heads 1 and 4 exchanged", "positions",
           "alibi_slopes", broken_here(add=slopes)),
)  # fmt: skip
