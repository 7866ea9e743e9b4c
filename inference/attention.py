"""Attention: grouped queries (GQA) and multi-head latent (MLA), fused or step by step."""

from collections.abc import Mapping

import numpy as np

from aprfmt.errors import ArchError
from aprfmt.inference import score_bias
from aprfmt.inference.backends.base import Array, Heads, Numbers, Style
from aprfmt.inference.context import Context
from aprfmt.inference.rope import kind_of


def attention(c: Context, layer: int, x: Array) -> Array:
    """Return a layer's attention, heads joined, before the output product: point `attn`."""
    gated = c.block.attention_gate == "sigmoid"
    gate = c.tap("attn_gate", layer, c.linear(layer, "attn_q_gate", x)) if gated else None
    q, k, v = _KINDS[c.block.attention](c, layer, x)
    if c.cache is not None:
        cached = c.cache.length > 0
        k, v = c.cache.extend(layer, k, v)
        if cached:
            k, v = c.tap("k_cache", layer, k), c.tap("v_cache", layer, v)
    mixed = _mix(c, layer, q, k, v)
    mixed = mixed.reshape(len(mixed), -1)
    if gate is not None:
        mixed = c.tap("attn_mixed", layer, mixed)
        mixed = c.backend.mul(mixed, c.backend.sigmoid(gate))
    return c.tap("attn", layer, mixed)


def stepped(c: Context, layer: int) -> bool:
    """Say whether a point inside the fused operation is wanted."""
    return c.wants("scores", layer) or c.wants("probs", layer)


def _mix(c: Context, layer: int, q: Array, k: Array, v: Array) -> Array:
    """Return probs.v [tokens, heads, value_dim]."""
    heads = _heads(c, layer, int(k.shape[0]))
    if c.block.score_bias != "none":
        return score_bias.attention(c, layer, q, k, v, heads)
    if not stepped(c, layer):
        return c.backend.attention(q, k, v, heads)
    scores = c.tap("scores", layer, c.backend.scores(q, k, heads))
    probs = c.tap("probs", layer, c.backend.probs(scores, heads))
    return c.backend.mix(probs, v)


def _heads(c: Context, layer: int, keys: int) -> Heads:
    hp = c.hp
    scale = float(hp["attn_scale"])
    if hp["attn_scale_by_layer"]:
        scale /= layer + 1
    cap = hp["attn_softcap"]
    sinks = c.vector(layer, "attn_sinks.weight") if c.block.sinks else None
    window = hp["sliding_window"] if hp["window_layers"][layer] else None
    causal = c.block.attends == "causal"
    tokens = len(c.facts.ids)
    mask = c.backend.seen(tokens, keys, c.facts.cached, window, causal=causal)
    return Heads(
        mask,
        scale,
        None if cap is None else float(cap),
        sinks,
        c.block.softmax_cast,
        (c.facts.cached, window) if causal else None,
    )


