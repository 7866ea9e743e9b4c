"""Attention over a window of tokens and over keys that stand for all windows of tokens before.

One head of keys serves all queries, and its rotated keys are the values; so what attention reads is
rotated back by the query's position. Windowed layers see no compressed keys. In layers with an
indexer a query sees the `index_topk` ones that score best, in the others all. Heads are projected
in groups. Source: transformers' modeling_deepseek_v4.
"""

from aprfmt.inference.attention import attend_keys, settings_with_mask
from aprfmt.inference.backends.base import Array
from aprfmt.inference.compressed_keys import (
    Compressor,
    compress_keys,
    empty_state,
    rotate_last,
    rotate_last_back,
)
from aprfmt.inference.context import Context
from aprfmt.inference.indexer import choose_windows
from aprfmt.inference.layer_heads import compress_rate
from aprfmt.inference.masks import Causal, Mask
from aprfmt.inference.rope import rotation_of_layer


def compressed_attention(c: Context, layer: int, x: Array) -> Array:
    """Return a layer's attention [tokens, groups * rank], before the last output product.

    That is the point `attn_low`. x [tokens, hidden] is normalised already.
    """
    hp, tokens = c.hp, len(x)
    latent = c.tap("q_a", layer, c.linear(layer, "attn_q_a", x))
    eps = float(hp["norm_eps"])
    latent = c.rms_norm(latent, c.vector(layer, "attn_q_a_norm.weight"), eps)
    latent = c.tap("q_a_norm", layer, latent)
    rate = compress_rate(hp, layer)
    windows, shown = _compress(c, layer, x, latent, rate) if rate else (None, None)
    q = c.linear(layer, "attn_q_b", latent).reshape(tokens, int(hp["n_heads"]), -1)
    q = c.tap("q", layer, q)
    k = c.tap("k", layer, c.linear(layer, "attn_kv", x).reshape(tokens, 1, -1))
    q = c.tap("q_norm", layer, c.plain_norm(q))
    k = c.tap("k_norm", layer, c.rms_norm(k, c.vector(layer, "attn_kv_a_norm.weight"), eps))
    kind = rotation_of_layer(hp, layer)
    if kind is not None:
        q, k = rotate_last(c, q, c.ropes[kind]), rotate_last(c, k, c.ropes[kind])
    q, k = c.tap("q_rope", layer, q), c.tap("k_rope", layer, k)
    if c.cache is not None:
        k = c.cache.extend_one(layer, k)
    mixed = _attend(c, layer, q, k, windows, shown)
    mixed = c.tap("attn_mixed", layer, mixed.reshape(tokens, -1)).reshape(*q.shape)
    if kind is not None:
        mixed = rotate_last_back(c, mixed, c.ropes[kind])
    mixed = c.tap("attn", layer, mixed.reshape(tokens, -1))
    return c.tap("attn_low", layer, _project_groups(c, layer, mixed))


def _project_groups(c: Context, layer: int, x: Array) -> Array:
    """Return x [tokens, width] with each group of heads projected: [tokens, groups * rank]."""
    w, b = c.weights.role(layer, "attn_output_a.weight"), c.backend
    width = w.shape[-1]
    parts = [
        b.linear(x[:, group * width : (group + 1) * width], w.expert(group), None)
        for group in range(w.shape[0])
    ]
    return b.concat(parts)


def _attend(
    c: Context, layer: int, q: Array, k: Array, windows: Array | None, shown: Mask | None
) -> Array:
    """Return attention [tokens, heads, d] of q over the keys of tokens and of windows.

    `k` [keys, 1, d] are those of tokens. `windows` [windows, 1, d] are the compressed ones and
    `shown` [tokens, windows] says which are read; None in layers without.
    """
    b, n_keys, cached = c.backend, int(k.shape[0]), c.facts.cached
    windowed = windows is not None or c.hp["window_layers"][layer]
    window = c.hp["sliding_window"] if windowed else None
    causal: Causal | None = cached, window
    mask, keys, gap = b.attention_mask(len(q), n_keys, cached, window, causal=True), k, 0
    if windows is not None and shown is not None and len(windows):
        # Deterministic sums run block by block: compressed keys begin a block, however many keys
        # come before them.
        gap = -n_keys % b.key_block if b.deterministic else 0
        keys, mask, causal = b.stack([k, windows]), b.join_masks(mask, shown, gap), None
    if c.cache is not None and c.cache.length > 0:
        keys = c.tap("k_cache", layer, keys)
    if gap:
        keys = b.stack([keys[:n_keys], b.zeros((gap, *keys.shape[1:])), keys[n_keys:]])
    heads = settings_with_mask(c, layer, mask, causal)
    return attend_keys(c, layer, q, keys, keys, heads, (n_keys, gap))


def _compress(c: Context, layer: int, x: Array, latent: Array, rate: int) -> tuple[Array, Mask]:
    """Return (compressed keys [windows, 1, d], mask [tokens, windows] of those that are read).

    `latent` is the normalised query latent, with which an indexer chooses windows. `rate` is the
    number of tokens of a window. The compressors' states continue from the cache, where there is
    one.
    """
    hp, b, indexed = c.hp, c.backend, bool(c.hp["index_layers"][layer])
    makers = [Compressor("attn_compressor", "", int(hp["head_dim"]), rate, indexed)]
    if indexed:
        size = int(hp["index_head_dim"])
        makers.append(Compressor("indexer.compressor", "index_", size, rate, indexed))
    cached = (None,) if c.cache is None else c.cache.recurrent_state(layer)
    if cached[0] is None:
        cached = tuple(part for made in makers for part in empty_state(c, made))
    states = [
        compress_keys(c, layer, x, made, (cached[2 * i], cached[2 * i + 1]))
        for i, made in enumerate(makers)
    ]
    if c.cache is not None:
        c.cache.set_next_state(layer, tuple(part for state in states for part in state))
    windows = states[0][1]
    shown = b.window_ends(len(x), len(windows), c.facts.cached, rate)
    if indexed and len(windows):
        shown = choose_windows(c, layer, x, latent, states[1][1], shown)
    return windows, shown
