"""Memory of runs on the CPU, counted with ghosts: arrays that have a shape but no numbers.

These are numpy and torch, with the C kernels where a run would use them.
"""

from dataclasses import dataclass
from typing import Any

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.codecs import native_kernels
from aprfmt.inference.backends.base import (
    QUERY_BLOCK,
    Array,
    Heads,
    NormCast,
    Part,
    RopeCast,
    Style,
)
from aprfmt.inference.dry.backend import DryBackend
from aprfmt.inference.dry.ghosts import Ghost
from aprfmt.inference.fast.encoded import ENCODED_ROWS, MOVE_AT
from aprfmt.inference.rows import FREE
from aprfmt.inference.weights import Weight


@dataclass(slots=True)
class _CountedStored:
    """Stored bytes that a kernel multiplies with, and how often that was done."""

    rows: Ghost
    uses: int = 0


class DryEncodedProducts:
    """Counts the memory of products with encoded weights, as fast/encoded.py computes them."""

    def __init__(self, copies: list[Ghost]) -> None:
        """Start with no weight used; `copies` lists stored bytes outside the weights' budget."""
        self._native: Any = native_kernels()
        self._copies = copies

    def use_kernel(self, tokens: int, w: Weight) -> bool:
        """Return whether a C kernel multiplies `tokens` rows with a weight, and count this use.

        At use MOVE_AT the stored bytes are copied to huge pages.
        """
        if tokens > ENCODED_ROWS:
            return False
        if self not in w.notes:
            w.notes[self] = self._find_stored(w)
        stored: _CountedStored | None = w.notes[self]
        if stored is None:
            return False
        stored.uses += 1
        if stored.uses == MOVE_AT:
            self._copy_to_huge_pages(w, stored)
        return True

    def _find_stored(self, w: Weight) -> _CountedStored | None:
        """Return a weight's stored bytes, None where no kernel multiplies with them."""
        if w.encoding not in self._native.KERNELS or len(w.shape) != 2:
            return None
        raw: Any = None if encoding_row(w.encoding).numpy in FREE else w.stored_bytes()
        if raw is not None and w.part is None and raw.memory.nbytes:
            self._copies.append(raw)
        return None if raw is None else _CountedStored(raw)

    def _copy_to_huge_pages(self, w: Weight, stored: _CountedStored) -> None:
        """Count the copy of a weight's bytes to huge pages, if the budget has room for it."""
        raw = stored.rows
        copy = w.place_encoded(self, raw.nbytes, lambda: raw.allocate_like(raw.shape))
        if copy is not None:
            self._copies[:] = [other for other in self._copies if other is not raw]
            stored.rows = copy


class DryNative(DryBackend):
    """Allocates what numpy_native.py does: encoded products, and small operations in place."""

    def __init__(self, device: str, dtype: str, **options: Any) -> None:
        """Open the account of a numpy run with C kernels."""
        super().__init__(device, dtype, **options)
        from aprfmt.codecs.native import step

        self._activations = step.ACTIVATIONS
        self._encoded = DryEncodedProducts(self.copies)

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return a new ghost for the product; no decoded weight where a kernel reads the bytes."""
        if self._encoded.use_kernel(len(x), w):
            return self.allocate((len(x), w.n_rows))
        return super().linear(x, w, bias)

    def gated(self, x: Array, gate: Part, up: Part, kind: str, *, steps: bool) -> Array:
        """Return the ghost of the gate's product, in which activation and product are computed."""
        if kind not in self._activations:
            return super().gated(x, gate, up, kind, steps=steps)
        a, b = self.linear(x, *gate), self.linear(x, *up)
        del b
        return a

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Return a new ghost; the kernel allocates nothing else."""
        if kind not in self._activations:
            return super().activate(x, kind, steps=steps)
        return self.allocate(x.shape)

    def rope(self, x: Array, table: tuple[Array, Array], *, style: Style, cast: RopeCast) -> Array:
        """Return a new ghost; the kernel allocates nothing else."""
        return self.allocate(x.shape)

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return a ghost [tokens, heads, value_dim], and count the scores during the call.

        The scores are those of few queries at once, or of a block of many.
        """
        if heads.causal is None:
            return super().attention(q, k, v, heads)
        (tokens, n_heads, _), keys = q.shape, len(k)
        out = self.allocate((tokens, n_heads, v.shape[-1]))
        if tokens <= ENCODED_ROWS:
            self.account.count_briefly(4 * tokens * n_heads * keys)
            return out
        cached, window = heads.causal
        for start in range(0, tokens, self.query_block):
            stop = min(start + self.query_block, tokens)
            first = max(0, cached + start + 1 - window) if window else 0
            seen = cached + stop - first
            scores = self.allocate((n_heads, stop - start, seen))
            grouped = 4 * (stop - start) * n_heads * q.shape[-1]
            mixed = 4 * (stop - start) * n_heads * v.shape[-1]
            self.account.count_briefly(max(grouped, 2 * mixed))
            del scores
        return out


