"""The reference backend: numpy in float32 or float64, one readable function per operation.

Products use BLAS; every other sum is numpy's pairwise sum. Nothing is rounded below the dtype,
so the rounding rules of base.py do not apply here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aprfmt.codecs.parallel import cpu_count
from aprfmt.errors import ArchError, BackendUnavailableError
from aprfmt.inference.backends import blas
from aprfmt.inference.backends.base import (
    ROWS,
    Array,
    Heads,
    NormCast,
    RopeCast,
    Style,
    panel_rows,
)
from aprfmt.inference.backends.tiles import Tiles
from aprfmt.inference.weights import Weight
from aprfmt.tensors.stats import Stats, compute

_DTYPES: Mapping[str, type[np.floating[Any]]] = {"float32": np.float32, "float64": np.float64}
# Query rows that the fused attention handles together: bounds the scores in memory.
QUERY_BLOCK = 128


def _gelu(x: Array) -> Array:
    erf = np.fromiter(map(math.erf, (x * math.sqrt(0.5)).ravel().tolist()), x.dtype, x.size)
    return x * 0.5 * (1 + erf.reshape(x.shape))


def _gelu_tanh(x: Array) -> Array:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return x * 0.5 * (1 + np.tanh(inner))


def _sigmoid(x: Array) -> Array:
    return np.divide(1, _one_plus_exp(x))


def _silu(x: Array) -> Array:
    y = _one_plus_exp(x)
    return np.divide(x, y, out=y)


def _one_plus_exp(x: Array) -> Array:
    """Return 1 + exp(-x); infinite for large negative x, so that its inverse is 0."""
    with np.errstate(over="ignore"):
        y = np.negative(x)
        np.exp(y, out=y)
    y += 1
    return y


def _mean(x: Array) -> Array:
    """Return the mean over the last axis (axis kept); saves 10 us per call against `np.mean`."""
    total = np.add.reduce(x, axis=-1, keepdims=True)
    total /= x.shape[-1]
    return total


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
}


class NumpyBackend(Tiles):
    """The numpy backend, on the CPU; `dtype` is float32 or float64."""

    name = "numpy"
    device = "cpu"

    def __init__(
        self,
        device: str,
        dtype: str,
        *,
        deterministic: bool = False,
        threads: int | None = None,
        tf32: bool = False,
    ) -> None:
        if device != "cpu":
            raise BackendUnavailableError(
                f"backend numpy: found device {device!r}; it computes on cpu only, choose "
                "backend torch for a GPU"
            )
        if dtype not in _DTYPES:
            raise BackendUnavailableError(
                f"backend numpy: found dtype {dtype!r}; expected {' or '.join(_DTYPES)}, "
                "backend torch also has bfloat16 and float16"
            )
        if tf32:
            raise BackendUnavailableError("backend numpy: there is no TF32 on a CPU")
        self.dtype = dtype
        self.deterministic = deterministic
        self._type = _DTYPES[dtype]
        self.itemsize = np.dtype(self._type).itemsize
        self._threads = threads or cpu_count()
        if threads is not None:
            blas.set_threads(threads)

    def facts(self) -> Mapping[str, Any]:
        """Versions, threads of the products."""
        return {
            "backend": self.name,
            "device": self.device,
            "dtype": self.dtype,
            "deterministic": self.deterministic,
            "threads": blas.threads() or self._threads,
            "tf32": False,
            "versions": {"numpy": np.__version__},
        }

    # in and out

    def array(self, x: Array) -> Array:
        """Return x in the dtype, without a copy where it already is."""
        return np.asarray(x, self._type)

    def to_numpy(self, x: Array) -> Array:
        """Return x itself; integers widened to int64."""
        return x if x.dtype.kind == "f" else x.astype(np.int64)

    def stats(self, x: Array) -> Stats:
        """Compute the statistics."""
        return compute(x, self._threads)

    def zeros(self, shape: Sequence[int]) -> Array:
        """Return zeros of the dtype."""
        return np.zeros(shape, self._type)

    def wide(self, x: Array) -> Array:
        """Return x, which is float32 or float64 already."""
        return x

    def narrow(self, x: Array) -> Array:
        """Return x."""
        return x

    def exp(self, x: Array) -> Array:
        """Return the exponential of each element."""
        return np.exp(x)

    def rounded(self, value: float) -> float:
        """Return the number rounded to the dtype."""
        return float(self._type(value))

    # products

    def embed(self, table: Weight, ids: Array) -> Array:
        """Decode only these rows."""
        held = table.ready(self)
        if held is not None:
            return np.ascontiguousarray(held[ids])
        rows = [table.rows(int(i), int(i) + 1) for i in ids]
        return self.array(np.concatenate(rows))

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Multiply by the placed weight, by the encoded one, or panel by panel decoded."""
        y = self._encoded(x, w)
        if y is None:
            held = w.held(self)
            if held is not None and not self.deterministic:
                y = x @ held.reshape(w.n_rows, w.n_columns).T
            else:
                y = self._by_panels(x, w, held)
        if bias is not None:
            y += bias
        return y

    def _by_panels(self, x: Array, w: Weight, held: Array | None) -> Array:
        y = np.empty((len(x), w.n_rows), self._type)
        step = panel_rows(w.n_columns)
        for start in range(0, w.n_rows, step):
            stop = min(start + step, w.n_rows)
            if held is not None:
                panel = held.reshape(w.n_rows, w.n_columns)[start:stop]
            else:
                panel = self.array(w.rows(start, stop))
            y[:, start:stop] = self.tiled_linear(x, panel) if self.deterministic else x @ panel.T
        return y

    def router(self, x: Array, w: Weight, bias: Array | None, *, rounded: bool) -> Array:
        """Multiply: everything here is at least float32."""
        return self.linear(x, w, bias)

    def _encoded(self, x: Array, w: Weight) -> Array | None:
        if self.dtype != "float32" or self.deterministic:
            return None
        return w.product(x, self._threads)

    # element by element

    def add(self, a: Array, b: Array) -> Array:
        """Return a + b."""
        return a + b

    def mul(self, a: Array, b: Array) -> Array:
        """Return a * b."""
        return a * b

    def scale(self, x: Array, factor: float) -> Array:
        """Return x * factor."""
        return x * self._type(factor)

    def softcap(self, x: Array, cap: float) -> Array:
        """Return tanh(x / cap) * cap."""
        return np.tanh(x / self._type(cap)) * self._type(cap)

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Apply a function of ACTIVATIONS."""
        if kind not in ACTIVATIONS:
            raise ArchError(f"activation {kind!r}; expected one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[kind](x).astype(self._type, copy=False)

    def sigmoid(self, x: Array) -> Array:
        """Return 1 / (1 + exp(-x))."""
        return _sigmoid(x)

    def swiglu_oai(self, gate: Array, up: Array, limit: float, alpha: float) -> Array:
        """Return gpt-oss's clamped product."""
        gate = np.minimum(gate, self._type(limit))
        up = np.clip(up, self._type(-limit), self._type(limit))
        return (up + 1) * (gate * _sigmoid(gate * self._type(alpha)))

    # norms

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Divide by the root of the mean square, multiply by weight + offset."""
        y = x / np.sqrt(_mean(x * x) + self._type(eps))
        y *= weight + self._type(offset)
        return y

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        """Subtract the mean, divide by the standard deviation, multiply, add."""
        x = x - _mean(x)
        y = x / np.sqrt(_mean(x * x) + self._type(eps)) * weight
        return y if bias is None else y + bias

    # rotary positions

    def rope_table(
        self, positions: Array, inv_freq: Array, *, factor: float, cast: RopeCast
    ) -> tuple[Array, Array]:
        """Return cos and sin of the angles, times factor."""
        angles = positions.astype(self._type)[:, None] * inv_freq.astype(self._type)
        return np.cos(angles) * self._type(factor), np.sin(angles) * self._type(factor)

    def rope(self, x: Array, table: tuple[Array, Array], *, style: Style, cast: RopeCast) -> Array:
        """Rotate pairs of elements; the rotated part comes out in split halves."""
        cos, sin = (part[:, None, :] for part in table)  # (token, 1, pair)
        pairs = cos.shape[-1]
        if style == "half":
            first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
        else:
            first, second = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return np.concatenate([*rotated, x[..., 2 * pairs :]], axis=-1)

    # attention

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Compute scores, probs and mix for a block of queries and the keys they can see."""
        tokens, n_heads, _ = q.shape
        out = np.empty((tokens, n_heads, v.shape[-1]), self._type)
        origin = self._origin
        start = 0
        while start < tokens:
            stop = min(tokens, start + QUERY_BLOCK - (origin + start) % QUERY_BLOCK)
            seen = np.flatnonzero(heads.mask[start:stop].any(axis=0))
            first, last = int(seen[0]) // ROWS * ROWS, int(seen[-1]) + 1
            part = Heads(
                heads.mask[start:stop, first:last],
                heads.scale, heads.softcap, heads.sinks, heads.cast,
            )  # fmt: skip
            self.at(origin + start)
            probs = self.probs(self.scores(q[start:stop], k[first:last], part), part)
            out[start:stop] = self.mix(probs, v[first:last])
            start = stop
        self.at(origin)
        return out

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Multiply each head's queries with its group's keys."""

        def finish(product: Array) -> Array:
            product *= self._type(heads.scale)
            return product if heads.softcap is None else self.softcap(product, heads.softcap)

        if self.deterministic:
            return self.tiled_scores(q, k, finish)
        return finish(self._dots(q, k))

    def _dots(self, q: Array, k: Array) -> Array:
        """Return q.k [heads, tokens, keys]."""
        (tokens, n_heads, d), (keys, kv_heads, _) = q.shape, k.shape
        grouped = q.reshape(tokens, kv_heads, -1, d).transpose(1, 2, 0, 3)
        flat = grouped.reshape(kv_heads, -1, d)  # (kv_head, group * token, d)
        product: Array = (flat @ k.transpose(1, 2, 0)).reshape(n_heads, tokens, keys)
        return product

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Exponentiate the scores of visible keys, divide by their sum."""
        masked = np.where(heads.mask, scores, -np.inf)
        highest = np.max(masked, axis=-1, keepdims=True)
        sinks = None
        if heads.sinks is not None:
            sinks = np.broadcast_to(heads.sinks[:, None, None], highest.shape)
            highest = np.maximum(highest, sinks)
        if self.deterministic:
            return self.tiled_softmax(masked, highest, sinks)
        masked -= highest
        e = np.exp(masked, out=masked)
        total = np.sum(e, axis=-1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks - highest)
        e /= total
        return e

    def mix(self, probs: Array, v: Array) -> Array:
        """Sum each head's values, weighted."""
        if self.deterministic:
            return self.tiled_mix(probs, v)
        (n_heads, tokens, keys), (_, kv_heads, d) = probs.shape, v.shape
        grouped = probs.reshape(kv_heads, -1, keys)  # (kv_head, group * token, key)
        mixed = (grouped @ v.transpose(1, 0, 2)).reshape(n_heads, tokens, d)
        return np.ascontiguousarray(mixed.transpose(1, 0, 2))

    # shapes and experts

    def concat(self, parts: Sequence[Array]) -> Array:
        """Join along the last axis."""
        return np.concatenate(parts, axis=-1)

    def stack(self, parts: Sequence[Array]) -> Array:
        """Join along the first axis."""
        return np.concatenate(parts)

    def repeat_heads(self, x: Array, n_heads: int) -> Array:
        """Repeat the single head."""
        return np.repeat(x, n_heads, axis=1)

    def take(self, x: Array, rows: Array) -> Array:
        """Copy the rows."""
        return x[rows]

    def add_weighted(self, total: Array, rows: Array, y: Array, weights: Array) -> Array:
        """Add weighted rows in place; no row occurs twice."""
        total[rows] += y * self.array(weights)[:, None]
        return total
