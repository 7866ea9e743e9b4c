"""Sparse attention: an indexer of a layer scores all keys and chooses those that attention reads.

A *group* is the query heads that read the keys which one head of the indexer chooses. A *block* is
keys that follow each other and are chosen together.

An indexer's queries come from the compressed query, its one key a token from the layer's input. A
key's score is the sum over the indexer's heads of weight * max(0, q.k). Sources: DeepSeek-V3.2's
report (arXiv 2512.02556), section 2.1; transformers' modeling_deepseek_v32 and
modeling_glm_moe_dsa. Of the rotation by a Hadamard matrix that other engines do nothing is left in
the scores.
"""

import numpy as np

from aprfmt.inference.backends.base import Array, Numbers, Style
from aprfmt.inference.compressed_keys import rotate_last
from aprfmt.inference.context import Context
from aprfmt.inference.masks import Causal, Mask
from aprfmt.inference.rope import rotation_of_layer

EPS = 1e-6  # of the norm on an indexer's keys, in every model
BLOCK_POINTS = ("index_block_scores", "index_blocks", "index_margin")
POINTS = ("index_scores", "index_keys", "index_margin")  # what is worked out on the host


def choose_keys(c: Context, layer: int, x: Array, latent: Array) -> Mask | Array | None:
    """Return the mask [tokens, keys] of keys a layer's queries read; None if they read all.

    `x` [tokens, hidden_size] is the layer's normed input, `latent` [tokens, q_lora_rank] its
    compressed query. The mask may be on the device: `Backend.limit_keys` takes it.
    """
    hp, b = c.hp, c.backend
    heads, size, count = (int(hp[f"index_{part}"]) for part in ("heads", "head_dim", "topk"))
    q = c.tap("index_q", layer, c.linear(layer, "indexer.attn_q_b", latent))
    k = b.layer_norm(
        c.linear(layer, "indexer.attn_k", x),
        c.vector(layer, "indexer.k_norm.weight"),
        c.bias(layer, "indexer.k_norm"),
        eps=EPS,
    )
    k = c.tap("index_k", layer, k)
    q, k = q.reshape(len(x), heads, size), k.reshape(len(x), 1, size)
    kind = rotation_of_layer(hp, layer)
    if kind is not None:
        style: Style = "interleaved" if c.block.indexer == "interleaved" else "half"
        q, k = b.ropes([q, k], c.ropes[kind], style=style, cast=c.block.rope_cast)
        q, k = c.tap("index_q_rope", layer, q), c.tap("index_k_rope", layer, k)
    weights = c.tap("index_w", layer, c.linear(layer, "indexer.proj", x))
    if c.cache is not None:
        k = c.cache.extend_one(layer, k)
    keys = int(k.shape[0])
    if keys <= count and not _is_watched(c, layer):
        return None
    mask = b.attention_mask(len(x), keys, c.facts.cached, None, causal=True)
    return _choose_best(c, layer, q, k, weights, mask, (c.facts.cached, None))


def choose_windows(
    c: Context, layer: int, x: Array, latent: Array, keys: Array, ended: Mask
) -> Mask:
    """Return the mask [tokens, windows] of windows whose compressed keys a layer's queries read.

    `x` [tokens, hidden_size] is the layer's normed input, `latent` [tokens, q_lora_rank] its
    compressed query, `keys` [windows, 1, d] the indexer's own keys of the windows. `ended`
    [tokens, windows] shows those that have ended.
    """
    hp = c.hp
    q = c.tap("index_q", layer, c.linear(layer, "indexer.attn_q_b", latent))
    q = q.reshape(len(x), int(hp["index_heads"]), -1)
    kind = rotation_of_layer(hp, layer)
    if kind is not None:
        q = rotate_last(c, q, c.ropes[kind])
    q = c.tap("index_q_rope", layer, q)
    weights = c.tap("index_w", layer, c.linear(layer, "indexer.proj", x))
    if keys.shape[0] <= int(hp["index_topk"]) and not _is_watched(c, layer):
        return ended
    kept = c.backend.to_numpy(_choose_best(c, layer, q, keys, weights, ended, None))
    return np.asarray(kept != 0)


