"""A backend on ghosts: arrays that have a shape and an account of memory, but no numbers.

Every operation that the base classes make of others runs unchanged. The ones written here
allocate what numpy_backend.py does; the other families' differences are in subclasses.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.inference.backends.base import Array, Heads, NormCast, Numbers, RopeCast
from aprfmt.inference.backends.tiles import Tiles
from aprfmt.inference.dry.ghosts import Ghost, Ledger
from aprfmt.inference.masks import Mask
from aprfmt.inference.recurrence import CHUNK, SUBCHUNK
from aprfmt.inference.weights import Weight, free_memory
from aprfmt.tensors.stats import Stats, compute_stats

MASKS = 2  # masks that are cached at a time (masks.py)
_NOTHING = compute_stats(np.zeros(1, np.float32))
_PYTHON_FLOAT = 32  # bytes of a float in a list, its place there included


class Routed(Ghost):
    """An expert router's logits without numbers: experts are chosen in turn, so all are used."""

    __slots__ = ("used",)
    used: int

    def numbers(self) -> Numbers:
        """Return logits [tokens, n_experts] that give the experts their turn, `used` a token."""
        tokens, experts = self.shape
        turn = np.arange(tokens)[:, None] * self.used
        place = (np.arange(experts)[None, :] - turn) % experts
        found: Numbers = (-4.0 * place / experts).astype(np.float32)
        return found


