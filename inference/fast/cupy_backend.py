"""CuPy and our own kernels on a CUDA device: float32, float64, bfloat16 or float16.

Weights stay encoded in GPU memory; products with one to four rows use the encoded bytes, with more
rows some rows of the weight at a time (a *panel*), decoded into a reused buffer. Dense products use
cuBLAS. 16-bit floats are arrays of uint16; all arithmetic is done by the kernels in cuda/, which
round as base.py says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.inference.backends.base import ROWS, Array, Heads, Numbers, RopeCast, Style
from aprfmt.inference.fast.cuda import MATVEC, MATVEC_TOKENS, gemm, graph_maker, matvec, memory
from aprfmt.inference.fast.cuda.arrays import Flat
from aprfmt.inference.fast.cuda.attend import Attention
from aprfmt.inference.fast.cuda.loader import cache_folder
from aprfmt.inference.fast.cuda.ops import GROUP
from aprfmt.inference.fast.cuda.pass_statistics import CupyPending, Workspace
from aprfmt.inference.fast.cuda.stored_weights import Dense, Placed, PlacedBlocks, Placer
from aprfmt.inference.fast.cupy_elements import make_contiguous
from aprfmt.inference.fast.cupy_experts import CupyExperts
from aprfmt.inference.fast.device_row import DeviceRow
from aprfmt.inference.fast.graphs import PassGraphs, PassInputs
from aprfmt.inference.masks import Causal, Mask
from aprfmt.inference.weights import FREE_SHARE, Weight
from aprfmt.tensors.stats import Stats


class CupyBackend(CupyExperts):
    """The CuPy backend; `device` is cuda or cuda:N, `tf32` allows TF32 in float32 products."""

    name = "cupy"
    key_block = GROUP  # a thread's keys: every GROUP-th one

    def __init__(
        self,
        device: str,
        dtype: str,
        *,
        deterministic: bool = False,
        threads: int | None = None,
        tf32: bool = False,
    ) -> None:
        """Open a GPU in a dtype; BackendUnavailableError if either is not there.

        `threads` is not used: nothing is computed on the CPU.
        """
        super().__init__(device, dtype, deterministic=deterministic)
        self._tf32 = tf32
        self._names: dict[Any, str] = {}  # of arrays' dtypes
        self._attention = Attention(
            self._ops, self._uploads, dtype, deterministic=deterministic, tf32=tf32
        )
        self._placer = Placer(self, self._uploads)
        self._workspace: Workspace | None = None

    def facts(self) -> Mapping[str, Any]:
        """Return {name: value} of what a trace records: device, versions, TF32, memory, weights.

        `weights_held` are bytes, `weights_streamed` a count of uses, `decoded_on_cpu` the tensors
        by encoding.
        """
        on_cpu = self._placer.on_cpu
        return {
            **super().facts(),
            "tf32": self._tf32,
            "kernel_cache": str(cache_folder()),
            "weights_held": self._placer.resident_bytes,
            "weights_streamed": self._placer.streamed,
            "decoded_on_cpu": {name: [*on_cpu.values()].count(name) for name in on_cpu.values()},
            **memory.device_facts(self._index),
        }

    def budget(self) -> int | None:
        """Return how many bytes of weights the GPU may hold: a fraction of its free memory."""
        return int(memory.free_bytes() * FREE_SHARE)

    # in and out

    def array(self, x: Numbers) -> Array:
        """Return numbers as an array on the GPU, rounded to the dtype there."""
        self._uploads.refuse_in_recording("numbers are brought to the device")
        if x.dtype != np.float32 and x.dtype != np.float64:
            x = x.astype(np.float32)
        return self._rounded(memory.copy_to_gpu(np.ascontiguousarray(x)))

    def constant(self, x: Numbers) -> Array:
        """Return a small array on the GPU, rounded to the dtype; equal ones are placed once."""
        wide = self._wide if x.dtype == np.float64 else np.dtype("float32")
        return self._rounded(self._uploads.constant(x, wide))

    def _rounded(self, values: Array) -> Array:
        """Return float32 or float64 numbers on the GPU as an array of the dtype."""
        if values.dtype == self._stored:
            return values
        if values.dtype == np.float32:
            return values.astype("float64") if self._wide != np.float32 else self.narrow(values)
        out, count = self._empty(*values.shape), int(values.size)
        self._ops.launch_over(
            "from_double", count, memory.pointer(values), memory.pointer(out), count
        )
        return out

    def alibi_bias(self, slopes: Numbers, start: int, queries: int, keys: int) -> Array:
        """Return ALiBi's slope times (key - query) [heads, queries, keys], rounded once.

        The first query is at position `start`. Multiplied in float64 on the GPU; a recorded step
        reads the position there.
        """
        arrays, cached = memory.array_module(), self._uploads.cached
        queries_at = arrays.arange(queries)[:, None] + (start if cached is None else cached)
        exact = self._uploads.constant(slopes, "float64")[:, None, None]
        return self._rounded(exact * (arrays.arange(keys) - queries_at))

    def to_numpy(self, x: Array) -> Numbers:
        """Return a numpy array on the host, 16-bit floats as float32.

        A numpy array is returned unchanged. Raises NotRecordable while a pass is recorded.
        """
        if not memory.is_on_gpu(x):
            return x  # type: ignore[no-any-return]
        self._uploads.refuse_in_recording("the host reads a value")
        values: Numbers = memory.copy_to_host(x)
        if values.dtype != np.uint16:
            return values
        if self.dtype == "float16":
            return values.view(np.float16).astype(np.float32)
        return (values.astype(np.uint32) << 16).view(np.float32)

    def _flat(self, x: Array) -> Flat:
        """Return the address, size and dtype name of a contiguous array."""
        kind = x.dtype
        name = self._names.get(kind)
        if name is None:
            name = self._names[kind] = self.dtype if kind == np.uint16 else str(kind.name)
        return Flat(memory.pointer(x), int(x.size), name)

    def _reduction_workspace(self) -> Workspace:
        """Return the workspace of statistics, allocated at the first call."""
        if self._workspace is None:
            self._workspace = Workspace(self._uploads)
        return self._workspace

    def stats(self, x: Array) -> Stats:
        """Return the statistics of x, computed on the GPU in one pass; waits for the result."""
        pending = self.pending()
        pending.add(x)
        return pending.read()[0]

    def pending(self) -> CupyPending:
        """Return an object that collects statistics and reads all of them in one transfer."""
        return CupyPending(self._reduction_workspace(), self._contiguous_memory)

    def _contiguous_memory(self, x: Array) -> tuple[Array, Flat]:
        """Return (x or a contiguous copy of it, its address, size and dtype)."""
        given = make_contiguous(x)
        return given, self._flat(given)

    # recorded passes

    @property
    def recording(self) -> PassInputs | None:
        """The inputs of the pass being recorded, or None."""
        return self._uploads.recording

    @recording.setter
    def recording(self, inputs: PassInputs | None) -> None:
        """Set the inputs of the pass being recorded, or None at its end."""
        self._uploads.recording = inputs

    def graphs(self) -> PassGraphs | None:
        """Return a recorder of passes; None in deterministic mode."""
        return None if self.deterministic else PassGraphs(self, graph_maker.CupyGraphMaker())

    def best(self, row: Array) -> Array:
        """Return int64 [argmax, 1 if a logit is NaN else 0] of logits [vocab], on the device."""
        arrays, wide = memory.array_module(), self.wide(row)
        found = arrays.argmax(wide, keepdims=True), arrays.isnan(wide).any(keepdims=True)
        return arrays.concatenate([each.astype("int64") for each in found])

    def host_row(self, x: Array, best: Any | None) -> DeviceRow:
        """Return logits whose argmax is computed on the device, copied only if more is needed.

        `best` is the result of the method `best` that a replayed pass has copied to the host
        already, or None.
        """
        found = self.best(x) if best is None else best

        def wait_for_best() -> Sequence[int]:
            """Return [argmax of the logits, whether a logit is NaN] on the host.

            It waits until the device has computed them.
            """
            if best is not None:  # a replay copies it to the host
                memory.wait()
            numbers: list[int] = (
                found if best is not None else memory.copy_to_host(found)
            ).tolist()
            return numbers

        return DeviceRow(self, x, wait_for_best)

    # products

    def matrix(self, w: Weight) -> Array | None:
        """Return a weight [rows, columns] decoded in the dtype; None if it is not kept decoded."""
        placed = self._placer.place_within_budget(w)
        return placed.values if isinstance(placed, Dense) else None

    def ids_with_rows(self, ids: Numbers, count: int) -> Numbers | Array:
        """Return token ids to `embed` with a table of `count` rows: 0 for an id that has none."""
        if self.recording is None:
            return super().ids_with_rows(ids, count)
        rows = self._uploads.row_numbers(ids)
        return rows * (rows < count)

    def embed(self, table: Weight, ids: Numbers) -> Array:
        """Return rows `ids` of the table [tokens, width], decoded on the GPU."""
        return self._placer.gather(table, ids)

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return x [tokens, in] times w [out, in] transposed, plus bias [out].

        A few rows of x are multiplied with the encoded bytes, more rows with a decoded panel at a
        time. Deterministic runs multiply blocks of ROWS rows.
        """
        x = make_contiguous(x)
        placed = self._placer.place(w)
        encoded = isinstance(placed, PlacedBlocks) and placed.encoding in MATVEC
        few = len(x) <= MATVEC_TOKENS and self.dtype != "float64" and not self.deterministic
        if encoded and few and len(x):
            assert isinstance(placed, PlacedBlocks)
            y = self._empty(len(x), w.n_rows)
            raw = Flat(memory.pointer(placed.raw), int(placed.raw.size), "uint8")
            matvec(placed.encoding, raw, self._flat(x), self._flat(y))
        elif self.deterministic:
            before = self._origin % ROWS
            padded = self.zeros((-(-(before + len(x)) // ROWS) * ROWS, w.n_columns))
            padded[before : before + len(x)] = x
            y = self._dense(padded, w, placed, self.dtype, ROWS)[before : before + len(x)]
        else:
            y = self._dense(x, w, placed, self.dtype, len(x))
        return y if bias is None else self.add(y, bias)

    def _dense(self, x: Array, w: Weight, placed: Placed, dtype: str, rows: int) -> Array:
        """Return x times a placed weight transposed, multiplied in blocks of `rows` rows of x.

        The weight is decoded panel by panel, some of its rows at a time. x, panels and result are
        of `dtype`.
        """
        stored = np.dtype(memory.STORED[dtype])
        y = memory.array_module().empty((len(x), w.n_rows), stored)
        item, depth, width = stored.itemsize, w.n_columns, w.n_rows
        for start, stop, panel in self._placer.panels(w, placed, dtype):
            for first in range(0, len(x), rows):
                gemm.multiply_strided(
                    dtype,
                    memory.pointer(x) + first * depth * item,
                    panel.ptr,
                    memory.pointer(y) + (first * width + start) * item,
                    rows=min(rows, len(x) - first),
                    columns=stop - start,
                    depth=depth,
                    turned=True,
                    strides=(depth, depth, width),
                    tf32=self._tf32,
                )
        return y

    def router(self, x: Array, w: Weight, bias: Array | None, *, rounded: bool) -> Array:
        """Return a router's logits [tokens, n_experts].

        They are in the dtype if `rounded` or in deterministic mode, else in float32 at least.
        """
        if rounded or self.deterministic or self._stored == self._wide:
            return self.linear(x, w, bias)
        placed = self._placer.place(w)
        if isinstance(placed, Dense):
            placed = Dense(self.wide(placed.values))
        y = self._dense(self.wide(x), w, placed, "float32", len(x))
        return y if bias is None else y + self.wide(bias)

    # rotary positions

    def rope_table(
        self, positions: Numbers, inv_freq: Numbers, *, factor: float, cast: RopeCast
    ) -> tuple[Array, Array]:
        """Return cos and sin [tokens, pairs] of float32 angles (float64 if that is the dtype).

        Both are multiplied by `factor`, and rounded to the dtype unless `cast` is `result`.
        """
        at, frequencies = (
            self._uploads.row_numbers(positions),
            self._uploads.constant(inv_freq, "float32"),
        )
        shape, wide = (len(positions), len(inv_freq)), cast == "result"
        kind = self._wide if wide else self._stored
        cos, sin = (memory.array_module().empty(shape, kind) for _ in range(2))
        self._ops.launch_over(
            "rope_table_wide" if wide else "rope_table",
            int(cos.size),
            *(memory.pointer(a) for a in (at, frequencies, cos, sin)),
            int(cos.size),
            shape[1],
            float(factor),
        )
        return cos, sin

    def rope(self, x: Array, table: tuple[Array, Array], *, style: Style, cast: RopeCast) -> Array:
        """Return x with the first elements of each head rotated; these come out in split halves."""
        x = make_contiguous(x)
        cos, sin = table
        out, (_, heads, d) = self._empty(*x.shape), x.shape
        self._ops.launch_over(
            "rope_wide" if cast == "result" else "rope",
            int(x.size),
            *(memory.pointer(a) for a in (x, cos, sin, out)),
            int(x.size),
            int(heads),
            int(d),
            int(cos.shape[-1]),
            int(style == "interleaved"),
            int(cast == "table"),
        )
        return out

    # attention

    def append(
        self, buffers: Sequence[Array], rows: Sequence[Array], start: int
    ) -> tuple[Array, ...]:
        """Write rows after the first `start` rows of each buffer, and return the rows to read.

        A recorded step reads the position on the device and returns the whole buffers.
        """
        cached = self._uploads.cached
        if cached is None:
            return super().append(buffers, rows, start)
        for buffer, x in zip(buffers, rows, strict=True):
            buffer[cached] = x
        return tuple(buffers)

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention [tokens, heads, value_dim]: kernels for few queries, cuBLAS for many."""
        return self._attention.attention(
            make_contiguous(q), make_contiguous(k), make_contiguous(v), heads
        )

    def limit_keys(self, heads: Heads, chosen: Mask | Array) -> Heads:
        """Return `heads` whose queries look only where `chosen` [tokens, keys] is True too."""
        if not memory.is_on_gpu(chosen):
            return super().limit_keys(heads, chosen)
        limited = self._attention.mask(heads) & chosen
        return replace(heads, causal=None, device_mask=limited)

    def chosen_keys(
        self,
        q: Array,
        k: Array,
        weights: Array,
        mask: Mask,
        *,
        scale: float,
        count: int,
        causal: Causal | None,
    ) -> Mask | Array:
        """Return the mask [tokens, keys] of the keys that an indexer chooses: uint8 on the GPU.

        Deterministic runs choose on the host.
        """
        if self.deterministic:
            return super().chosen_keys(q, k, weights, mask, scale=scale, count=count, causal=causal)
        seen = self._attention.mask(Heads(mask, scale, None, None, "float32", causal))
        parts = []
        for start in range(0, len(mask), self.query_block):
            rows = slice(start, start + self.query_block)
            scores = self.index_scores(q[rows], k, weights[rows], scale)
            parts.append(self._attention.choose_best(scores, seen[rows], count))
        return parts[0] if len(parts) == 1 else memory.array_module().concatenate(parts)

    def index_scores(self, q: Array, k: Array, weights: Array, scale: float) -> Array:
        """Return the sum over heads of weight * max(0, q.k * scale) [tokens, keys].

        It is on the GPU, in float32 at least; in deterministic runs a numpy array.
        """
        if self.deterministic:
            return super().index_scores(q, k, weights, scale)
        q, k, weights = (self.wide(make_contiguous(x)) for x in (q, k, weights))
        return self._attention.index_scores(q, k, weights, scale)

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Return q.k [heads, tokens, keys], scaled and soft-capped."""
        return self._attention.scores(make_contiguous(q), make_contiguous(k), heads)

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Return the softmax over visible keys [heads, tokens, keys], a sink dropped."""
        return self._attention.probs(make_contiguous(scores), heads)

    def mix(self, probs: Array, v: Array) -> Array:
        """Return each head's values weighted by probs: [tokens, heads, value_dim]."""
        return self._attention.mix(make_contiguous(probs), make_contiguous(v))

    # a loss

    def cross_entropy(self, logits: Array, labels: Numbers) -> Numbers:
        """Return the loss of each label in nats, of logits rounded to the dtype, in float32."""
        arrays, x = memory.array_module(), memory.copy_to_gpu(self.to_numpy(logits))
        wide = x - x.max(axis=-1, keepdims=True)
        logs = wide - arrays.log(arrays.exp(wide).sum(axis=-1, keepdims=True))
        found = -arrays.take_along_axis(logs, memory.copy_to_gpu(labels)[:, None], -1)[:, 0]
        return np.asarray(memory.copy_to_host(found))