def _project(c: Context, layer: int, x: Array, heads: Mapping[str, int]) -> list[Array]:
    """Return q, k, v [tokens, heads, d] of these parts; captures points around the bias."""
    biases = {part: c.bias(layer, f"attn_{part}") for part in heads}
    late = {part for part in heads if biases[part] is not None and c.wants(f"{part}_mm", layer)}
    products = c.backend.projections(
        x,
        [
            (c.weights.of(layer, f"attn_{part}.weight"), None if part in late else biases[part])
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
        found.append(c.tap(part, layer, y if normed else _clipped(c, y)))
    return found


def _clipped(c: Context, x: Array) -> Array:
    """Clamp q, k or v where the model does: after a norm, before rope."""
    limit = c.hp["qkv_clip"]
    return x if limit is None else c.backend.clip(x, float(limit))


def _gqa(c: Context, layer: int, x: Array) -> tuple[Array, Array, Array]:
    n_heads, n_kv = int(c.hp["n_heads"]), int(c.hp["n_kv_heads"])
    q, k, v = _project(c, layer, x, {"q": n_heads, "k": n_kv, "v": n_kv})
    if c.hp["qk_norm"] and c.block.qk_norm_place == "before_rope":
        q = c.tap("q_norm", layer, _clipped(c, _qk_norm(c, layer, "attn_q_norm", q)))
        k = c.tap("k_norm", layer, _clipped(c, _qk_norm(c, layer, "attn_k_norm", k)))
    kind = kind_of(c.hp, layer) if c.block.position == "rope" else None
    if kind is not None:
        q, k = c.backend.ropes([q, k], c.ropes[kind], style=_style(c), cast=c.block.rope_cast)
        q, k = c.tap("q_rope", layer, q), c.tap("k_rope", layer, k)
    return *_finished(c, layer, q, k), v


def _finished(c: Context, layer: int, q: Array, k: Array) -> tuple[Array, Array]:
    """Return q and k after what follows rope: norms, or a factor on the queries."""
    if c.hp["qk_norm"] and c.block.qk_norm_place == "after_rope":
        q = c.tap("q_attn", layer, _qk_norm(c, layer, "attn_q_norm", q))
        k = c.tap("k_attn", layer, _qk_norm(c, layer, "attn_k_norm", k))
    elif c.block.temperature != "none" and c.hp["temperature_scale"] is not None:
        q = c.tap("q_attn", layer, c.backend.mul(q, c.backend.array(_temperature(c))))
    return q, k


def _temperature(c: Context) -> Numbers:
    """Return the factors [tokens, 1, 1], in float32 steps as transformers computes them."""
    positions = c.facts.positions.astype(np.float32)
    length, scale = (np.float32(c.hp[f"temperature_{part}"]) for part in ("length", "scale"))
    grown = np.log(np.float32(1) + np.floor(positions / length)) * scale
    factors: Numbers = np.float32(1) + grown
    return factors[:, None, None]


def _rotate(c: Context, x: Array, table: tuple[Array, Array]) -> Array:
    return c.backend.rope(x, table, style=_style(c), cast=c.block.rope_cast)


def _style(c: Context) -> Style:
    styles: dict[str, Style] = {"half": "half", "interleaved": "interleaved"}
    name = str(c.hp["rope_style"])
    if name not in styles:
        raise ArchError(f"rope_style is {name!r}; expected one of {', '.join(styles)}")
    return styles[name]


def _qk_norm(c: Context, layer: int, role: str, x: Array) -> Array:
    """Normalise q or k [tokens, heads, d] as the block's qk_norm says."""
    weight = c.vector(layer, f"{role}.weight")
    eps = float(c.hp["norm_eps"])
    kind = c.block.qk_norm
    if kind == "head_layer":
        return c.backend.layer_norm(x, weight, c.bias(layer, role), eps=eps)
    if kind == "width":
        return c.rms_norm(x.reshape(len(x), -1), weight, eps).reshape(x.shape)
    return c.rms_norm(x, weight, eps)


def _mla(c: Context, layer: int, x: Array) -> tuple[Array, Array, Array]:
    """Expand the latents: every head's key is [k_nope | k_pe], k_pe shared by all heads."""
    hp, b = c.hp, c.backend
    n_heads, rank = int(hp["n_heads"]), int(hp["kv_lora_rank"])
    nope, eps = int(hp["qk_nope_head_dim"]), float(hp["lora_norm_eps"])
    if hp["q_lora_rank"] is None:
        [q] = _project(c, layer, x, {"q": n_heads})
    else:
        latent = c.tap("q_a", layer, c.linear(layer, "attn_q_a", x))
        latent = c.rms_norm(latent, c.vector(layer, "attn_q_a_norm.weight"), eps)
        latent = c.tap("q_a_norm", layer, latent)
        q = c.linear(layer, "attn_q_b", latent).reshape(len(x), n_heads, -1)
        q = c.tap("q", layer, q)
    latent = c.tap("kv_a", layer, c.linear(layer, "attn_kv_a_mqa", x))
    k_pe = c.tap("k_pe", layer, latent[:, rank:].reshape(len(x), 1, -1))
    latent = c.rms_norm(latent[:, :rank], c.vector(layer, "attn_kv_a_norm.weight"), eps)
    latent = c.tap("kv_a_norm", layer, latent)
    expanded = c.linear(layer, "attn_kv_b", latent).reshape(len(x), n_heads, -1)
    k_nope = c.tap("k_nope", layer, expanded[..., :nope])
    v = c.tap("v", layer, expanded[..., nope:])
    kind = kind_of(hp, layer)
    q_pe = q[..., nope:]
    if kind is not None:
        q_pe = _rotate(c, q_pe, c.ropes[kind])
        k_pe = c.tap("k_pe_rope", layer, _rotate(c, k_pe, c.ropes[kind]))
    q = c.tap("q_rope", layer, b.concat([q[..., :nope], q_pe]))
    k = c.tap("k_rope", layer, b.concat([k_nope, b.repeat_heads(k_pe, n_heads)]))
    return q, k, v


_KINDS = {"gqa": _gqa, "mla": _mla}
