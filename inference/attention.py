"""Attention: grouped queries (GQA) and multi-head latent (MLA), fused or step by step.

A *chunk* is a fixed range of positions: in a layer with chunks a query sees the earlier keys of its
own range only. A *group* is the query heads that read the same keys.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from aprfmt.errors import ArchError
from aprfmt.inference.backends.base import Array, Heads, Numbers, Style
from aprfmt.inference.context import Context
from aprfmt.inference.layer_heads import (
    gives_keys_to_later,
    key_value_layer,
    kv_head_count,
    values_are_keys,
)
from aprfmt.inference.masks import Causal, Mask
from aprfmt.inference.rope import rotation_of_layer


def attention(c: Context, layer: int, x: Array) -> Array:
    """Return a layer's attention [tokens, heads * value_dim], before the output product.

    That is the point `attn`. x [tokens, hidden] is normalised already. Keys and values are those of
    the cache and the pass, or of the earlier layer whose keys and values this layer reads.
    """
    role = _GATES[c.block.attention_gate]
    gated = role and c.weights.get_role(layer, f"{role}.weight") is not None
    gate = c.tap("attn_gate", layer, c.linear(layer, role, x)) if gated else None
    in_blocks = c.block.indexer == "blocks" and c.hp["index_layers"][layer]
    chosen = None
    if in_blocks:
        from aprfmt.inference.indexer import choose_blocks

        chosen = choose_blocks(c, layer, x)
    q, k, v = _KINDS[c.block.attention](c, layer, x)
    source = key_value_layer(c.hp, layer)
    if source != layer:
        n_layers = int(c.hp["n_layers"])
        k, v = (c.backend.to_layer_device(layer, n_layers, part) for part in c.state.shared[source])
    elif c.cache is not None:
        k, v = c.cache.extend(layer, k, v)
    if c.cache is not None and c.cache.length > 0:
        k, v = c.tap("k_cache", layer, k), c.tap("v_cache", layer, v)
    if source == layer and gives_keys_to_later(c.hp, layer):
        c.state.shared[layer] = k, v
    mixed = _attend(c, layer, q, k, v, chosen)
    mixed = mixed.reshape(len(mixed), -1)
    if gate is not None:
        mixed, gate = c.tap("attn_mixed", layer, mixed), c.backend.sigmoid(gate)
        if gate.shape != mixed.shape:  # one number a head
            headed = mixed.reshape(*gate.shape, -1)
            mixed = c.backend.mul(headed, gate[:, :, None]).reshape(len(mixed), -1)
        else:
            mixed = c.backend.mul(mixed, gate)
    return c.tap("attn", layer, mixed)


_GATES = {"none": "", "sigmoid": "attn_q_gate", "sigmoid_head": "attn_gate"}


def wants_scores(c: Context, layer: int) -> bool:
    """Return whether a point inside fused attention is wanted, scores or probs."""
    return c.wants("scores", layer) or c.wants("probs", layer)


def _attend(c: Context, layer: int, q: Array, k: Array, v: Array, chosen: Mask | None) -> Array:
    """Return attention [tokens, heads, value_dim] over the keys that the layer's mask shows.

    `chosen` [groups, tokens, keys] is a further mask for each group of heads; None: no further
    mask.
    """
    chunk = _chunk_size(c, layer)
    # In deterministic mode keys stay where they are: the sums over them run block by block.
    if chunk is not None and not wants_scores(c, layer) and not c.backend.deterministic:
        return _attend_by_chunk(c, layer, (q, k, v), chunk)
    heads = _attention_settings(c, layer, int(k.shape[0]))
    if c.state.chosen is not None:
        heads = c.backend.limit_keys(heads, c.state.chosen)
    if chosen is not None:
        return _attend_by_group(c, layer, (q, k, v), heads, chosen)
    if c.block.score_bias != "none":
        from aprfmt.inference.score_bias import biased_attention

        return biased_attention(c, layer, q, k, v, heads)
    return attend_keys(c, layer, q, k, v, heads)


def attend_keys(
    c: Context,
    layer: int,
    q: Array,
    k: Array,
    v: Array,
    heads: Heads,
    gap: tuple[int, int] = (0, 0),
) -> Array:
    """Return attention [tokens, heads, value_dim], fused or step by step.

    It is computed step by step where a recorder wants the scores or probabilities. q is [tokens,
    heads, d], k and v [keys, kv_heads, d or value_dim]. `gap` is (first key, number) of padding
    keys between two kinds of keys: the mask hides them from all queries, and recorders do not see
    them.
    """
    if not wants_scores(c, layer):
        return c.backend.attention(q, k, v, heads)
    scores = _tap_without_gap(c, "scores", layer, c.backend.scores(q, k, heads), gap)
    probs = _tap_without_gap(c, "probs", layer, c.backend.probs(scores, heads), gap)
    return c.backend.mix(probs, v)


def _tap_without_gap(c: Context, point: str, layer: int, x: Array, gap: tuple[int, int]) -> Array:
    """Return x [heads, tokens, keys] after a recorder has seen it without the keys of the gap.

    `gap` is (first key, number) of padding keys; they are zeros in the result if the recorder
    wants the point. Without a gap this is `Context.tap`.
    """
    (start, size), b = gap, c.backend
    if not size or not c.wants(point, layer):
        return c.tap(point, layer, x)
    x = c.tap(point, layer, b.concat([x[..., :start], x[..., start + size :]]))
    hidden = b.zeros((*x.shape[:-1], size))
    return b.concat([x[..., :start], hidden, x[..., start:]])


def _attend_by_group(
    c: Context, layer: int, qkv: tuple[Array, Array, Array], heads: Heads, chosen: Mask
) -> Array:
    """Return attention [tokens, heads, value_dim] where groups of heads read different keys.

    `qkv` are the queries, keys and values. `chosen` [groups, tokens, keys] is each group's mask;
    a key must be shown by the mask of `heads` too.
    """
    b, count = c.backend, len(chosen)
    each = [heads_of.shape[1] // count for heads_of in qkv]
    parts = [
        [x[:, i * n : (i + 1) * n] for x, n in zip(qkv, each, strict=True)] for i in range(count)
    ]
    limited = [replace(heads, mask=heads.mask & mask, causal=None) for mask in chosen]
    if wants_scores(c, layer):
        scores = b.stack([b.scores(q, k, h) for (q, k, _), h in zip(parts, limited, strict=True)])
        scores, n = c.tap("scores", layer, scores), each[0]
        probs = [b.probs(scores[i * n : (i + 1) * n], h) for i, h in enumerate(limited)]
        joined = c.tap("probs", layer, b.stack(probs))
        mixed = [b.mix(joined[i * n : (i + 1) * n], part[2]) for i, part in enumerate(parts)]
    else:
        mixed = [b.attention(q, k, v, h) for (q, k, v), h in zip(parts, limited, strict=True)]
    tokens = len(mixed[0])
    return b.concat([x.reshape(tokens, -1) for x in mixed]).reshape(tokens, qkv[0].shape[1], -1)


def _chunk_size(c: Context, layer: int) -> int | None:
    """Return the size of a layer's attention chunks, in tokens.

    None if the layer has no chunks, or if all tokens of the pass lie in the first chunk.
    """
    if c.block.window != "chunk" or not c.hp["window_layers"][layer]:
        return None
    size = c.hp["sliding_window"]
    return size if size is not None and c.facts.cached + len(c.facts.ids) > size else None


def _attend_by_chunk(c: Context, layer: int, qkv: tuple[Array, Array, Array], chunk: int) -> Array:
    """Return attention [tokens, heads, value_dim] where queries read the keys of their own chunk.

    `qkv` are the queries, keys and values, `chunk` is the size of a chunk in tokens.
    """
    b, (q, k, v) = c.backend, qkv
    start = cached = c.facts.cached
    parts = []
    while start < cached + len(q):
        begin = start // chunk * chunk
        stop = min(begin + chunk, cached + len(q))
        mask = b.attention_mask(stop - start, stop - begin, start - begin, None, causal=True)
        heads = settings_with_mask(c, layer, mask, (start - begin, None))
        b.set_position(start)
        rows = slice(start - cached, stop - cached)
        parts.append(b.attention(q[rows], k[begin:stop], v[begin:stop], heads))
        start = stop
    b.set_position(cached)
    return parts[0] if len(parts) == 1 else b.stack(parts)


def _attention_settings(c: Context, layer: int, keys: int) -> Heads:
    """Return a layer's mask, scale, softcap and sinks for all queries of a pass.

    `keys` is the number of keys: those of the cache and of the pass.
    """
    tokens, cached = len(c.facts.ids), c.facts.cached
    chunk = _chunk_size(c, layer)
    if chunk is not None:
        return settings_with_mask(
            c, layer, c.backend.chunked_mask(tokens, keys, cached, chunk), None
        )
    limited = c.hp["window_layers"][layer] and c.block.window == "sliding"
    window = c.hp["sliding_window"] if limited else None
    causal = c.block.attends == "causal"
    mask = c.backend.attention_mask(tokens, keys, cached, window, causal=causal)
    return settings_with_mask(c, layer, mask, (cached, window) if causal else None)


def settings_with_mask(c: Context, layer: int, mask: Mask, causal: Causal | None) -> Heads:
    """Return the layer's scale, softcap and sinks with a mask.

    `causal` is (cached, window) if the mask is causal, else None.
    """
    hp = c.hp
    scale = float(hp["attn_scale"])
    if hp["attn_scale_by_layer"]:
        scale /= layer + 1
    cap = hp["attn_softcap"]
    sinks = c.vector(layer, "attn_sinks.weight") if c.block.sinks else None
    softcap = None if cap is None else float(cap)
    return Heads(mask, scale, softcap, sinks, c.block.softmax_cast, causal)


def _project_parts(c: Context, layer: int, x: Array, heads: Mapping[str, int]) -> list[Array]:
    """Return the projections of x that `heads` names, as [tokens, heads, d] each, in order.

    `heads` is {"q", "k" or "v": number of heads}. The points around the bias are captured, and q,
    k and v clamped where no norm follows.
    """
    biases = {part: c.bias(layer, f"attn_{part}") for part in heads}
    late = {part for part in heads if biases[part] is not None and c.wants(f"{part}_mm", layer)}
    products = c.backend.projections(
        x,
        [
            (c.weights.role(layer, f"attn_{part}.weight"), None if part in late else biases[part])
            for part in heads
        ],
    )
    found = []
    for (part, n_heads), y in zip(heads.items(), products, strict=True):
        shape = (len(x), n_heads, -1)
        if part in late:
            y = c.tap(f"{part}_mm", layer, y.reshape(shape)).reshape(len(x), -1)
            y = c.backend.add(y, biases[part])
        y = y.reshape(shape)
        normed = c.hp["qk_norm"] and part != "v"
        found.append(c.tap(part, layer, y if normed else _clip(c, y)))
    return found


def _clip(c: Context, x: Array) -> Array:
    """Return q, k or v clamped to the model's limit (clip_qkv); unchanged without a limit."""
    limit = c.hp["qkv_clip"]
    return x if limit is None else c.backend.clip(x, float(limit))