class DryBackend(Tiles):
    """Allocates what the numpy backend does, without numbers; `used` experts serve a token."""

    name = "dry"
    query_block = 128

    def __init__(
        self, device: str, dtype: str, *, deterministic: bool = False, used: int = 0
    ) -> None:
        """Open a backend with one empty account, of `device`; `used` experts serve a token."""
        super().__init__(device, dtype, deterministic=deterministic)
        self.accounts = [Ledger(device)]
        self.account = self.host = self.accounts[0]
        self.used = used
        self.copies: list[Ghost] = []  # of stored bytes, outside the weights' budget
        self._masks: list[Ghost] = []
        self._mask_sizes: list[tuple[int, ...]] = []

    def allocate(self, shape: Sequence[int], itemsize: int | None = None) -> Ghost:
        """Return a new ghost, counted as allocated, of the dtype unless `itemsize` is given."""
        return Ghost.allocate(self.account, shape, itemsize or self.itemsize)

    def free(self) -> list[int | None]:
        """Return the bytes free now on the device of each account; None where that is not known."""
        return [free_memory()]

    @property
    def wide_size(self) -> int:
        """Bytes of an element in sums: those of the dtype, 4 at least."""
        return max(self.itemsize, 4)

    # in and out

    def array(self, x: Any) -> Ghost:
        """Return x if it has the dtype and is on the device, else a new ghost of its shape."""
        if isinstance(x, Ghost) and x.itemsize == self.itemsize and x.device == self.device:
            return x
        if isinstance(x, np.ndarray):
            self.account.count_briefly(x.nbytes + x.size * self.itemsize)
        return self.allocate(x.shape)

    def to_numpy(self, x: Any) -> Numbers:
        """Return zeros that take no memory; for router logits, numbers that use experts in turn."""
        if isinstance(x, np.ndarray):
            return x
        return x.numbers() if isinstance(x, Routed) else x.__array__()

    def stats(self, x: Any) -> Stats:
        """Return empty statistics; no memory is counted, for they are computed piece by piece."""
        return _NOTHING

    def zeros(self, shape: Sequence[int]) -> Ghost:
        """Return a new ghost, counted as allocated."""
        return self.allocate(shape)

    def wide(self, x: Array) -> Array:
        """Return x if its elements have four bytes at least, else a new ghost with four."""
        return x if x.itemsize >= 4 else x.allocate_like(x.shape, 4)

    def narrow(self, x: Array) -> Array:
        """Return x if it is of the dtype, else a new ghost of it."""
        return x if x.itemsize == self.itemsize else x.allocate_like(x.shape, self.itemsize)

    def exp(self, x: Array) -> Array:
        """Return a new ghost for the exponentials."""
        return x.copy()

    def seen(
        self, tokens: int, keys: int, cached: int, window: int | None, *, causal: bool
    ) -> Mask:
        """Return a mask [tokens, keys] of True that takes no memory, and count the run's masks.

        A run keeps its last MASKS masks on the host; these are counted as allocated.
        """
        size = (tokens, keys, cached, window or 0)
        if size not in self._mask_sizes:
            self._mask_sizes = [*self._mask_sizes, size][-MASKS:]
            self._masks = [*self._masks, self._on_host((tokens, keys))][-MASKS:]
        return np.broadcast_to(np.ones((), np.bool_), (tokens, keys))

    def chunked(self, tokens: int, keys: int, cached: int, chunk: int) -> Mask:
        """Return a mask [tokens, keys] that takes no memory, counted as `seen` counts it."""
        return self.seen(tokens, keys, cached, -chunk, causal=True)

    def chosen_keys(
        self, q: Array, k: Array, weights: Array, mask: Mask, *, scale: float, count: int
    ) -> Mask:
        """Return `mask`, and count the host's memory for an indexer's scores and choice.

        The scores are those of `query_block` queries, the choice is of all.
        """
        rows, keys = min(len(mask), self.query_block), mask.shape[1]
        self.host.count_briefly(rows * keys * (3 * self.wide_size + 8) + mask.size)
        return mask

    def _on_host(self, shape: Sequence[int]) -> Ghost:
        """Return a new ghost of one byte an element, in the account that masks are counted in."""
        return self.allocate(shape, 1)

    # products

    def embed(self, table: Weight, ids: Numbers) -> Array:
        """Return a ghost [tokens, width]: rows of a table that is held, or decoded rows."""
        held = table.placed_for_lookup(self)
        if held is not None:
            return self.take(held, ids)
        return self.array(self.allocate((len(ids), table.n_columns), 4))

    def dense(self, x: Array, rows: Array, bias: Array | None) -> Array:
        """Return a new ghost for the product [tokens, out]."""
        return self.allocate((len(x), rows.shape[0]))

    def router(self, x: Array, w: Weight, bias: Array | None, *, rounded: bool) -> Array:
        """Return ghost logits [tokens, n_experts], by which tokens use the experts in turn."""
        y = self.router_product(x, w, bias, rounded=rounded)
        logits = Routed(y.shape, y.itemsize, y.memory)
        logits.used = self.used
        return logits

    def listed_experts(self, table: Weight, ids: Numbers, n_experts: int) -> Numbers:
        """Return experts [tokens, used] that take turns, so that all are used; no row is read."""
        used = table.n_columns
        return np.arange(len(ids) * used).reshape(-1, used) % n_experts

    def router_product(self, x: Array, w: Weight, bias: Array | None, *, rounded: bool) -> Array:
        """Return a ghost for the router's product, allocated as `linear` allocates."""
        return self.linear(x, w, bias)

    # element by element

    def softcap(self, x: Array, cap: float) -> Array:
        """Return a new ghost, and count two more of its size as allocated during the call."""
        self.account.count_briefly(2 * x.nbytes)
        return x.copy()

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Return a new ghost, and count what the activation `kind` allocates during the call."""
        if kind == "gelu":  # by way of Python's numbers
            self.account.count_briefly((_PYTHON_FLOAT + 2 * self.itemsize) * x.size)
        elif kind == "gelu_tanh":
            self.account.count_briefly(3 * x.nbytes)
        return self.allocate(x.shape)

    def sigmoid(self, x: Array) -> Array:
        """Return a new ghost, and count two more of its size as allocated during the call."""
        self.account.count_briefly(2 * x.nbytes)
        return x.copy()

    # norms

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return a new ghost of x's shape; the squares are freed before it and are not counted."""
        return self.allocate(x.shape)

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        """Return a new ghost, and count the three arrays of its steps during the call."""
        self.account.count_briefly(3 * x.nbytes)
        return self.allocate(x.shape)

    # rotary positions

    def rope_table(
        self, positions: Numbers, inv_freq: Numbers, *, factor: float, cast: RopeCast
    ) -> tuple[Array, Array]:
        """Return new ghosts for cos and sin [tokens, pairs]."""
        size = self.wide_size if cast == "result" else self.itemsize
        shape = (len(positions), len(inv_freq))
        return self.allocate(shape, size), self.allocate(shape, size)

    # attention

    def attend(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention of one block of queries, allocated for the keys that these can see."""
        if heads.causal is None:
            return super().attend(q, k, v, heads)
        cached, window = heads.causal
        first = max(0, cached + 1 - window) if window else 0
        stop = min(cached + len(q), len(k))
        part = replace(heads, mask=heads.mask[:, first:stop], causal=None)
        return super().attend(q, k[first:stop], v[first:stop], part)

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Return a new ghost [heads, tokens, keys], and count the queries' copy during the call."""
        if self.deterministic:
            return self.tiled_scores(q, k, lambda x: x)
        scores = self.allocate((q.shape[1], len(q), len(k)))
        self.account.count_briefly(q.nbytes)
        return scores if heads.softcap is None else self.softcap(scores, heads.softcap)

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Return a ghost of the attention probabilities, of the shape of `scores`.

        It is one new array: the softmax works in place on the masked copy of the scores.
        """
        return self.allocate(scores.shape)

    def mix(self, probs: Array, v: Array) -> Array:
        """Return a new ghost for the result, and count its transposed copy during the call."""
        if self.deterministic:
            return self.tiled_mix(probs, v)
        mixed = self.allocate((probs.shape[1], probs.shape[0], v.shape[-1]))
        self.account.count_briefly(mixed.nbytes)
        return mixed

    # recurrent layers

    def convolve(self, window: Array, kernel: Array, bias: Array | None = None) -> Array:
        """Return a new ghost [tokens, channels], and count the sum of taps during the call."""
        y = self.allocate((len(window) - kernel.shape[1] + 1, window.shape[1]))
        self.account.count_briefly(2 * y.size * self.wide_size)
        return y

    def decay(self, a: Array, rate: Array, shift: Array) -> Array:
        """Return a new ghost in float32 at least, and count four more during the call."""
        y = self.allocate(a.shape, self.wide_size)
        self.account.count_briefly(4 * y.nbytes)
        return y

    def delta(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array | None
    ) -> tuple[Array, Array]:
        """Return new ghosts (reads, state), and count what a chunk of the delta rule takes.

        That is counted during the call; so are q and k repeated for the value heads, and the state
        a second time.
        """
        (tokens, heads, values), keys, size = v.shape, k.shape[2], self.wide_size
        kept = self.allocate((heads, keys, values), size)
        read = self.allocate(v.shape)
        rows = min(tokens, CHUNK)
        chunk = heads * rows * (3 * rows + 4 * keys + 4 * values) * size
        if decay.ndim == 3:  # pairs of tokens by channel
            chunk += 3 * heads * min(rows, SUBCHUNK) ** 2 * keys * size
        self.account.count_briefly(
            2 * tokens * heads * keys * size + read.nbytes + kept.nbytes + chunk
        )
        return read, kept

    def gated_norm(self, x: Array, weight: Array, gate: Array, kind: str, *, eps: float) -> Array:
        """Return a new ghost, and count the norm and the activated gate during the call."""
        self.account.count_briefly(2 * x.size * self.wide_size)
        return self.allocate(x.shape)

    def add_wide(self, a: Array, b: Array) -> Array:
        """Return a new ghost in float32 at least, counting the converted operands briefly."""
        self.account.count_briefly((a.size + b.size) * self.wide_size)
        return self.allocate(a.shape, self.wide_size)

    def time_step(self, raw: Array, bias: Array | None, low: float, high: float) -> Array:
        """Return a new ghost, and count the sum and the softplus during the call."""
        self.account.count_briefly(2 * raw.nbytes)
        return self.allocate(raw.shape)

    def decay_rates(self, logs: Array) -> Array:
        """Return a new ghost in float32 at least, and count one more during the call."""
        self.account.count_briefly(logs.size * self.wide_size)
        return self.allocate(logs.shape, self.wide_size)

    def scan(
        self,
        x: Array,
        step: Array,
        rate: Array,
        b: Array,
        c: Array,
        skip: Array,
        state: Array | None,
    ) -> tuple[Array, Array]:
        """Return new ghosts (reads, state), and count what a chunk of the scan takes.

        That is counted during the call: the decays between its tokens, or every token's state where
        states have rates each.
        """
        (tokens, heads, width), numbers, size = x.shape, b.shape[2], self.wide_size
        kept = self.allocate((heads, width, numbers), size)
        read = self.allocate(x.shape, size)
        rows = min(tokens, CHUNK)
        each = rows * (2 * rows + 3 * width + 2 * numbers) + width * numbers
        if rate.ndim == 2:
            each = rows * 3 * width * numbers
        self.account.count_briefly(2 * read.nbytes + kept.nbytes + heads * each * size)
        return read, kept

    def gated_scan(
        self, x: Array, gate: Array, weight: Array | None, *, groups: int, eps: float, first: bool
    ) -> Array:
        """Return a new ghost, and count gate, product and norm during the call."""
        self.account.count_briefly(3 * x.size * self.wide_size)
        return self.allocate(x.shape)

    def hyper_weights(
        self,
        x: Array,
        products: Array,
        scale: Array,
        base: Array,
        *,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> Array:
        """Return a new ghost in float32 at least, and count the squares and three more of it."""
        found = self.allocate(products.shape, self.wide_size)
        self.account.count_briefly(x.size * self.wide_size + 3 * found.nbytes)
        return found

    def compress(self, kv: Array, gate: Array) -> Array:
        """Return a new ghost [windows, width], and count the softmax and the products briefly."""
        self.account.count_briefly(2 * gate.size * self.wide_size)
        return self.allocate((kv.shape[0], kv.shape[2]))

    def window_ends(self, tokens: int, windows: int, cached: int, rate: int) -> Mask:
        """Return a mask [tokens, windows] of True that takes no memory here or on a run's host."""
        return np.broadcast_to(np.ones((), np.bool_), (tokens, windows))

    def join_masks(self, first: Mask, second: Mask, gap: int) -> Mask:
        """Return a mask of True with the masks' joint width, and count it on the host."""
        shape = len(first), first.shape[1] + gap + second.shape[1]
        self.host.count_briefly(math.prod(shape))
        return np.broadcast_to(np.ones((), np.bool_), shape)

    # shapes and experts

    def concat(self, parts: Sequence[Array]) -> Array:
        """Return a new ghost: the arrays joined along the last axis."""
        return self.allocate((*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)))

    def stack(self, parts: Sequence[Array]) -> Array:
        """Return a new ghost: the arrays joined along the first axis."""
        return self.allocate((sum(map(len, parts)), *parts[0].shape[1:]))

    def take(self, x: Array, rows: Numbers) -> Array:
        """Return a new ghost for a copy of the rows."""
        return self.allocate((len(rows), *x.shape[1:]))

    def add_weighted(self, total: Array, rows: Numbers, y: Array, weights: Numbers) -> Array:
        """Return total, and count the rows, their product and the sum during the call."""
        self.account.count_briefly(3 * y.nbytes)  # the rows, their product, the sum
        return total
