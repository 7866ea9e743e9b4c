"""CuPy and our own kernels on a CUDA device: float32, float64, bfloat16 or float16.

Weights stay encoded in GPU memory; products with one to four rows use the encoded bytes, with more
rows a panel decoded into a reused buffer. Dense products use cuBLAS. 16-bit floats are arrays of
uint16; all arithmetic is done by the kernels in cuda/, which round as base.py says.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aprfmt.errors import ArchError, BackendUnavailableError
from aprfmt.inference.backends.base import ROWS, Array, Heads, NormCast, Numbers, RopeCast, Style
from aprfmt.inference.fast.cuda import MATVEC, MATVEC_TOKENS, gemm, matvec, memory
from aprfmt.inference.fast.cuda.arrays import Flat
from aprfmt.inference.fast.cuda.attend import Attention
from aprfmt.inference.fast.cuda.loader import cache_folder
from aprfmt.inference.fast.cuda.ops import Ops
from aprfmt.inference.fast.cuda.pending import CupyPending, Workspace
from aprfmt.inference.fast.cuda.placed import Dense, Placed, PlacedBlocks, Placer
from aprfmt.inference.fast.cupy_recurrent import CupyRecurrent
from aprfmt.inference.weights import FREE_SHARE, Weight
from aprfmt.tensors.stats import Stats

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
STEPS = ("gelu_tanh",)  # activations that have a kernel NAME_steps


class CupyBackend(CupyRecurrent):
    """The CuPy backend; `device` is cuda or cuda:N, `tf32` allows TF32 in float32 products."""

    name = "cupy"

    def __init__(
        self,
        device: str,
        dtype: str,
        *,
        deterministic: bool = False,
        threads: int | None = None,
        tf32: bool = False,
    ) -> None:
        if dtype not in memory.STORED:
            raise BackendUnavailableError(
                f"backend cupy: found dtype {dtype!r}; expected one of {', '.join(memory.STORED)}"
            )
        self._index = memory.use_device(device)
        super().__init__(f"cuda:{self._index}", dtype, deterministic=deterministic)
        self._stored = np.dtype(memory.STORED[dtype])
        self._wide = np.dtype("float64" if dtype == "float64" else "float32")
        self._tf32 = tf32
        self._names: dict[Any, str] = {}  # of arrays' dtypes
        self._ops = Ops(dtype)
        self._attention = Attention(self._ops, dtype, deterministic=deterministic, tf32=tf32)
        self._placer = Placer(self)
        self._workspace: Workspace | None = None

    def facts(self) -> Mapping[str, Any]:
        """Device, driver, versions, TF32, memory, and how the weights were placed."""
        on_cpu = self._placer.on_cpu
        return {
            **super().facts(),
            "tf32": self._tf32,
            "kernel_cache": str(cache_folder()),
            "weights_held": self._placer.held,
            "weights_streamed": self._placer.streamed,
            "decoded_on_cpu": {name: [*on_cpu.values()].count(name) for name in on_cpu.values()},
            **memory.facts(self._index),
        }

    def budget(self) -> int | None:
        """Return the share of the free GPU memory that weights may take."""
        return int(memory.free_bytes() * FREE_SHARE)

    # in and out

    def array(self, x: Numbers) -> Array:
        """Copy to the GPU, rounded to the dtype there."""
        if x.dtype != np.float32 and x.dtype != np.float64:
            x = x.astype(np.float32)
        return self._rounded(memory.put(np.ascontiguousarray(x)))

    def _rounded(self, values: Array) -> Array:
        """Return float32 or float64 numbers on the GPU in the dtype."""
        if values.dtype == self._stored:
            return values
        if values.dtype == np.float32:
            return values.astype("float64") if self._wide != np.float32 else self.stored(values)
        out, count = self._empty(*values.shape), int(values.size)
        self._ops.over("from_double", count, memory.pointer(values), memory.pointer(out), count)
        return out

    def sloped(self, slopes: Numbers, start: int, queries: int, keys: int) -> Array:
        """Multiply in float64 on the GPU, round there."""
        arrays = memory.arrays()
        away = arrays.arange(keys) - arrays.arange(start, start + queries)[:, None]
        return self._rounded(memory.put(slopes)[:, None, None] * away)

    def to_numpy(self, x: Array) -> Numbers:
        """Return a numpy array on the host; a numpy array is returned as it is."""
        if not memory.is_device(x):
            return x  # type: ignore[no-any-return]
        values: Numbers = memory.get(x)
        if values.dtype != np.uint16:
            return values
        if self.dtype == "float16":
            return values.view(np.float16).astype(np.float32)
        return (values.astype(np.uint32) << 16).view(np.float32)

    def _flat(self, x: Array) -> Flat:
        """Return a contiguous array's memory; wide results are float32 or float64 arrays."""
        kind = x.dtype
        name = self._names.get(kind)
        if name is None:
            name = self._names[kind] = self.dtype if kind == np.uint16 else str(kind.name)
        return Flat(memory.pointer(x), int(x.size), name)

    def _room(self) -> Workspace:
        if self._workspace is None:
            self._workspace = Workspace()
        return self._workspace

    def stats(self, x: Array) -> Stats:
        """Compute the statistics on the GPU, in one pass, and wait for them."""
        pending = self.pending()
        pending.add(x)
        return pending.read()[0]

    def pending(self) -> CupyPending:
        """Return Pending, which read all statistics in one transfer."""
        return CupyPending(self._room(), self._given)

    def _given(self, x: Array) -> tuple[Array, Flat]:
        whole = _whole(x)
        return whole, self._flat(whole)

    def _empty(self, *shape: int) -> Array:
        return memory.arrays().empty(shape, self._stored)

    def zeros(self, shape: Sequence[int]) -> Array:
        """Return zeros on the GPU."""
        return memory.arrays().zeros(tuple(shape), self._stored)

    # products

    def embed(self, table: Weight, ids: Numbers) -> Array:
        """Decode only these rows, on the GPU."""
        return self._placer.gather(table, ids)

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Multiply by the encoded weight, or panel by panel decoded."""
        x = _whole(x)
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
        """Multiply in blocks of `rows` rows of x, panel by panel, all of `dtype`."""
        stored = np.dtype(memory.STORED[dtype])
        y = memory.arrays().empty((len(x), w.n_rows), stored)
        item, depth, width = stored.itemsize, w.n_columns, w.n_rows
        for start, stop, panel in self._placer.panels(w, placed, dtype):
            for first in range(0, len(x), rows):
                gemm.product(
                    dtype,
                    memory.pointer(x) + first * depth * item,
                    panel.ptr,
                    memory.pointer(y) + (first * width + start) * item,
                    rows=min(rows, len(x) - first), columns=stop - start, depth=depth,
                    turned=True, strides=(depth, depth, width), tf32=self._tf32,
                )  # fmt: skip
        return y

    def router(self, x: Array, w: Weight, bias: Array | None, *, rounded: bool) -> Array:
        """Multiply in the dtype, or everything in float32."""
        if rounded or self.deterministic or self._stored == self._wide:
            return self.linear(x, w, bias)
        placed = self._placer.place(w)
        if isinstance(placed, Dense):
            placed = Dense(self.widened(placed.values))
        y = self._dense(self.widened(x), w, placed, "float32", len(x))
        return y if bias is None else y + self.widened(bias)

    def widened(self, x: Array) -> Array:
        """Return x as a contiguous array of float32, or float64 if that is the dtype."""
        x = _whole(x)
        if x.dtype == self._wide:
            return x
        out = memory.arrays().empty(x.shape, self._wide)
        self._ops.over("to_wide", int(x.size), memory.pointer(x), memory.pointer(out), int(x.size))
        return out

    def stored(self, x: Array) -> Array:
        """Return a wide array rounded to the dtype."""
        x = _whole(x)
        if x.dtype == self._stored:
            return x
        out, count = self._empty(*x.shape), int(x.size)
        self._ops.over("from_wide", count, memory.pointer(x), memory.pointer(out), count)
        return out

    # element by element

    def _each(self, name: str, x: Array, *rest: Any) -> Array:
        x = _whole(x)
        out, count = self._empty(*x.shape), int(x.size)
        self._ops.over(name, count, memory.pointer(x), memory.pointer(out), count, *rest)
        return out

    def add(self, a: Array, b: Array) -> Array:
        """Return a + b; b may be a vector."""
        a, b = _whole(a), _whole(b)
        out, count = self._empty(*a.shape), int(a.size)
        places = (memory.pointer(x) for x in (a, b, out))
        self._ops.over("add", count, *places, count, int(b.size))
        return out

    def mul(self, a: Array, b: Array) -> Array:
        """Return a * b, broadcasting."""
        if a.size < b.size:
            a, b = b, a
        run = 1
        if b.shape != a.shape[a.ndim - b.ndim :]:
            if b.shape == (*a.shape[:-1], 1):
                run = int(a.shape[-1])
            else:
                shape = np.broadcast_shapes(a.shape, b.shape)
                a, b = (memory.arrays().broadcast_to(x, shape) for x in (a, b))
        a, b = _whole(a), _whole(b)
        out, count = self._empty(*a.shape), int(a.size)
        places = (memory.pointer(x) for x in (a, b, out))
        self._ops.over("mul", count, *places, count, int(b.size), run)
        return out

    def scale(self, x: Array, factor: float) -> Array:
        """Return x * factor, rounded once."""
        return self._each("scale", x, float(factor))

    def shift(self, x: Array, number: float) -> Array:
        """Return x + number, rounded once."""
        return self._each("shift", x, float(number))

    def clip(self, x: Array, limit: float) -> Array:
        """Return x clamped to [-limit, limit]."""
        return self._each("clip", x, float(limit))

    def softcap(self, x: Array, cap: float) -> Array:
        """Return tanh(x / cap) * cap."""
        return self._each("softcap", x, float(cap))

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Apply an activation; `steps` rounds every step if there is a kernel for that."""
        if kind not in ACTIVATIONS:
            raise ArchError(f"activation {kind!r}; expected one of {', '.join(ACTIVATIONS)}")
        return self._each(f"{kind}_steps" if steps and kind in STEPS else kind, x)

    def sigmoid(self, x: Array) -> Array:
        """Return 1 / (1 + exp(-x))."""
        return self._each("sigmoid", x)

    def swiglu_oai(self, gate: Array, up: Array, limit: float, alpha: float) -> Array:
        """Return gpt-oss's clamped product."""
        gate, up = _whole(gate), _whole(up)
        out, count = self._empty(*gate.shape), int(gate.size)
        places = (memory.pointer(x) for x in (gate, up, out))
        self._ops.over("swiglu_oai", count, *places, count, float(limit), float(alpha))
        return out

    # norms

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Normalise in float32, round before or after the weight."""
        x, weight = _whole(x), _whole(weight)
        out, width = self._empty(*x.shape), int(x.shape[-1])
        self._ops.run(
            "rms_norm", (int(x.size) // width,), *(memory.pointer(a) for a in (x, weight, out)),
            width, int(weight.size), offset, int(cast == "before_weight"), float(eps),
        )  # fmt: skip
        return out

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        """Normalise, weigh and shift in float32, round last."""
        x, weight = _whole(x), _whole(weight)
        out, width = self._empty(*x.shape), int(x.shape[-1])
        self._ops.run(
            "layer_norm", (int(x.size) // width,), memory.pointer(x), memory.pointer(weight),
            0 if bias is None else memory.pointer(bias), memory.pointer(out), width,
            int(weight.size), float(eps),
        )  # fmt: skip
        return out

    # rotary positions

    def rope_table(
        self, positions: Numbers, inv_freq: Numbers, *, factor: float, cast: RopeCast
    ) -> tuple[Array, Array]:
        """Return cos and sin of float32 angles (float64 if that is the dtype)."""
        at = memory.put(np.ascontiguousarray(positions, np.int64))
        frequencies = memory.put(np.ascontiguousarray(inv_freq, np.float32))
        shape, wide = (len(positions), len(inv_freq)), cast == "result"
        kind = self._wide if wide else self._stored
        cos, sin = (memory.arrays().empty(shape, kind) for _ in range(2))
        self._ops.over(
            "rope_table_wide" if wide else "rope_table", int(cos.size),
            *(memory.pointer(a) for a in (at, frequencies, cos, sin)),
            int(cos.size), shape[1], float(factor),
        )  # fmt: skip
        return cos, sin

    def rope(self, x: Array, table: tuple[Array, Array], *, style: Style, cast: RopeCast) -> Array:
        """Rotate pairs of elements; the rotated part comes out in split halves."""
        x = _whole(x)
        cos, sin = table
        out, (_, heads, d) = self._empty(*x.shape), x.shape
        self._ops.over(
            "rope_wide" if cast == "result" else "rope", int(x.size),
            *(memory.pointer(a) for a in (x, cos, sin, out)), int(x.size), int(heads), int(d),
            int(cos.shape[-1]), int(style == "interleaved"), int(cast == "table"),
        )  # fmt: skip
        return out

    # attention

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Use the kernels query by query, or cuBLAS for many queries."""
        return self._attention.attention(_whole(q), _whole(k), _whole(v), heads)

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Multiply each head's queries with its group's keys."""
        return self._attention.scores(_whole(q), _whole(k), heads)

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Softmax over the visible keys and the sink."""
        return self._attention.probs(_whole(scores), heads)

    def mix(self, probs: Array, v: Array) -> Array:
        """Sum each head's values, weighted."""
        return self._attention.mix(_whole(probs), _whole(v))

    # shapes and experts

    def concat(self, parts: Sequence[Array]) -> Array:
        """Join along the last axis."""
        return memory.arrays().concatenate(list(parts), axis=-1)

    def stack(self, parts: Sequence[Array]) -> Array:
        """Join along the first axis."""
        return memory.arrays().concatenate(list(parts))

    def repeat_heads(self, x: Array, n_heads: int) -> Array:
        """Repeat the single head."""
        return memory.arrays().repeat(x, n_heads, axis=1)

    def take(self, x: Array, rows: Numbers) -> Array:
        """Copy the rows."""
        return x[memory.put(np.ascontiguousarray(rows, np.int64))]

    def add_weighted(self, total: Array, rows: Numbers, y: Array, weights: Numbers) -> Array:
        """Add weighted rows in place; no row occurs twice."""
        if len(rows):
            index = memory.put(np.ascontiguousarray(rows, np.int64))
            factors = memory.put(np.ascontiguousarray(weights, self._wide))
            y = _whole(y)
            self._ops.run(
                "add_weighted", (len(rows),),
                *(memory.pointer(a) for a in (total, index, y, factors)), int(y.shape[-1]),
            )  # fmt: skip
        return total

    def cross_entropy(self, logits: Array, labels: Numbers) -> Numbers:
        """Return every label's loss of the logits as the dtype holds them, computed in float32."""
        arrays, x = memory.arrays(), memory.put(self.to_numpy(logits))
        wide = x - x.max(axis=-1, keepdims=True)
        logs = wide - arrays.log(arrays.exp(wide).sum(axis=-1, keepdims=True))
        found = -arrays.take_along_axis(logs, memory.put(labels)[:, None], -1)[:, 0]
        return np.asarray(memory.get(found))


def _whole(x: Array) -> Array:
    """Return x as a contiguous array, without a copy if it is one."""
    return x if x.flags.c_contiguous else memory.arrays().ascontiguousarray(x)
