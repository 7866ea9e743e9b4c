"""Attention's calls of kernels and of cuBLAS, with numpy in the place of the GPU.

Each kernel here does what its arguments say, at the addresses that it is given.
"""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.backends.base import Heads
from aprfmt.inference.fast.cuda import attend, gemm, memory
from aprfmt.inference.fast.cuda.attend import Attention
from aprfmt.inference.fast.cuda.ops import SHARED_LIMIT

TOKENS, KEYS, HEADS, KV, D, DV = 5, 15, 6, 3, 4, 2
RNG = np.random.default_rng(8)


def at(address: int, *shape: int, dtype: str = "float32") -> Any:
    """Return the array [shape] at an address."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    held: Any = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(held, dtype).reshape(shape)


def multiply_strided(dtype: str, a: int, b: int, c: int, **given: Any) -> None:
    """Do what the function of this name says, by numpy's strides."""
    rows, columns, depth = given["rows"], given["columns"], given["depth"]
    item = np.dtype(dtype).itemsize
    (row_a, row_b, row_c), steps = given["strides"], given.get("steps", (0, 0, 0))
    b_rows, b_columns = (columns, depth) if given["turned"] else (depth, columns)

    def matrices(place: int, n: int, m: int, row: int, step: int) -> Any:
        count = (given.get("batch", 1) - 1) * step + (n - 1) * row + m
        whole = at(place, count, dtype=dtype)
        shape, strides = (given.get("batch", 1), n, m), (step * item, row * item, item)
        return np.lib.stride_tricks.as_strided(whole, shape, strides, writeable=True)

    x = matrices(a, rows, depth, row_a, steps[0])
    y = matrices(b, b_rows, b_columns, row_b, steps[1])
    out = matrices(c, rows, columns, row_c, steps[2])
    out[...] = x @ (y.swapaxes(1, 2) if given["turned"] else y)


def softmax(scores: Any, mask: Any, sinks: Any) -> Any:
    """Return the softmax over keys of [heads, tokens, keys], with a sink that is dropped."""
    shown = np.where(mask, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*shown.shape[:2], 1))
        shown = np.concatenate([shown, column], 2)
    shown = np.exp(shown - shown.max(2, keepdims=True))
    return (shown / shown.sum(2, keepdims=True))[..., : scores.shape[2]]


def capped(scores: Any, scale: float, cap: float) -> Any:
    return np.tanh(scores * scale / cap) * cap if cap else scores * scale


