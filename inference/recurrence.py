"""Short convolutions and gated delta nets in numpy, for backends without code for them.

A *chunk* is CHUNK tokens that follow each other and are computed by one product.

A gated delta net has, for each value head, a matrix S [key_dim, value_dim]. A token with key k,
query q, value v, decay g and strength b changes it to S' = exp(g) S, then S' + k (b (v - k S')),
and reads q times that. In Kimi delta attention exp(g) is a number for each row of S: the state
decays by channel of the key. `delta_rule_by_token` does so token by token; `delta_rule_by_chunk`
gives the same numbers by products of CHUNK tokens at a time. Source: Yang et al., "Gated Delta
Networks" (2024), and transformers' modeling_qwen3_next; Kimi Team, "Kimi Linear" (2025), and
transformers' modeling_kimi_linear.
"""

from typing import Any

import numpy as np

Array = Any
SUBCHUNK = 16  # tokens of a chunk between which decays by channel are multiplied out
CHUNK = 64  # tokens whose changes are worked out together
TINY = 1e-6  # inside the root of a key's or query's length, in every model
LINEAR = 20.0  # softplus is the identity from here on, in transformers and in llama.cpp


def convolve_causal(window: Array, kernel: Array) -> Array:
    """Return a causal convolution of each channel: [tokens, channels].

    `window` is [tokens + taps - 1, channels], `kernel` [channels, taps]; the last tap belongs to
    the token itself.
    """
    taps = kernel.shape[1]
    tokens = len(window) - taps + 1
    y = window[:tokens] * kernel[:, 0]
    for tap in range(1, taps):
        y = y + window[tap : tap + tokens] * kernel[:, tap]
    return y


