"""What attention adds to its scores for the distance of query and key: ALiBi, or a table.

A *bucket* is a row of a learned table: near distances have one each, far distances share.

Positions are those the mask counts. Sources: arXiv 2108.12409 (ALiBi), 1910.10683 (buckets);
transformers' modeling files of bloom, mpt, falcon and mpnet.
"""

import math
from dataclasses import replace

import numpy as np

from aprfmt.codecs.bf16 import round_to_bf16
from aprfmt.inference.backends.base import Array, Heads, Numbers
from aprfmt.inference.context import Context

FURTHEST = 128  # distance from which on all keys share one row of a table


def biased_attention(c: Context, layer: int, q: Array, k: Array, v: Array, heads: Heads) -> Array:
    """Return attention with the bias added to the scores: [tokens, heads, value_dim].

    Queries are computed `query_block` at a time, all at once where scores or probs are wanted.
    """
    b, tokens, keys, before = c.backend, len(q), int(k.shape[0]), c.facts.cached
    whole = c.wants("scores", layer) or c.wants("probs", layer)
    parts, start = [], 0
    while start < tokens:
        aligned = b.query_block - (before + start) % b.query_block
        stop = tokens if whole else min(tokens, start + aligned)
        seen = heads.causal and (heads.causal[0] + start, heads.causal[1])
        part = replace(heads, mask=heads.mask[start:stop], causal=seen)
        b.set_position(before + start)
        added = _BIASES[c.block.score_bias](c, before + start, stop - start, keys)
        scores = c.tap("scores", layer, b.add(b.scores(q[start:stop], k, part), added))
        parts.append(b.mix(c.tap("probs", layer, b.probs(scores, part)), v))
        start = stop
    b.set_position(before)
    return parts[0] if len(parts) == 1 else b.stack(parts)


def _alibi_distance_bias(c: Context, start: int, queries: int, keys: int) -> Array:
    """Return slope times (key - query) [heads, queries, keys]; the first query is at `start`."""
    slopes = alibi_slopes(int(c.hp["n_heads"]), float(c.hp["alibi_max_bias"]))
    return c.backend.alibi_bias(slopes, start, queries, keys)


def _alibi_key_bias(c: Context, start: int, queries: int, keys: int) -> Array:
    """Return slope times the key's position [heads, queries, keys], as falcon computes it.

    All steps are bfloat16, and the attention scale multiplies the result. It is the same for every
    query, so `start` is not used.
    """
    slopes = alibi_slopes(int(c.hp["n_heads"]), float(c.hp["alibi_max_bias"]))
    added = key_bias(slopes, keys, float(c.hp["attn_scale"]))[:, None]
    return c.backend.array(np.repeat(added, queries, axis=1))


def key_bias(slopes: Numbers, keys: int, scale: float) -> Numbers:
    """Return slope times the key's position, in bfloat16 steps, scaled: [heads, keys], float64."""
    reach = _bfloat16(_bfloat16(slopes)[:, None] * _bfloat16(np.arange(keys)))
    found: Numbers = np.multiply(reach, scale, dtype=np.float64)
    return found


def _bfloat16(x: Numbers) -> Numbers:
    """Return numbers rounded to bfloat16, as float32."""
    kept: Numbers = round_to_bf16(x.astype(np.float32).view(np.uint32)) & np.uint32(0xFFFF0000)
    return kept.view(np.float32)


def alibi_slopes(heads: int, max_bias: float) -> Numbers:
    """Return ALiBi's slope of each head [heads], float64.

    The first n heads, n the power of two not above `heads`, have 2^(-max_bias*i/n); the others
    have the odd multiples of half a step.
    """
    power = 1 << (heads.bit_length() - 1)
    steps = [(i + 1) / power for i in range(power)]
    steps += [(2 * i + 1) / (2 * power) for i in range(heads - power)]
    return np.array([2.0 ** (-max_bias * step) for step in steps])


def _relative_bias(c: Context, start: int, queries: int, keys: int) -> Array:
    """Return the bias by distance of key and query, from a learned table [heads, queries, keys].

    The first query is at position `start`. The table is `attn_rel_b.weight` [rows, heads].
    """
    away = np.arange(keys)[None, :] - np.arange(start, start + queries)[:, None]
    weight = c.weights["attn_rel_b.weight"]
    table = np.asarray(weight.rows(0, weight.n_rows))
    bias: Numbers = table[_bucket_rows(away, len(table))]
    return c.backend.array(np.ascontiguousarray(bias.transpose(2, 0, 1)))


def _bucket_rows(away: Numbers, count: int) -> Numbers:
    """Return the row (bucket) of a learned table for each distance key - query.

    `count` is the number of the table's rows. Half of them are for each sign; near distances have a
    row each, far ones share by logarithm.
    """
    half = count // 2
    near = half // 2
    distance = np.abs(away)
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(near)
    grown = np.log(ratio) / np.float32(math.log(FURTHEST / near)) * np.float32(half - near)
    far = np.minimum(near + grown.astype(np.int64), half - 1)
    rows: Numbers = np.where(distance < near, distance, far) + np.where(away > 0, half, 0)
    return rows


_BIASES = {"alibi": _alibi_distance_bias, "alibi_keys": _alibi_key_bias, "relative": _relative_bias}
