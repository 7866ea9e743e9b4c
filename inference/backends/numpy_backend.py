"""The reference backend: numpy in float32 or float64, one readable function per operation.

Products use BLAS; every other sum is numpy's pairwise sum. Nothing is rounded below the dtype,
so the rounding rules of base.py do not apply here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.base.processors import cpu_count
from aprfmt.errors import ArchError, BackendUnavailableError
from aprfmt.inference.backends import blas
from aprfmt.inference.backends.base import ROWS, Array, Heads, NormCast, RopeCast
from aprfmt.inference.backends.tiles import Tiles
from aprfmt.tensors.stats import Stats, compute_stats

_DTYPES: Mapping[str, type[np.floating[Any]]] = {"float32": np.float32, "float64": np.float64}


def _gelu(x: Array) -> Array:
    """Return gelu by the error function, computed by Python's math.erf element by element."""
    erf = np.fromiter(map(math.erf, (x * math.sqrt(0.5)).ravel().tolist()), x.dtype, x.size)
    return x * 0.5 * (1 + erf.reshape(x.shape))


def _gelu_tanh(x: Array) -> Array:
    """Return gelu with the tanh formula."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return x * 0.5 * (1 + np.tanh(inner))


def _sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    return np.divide(1, _one_plus_exp(x))


def silu(x: Array) -> Array:
    """Return x / (1 + exp(-x))."""
    y = _one_plus_exp(x)
    return np.divide(x, y, out=y)


def _relu2(x: Array) -> Array:
    """Return the square of max(x, 0)."""
    y = np.maximum(x, 0)
    return np.multiply(y, y, out=y)


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
    "silu": silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": _relu2,
}


class NumpyBackend(Tiles):
    """The numpy backend, on the CPU; `dtype` is float32 or float64."""

    name = "numpy"
    query_block = 128

    def __init__(
        self,
        device: str,
        dtype: str,
        *,
        deterministic: bool = False,
        threads: int | None = None,
        tf32: bool = False,
    ) -> None:
        """Open numpy on the CPU; BackendUnavailableError for another device or dtype, or for TF32.

        `threads` sets the threads of numpy's BLAS for the whole process, None leaves them.
        """
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
        super().__init__(device, dtype, deterministic=deterministic)
        self._type = _DTYPES[dtype]
        self._threads = threads or cpu_count()
        if threads is not None:
            blas.set_blas_threads(threads)

    def facts(self) -> Mapping[str, Any]:
        """Return {name: value} of what a trace records: the base's, versions and threads."""
        return {
            **super().facts(),
            "threads": blas.blas_threads() or self._threads,
            "tf32": False,
            "versions": {"numpy": np.__version__},
        }

    # in and out

    def array(self, x: Array) -> Array:
        """Return x in the dtype, without a copy where it already is."""
        return np.asarray(x, self._type)

    def to_numpy(self, x: Array) -> Array:
        """Return x itself, integers as int64."""
        return x if x.dtype.kind == "f" else x.astype(np.int64)

    def stats(self, x: Array) -> Stats:
        """Return the statistics of x, computed by the backend's threads."""
        return compute_stats(x, self._threads)

    def zeros(self, shape: Sequence[int]) -> Array:
        """Return zeros of the dtype."""
        return np.zeros(shape, self._type)

    def exp(self, x: Array) -> Array:
        """Return the exponential of each element."""
        return np.exp(x)

    # products

    def dense(self, x: Array, rows: Array, bias: Array | None) -> Array:
        """Return x [tokens, in] times a decoded weight [out, in] transposed, plus bias [out]."""
        y = x @ rows.T
        if bias is not None:
            y += bias
        return y

    # element by element

    def softcap(self, x: Array, cap: float) -> Array:
        """Return tanh(x / cap) * cap."""
        return np.tanh(x / self._type(cap)) * self._type(cap)

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Return act(x) by a function of ACTIVATIONS; ArchError for another `kind`."""
        if kind not in ACTIVATIONS:
            raise ArchError(f"activation {kind!r}; expected one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[kind](x).astype(self._type, copy=False)

    def sigmoid(self, x: Array) -> Array:
        """Return 1 / (1 + exp(-x))."""
        return _sigmoid(x)

    # norms

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return x over its root mean square, times weight + offset."""
        y = x / np.sqrt(_mean(x * x) + self._type(eps))
        y *= weight + self._type(offset)
        return y

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        """Return (x - mean) / sqrt(var + eps) * weight + bias over the last axis."""
        x = x - _mean(x)
        y = x / np.sqrt(_mean(x * x) + self._type(eps)) * weight
        return y if bias is None else y + bias

    # rotary positions

    def rope_table(
        self, positions: Array, inv_freq: Array, *, factor: float, cast: RopeCast
    ) -> tuple[Array, Array]:
        """Return cos and sin [tokens, pairs] of the angles in the dtype, times factor."""
        angles = positions.astype(self._type)[:, None] * inv_freq.astype(self._type)
        return np.cos(angles) * self._type(factor), np.sin(angles) * self._type(factor)

    # attention

    def attend(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention of one block of queries, over the keys that any of them can see."""
        seen = np.flatnonzero(heads.mask.any(axis=0))
        first, last = int(seen[0]) // ROWS * ROWS, int(seen[-1]) + 1
        part = replace(heads, mask=heads.mask[:, first:last], causal=None)
        return super().attend(q, k[first:last], v[first:last], part)

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Return q.k [heads, tokens, keys], scaled and soft-capped.

        Each head's queries are multiplied with its group's keys.
        """

        def finish(product: Array) -> Array:
            """Return a product q.k multiplied in place by the heads' scale, then soft-capped."""
            product *= self._type(heads.scale)
            return product if heads.softcap is None else self.softcap(product, heads.softcap)

        if self.deterministic:
            return self.tiled_scores(q, k, finish)
        return finish(self._query_key_products(q, k))

    def _query_key_products(self, q: Array, k: Array) -> Array:
        """Return q.k [heads, tokens, keys] of q [tokens, heads, d] and k [keys, kv_heads, d]."""
        (tokens, n_heads, d), (keys, kv_heads, _) = q.shape, k.shape
        grouped = q.reshape(tokens, kv_heads, -1, d).transpose(1, 2, 0, 3)
        flat = grouped.reshape(kv_heads, -1, d)  # (kv_head, group * token, d)
        product: Array = (flat @ k.transpose(1, 2, 0)).reshape(n_heads, tokens, keys)
        return product

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Return the softmax over visible keys [heads, tokens, keys].

        Sinks join the softmax and are dropped from the result.
        """
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
        """Return each head's values weighted by probs: [tokens, heads, d]."""
        if self.deterministic:
            return self.tiled_mix(probs, v)
        (n_heads, tokens, keys), (_, kv_heads, d) = probs.shape, v.shape
        grouped = probs.reshape(kv_heads, -1, keys)  # (kv_head, group * token, key)
        mixed = (grouped @ v.transpose(1, 0, 2)).reshape(n_heads, tokens, d)
        return np.ascontiguousarray(mixed.transpose(1, 0, 2))

    # shapes and experts

    def concat(self, parts: Sequence[Array]) -> Array:
        """Return the arrays joined along the last axis."""
        return np.concatenate(parts, axis=-1)

    def stack(self, parts: Sequence[Array]) -> Array:
        """Return the arrays joined along the first axis."""
        return np.concatenate(parts)

    def take(self, x: Array, rows: Array) -> Array:
        """Return a contiguous copy of rows `rows` of x, in that order."""
        return np.ascontiguousarray(x[rows])

    def add_weighted(self, total: Array, rows: Array, y: Array, weights: Array) -> Array:
        """Add y [n, width] times weights [n] to n rows of total in place; return total.

        `rows` are the numbers of these rows of total, each at most once.
        """
        total[rows] += y * self.array(weights)[:, None]
        return total
