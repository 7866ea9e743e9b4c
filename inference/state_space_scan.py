"""State space scans in numpy, for backends without code for them.

A *group* is the heads that share the input and output vectors B and C. A *chunk* is tokens that
follow each other and are computed by one product.

A mixer has for each of its heads a matrix S [head_dim, state]. A token with value x, time step t,
input vector B and output vector C changes it to S' = exp(t a) S + t x B, and reads S' C + d x. The
rate `a` is below zero: one number a head (Mamba 2), or one for each number of state (Mamba 1, whose
heads are channels of one element). `scan_by_token` computes token by token; `scan_by_chunk` gives
the same numbers by products of CHUNK tokens at a time, where a head has one rate. Sources: Gu and
Dao, "Mamba" (2023); Dao and Gu, "Transformers are SSMs" (2024); transformers' modeling_mamba2.
"""

from typing import Any

import numpy as np

from aprfmt.inference.recurrence import softplus

Array = Any
CHUNK = 64  # tokens that are worked out together


def run_scan(
    x: Array,
    step: Array,
    rate: Array,
    b: Array,
    c: Array,
    skip: Array,
    state: Array | None,
    *,
    steps: bool,
) -> tuple[Array, Array]:
    """Return (reads [tokens, heads, head_dim], state after the last token) of a scan.

    x is shaped as the reads, `step` [tokens, heads], `rate` [heads] or [heads, state], b and c
    [tokens, groups, state], `skip` [heads], `state` [heads, head_dim, state], None for zeros. Heads
    that follow each other share the B and C of one group. `steps`: token by token.
    """
    if state is None:
        state = np.zeros((*x.shape[1:], b.shape[2]), x.dtype)
    if steps or len(x) == 1:
        read, state = scan_by_token(x, step, rate, b, c, state)
    elif rate.ndim == 2:
        read, state = _scan_by_state_element(x, step, rate, b, c, state)
    else:
        read, state = scan_by_chunk(x, step, rate, b, c, state)
    return read + skip[:, None] * x, state


def scan_by_token(
    x: Array, step: Array, rate: Array, b: Array, c: Array, state: Array
) -> tuple[Array, Array]:
    """Return (reads without the skip, state after the last token), computed token by token.

    x is [tokens, heads, head_dim], `step` [tokens, heads], `rate` [heads] or [heads, state], b and
    c [tokens, groups, state]. `state` [heads, head_dim, state] is the one before the first token.
    """
    each = x.shape[1] // b.shape[1]
    reads = []
    for t in range(len(x)):
        grown = step[t][:, None, None]  # (head, 1, 1)
        kept = np.exp(grown * (rate[:, None, None] if rate.ndim == 1 else rate[:, None]))
        into, out = (np.repeat(y[t], each, axis=0)[:, None] for y in (b, c))  # (head, 1, state)
        state = kept * state + grown * into * x[t][:, :, None]
        reads.append((state * out).sum(axis=-1))
    return np.stack(reads), state


def _scan_by_state_element(
    x: Array, step: Array, rate: Array, b: Array, c: Array, state: Array
) -> tuple[Array, Array]:
    """Return a scan's (reads without the skip, last state), where each number of state has a rate.

    What does not depend on the state is computed for CHUNK tokens at once.
    """
    each = x.shape[1] // b.shape[1]
    reads = []
    for start in range(0, len(x), CHUNK):
        y, t, i, o = (part[start : start + CHUNK] for part in (x, step, b, c))
        kept = np.exp(t[..., None] * rate)[:, :, None]  # (token, head, 1, state)
        i, o = (np.repeat(part, each, axis=1) for part in (i, o))
        states = (t[..., None] * y)[..., None] * i[:, :, None]
        for token in range(len(y)):
            states[token] += kept[token] * state
            state = states[token]
        reads.append((states @ o[..., None])[..., 0])
    return np.concatenate(reads), state.copy()


def scan_by_chunk(
    x: Array, step: Array, rate: Array, b: Array, c: Array, state: Array
) -> tuple[Array, Array]:
    """Return a scan's (reads without the skip, last state), computed CHUNK tokens at a time.

    Each head has one decay rate: `rate` is [heads].
    """
    groups = b.shape[1]
    grouped = x.shape[1] // groups
    state = state.reshape(groups, grouped, *state.shape[1:])
    reads = []
    for start in range(0, len(x), CHUNK):
        y, t, i, o = (part[start : start + CHUNK].swapaxes(0, 1) for part in (x, step, b, c))
        read, state = _scan_chunk(
            y.reshape(groups, grouped, *y.shape[1:]),
            t.reshape(groups, grouped, -1),
            rate.reshape(groups, grouped),
            i[:, None],
            o[:, None],
            state,
        )
        reads.append(read.reshape(-1, *y.shape[1:]).swapaxes(0, 1))
    return np.concatenate(reads), state.reshape(-1, *state.shape[2:])


def _scan_chunk(
    x: Array, step: Array, rate: Array, b: Array, c: Array, state: Array
) -> tuple[Array, Array]:
    """Return (reads [groups, heads of each, tokens, head_dim], state) of one chunk.

    Inputs have groups and heads first. The decay from token j to token i is the exponential of
    the sum of `step` times `rate` over the tokens between; the sums are taken over those alone,
    as differences of two long sums would cancel.
    """
    decay = step * rate[..., None]  # (group, head, token)
    tokens = decay.shape[-1]
    seen = np.tril(np.ones((tokens, tokens), bool))
    between = np.where(np.tril(seen, -1), decay[..., None], 0)
    between = np.where(seen, between.cumsum(axis=-2), -np.inf)
    between = np.exp(between)  # (group, head, i, j), zero for later j
    grown = np.exp(decay.cumsum(axis=-1))[..., None]
    value = x * step[..., None]
    read = (c @ b.swapaxes(-1, -2) * between) @ value
    read += grown * (c @ state.swapaxes(-1, -2))
    left = value * between[..., -1, :, None]
    return read, state * grown[..., -1:, :] + left.swapaxes(-1, -2) @ b


def time_steps(raw: Array, bias: Array | None, low: float, high: float) -> Array:
    """Return softplus(raw + bias) [tokens, heads], clamped to [low, high].

    Softplus is the identity above LINEAR (recurrence.py).
    """
    return softplus(raw if bias is None else raw + bias).clip(low, high)


def gate_and_norm(
    x: Array, gate: Array, weight: Array | None, *, groups: int, eps: float, first: bool
) -> Array:
    """Return x [tokens, width] times silu(gate), with RMSNorm by groups if there is a weight.

    The norm is computed within each group's width. `first`: it comes before the gate, else after
    it.
    """
    with np.errstate(over="ignore"):
        opened = gate / (1 + np.exp(-gate))
    if weight is None:
        return x * opened
    y = (x if first else x * opened).reshape(len(x), groups, -1)
    y = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + y.dtype.type(eps))
    y = y.reshape(x.shape) * weight
    return y * opened if first else y
