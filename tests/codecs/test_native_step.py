"""The C kernels of a decoding step against numpy in float64."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import CodecError
from tests.codecs.levels import F32, guards_hold, level, out_at, same_bits

__all__ = ["level"]

step = pytest.importorskip(
    "aprfmt.codecs.native.step",
    reason="NOT-RUN: the C extension is not built",
    exc_type=ImportError,
)
pytestmark = pytest.mark.usefixtures("level")

ULP = 2.0**-24  # half a unit in the last place, relative


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("columns", [1, 7, 8, 64, 577])
@pytest.mark.parametrize("offset", [0, 1])
def test_rms_norm(columns: int, offset: int) -> None:
    x, weight = normal(5, columns) * 30, normal(columns, seed=1)
    out = out_at(5 * columns, 3)
    step.rms_norm(x, weight, out, 1e-6, offset, 2)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (weight + float(offset))
    np.testing.assert_allclose(out.reshape(5, -1), exact, rtol=8 * ULP, atol=1e-7)
    assert guards_hold(out)


def test_eps_counts_where_rows_are_small() -> None:
    """A row of zeros stays one; one whose mean square is eps becomes 1/sqrt(2)."""
    x = np.zeros((3, 20), np.float32)
    x[1], x[2] = 1e-3, normal(20) * 1e-4
    out = np.empty(60, np.float32)
    step.rms_norm(x, np.ones(20, np.float32), out, 1e-6, 0, 1)
    zeros, even, small = out.reshape(3, 20)
    assert not zeros.any()
    np.testing.assert_allclose(even, 0.5**0.5, rtol=1e-6)
    assert (np.abs(small) <= np.abs(x[2]) / 1e-3).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "pairs"), [(64, 32), (20, 7), (6, 0), (32, 12)])
def test_rope_has_numpys_bits(width: int, pairs: int, interleaved: bool) -> None:
    x, cos, sin = normal(3, 2, width), normal(3, pairs, seed=1), normal(3, pairs, seed=2)
    out = out_at(x.size, 1)
    step.rope(x, cos, sin, out, 2, width, interleaved)
    first, second = (
        (x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2])
        if interleaved
        else (x[..., :pairs], x[..., pairs : 2 * pairs])
    )
    c, s = cos[:, None], sin[:, None]
    expected = np.concatenate(
        [first * c - second * s, second * c + first * s, x[..., 2 * pairs :]], axis=-1
    )
    same_bits(out, expected.reshape(-1))
    assert guards_hold(out)


EXACT: Mapping[str, Callable[[Any], Any]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.where(x < 0, 0, x),
    "gelu": lambda x: x / 2 * np.vectorize(math.erfc)(-x / np.sqrt(2)),
}
# How much more than itself x's rounding shows in what it is the exponent of.
EXPONENTS: Mapping[str, Callable[[Any], Any]] = {
    "gelu_tanh": lambda x: 1.6 * (1 + 0.045 * x * x),
    "gelu": lambda x: 0.5 * np.abs(x),
}


@pytest.mark.parametrize("kind", list(step.ACTIVATIONS))
def test_activations(kind: str) -> None:
    """Down to where they vanish: a few units in the last place, and nothing below the smallest."""
    x = np.concatenate([np.linspace(-120, 120, 20011), normal(1000)]).astype(np.float32)
    out, gated, up = out_at(x.size, 2), out_at(x.size, 0), normal(x.size, seed=3)
    step.activate(step.ACTIVATIONS[kind], x, None, out, 2)
    step.activate(step.ACTIVATIONS[kind], x, up, gated, 1)
    with np.errstate(over="ignore"):
        exact = EXACT[kind](x.astype(np.float64))
    far = np.abs(out - exact) / np.maximum(np.abs(exact), 1e-30)
    exponent = np.abs(x) * (EXPONENTS[kind](x) if kind in EXPONENTS else 1)
    assert (far <= (8 + 4 * exponent) * ULP).all()  # e**-x amplifies x's rounding
    np.testing.assert_array_equal(gated, out * up)
    assert guards_hold(out) and guards_hold(gated)
    special = np.array([np.nan, np.inf, 0, -0.0], np.float32)
    found = np.empty(4, np.float32)
    step.activate(step.ACTIVATIONS[kind], special, None, found, 1)
    assert np.isnan(found[0]) and found[1] == np.inf and not found[2:].any()


def reference(
    q: F32, k: F32, v: F32, cached: int, window: int, scale: float, cap: float, sinks: F32 | None
) -> Any:
    """Compute attention in float64, one head after another."""
    tokens, heads, _ = q.shape
    keys, kv_heads, _ = k.shape
    out = np.empty((tokens, heads, v.shape[-1]))
    for t in range(tokens):
        seen = np.arange(keys) <= cached + t
        if window:
            seen &= np.arange(keys) > cached + t - window
        for h in range(heads):
            at = h // (heads // kv_heads)
            scores = k[seen, at].astype(np.float64) @ q[t, h].astype(np.float64) * scale
            if cap:
                scores = np.tanh(scores / cap) * cap
            sink = [] if sinks is None else [float(sinks[h])]
            e = np.exp(scores - max([*scores, *sink]))
            total = e.sum() + sum(np.exp(s - max([*scores, *sink])) for s in sink)
            out[t, h] = (e / total) @ v[seen, at].astype(np.float64)
    return out


def attend(
    q: F32,
    k: F32,
    v: F32,
    cached: int,
    window: int,
    scale: float,
    cap: float,
    sinks: F32 | None,
    threads: int,
) -> F32:
    (tokens, heads, width), (keys, kv_heads, _) = q.shape, k.shape
    out = out_at(tokens * heads * v.shape[-1], 1)
    probs = np.full((tokens, heads, keys), np.nan, np.float32)
    shape = (tokens, heads, kv_heads, keys, width, v.shape[-1])
    step.attention(q, k, v, sinks, probs, out, shape, cached, window, scale, cap, threads)
    assert guards_hold(out)
    return out.reshape(tokens, heads, -1)


@pytest.mark.parametrize("window", [0, 1, 60, 200])
@pytest.mark.parametrize(
    ("tokens", "cached", "heads", "kv_heads", "width", "value_width"),
    [(1, 0, 1, 1, 8, 8), (1, 299, 9, 3, 64, 64), (5, 130, 4, 1, 20, 12), (16, 3, 6, 2, 33, 70)],
)
def test_attention(
    window: int, tokens: int, cached: int, heads: int, kv_heads: int, width: int, value_width: int
) -> None:
    keys = cached + tokens
    q, k = normal(tokens, heads, width) * 3, normal(keys, kv_heads, width, seed=1)
    v, sinks = normal(keys, kv_heads, value_width, seed=2), normal(heads, seed=3)
    for cap, sink in ((0.0, None), (2.5, None), (0.0, sinks)):
        found = attend(q, k, v, cached, window, width**-0.5, cap, sink, 1)
        exact = reference(q, k, v, cached, window, width**-0.5, cap, sink)
        np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-6)
        split = attend(q, k, v, cached, window, width**-0.5, cap, sink, 3)
        assert split.tobytes() == found.tobytes()


@pytest.mark.parametrize("window", [0, 1, 9])
@pytest.mark.parametrize(("cap", "sink"), [(0.0, False), (2.5, False), (0.0, True)])
def test_softmax_of_many_queries(window: int, cap: float, sink: bool) -> None:
    heads, tokens, cached = 3, 21, 5
    scores = normal(heads, tokens, cached + tokens) * 4
    sinks = normal(heads, seed=1) if sink else None
    found = scores.copy()
    shape = (heads, tokens, cached + tokens)
    step.softmax(found, sinks, shape, cached, window, 0.5, cap, 2)
    position, key = np.arange(cached, cached + tokens)[:, None], np.arange(cached + tokens)
    seen = (key <= position) & ((key > position - window) if window else True)
    exact = scores.astype(np.float64) * 0.5
    if cap:
        exact = np.tanh(exact / cap) * cap
    e = np.where(seen, np.exp(exact), 0)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks.astype(np.float64))[:, None, None]
    np.testing.assert_allclose(found, e / total, rtol=3e-6, atol=1e-12)
    assert (found[:, ~seen] == 0).all()
    for wrong in ((3, 21, 27), (2, 21, 26), (3, 0, 26)):
        with pytest.raises(CodecError, match="softmax: found"):
            step.softmax(found, sinks, wrong, cached, window, 0.5, cap, 1)
    with pytest.raises(CodecError, match="softmax: found"):
        step.softmax(found, normal(2), shape, cached, window, 0.5, cap, 1)


def test_a_query_alone_has_the_bits_it_has_among_others() -> None:
    q, k, v = normal(4, 6, 32), normal(404, 2, 32, seed=1), normal(404, 2, 32, seed=2)
    for window in (0, 100):
        together = attend(q, k, v, 400, window, 0.2, 0.0, None, 2)
        for t in range(4):
            alone = attend(
                q[t : t + 1], k[: 401 + t], v[: 401 + t], 400 + t, window, 0.2, 0.0, None, 1
            )
            assert alone.tobytes() == together[t : t + 1].tobytes()


def test_a_nan_stays_and_what_is_not_seen_does_not_matter() -> None:
    q, k, v = normal(1, 2, 16), normal(90, 1, 16, seed=1), normal(90, 1, 16, seed=2)
    clean = attend(q, k, v, 89, 8, 1.0, 0.0, None, 1)
    k[:82], v[:82] = np.nan, np.nan
    assert attend(q, k, v, 89, 8, 1.0, 0.0, None, 1).tobytes() == clean.tobytes()
    k[85] = np.nan
    assert np.isnan(attend(q, k, v, 89, 8, 1.0, 0.0, None, 1)).all()


def test_what_does_not_fit_is_refused() -> None:
    x, out = normal(2, 8), np.empty((2, 8), np.float32)
    with pytest.raises(CodecError, match="rms_norm: found x of 16 elements"):
        step.rms_norm(x, normal(3), out, 1e-6, 0, 1)
    with pytest.raises(CodecError, match="rms_norm: found"):
        step.rms_norm(x, np.empty(0, np.float32), out, 1e-6, 0, 1)
    with pytest.raises(CodecError, match="rope: found"):
        step.rope(x, normal(2, 5), normal(2, 5), out, 1, 8, False)
    with pytest.raises(CodecError, match="rope: found"):
        step.rope(x, normal(2, 2), normal(2, 2), out, 0, 8, False)
    with pytest.raises(CodecError, match="activate: found kind 4"):
        step.activate(4, x, None, out, 2)
    with pytest.raises(CodecError, match="activate: found"):
        step.activate(0, x, normal(3), out, 1)
    q, k = normal(1, 2, 4), normal(3, 1, 4)
    probs, mixed = np.empty((1, 2, 3), np.float32), np.empty((1, 2, 4), np.float32)
    shape = (1, 2, 1, 3, 4, 4)
    step.attention(q, k, k, None, probs, mixed, shape, 2, 0, 1.0, 0.0, 1)
    for cached, found in (
        (1, shape),
        (2, (1, 2, 1, 3, 4, 5)),
        (2, (1, 3, 2, 3, 4, 4)),
        (-1, shape),
        (2, (0, 2, 1, 3, 4, 4)),
    ):
        with pytest.raises(CodecError, match="attention: found"):
            step.attention(q, k, k, None, probs, mixed, found, cached, 0, 1.0, 0.0, 1)
    with pytest.raises(CodecError, match="attention: found"):
        step.attention(q, k, k, normal(3), probs, mixed, shape, 2, 0, 1.0, 0.0, 1)
