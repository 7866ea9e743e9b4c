"""The numpy backend in float32 with C kernels for the operations of a decoding step.

In a step, numpy spends most of the time outside the products on call overhead. These kernels
compute the same functions in float32 with wider sums, in another order, so results differ from the
reference in the last bits (the reference itself differs that much between processors).
Deterministic and float64 runs use numpy_backend.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aprfmt.inference.backends.base import Array, Backend, Heads, NormCast, Part, RopeCast, Style
from aprfmt.inference.backends.numpy_backend import NumpyBackend
from aprfmt.inference.fast.encoded import ENCODED_ROWS, EncodedProducts, kernels_apply
from aprfmt.inference.fast.pages import Pages
from aprfmt.inference.weights import Weight

LARGE = 1 << 18  # from this many bytes on, zeros are allocated in huge pages


def open_numpy(device: str, dtype: str, *, deterministic: bool = False, **settings: Any) -> Backend:
    """Return the numpy backend, with the C kernels if they are built and fit the run.

    Raises BackendUnavailableError for another device or dtype, or for TF32.
    """
    kind = NativeBackend if kernels_apply(dtype, deterministic) else NumpyBackend
    return kind(device, dtype, deterministic=deterministic, **settings)


class NativeBackend(NumpyBackend):
    """The numpy backend in float32, its small operations in C."""

    def __init__(self, device: str, dtype: str, **settings: Any) -> None:
        """Open the numpy backend with its C kernels; `settings` go to NumpyBackend."""
        super().__init__(device, dtype, **settings)
        from aprfmt.codecs.native import step

        self._step = step
        self._encoded = EncodedProducts(self._threads)
        self._pages = Pages()

    def facts(self) -> Mapping[str, Any]:
        """Return the numpy backend's facts, with the processor level the kernels were built for."""
        found = dict(super().facts())
        return found | {"versions": {**found["versions"], "kernels": self._step.level()}}

    def zeros(self, shape: Sequence[int]) -> Array:
        """Return zeros; large ones (a cache) in huge pages, which a step reads faster."""
        size = 4 * math.prod(shape)
        if size < LARGE:
            return super().zeros(shape)
        return np.frombuffer(self._pages.allocate(size), np.float32).reshape(shape)

    def empty(self, shape: Sequence[int]) -> Array:
        """Return an array of the dtype that the caller will write whole."""
        return np.empty(shape, np.float32)

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return x [tokens, in] times w [out, in] transposed, plus bias [out].

        The encoded bytes are multiplied where there is a kernel for them.
        """
        y = self._encoded.multiply(x, w)
        return super().linear(x, w, bias) if y is None else _add_bias(y, bias)

    def _encoded_products(self, x: Array, parts: Sequence[Part]) -> list[Array] | None:
        """Return x times each encoded weight, plus its bias; None if one has no kernel."""
        products = self._encoded.multiply_each(x, [w for w, _ in parts])
        if products is not None:
            for (_, bias), y in zip(parts, products, strict=True):
                _add_bias(y, bias)
        return products

    def projections(self, x: Array, parts: Sequence[Part]) -> list[Array]:
        """Return x [tokens, in] times each weight, plus its bias; threads divide all the work."""
        products = self._encoded_products(x, parts)
        return super().projections(x, parts) if products is None else products

    def gated(self, x: Array, gate: Part, up: Part, kind: str, *, steps: bool) -> Array:
        """Return act(x @ gate) * (x @ up), activated and multiplied in one kernel."""
        if kind not in self._step.ACTIVATIONS:
            return super().gated(x, gate, up, kind, steps=steps)
        a, b = self._encoded_products(x, (gate, up)) or (self.linear(x, *gate), self.linear(x, *up))
        self._step.activate(self._step.ACTIVATIONS[kind], a, b, a, self._threads)
        return a

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Return act(x), by a kernel where there is one."""
        if kind not in self._step.ACTIVATIONS or not x.flags.c_contiguous:
            return super().activate(x, kind, steps=steps)
        out = np.empty_like(x)
        self._step.activate(self._step.ACTIVATIONS[kind], x, None, out, self._threads)
        return out

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return x over its root mean square, times weight + offset.

        numpy computes it where weight is not a vector or x is not contiguous.
        """
        if weight.shape != x.shape[-1:] or not x.flags.c_contiguous or not x.size:
            return super().rms_norm(x, weight, eps=eps, offset=offset, cast=cast)
        out = np.empty_like(x)
        self._step.rms_norm(x, weight, out, eps, offset, self._threads)
        return out

    def rope(self, x: Array, table: tuple[Array, Array], *, style: Style, cast: RopeCast) -> Array:
        """Return x with pairs of elements rotated, with the same bits as the numpy backend's."""
        cos, sin = table
        if not x.flags.c_contiguous or not x.size:
            return super().rope(x, table, style=style, cast=cast)
        out = np.empty_like(x)
        _, heads, width = x.shape
        self._step.rope(x, cos, sin, out, heads, width, style == "interleaved")
        return out

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention [tokens, heads, value_dim] of q over k and v.

        One kernel computes few queries, matrix products many. The numpy backend computes masks that
        are not causal.
        """
        (tokens, n_heads, width), (keys, kv_heads, _) = q.shape, k.shape
        if heads.causal is None or heads.causal[0] + tokens != keys:
            return super().attention(q, k, v, heads)
        cached, window = heads.causal
        out = np.empty((tokens, n_heads, v.shape[-1]), np.float32)
        if tokens > ENCODED_ROWS:
            return self._attend_blocks(q, k, v, heads, out)
        self._step.attention(
            np.ascontiguousarray(q),
            np.ascontiguousarray(k),
            np.ascontiguousarray(v),
            heads.sinks,
            np.empty((tokens, n_heads, keys), np.float32),
            out,
            (tokens, n_heads, kv_heads, keys, width, v.shape[-1]),
            cached,
            window or 0,
            heads.scale,
            heads.softcap or 0.0,
            self._threads,
        )
        return out

    def _attend_blocks(self, q: Array, k: Array, v: Array, heads: Heads, out: Array) -> Array:
        """Fill and return `out` in blocks of queries: scores and mix by BLAS, the softmax in C."""
        assert heads.causal is not None
        cached, window = heads.causal
        for start in range(0, len(q), self.query_block):
            stop = min(start + self.query_block, len(q))
            first = max(0, cached + start + 1 - window) if window else 0
            seen = slice(first, cached + stop)
            scores = self._query_key_products(q[start:stop], k[seen])
            self._softmax(scores, heads, heads.scale, heads.softcap)
            out[start:stop] = self.mix(scores, v[seen])
        return out

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Return the softmax over visible keys [heads, tokens, keys], a sink dropped."""
        _, tokens, keys = scores.shape
        if heads.causal is None or heads.causal[0] + tokens != keys:
            return super().probs(scores, heads)
        out = np.array(scores, order="C")
        self._softmax(out, heads, 1.0, None)
        return out

    def _softmax(self, scores: Array, heads: Heads, scale: float, softcap: float | None) -> None:
        """Turn scores [heads, tokens, keys] into probabilities in place; the mask is causal.

        The queries are the last tokens of the keys.
        """
        assert heads.causal is not None
        _, tokens, keys = scores.shape
        self._step.softmax(
            scores,
            heads.sinks,
            scores.shape,
            keys - tokens,
            heads.causal[1] or 0,
            scale,
            softcap or 0.0,
            self._threads,
        )


def _add_bias(y: Array, bias: Array | None) -> Array:
    """Add a bias to y in place, if there is one, and return y."""
    if bias is not None:
        y += bias
    return y