class Kernels:
    """The kernels that attention launches; `launched` are their names."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.shared: list[int] = []
        self.input_casts: list[int] = []

    def launch(self, name: str, grid: tuple[int, ...], *given: Any, shared: int = 0) -> None:
        self.launched.append(name)
        self.shared.append(shared)
        getattr(self, name)(grid, *given)

    def launch_over(self, name: str, count: int, *given: Any) -> None:
        self.launched.append(name)
        getattr(self, name)(count, *given)

    def scores(
        self,
        grid: Any,
        q: int,
        k: int,
        out: int,
        keys: int,
        heads: int,
        kv: int,
        d: int,
        scale: float,
        cap: float,
    ) -> None:
        blocks, tokens, n_heads = grid
        assert n_heads == heads and blocks == -(-keys // 8)  # 8 warps of a group, a key each
        x, y = at(q, tokens, heads, d), at(k, keys, kv, d).repeat(heads // kv, 1)
        at(out, heads, tokens, keys)[...] = capped(np.einsum("thd,khd->htk", x, y), scale, cap)

    def probs(
        self,
        grid: Any,
        scores: int,
        mask: int,
        sinks: int,
        out: int,
        rows: int,
        keys: int,
        cast: int,
    ) -> None:
        tokens, heads = grid
        self.input_casts.append(cast)
        shown = at(mask, tokens, keys, dtype="uint8").astype(bool)
        own = at(sinks, heads) if sinks else None
        at(out, heads, tokens, keys)[...] = softmax(at(scores, heads, tokens, keys), shown, own)

    def mix(
        self,
        grid: Any,
        probs: int,
        v: int,
        out: int,
        rows: int,
        keys: int,
        heads: int,
        kv: int,
        dv: int,
    ) -> None:
        tokens, n_heads = grid
        assert n_heads == heads
        x, y = at(probs, heads, tokens, keys), at(v, keys, kv, dv).repeat(heads // kv, 1)
        at(out, tokens, heads, dv)[...] = np.einsum("htk,khd->thd", x, y)

    def attend(
        self,
        grid: Any,
        q: int,
        k: int,
        v: int,
        mask: int,
        sinks: int,
        out: int,
        rows: int,
        keys: int,
        kv: int,
        d: int,
        dv: int,
        cast: int,
        scale: float,
        cap: float,
    ) -> None:
        tokens, heads = grid
        self.input_casts.append(cast)
        x, y = at(q, tokens, heads, d), at(k, keys, kv, d).repeat(heads // kv, 1)
        scores = capped(np.einsum("thd,khd->htk", x, y), scale, cap)
        shown = at(mask, tokens, keys, dtype="uint8").astype(bool)
        weights = softmax(scores, shown, at(sinks, heads) if sinks else None)
        values = at(v, keys, kv, dv).repeat(heads // kv, 1)
        at(out, tokens, heads, dv)[...] = np.einsum("htk,khd->thd", weights, values)

    def scale(self, count: int, source: int, out: int, size: int, by: float) -> None:
        assert count == size
        at(out, size)[...] = at(source, size) * np.float32(by)

    def softcap(self, count: int, source: int, out: int, size: int, cap: float) -> None:
        assert count == size
        at(out, size)[...] = np.tanh(at(source, size) / cap) * cap

    def index_scores(
        self,
        count: int,
        products: int,
        weights: int,
        total: int,
        size: int,
        keys: int,
        heads: int,
        batch: int,
        adds: int,
        scale: float,
    ) -> None:
        assert count == size
        tokens = size // keys
        each = np.maximum(0, at(products, batch, tokens, keys) * scale)
        strided = np.lib.stride_tricks.as_strided(
            at(weights, (tokens - 1) * heads + batch), (tokens, batch), (heads * 4, 4)
        )
        into = at(total, tokens, keys)
        into[...] = (into if adds else 0) + np.einsum("btk,tb->tk", each, strided)

    def causal(
        self, count: int, out: int, cached: int, before: int, size: int, keys: int, window: int
    ) -> None:
        assert count == size
        rows = np.arange(size // keys)[:, None] + before
        if cached:
            rows = rows + at(cached, 1, dtype="int64")
        columns = np.arange(keys)
        shown = (columns <= rows) & ((columns > rows - window) if window else True)
        at(out, size // keys, keys, dtype="uint8")[...] = shown

    def choose_best(
        self, grid: Any, scores: int, mask: int, out: int, keys: int, count: int
    ) -> None:
        (tokens,) = grid
        assert count <= keys
        shown = at(mask, tokens, keys, dtype="uint8").astype(bool)
        order = np.argsort(-np.where(shown, at(scores, tokens, keys), -np.inf), 1, kind="stable")
        best = np.zeros((tokens, keys), bool)
        np.put_along_axis(best, order[:, :count], True, 1)
        at(out, tokens, keys, dtype="uint8")[...] = best & shown


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Attention, Kernels]]:
    """Return a function that makes an attention on numpy's arrays, and its kernels."""
    arrays = SimpleNamespace(empty=lambda shape, dtype: np.full(shape, 77, dtype))
    monkeypatch.setattr(memory, "array_module", lambda: arrays)
    monkeypatch.setattr(memory, "pointer", lambda x: int(x.ctypes.data))
    monkeypatch.setattr(memory, "copy_to_gpu", lambda x: x.copy())
    monkeypatch.setattr(gemm, "multiply_strided", multiply_strided)

    def made(deterministic: bool = False, cached: Any = None) -> tuple[Attention, Kernels]:
        kernels = Kernels()
        uploads: Any = SimpleNamespace(recording=None, cached=cached)
        ops: Any = kernels
        return Attention(ops, uploads, "float32", deterministic=deterministic, tf32=False), kernels

    return made