def _grouped_query_key_value(
    c: Context, layer: int, x: Array
) -> tuple[Array, Array | None, Array | None]:
    """Return (q, k, v) of grouped queries, each [tokens, heads, d], after norms and rope.

    k and v are None in a layer that reads those of an earlier layer.
    """
    if not c.hp["own_kv_layers"][layer]:
        [q] = _project_parts(c, layer, x, {"q": int(c.hp["n_heads"])})
        return _rotate_parts(c, layer, [_norm_part(c, layer, "q", q)])[0], None, None
    if c.block.multipliers != "none":
        x = c.backend.scale(x, float(c.hp["attn_in_scale"]))
    n_kv = kv_head_count(c.hp, layer)
    parts = {"q": int(c.hp["n_heads"]), "k": n_kv, "v": n_kv}
    if values_are_keys(c.hp, layer):
        del parts["v"]
    q, k, *others = _project_parts(c, layer, x, parts)
    v = others[0] if others else k
    if c.block.multipliers != "none":
        k = c.backend.scale(k, float(c.hp["key_scale"]))
    q, k = _norm_part(c, layer, "q", q), _norm_part(c, layer, "k", k)
    if c.block.value_norm == "plain":
        v = c.tap("v_norm", layer, c.plain_norm(v))
    q, k = _rotate_parts(c, layer, [q, k])
    rotates = c.block.position == "rope" and bool(c.hp["rope_layers"][layer])
    return *_finish_query_key(c, layer, q, k, rotates=rotates), v


