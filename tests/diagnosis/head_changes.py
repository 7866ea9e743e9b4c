"""Mistakes of engines that give a head what is another head's, for the seeded faults."""

from typing import Any

import numpy as np

from tests.diagnosis.engine_changes import How, heads
from tests.diagnosis.engines import broken, broken_here


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


def exchanged_sinks(order: list[int]) -> Any:
    """Return a backend whose heads take the sinks of other heads."""
    return lambda: broken("probs", heads(sinks=lambda own: own.sinks[order]))


def sinks_by_row(here: Any, op: Any, scores: Any, own: Any) -> Any:
    """Give every row the sink of the head of its number, in all heads."""
    masked, at = np.where(own.mask, scores, -np.inf), np.arange(scores.shape[1])
    sink = own.sinks[at % len(own.sinks)][None, :, None]
    highest = np.maximum(masked.max(-1, keepdims=True), sink)
    e = np.exp(masked - highest)
    return (e / (e.sum(-1, keepdims=True) + np.exp(sink - highest))).astype(scores.dtype)


def exchanged_decays(shift: list[int], rate: list[int]) -> How:
    """Give a delta net's heads dt_bias and A_log of other heads."""

    def change(here: Any, op: Any, a: Any, rates: Any, shifts: Any) -> Any:
        return op(a, rates[rate], shifts[shift])

    return broken_here(decay=change)


def exchanged_scan(place: int, order: list[int]) -> How:
    """Give a scan's heads the numbers of other heads."""

    def change(here: Any, op: Any, *given: Any) -> Any:
        return op(*given[:place], given[place][order], *given[place + 1 :])

    return broken_here(scan=change)


def exchanged_slopes(here: Any, op: Any, a: Any, b: Any) -> Any:
    """Exchange the biases of heads 1 and 4 of 6."""
    return op(a, b[[0, 4, 2, 3, 1, 5]] if b.ndim == 3 else b)