def numbers(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


Q, K, V = numbers(TOKENS, HEADS, D), numbers(KEYS, KV, D), numbers(KEYS, KV, DV)


@pytest.mark.parametrize("deterministic", [False, True])
def test_scores_probabilities_and_sums_are_those_of_numpy_in_both_ways(
    deterministic: bool, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "MANY_QUERIES", TOKENS)
    monkeypatch.setattr(attend, "QUERY_BLOCK", 2)
    shown = np.tri(TOKENS, KEYS, 2, dtype=bool)
    ways: Any = ((None, None, "float32"), (0.5, numbers(HEADS), "input"))
    for cap, sinks, cast in ways:
        attention, kernels = make(deterministic)
        heads = Heads(shown, 0.3, cap, sinks, cast)
        raw = np.einsum("thd,khd->htk", Q, K.repeat(HEADS // KV, 1))
        scores = attention.scores(Q, K, heads)
        assert np.allclose(scores, capped(raw, 0.3, cap or 0.0), atol=1e-6)
        probs = attention.probs(scores, heads)
        expected = softmax(scores, shown, sinks)
        assert np.allclose(probs, expected, atol=1e-6)
        assert kernels.input_casts == [cast == "input"] and kernels.shared[-1] == KEYS * 4
        mixed = np.einsum("htk,khd->thd", expected, V.repeat(HEADS // KV, 1))
        assert np.allclose(attention.mix(probs, V), mixed, atol=1e-6)
        used = ["scores", "probs", "mix"]
        plain = ["scale", *(["softcap"] if cap else []), "probs"]
        assert kernels.launched == (used if deterministic else plain)
        kernels.launched.clear()
        assert np.allclose(attention.attention(Q, K, V, heads), mixed, atol=1e-6)
        assert kernels.launched == (["attend"] if deterministic else plain * 3)  # of 2, 2 and 1
    monkeypatch.setattr(attend, "MANY_QUERIES", TOKENS + 1)
    attention, kernels = make()
    assert np.allclose(attention.attention(Q, K, V, heads), mixed, atol=1e-6)
    assert kernels.launched == ["attend"]


def test_rows_that_are_too_long_for_shared_memory_have_room_of_their_own(make: Any) -> None:
    attention, _ = make()
    most = (SHARED_LIMIT - 1024) // 4
    assert attention._row_buffers(most, 3) == (most * 4, 0, None)
    size, place, room = attention._row_buffers(most + 1, 3)
    assert size == 0 and place == room.ctypes.data and room.shape == (3 * (most + 1),)


def test_an_indexer_s_scores_are_summed_some_heads_at_a_time(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, weights = numbers(KEYS, 1, D), numbers(TOKENS, HEADS)
    products = np.maximum(0, np.einsum("thd,kd->thk", Q, k[:, 0]) * 0.7)
    expected = np.einsum("thk,th->tk", products, weights)
    for most, launches in (
        (1, 6),
        (TOKENS * KEYS * 4, 2),
        (TOKENS * KEYS * 4 - 1, 2),
        (1 << 20, 1),
    ):
        monkeypatch.setattr(attend, "MOST_PRODUCTS", most)
        attention, kernels = make()
        found = attention.index_scores(Q, k, weights, 0.7)
        assert np.allclose(found, expected, atol=1e-6)
        assert len(kernels.launched) == launches
    shown = np.tri(TOKENS, KEYS, 1, dtype=bool).view(np.uint8)
    for count in (1, 3, KEYS, KEYS + 5):
        best = attention.choose_best(found, shown, count)
        assert best.sum(1).tolist() == [min(count, i + 2) for i in range(TOKENS)]
        assert not (best & ~shown).any()


def test_a_mask_is_made_once_for_the_layers_of_a_pass(make: Any) -> None:
    """Of a causal one no copy is made; a window ends it, and what is cached moves it."""
    attention, kernels = make()
    shown = np.tri(TOKENS, KEYS, 2, dtype=bool)
    heads = Heads(shown, 1.0, None, None, "float32")
    found = attention.mask(heads)
    assert np.array_equal(found, shown.view(np.uint8)) and not kernels.launched
    assert attention.mask(heads) is found
    for window in (None, 2):
        causal = Heads(shown, 1.0, None, None, "float32", causal=(2, window))
        expected = shown & ~np.tri(TOKENS, KEYS, 2 - window, dtype=bool) if window else shown
        assert np.array_equal(attention.mask(causal), expected.view(np.uint8))
    assert kernels.launched == ["causal"] * 2
    others = [Heads(shown.copy(), 1.0, None, None, "float32") for _ in range(4)]
    masks = [attention.mask(each) for each in others]
    assert len(attention._masks) == 4 and attention.mask(heads) is not found
    assert attention.mask(others[3]) is masks[3]
    cached, _ = make(cached=np.array([1], np.int64))
    moved = cached.mask(Heads(shown, 1.0, None, None, "float32", causal=(1, None)))
    assert np.array_equal(moved, shown.view(np.uint8))
    given = object()
    assert cached.mask(Heads(shown, 1.0, None, None, "float32", device_mask=given)) is given