def _norm_part(c: Context, layer: int, part: str, x: Array) -> Array:
    """Return queries or keys after their norm before rope; unchanged if the architecture has none.

    `part` is "q" or "k".
    """
    if not c.hp["qk_norm"] or c.block.qk_norm_place != "before_rope":
        return x
    return c.tap(f"{part}_norm", layer, _clip(c, _qk_norm(c, layer, f"attn_{part}_norm", x)))


def _rotate_parts(c: Context, layer: int, xs: list[Array]) -> list[Array]:
    """Return q, or q and k, after rope; unchanged where the layer does not rotate."""
    kind = rotation_of_layer(c.hp, layer) if c.block.position == "rope" else None
    if kind is None:
        return xs
    turned = c.backend.ropes(xs, c.ropes[kind], style=_rope_style(c), cast=c.block.rope_cast)
    names = ("q_rope", "k_rope")[: len(xs)]
    return [c.tap(name, layer, x) for name, x in zip(names, turned, strict=True)]


def _finish_query_key(
    c: Context, layer: int, q: Array, k: Array, *, rotates: bool
) -> tuple[Array, Array]:
    """Return (q, k) after what follows rope: norms of both, or else a factor on the queries.

    The factor is the temperature, which depends on the position. `rotates` says whether the layer
    has rope. Both are unchanged where the model has neither.
    """
    place = c.block.qk_norm_place
    if c.hp["qk_norm"] and (place == "after_rope" or (place == "rotated" and rotates)):
        q = c.tap("q_attn", layer, _qk_norm(c, layer, "attn_q_norm", q))
        k = c.tap("k_attn", layer, _qk_norm(c, layer, "attn_k_norm", k))
    elif c.hp["temperature_scale"] is not None and (
        c.block.temperature == "all" or (c.block.temperature == "unrotated" and not rotates)
    ):
        q = c.tap("q_attn", layer, _TEMPERATURES[c.block.temperature](c, q))
    return q, k