def choose_blocks(c: Context, layer: int, x: Array) -> Mask | None:
    """Return the masks [index_heads, tokens, keys] of the keys that each group of heads reads.

    An indexer's head scores each block of keys by its best key. Read are the blocks with the
    highest scores, and the blocks next to the query. None if every block is read. `x` [tokens,
    hidden_size] is the layer's input.
    """
    hp, b, eps = c.hp, c.backend, float(c.hp["norm_eps"])
    parts = []
    for part in "qk":
        y = c.linear(layer, f"indexer.{part}_proj", x)
        headed = y.reshape(len(x), -1, int(hp["index_head_dim"]))
        y = c.rms_norm(headed, c.vector(layer, f"indexer.{part}_norm.weight"), eps)
        parts.append(c.tap(f"index_{part}", layer, y.reshape(len(x), -1)).reshape(headed.shape))
    q, k = parts
    kind = rotation_of_layer(hp, layer)
    if kind is not None:
        q, k = b.ropes([q, k], c.ropes[kind], style="half", cast=c.block.rope_cast)
        q, k = c.tap("index_q_rope", layer, q), c.tap("index_k_rope", layer, k)
    if c.cache is not None:
        k = c.cache.extend_one(layer, k)
    keys, size, count = int(k.shape[0]), int(hp["index_block"]), int(hp["index_topk"])
    blocks = -(-keys // size)
    watched = any(c.wants(point, layer) for point in BLOCK_POINTS)
    if blocks <= count and not watched:
        return None
    own = (c.facts.cached + np.arange(len(x)))[:, None] // size
    shown: Mask = np.arange(blocks) <= own
    near = shown & (np.arange(blocks) > own - int(hp["index_local_blocks"]))
    scores = b.to_numpy(
        c.tap("index_block_scores", layer, b.block_scores(q, k, c.facts.cached, size))
    )
    first = np.where(near, np.inf, scores)
    best = np.stack([b.best_keys(each, shown, count) for each in first]).astype(np.int64)
    kept: Mask = np.asarray(b.to_numpy(c.tap("index_blocks", layer, best)) != 0) & shown
    margins = [_margin(np.where(near, np.inf, each), shown, count) for each in scores]
    c.tap("index_margin", layer, np.min(margins, axis=0))
    return np.repeat(kept, size, axis=-1)[..., :keys]


def _is_watched(c: Context, layer: int) -> bool:
    """Return whether the recorder wants the layer's index scores, keys or margin.

    These are computed on the host.
    """
    return any(c.wants(point, layer) for point in POINTS)


def _choose_best(
    c: Context, layer: int, q: Array, k: Array, weights: Array, mask: Mask, causal: Causal | None
) -> Mask | Array:
    """Return the mask [tokens, keys] of the `index_topk` best keys of each query within `mask`.

    `q` [tokens, heads, d], `k` [keys, 1, d] and `weights` [tokens, heads] are the indexer's.
    `causal` is (cached, window) if the mask is causal. The result may be on the device.
    """
    b, count = c.backend, int(c.hp["index_topk"])
    scale = float(q.shape[1] * q.shape[2]) ** -0.5
    if not _is_watched(c, layer):
        return b.chosen_keys(q, k, weights, mask, scale=scale, count=count, causal=causal)
    scores = c.tap("index_scores", layer, b.index_scores(q, k, weights, scale))
    scores = b.to_numpy(scores)
    kept = c.tap("index_keys", layer, b.best_keys(scores, mask, count).astype(np.int64))
    c.tap("index_margin", layer, _margin(scores, mask, count))
    return np.asarray(b.to_numpy(kept) != 0) & mask


def _margin(scores: Numbers, mask: Mask, count: int) -> Numbers:
    """Return each query's lowest chosen score minus the highest that was not chosen [tokens].

    It is infinite where every visible key is chosen. `count` is how many keys are chosen.
    """
    if count >= scores.shape[1]:
        return np.full(len(scores), np.inf, scores.dtype)
    ranked = -np.sort(-np.where(mask, scores, -np.inf), axis=-1)
    last, following = ranked[:, count - 1], ranked[:, count]
    there = (following > -np.inf) & (following < np.inf)
    return np.where(there, last - np.where(there, following, 0), np.inf)