def log_decay(a: Array, rate: Array, shift: Array) -> Array:
    """Return -exp(rate) * softplus(a + shift), the decay's logarithm [tokens, heads]."""
    return -np.exp(rate) * softplus(a + shift)


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x)) of each element; x itself above LINEAR."""
    soft = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return np.where(x > LINEAR, x, soft)


def delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array | None, *, steps: bool
) -> tuple[Array, Array]:
    """Return the reads [tokens, value_heads, value_dim] and the state after the last token.

    q and k are [tokens, key_heads, key_dim], v is shaped as the result, g (the decay's logarithm)
    and beta are [tokens, value_heads], g [tokens, value_heads, key_dim] where each channel has its
    own decay, `state` is [value_heads, key_dim, value_dim], None for zeros. Each key head serves as
    many value heads in a row. `steps`: token by token.
    """
    each = v.shape[1] // k.shape[1]
    q, k = (np.repeat(unit_length(x), each, axis=1) for x in (q, k))
    q = q * q.dtype.type(q.shape[-1] ** -0.5)
    if state is None:
        state = np.zeros((v.shape[1], k.shape[2], v.shape[2]), v.dtype)
    if steps or len(q) == 1:
        return delta_rule_by_token(q, k, v, g, beta, state)
    return delta_rule_by_chunk(q, k, v, g, beta, state)


def unit_length(x: Array) -> Array:
    """Return vectors over the last axis scaled to length one; zeros stay zeros."""
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + x.dtype.type(TINY))


def by_channel(g: Array) -> Array:
    """Return decays by channel [tokens, heads, key_dim] unchanged, those by head as [..., 1]."""
    return g if g.ndim == 3 else g[..., None]


def delta_rule_by_token(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """Return (reads [tokens, value_heads, value_dim], state after the last token), token by token.

    q and k are [tokens, value_heads, key_dim], already scaled; every value head has its own. v is
    shaped as the reads, beta (how much is written) [tokens, value_heads]. g is the logarithm of the
    decay by head, or [tokens, value_heads, key_dim] by channel. `state` [value_heads, key_dim,
    value_dim] is the one before.
    """
    reads, decays = [], by_channel(np.exp(g))[..., None]
    for t in range(len(q)):
        state = state * decays[t]
        row = k[t][:, None, :]  # (head, 1, key_dim)
        change = (v[t] - (row @ state)[:, 0]) * beta[t][:, None]
        state = state + row.swapaxes(1, 2) * change[:, None, :]
        reads.append((q[t][:, None, :] @ state)[:, 0])
    return np.stack(reads), state


def delta_rule_by_chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """Return (reads [tokens, heads, value_dim], last state), computed CHUNK tokens at a time.

    q and k are [tokens, heads, key_dim], v is shaped as the reads, beta [tokens, heads]. g is the
    logarithm of the decay, by head or by channel. `state` [heads, key_dim, value_dim] is the one
    before the first token.
    """
    reads = []
    for start in range(0, len(q), CHUNK):
        i, j, w, c, b = (x[start : start + CHUNK].swapaxes(0, 1) for x in (q, k, v, g, beta))
        read, state = _delta_chunk(i, j, w, c, b, state)
        reads.append(read.swapaxes(0, 1))
    return np.ascontiguousarray(np.concatenate(reads)), state


def _delta_chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """Return the reads [heads, tokens, value_dim] of one chunk, and the state after it.

    Inputs have heads first. The change d_i of token i depends on those before it: d_i = b_i (v_i -
    exp(c_i) k_i S - sum over j < i of exp(c_i - c_j) (k_i . k_j) d_j), with c the running sum of g:
    a triangular system, solved by its inverse. Where channels decay by themselves, exp(c_i - c_j)
    is inside the sum of k_i . k_j.
    """
    total = np.cumsum(g, axis=1)  # (head, token) or (head, token, key_dim)
    within = _products_by_channel if g.ndim == 3 else _products_by_head
    overlap, seen = within(k, total, k), within(q, total, k)
    grown = np.exp(by_channel(total))
    change = _inverse_unit_lower(overlap * beta[..., None]) @ (
        (v - (k * grown) @ state) * beta[..., None]
    )
    read = (q * grown) @ state + seen @ change
    last = by_channel(total[:, -1:])
    left = k * np.exp(last - by_channel(total))
    return read, state * np.exp(last).swapaxes(1, 2) + left.swapaxes(1, 2) @ change


def _products_by_head(x: Array, total: Array, k: Array) -> Array:
    """Return exp(c_i - c_j) (x_i . k_j) [heads, i, j], zero for j after i.

    x and k are [heads, tokens, key_dim]. `total` is c [heads, tokens], the log decay summed up to
    each token.
    """
    seen = np.tril(np.ones((x.shape[1],) * 2, bool))
    between = np.exp(np.where(seen, total[:, :, None] - total[:, None, :], -np.inf))
    return (x @ k.swapaxes(1, 2)) * between


def _products_by_channel(x: Array, total: Array, k: Array) -> Array:
    """Return how much each token of a chunk reads of each earlier one, decayed by channel.

    The result [heads, i, j] is the sum over channels d of exp(c_id - c_jd) x_id k_jd, zero for a
    token j after i. `x` are the chunk's queries or keys and `k` its keys, [heads, tokens, key_dim];
    `total` is c in that shape, the log decay summed up to each token. Inside SUBCHUNK
    tokens the exponentials are taken pair by pair; for earlier tokens they are split at the rows'
    first token, where neither factor grows.
    """
    heads, tokens, _ = x.shape
    found = np.zeros((heads, tokens, tokens), x.dtype)
    for start in range(0, tokens, SUBCHUNK):
        rows = slice(start, min(start + SUBCHUNK, tokens))
        here, keys = total[:, rows], k[:, rows]
        seen = np.tril(np.ones((here.shape[1],) * 2, bool))[..., None]
        between = np.exp(np.where(seen, here[:, :, None] - here[:, None], -np.inf))
        found[:, rows, rows] = np.einsum("hid,hijd,hjd->hij", x[:, rows], between, keys)
        if start:
            first = total[:, start : start + 1]
            earlier = k[:, :start] * np.exp(first - total[:, :start])
            found[:, rows, :start] = (x[:, rows] * np.exp(here - first)) @ earlier.swapaxes(1, 2)
    return found


def _inverse_unit_lower(below: Array) -> Array:
    """Return the inverse of unit lower triangular matrices [heads, n, n].

    Each is the identity plus what `below` has below its diagonal. Square blocks on the diagonal are
    joined two by two, all of one size at once: with inverses A' and C' the inverse of ((A, 0), (B,
    C)) is ((A', 0), (-C' B A', C')). Six steps for 64 rows, where going row by row takes 63.
    """
    heads, rows = below.shape[:2]
    size = 1 << (rows - 1).bit_length()
    whole = np.zeros((heads, size, size), below.dtype)
    whole[:, :rows, :rows] = below
    found = np.ones((heads, size, 1, 1), below.dtype)
    each = 1
    while each < size:
        pairs = size // (2 * each)
        corners = whole.reshape(heads, pairs, 2, each, pairs, 2, each)[:, :, 1, :, :, 0]
        corner = np.moveaxis(corners.diagonal(axis1=1, axis2=3), -1, 1)
        first, second = found[:, ::2], found[:, 1::2]
        joined = np.zeros((heads, pairs, 2 * each, 2 * each), below.dtype)
        joined[..., :each, :each], joined[..., each:, each:] = first, second
        joined[..., each:, :each] = -(second @ corner @ first)
        found, each = joined, 2 * each
    return found[:, 0, :rows, :rows]