def _scale_queries_rounded(c: Context, q: Array) -> Array:
    """Return q times its positions' factors, computed in float32 steps and rounded."""
    factors = _query_factors(c, c.facts.positions.astype(np.float32))
    return c.backend.mul(q, c.backend.array(factors[:, None, None]))


def _scale_queries_exactly(c: Context, q: Array) -> Array:
    """Return q times its positions' factors, which are not rounded to the dtype.

    Neighbouring positions with the same factor are multiplied together.
    """
    kind = np.float64 if c.backend.dtype == "float64" else np.float32
    factors = _query_factors(c, (c.facts.positions + 1).astype(kind))
    edges = [0, *(np.flatnonzero(np.diff(factors)) + 1).tolist(), len(factors)]
    parts = [
        c.backend.scale(q[start:stop], float(factors[start]))
        for start, stop in itertools.pairwise(edges)
    ]
    return parts[0] if len(parts) == 1 else c.backend.stack(parts)


def _query_factors(c: Context, positions: Numbers) -> Numbers:
    """Return the temperature factor of each position [tokens], in the positions' dtype.

    It is 1 + log(1 + floor(position / temperature_length)) * temperature_scale.
    """
    kind = positions.dtype.type
    length, scale = (kind(c.hp[f"temperature_{part}"]) for part in ("length", "scale"))
    factors: Numbers = kind(1) + np.log(kind(1) + np.floor(positions / length)) * scale
    return factors


_TEMPERATURES = {"all": _scale_queries_rounded, "unrotated": _scale_queries_exactly}


