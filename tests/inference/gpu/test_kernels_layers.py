"""A layer's fused kernels against torch's own operations, each value rounded where it is said.

Seen red: a product's rows of the second weight taken from the first, heads grouped the other way, a
window one key too long, parts of the keys joined without their weights, sinks left out, a rotation
by the negative angle, the offset left out of the norm.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from aprfmt.inference.fast.cuda import layers
from tests.inference.gpu.machine import Gpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIMIT = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Place:
    """Random tensors where the kernels run, and results poisoned with NaN."""

    def __init__(self, machine: Any, dtype: str) -> None:
        self.device = "cuda" if isinstance(machine, Gpu) else "cpu"
        self.dtype, self.type = dtype, DTYPES[dtype]
        self._random = np.random.default_rng(11)

    @property
    def common(self) -> dict[str, Any]:
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
        return {"dtype": self.dtype, "stream": stream}

    def random(self, *shape: int) -> torch.Tensor:
        values = self._random.standard_normal(shape).astype(np.float32)
        return torch.from_numpy(values).to(self.type).to(self.device)

    def poison(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=self.type, device=self.device)

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        wide = expected.double()
        distance = (found.double() - wide).norm() / wide.norm()
        assert float(distance) < LIMIT[self.dtype]  # a NaN is not below


@pytest.fixture
def place(machine: Any, dtype: str) -> Place:
    return Place(machine, dtype)


@pytest.mark.parametrize(
    ("rows", "width"), [(4, 896), (7, 33), (2, 4097), (3, 40), (5, 10), (3, 131)]
)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("before", [True, False])
def test_rms_norm(place: Place, rows: int, width: int, offset: int, before: bool) -> None:
    x, w, y = place.random(rows, width) * 3, place.random(width), place.poison(rows, width)
    layers.rms_norm(x, w, y, eps=1e-5, offset=offset, before=before, **place.common)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = normed.to(place.type) * (w + offset) if before else normed * (w.float() + offset)
    place.close(y, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("dim", "pairs"), [(40, 16), (10, 5), (36, 7)])
def test_rope(
    place: Place, interleaved: bool, wide: bool, both: bool, dim: int, pairs: int
) -> None:
    tokens = 5
    joined = place.random(tokens, 3 * dim + 2 * dim)
    q, k = joined[:, : 3 * dim].view(tokens, 3, dim), joined[:, 3 * dim :].view(tokens, 2, dim)
    angles = torch.arange(tokens, device=place.device)[:, None] * place.random(pairs).float()
    table = (angles.cos(), angles.sin())
    if not wide:
        table = (table[0].to(place.type), table[1].to(place.type))
    outs = place.poison(tokens, 3, dim), place.poison(tokens, 2, dim)
    layers.rope(
        q,
        outs[0],
        k if both else None,
        outs[1] if both else None,
        table,
        float32_table=wide,
        interleaved=interleaved,
        stepped=not wide,
        **place.common,
    )
    for x, found in ((q, outs[0]), (k, outs[1]))[: 1 + both]:
        cos, sin = table[0][:, None], table[1][:, None]
        y = x.float() if wide else x
        a, b = y[..., :pairs], y[..., pairs : 2 * pairs]
        if interleaved:
            a, b = y[..., 0 : 2 * pairs : 2], y[..., 1 : 2 * pairs : 2]
        expected = torch.cat(
            [(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), x[..., 2 * pairs :]],
            dim=-1,
        )
        assert torch.equal(found, expected)  # the same products and the same roundings


@pytest.mark.parametrize(("dim", "v_dim"), [(24, 16), (10, 11), (36, 15)])
def test_append(place: Place, dim: int, v_dim: int) -> None:
    k, v = place.random(1, 2, dim), place.random(1, 2, v_dim)
    keys, values = place.random(7, 2, dim), place.random(7, 2, v_dim)
    before = keys.clone(), values.clone()
    cached = torch.tensor(5, device=place.device)
    layers.append(k, v, keys, values, cached, **place.common)
    for buffer, old, new in ((keys, before[0], k), (values, before[1], v)):
        old[5] = new[0]
        assert torch.equal(buffer, old)


@pytest.mark.parametrize("width", [300, 27])
@pytest.mark.parametrize("kind", layers.ACTIVATIONS)
def test_act_mul(place: Place, kind: str, width: int) -> None:
    both = place.random(3, 2 * width)
    gate, up, y = both[:, :width], both[:, width:], place.poison(3, width)
    layers.act_mul(gate, up, y, kind, **place.common)
    place.close(y, activation(kind, gate) * up)


def activation(kind: str, x: torch.Tensor) -> torch.Tensor:
    if kind == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    found: torch.Tensor = getattr(functional, kind)(x)
    return found


@pytest.mark.parametrize("columns", [40, 64, 120, 1000, 2048])
@pytest.mark.parametrize("counts", [(5,), (64, 32, 33)])
@pytest.mark.parametrize("added", [False, True])
def test_matvec(place: Place, columns: int, counts: tuple[int, ...], added: bool) -> None:
    x, weights = place.random(1, columns), [place.random(n, columns) for n in counts]
    biases = [place.random(n) if added else None for n in counts]
    residual = place.random(1, sum(counts)) if added else None
    y = place.poison(1, sum(counts))
    layers.matvec(weights, biases, x, y, residual=residual, **place.common)
    parts = [x.double() @ w.double().T for w in weights]
    expected = torch.cat(
        [p if b is None else p + b.double() for p, b in zip(parts, biases, strict=True)], dim=-1
    )
    place.close(y, expected if residual is None else expected + residual.double())


def test_matvec_of_many_rows(place: Place) -> None:
    n = 8 * layers.BUSY_WARPS + 3  # two rows a warp
    x, w, y = place.random(1, 16), place.random(n, 16), place.poison(1, n)
    layers.matvec([w], [None], x, y, **place.common)
    place.close(y, x.double() @ w.double().T)


@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("added", [False, True])
def test_matvec_gated(place: Place, rows: int, added: bool) -> None:
    x, gate, up = place.random(1, 320) / 8, place.random(rows, 320), place.random(rows, 320)
    biases = [place.random(rows) if added else None for _ in range(2)]
    y = place.poison(1, rows)
    layers.matvec_gated(gate, up, biases[0], biases[1], x, y, "silu", **place.common)
    g, u = (
        functional.linear(x.double(), w.double(), None if b is None else b.double())
        for w, b in zip((gate, up), biases, strict=True)
    )
    place.close(y, functional.silu(g) * u)


@pytest.mark.parametrize(("tokens", "keys", "before"), [(5, 7, 2), (3, 300, 200), (1, 1, 0)])
@pytest.mark.parametrize("window", [None, 3, 150])
@pytest.mark.parametrize("sink", [False, True])
def test_softmax_causal(
    place: Place, tokens: int, keys: int, before: int, window: int | None, sink: bool
) -> None:
    scores, probs = place.random(2, tokens, keys), place.poison(2, tokens, keys)
    sinks = place.random(2) if sink else None
    cached = torch.tensor(before, device=place.device) if sink else None
    layers.softmax_causal(
        scores,
        sinks,
        probs,
        cached=cached,
        before=-99 if sink else before,
        window=window,
        **place.common,
    )
    position = before + torch.arange(tokens, device=place.device)[:, None]
    key = torch.arange(keys, device=place.device)
    seen = (key <= position) & (key > position - (window or keys + before))
    x = scores.double().masked_fill(~seen, -torch.inf)
    if sinks is not None:
        x = torch.cat([x, sinks.double()[:, None, None].expand(2, tokens, 1)], dim=-1)
    expected = torch.softmax(x, -1)[..., :keys]
    place.close(probs, expected)
    assert not probs[:, ~seen].any()


@pytest.mark.parametrize("count", [1, 17, 257, 700])
@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.parametrize("extras", [False, True])
def test_attend(place: Place, count: int, window: int | None, extras: bool) -> None:
    dims = (64, 64) if extras else (24, 20)  # whole pieces of 16 bytes, and not
    attended(place, dims, count, window, extras)


@pytest.mark.parametrize("dims", [(10, 10), (36, 9), (20, 21), (11, 40)])
def test_attend_of_odd_heads(place: Place, dims: tuple[int, int]) -> None:
    attended(place, dims, 261, 259, True)


def attended(
    place: Place, dims: tuple[int, int], count: int, window: int | None, extras: bool
) -> None:
    heads, kv_heads, capacity = 6, 2, 1024
    dim, v_dim = dims
    q = place.random(1, heads, dim)
    keys, values = place.random(capacity, kv_heads, dim), place.random(capacity, kv_heads, v_dim)
    keys[count:] = torch.nan  # what is not valid is not read
    values[count:] = torch.nan
    sinks = place.random(heads) if extras else None
    softcap = 2.5 if extras else None
    y = place.poison(1, heads, v_dim)
    parts = torch.full((heads * layers.SPLITS * (v_dim + 2),), torch.nan, device=place.device)
    arrived = torch.zeros(heads, dtype=torch.int32, device=place.device)
    on_device = torch.tensor(count - 1, device=place.device) if extras else None
    for _ in range(2):  # the second finds what the first left
        layers.attend(
            q,
            keys,
            values,
            sinks,
            y,
            parts,
            arrived,
            cached=on_device,
            count=count,
            window=window,
            scale=0.3,
            softcap=softcap,
            **place.common,
        )
    first = 0 if window is None else max(0, count - window)
    group = heads // kv_heads
    k = keys[first:count].double().repeat_interleave(group, 1)
    v = values[first:count].double().repeat_interleave(group, 1)
    scores = torch.einsum("hd,khd->hk", q[0].double(), k) * 0.3
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], dim=-1)
    probs = torch.softmax(scores, -1)[:, : len(k)]
    place.close(y[0], torch.einsum("hk,khd->hd", probs, v))
    assert not arrived.any()
