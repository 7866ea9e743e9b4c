"""Attention on the GPU: kernels that work query by query, and cuBLAS for many queries.

The results of the kernels do not depend on the number of queries or of masked keys; the
deterministic mode uses only them.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np

from aprfmt.inference.backends.base import Array, Heads
from aprfmt.inference.fast.cuda import gemm, memory
from aprfmt.inference.fast.cuda.host_uploads import HostUploads
from aprfmt.inference.fast.cuda.ops import GROUP, SHARED_LIMIT, Ops

# From this many queries on, cuBLAS with scores in memory is faster.
MANY_QUERIES = 256
# Queries whose scores are in memory at the same time.
QUERY_BLOCK = 512
# Products of an indexer's queries and keys that are in memory at the same time.
MOST_PRODUCTS = 1 << 26


class Attention:
    """The attention operations of one dtype, on contiguous arrays."""

    def __init__(
        self, ops: Ops, uploads: HostUploads, dtype: str, *, deterministic: bool, tf32: bool
    ) -> None:
        """Take the kernels of the dtype and the copies to the device; no mask exists yet."""
        self._ops = ops
        self._uploads = uploads
        self._dtype = dtype
        self._deterministic = deterministic
        self._tf32 = tf32
        self._wide = np.dtype("float64" if dtype == "float64" else "float32")
        self._masks: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()

    def _empty(self, *shape: int) -> Array:
        """Return an array of the dtype on the GPU, to be written whole."""
        return memory.array_module().empty(shape, memory.STORED[self._dtype])

    def mask(self, heads: Heads) -> Array:
        """Return the mask [tokens, keys] as uint8 on the GPU; the layers of a pass share it."""
        if heads.device_mask is not None:
            return heads.device_mask
        recording = self._uploads.recording
        if recording is not None:
            if heads.causal is None:
                return recording.constant_array(heads.mask, lambda: self._make_mask(heads))
            key = (*heads.causal, *heads.mask.shape)
            if key not in recording.masks:
                recording.masks[key] = self._make_mask(heads)
            return recording.masks[key]
        key = (id(heads.mask), heads.causal)
        if key not in self._masks:
            self._masks[key] = (
                heads.mask,
                self._make_mask(heads),
            )  # holds the mask, so that its id is not reused
            while len(self._masks) > 4:
                self._masks.popitem(last=False)
        return self._masks[key][1]

    def _make_mask(self, heads: Heads) -> Array:
        """Return the mask [tokens, keys] as uint8: computed on the GPU if causal, else copied."""
        if heads.causal is None:
            return memory.copy_to_gpu(np.ascontiguousarray(heads.mask).view(np.uint8))
        (before, window), (tokens, keys) = heads.causal, heads.mask.shape
        mask, cached = memory.array_module().empty((tokens, keys), "uint8"), self._uploads.cached
        self._ops.launch_over(
            "causal",
            tokens * keys,
            memory.pointer(mask),
            0 if cached is None else memory.pointer(cached),
            before,
            tokens * keys,
            keys,
            window or 0,
        )
        return mask

    def _row_buffers(self, keys: int, rows: int) -> tuple[int, int, Any]:
        """Return (bytes of shared memory, address, array) for `rows` rows of `keys` numbers.

        It is (bytes of a row, 0, None) if a row fits into shared memory, else (0, address, array on
        the GPU). The caller keeps the array until the kernel is launched.
        """
        size = keys * self._wide.itemsize
        if size <= SHARED_LIMIT - 1024:
            return size, 0, None
        room = memory.array_module().empty(rows * keys, self._wide.name)
        return 0, memory.pointer(room), room

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention [tokens, heads, value_dim] of contiguous q, k and v.

        A kernel computes few queries and deterministic runs, cuBLAS blocks of many queries.
        """
        tokens, n_heads = q.shape[:2]
        if tokens < MANY_QUERIES or self._deterministic:
            return self._attend_by_query(q, k, v, heads)
        out = self._empty(tokens, n_heads, v.shape[-1])
        mask = self.mask(heads)
        for start in range(0, tokens, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, tokens)
            scores = self.scores(q[start:stop], k, heads)
            probs = self._masked_softmax(scores, mask[start:stop], heads)
            out[start:stop] = self.mix(probs, v)
        return out

    def _attend_by_query(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention [tokens, heads, value_dim], computed by a kernel query by query."""
        (tokens, n_heads, d), (keys, kv_heads, _) = q.shape, k.shape
        out = self._empty(tokens, n_heads, v.shape[-1])
        shared, rows, room = self._row_buffers(keys, tokens * n_heads)
        self._ops.launch(
            "attend",
            (tokens, n_heads),
            memory.pointer(q),
            memory.pointer(k),
            memory.pointer(v),
            memory.pointer(self.mask(heads)),
            self._sinks_address(heads),
            memory.pointer(out),
            rows,
            keys,
            kv_heads,
            d,
            int(v.shape[-1]),
            int(heads.cast == "input"),
            float(heads.scale),
            float(heads.softcap or 0.0),
            shared=shared,
        )
        del room
        return out

    @staticmethod
    def _sinks_address(heads: Heads) -> int:
        """Return the address of the sinks [heads], 0 if there are none."""
        return 0 if heads.sinks is None else memory.pointer(heads.sinks)

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Return q.k [heads, tokens, keys], scaled and soft-capped."""
        (tokens, n_heads, d), (keys, kv_heads, _) = q.shape, k.shape
        out = self._empty(n_heads, tokens, keys)
        if self._deterministic:
            warps = GROUP // 32
            self._ops.launch(
                "scores",
                (-(-keys // warps), tokens, n_heads),
                memory.pointer(q),
                memory.pointer(k),
                memory.pointer(out),
                keys,
                n_heads,
                kv_heads,
                d,
                float(heads.scale),
                float(heads.softcap or 0.0),
            )
            return out
        group, item = n_heads // kv_heads, int(q.itemsize)
        for g in range(group):  # one query head of every group at a time, in place
            gemm.multiply_strided(
                self._dtype,
                memory.pointer(q) + g * d * item,
                memory.pointer(k),
                memory.pointer(out) + g * tokens * keys * item,
                rows=tokens,
                columns=keys,
                depth=d,
                turned=True,
                strides=(n_heads * d, kv_heads * d, keys),
                batch=kv_heads,
                steps=(group * d, d, group * tokens * keys),
                tf32=self._tf32,
            )
        place, count = memory.pointer(out), int(out.size)
        self._ops.launch_over("scale", count, place, place, count, float(heads.scale))
        if heads.softcap is not None:
            self._ops.launch_over("softcap", count, place, place, count, float(heads.softcap))
        return out

    def index_scores(self, q: Array, k: Array, weights: Array, scale: float) -> Array:
        """Return an indexer's scores [tokens, keys], float32 at least.

        They are the sum over heads of weight * max(0, q.k * scale). q [tokens, heads, d], k [keys,
        1, d] and `weights` [tokens, heads] are contiguous and float32 at least.
        """
        (tokens, heads, d), keys = q.shape, len(k)
        arrays, wide = memory.array_module(), self._wide.name
        total = arrays.empty((tokens, keys), wide)
        some = min(heads, max(1, MOST_PRODUCTS // max(1, int(total.size))))  # heads at a time
        products, item = arrays.empty((some, tokens, keys), wide), self._wide.itemsize
        for start in range(0, heads, some):
            batch = min(some, heads - start)
            gemm.multiply_strided(
                wide,
                memory.pointer(q) + start * d * item,
                memory.pointer(k),
                memory.pointer(products),
                rows=tokens,
                columns=keys,
                depth=d,
                turned=True,
                strides=(heads * d, d, keys),
                batch=batch,
                steps=(d, 0, tokens * keys),
            )
            self._ops.launch_over(
                "index_scores",
                int(total.size),
                memory.pointer(products),
                memory.pointer(weights) + start * item,
                memory.pointer(total),
                int(total.size),
                keys,
                heads,
                batch,
                int(start > 0),
                float(scale),
            )
        return total

    def choose_best(self, scores: Array, mask: Array, count: int) -> Array:
        """Return the uint8 mask [tokens, keys] of the `count` highest scores of each row.

        `scores` [tokens, keys] are float32 at least, `mask` is uint8. Only keys that it shows are
        chosen. Of equal scores the first are.
        """
        tokens, keys = scores.shape
        out = memory.array_module().empty((tokens, keys), "uint8")
        places = (memory.pointer(x) for x in (scores, mask, out))
        self._ops.launch("choose_best", (tokens,), *places, int(keys), min(count, int(keys)))
        return out

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Return the masked softmax of scores [heads, tokens, keys], a sink dropped."""
        return self._masked_softmax(scores, self.mask(heads), heads)

    def _masked_softmax(self, scores: Array, mask: Array, heads: Heads) -> Array:
        """Return the softmax of scores [heads, tokens, keys] with a uint8 mask on the GPU."""
        n_heads, tokens, keys = scores.shape
        out = self._empty(n_heads, tokens, keys)
        shared, rows, room = self._row_buffers(keys, tokens * n_heads)
        self._ops.launch(
            "probs",
            (tokens, n_heads),
            memory.pointer(scores),
            memory.pointer(mask),
            self._sinks_address(heads),
            memory.pointer(out),
            rows,
            keys,
            int(heads.cast == "input"),
            shared=shared,
        )
        del room
        return out

    def mix(self, probs: Array, v: Array) -> Array:
        """Return each head's values weighted by probs: [tokens, heads, value_dim]."""
        (n_heads, tokens, keys), (_, kv_heads, dv) = probs.shape, v.shape
        out = self._empty(tokens, n_heads, dv)
        if self._deterministic:  # a kernel whose sums do not depend on the number of queries
            shared, rows, room = self._row_buffers(keys, tokens * n_heads)
            self._ops.launch(
                "mix",
                (tokens, n_heads),
                memory.pointer(probs),
                memory.pointer(v),
                memory.pointer(out),
                rows,
                keys,
                n_heads,
                kv_heads,
                dv,
                shared=shared,
            )
            del room
            return out
        group, item = n_heads // kv_heads, int(v.itemsize)
        for g in range(group):  # one query head of every group at a time, in place
            gemm.multiply_strided(
                self._dtype,
                memory.pointer(probs) + g * tokens * keys * item,
                memory.pointer(v),
                memory.pointer(out) + g * dv * item,
                rows=tokens,
                columns=dv,
                depth=keys,
                turned=False,
                strides=(keys, kv_heads * dv, n_heads * dv),
                batch=kv_heads,
                steps=(group * tokens * keys, dv, group * dv),
                tf32=self._tf32,
            )
        return out