class DryTorch(DryBackend):
    """Allocates what torch_backend.py does on the CPU; sums widen 16-bit numbers to float32."""

    query_block = QUERY_BLOCK

    def array(self, x: Any) -> Ghost:
        """Return x as a ghost of the dtype; what lies in a mapped file is copied first."""
        if isinstance(x, Ghost) and not x.flags.writeable:
            x = self.allocate(x.shape, x.itemsize)
        return super().array(x)

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Return a new ghost, and count what the activation `kind` allocates during the call."""
        extra = {"relu2": 1, "gelu_tanh": 4 if steps else 0}.get(kind, 0)
        self.account.count_briefly((1 + extra) * x.nbytes)
        return x.copy()

    def sigmoid(self, x: Array) -> Array:
        """Return a new ghost for the result."""
        return x.copy()

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return a new ghost, and count the widened rows, squares and quotients during the call."""
        widened = 4 * x.size if self.itemsize < 4 else 0
        self.account.count_briefly(widened + 2 * x.size * self.wide_size)
        return self.allocate(x.shape)

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        """Return a new ghost; without a bias, count the three arrays of its steps briefly."""
        if bias is None:
            self.account.count_briefly(3 * x.size * self.wide_size)
        return self.allocate(x.shape)

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return a ghost [tokens, heads, value_dim], and count mask and sums during the call.

        With a softcap or a sink, and in deterministic mode, blocks of queries are counted.
        """
        if heads.softcap is not None or heads.sinks is not None or self.deterministic:
            return super().attention(q, k, v, heads)
        (tokens, n_heads, _), keys = q.shape, len(k)
        out = self.allocate((tokens, n_heads, v.shape[-1]))
        self.account.count_briefly((tokens * keys + tokens * n_heads) * self.wide_size)
        return out

    def attend(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention of one block of queries, allocated for all keys."""
        return self.mix(self.probs(self.scores(q, k, heads), heads), v)

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Return a new ghost [heads, tokens, keys], and count the unscaled product briefly."""
        if self.deterministic:
            return self.tiled_scores(q, k, lambda x: x)
        scores = self.allocate((q.shape[1], len(q), len(k)))
        self.account.count_briefly(scores.nbytes)
        return scores if heads.softcap is None else self.softcap(scores, heads.softcap)

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Return a new ghost, and count masked and widened scores during the call."""
        wide = scores.size * self.wide_size
        self.account.count_briefly(scores.nbytes + (2 if self.itemsize < 4 else 1) * wide)
        return self.allocate(scores.shape)

    def router_product(self, x: Array, w: Weight, bias: Array | None, *, rounded: bool) -> Array:
        """Return a ghost for the router's product: in the dtype, or widened with its weight."""
        if rounded or self.deterministic:
            return self.linear(x, w, bias)
        self.wide(w.array(self))
        return self.allocate((len(x), w.n_rows), self.wide_size)

    def repeat_heads(self, x: Array, n_heads: int) -> Array:
        """Return a view of the one head as `n_heads` heads, free of memory."""
        return Ghost((x.shape[0], n_heads, x.shape[2]), x.itemsize, x.memory)


class DryNativeTorch(DryTorch):
    """Allocates what torch_native.py does: products with encoded weights."""

    def __init__(self, device: str, dtype: str, **options: Any) -> None:
        """Open the account of a torch run on the CPU with C kernels."""
        super().__init__(device, dtype, **options)
        self._encoded = DryEncodedProducts(self.copies)

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return a new ghost for the product; no decoded weight where a kernel reads the bytes."""
        if not self._encoded.use_kernel(len(x), w):
            return super().linear(x, w, bias)
        y = self.allocate((len(x), w.n_rows))
        return y if bias is None else y + bias