def _rotate(c: Context, x: Array, table: tuple[Array, Array]) -> Array:
    """Return x [tokens, heads, d] after rope.

    `table` is (cos, sin) by position. The model's pairing says which elements rotate together.
    """
    return c.backend.rope(x, table, style=_rope_style(c), cast=c.block.rope_cast)


def _rope_style(c: Context) -> Style:
    """Return the pairing of the model's rope; ArchError if it is not known."""
    styles: dict[str, Style] = {"half": "half", "interleaved": "interleaved"}
    name = str(c.hp["rope_style"])
    if name not in styles:
        raise ArchError(f"rope_style is {name!r}; expected one of {', '.join(styles)}")
    return styles[name]


def _qk_norm(c: Context, layer: int, role: str, x: Array) -> Array:
    """Return q or k [tokens, heads, d] normalised as the block's qk_norm says."""
    eps = float(c.hp["norm_eps"])
    kind = c.block.qk_norm
    if kind == "plain":
        return c.plain_norm(x)
    weight = c.vector(layer, f"{role}.weight")
    if kind == "head_layer":
        return c.backend.layer_norm(x, weight, c.bias(layer, role), eps=eps)
    if kind == "width":
        return c.rms_norm(x.reshape(len(x), -1), weight, eps).reshape(x.shape)
    return c.rms_norm(x, weight, eps)


def _latent_query_key_value(c: Context, layer: int, x: Array) -> tuple[Array, Array, Array]:
    """Return (q, k, v), each [tokens, heads, d], of multi-head latent attention, latents expanded.

    Every head's key is [k_nope | k_pe], k_pe shared by all heads. An indexer's chosen keys are put
    in the pass's state.
    """
    hp, b = c.hp, c.backend
    n_heads, rank = int(hp["n_heads"]), int(hp["kv_lora_rank"])
    nope, eps = int(hp["qk_nope_head_dim"]), float(hp["lora_norm_eps"])
    # Queries: one product, or compressed, normalised and expanded.
    if hp["q_lora_rank"] is None:
        [q] = _project_parts(c, layer, x, {"q": n_heads})
    else:
        latent = c.tap("q_a", layer, c.linear(layer, "attn_q_a", x))
        latent = c.rms_norm(latent, c.vector(layer, "attn_q_a_norm.weight"), eps)
        latent = c.tap("q_a_norm", layer, latent)
        if c.block.indexer != "none" and hp["index_layers"][layer]:
            from aprfmt.inference.indexer import choose_keys

            c.state.chosen = choose_keys(c, layer, x, latent)
        q = c.linear(layer, "attn_q_b", latent).reshape(len(x), n_heads, -1)
        q = c.tap("q", layer, q)
    # One latent gives keys and values; the same product gives the rotated part of the keys.
    latent = c.tap("kv_a", layer, c.linear(layer, "attn_kv_a_mqa", x))
    k_pe = c.tap("k_pe", layer, latent[:, rank:].reshape(len(x), 1, -1))
    latent = c.rms_norm(latent[:, :rank], c.vector(layer, "attn_kv_a_norm.weight"), eps)
    latent = c.tap("kv_a_norm", layer, latent)
    expanded = c.linear(layer, "attn_kv_b", latent).reshape(len(x), n_heads, -1)
    k_nope = c.tap("k_nope", layer, expanded[..., :nope])
    v = c.tap("v", layer, expanded[..., nope:])
    kind = rotation_of_layer(hp, layer)
    q_pe = q[..., nope:]
    if kind is not None:
        q_pe = _rotate(c, q_pe, c.ropes[kind])
        k_pe = c.tap("k_pe_rope", layer, _rotate(c, k_pe, c.ropes[kind]))
    q = c.tap("q_rope", layer, b.concat([q[..., :nope], q_pe]))
    k = c.tap("k_rope", layer, b.concat([k_nope, b.repeat_heads(k_pe, n_heads)]))
    return q, k, v


_KINDS = {"gqa": _grouped_query_key_value, "mla": _latent_query_key_value}
