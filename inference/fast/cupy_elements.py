"""The CuPy backend's operations by element and by row, and those on shapes: kernels of ops.cu."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aprfmt.errors import ArchError, BackendUnavailableError
from aprfmt.inference.backends.base import Array, Backend, NormCast, Numbers
from aprfmt.inference.fast.cuda import memory
from aprfmt.inference.fast.cuda.host_uploads import HostUploads
from aprfmt.inference.fast.cuda.ops import Ops

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
STEPS = ("gelu_tanh",)  # activations that have a kernel NAME_steps


class CupyElements(Backend):
    """Element-wise operations on arrays of one dtype on one GPU.

    16-bit floats are stored as arrays of uint16.
    """

    def __init__(self, device: str, dtype: str, *, deterministic: bool) -> None:
        """Make `device` current and load nothing; BackendUnavailableError for an unknown dtype."""
        if dtype not in memory.STORED:
            raise BackendUnavailableError(
                f"backend cupy: found dtype {dtype!r}; expected one of {', '.join(memory.STORED)}"
            )
        self._index = memory.use_device(device)
        super().__init__(f"cuda:{self._index}", dtype, deterministic=deterministic)
        self._stored = np.dtype(memory.STORED[dtype])
        self._wide = np.dtype("float64" if dtype == "float64" else "float32")
        self._ops = Ops(dtype)
        self._uploads = HostUploads()

    def _empty(self, *shape: int) -> Array:
        """Return an array of the dtype on the GPU, to be written whole."""
        return memory.array_module().empty(shape, self._stored)

    def zeros(self, shape: Sequence[int]) -> Array:
        """Return zeros on the GPU."""
        return memory.array_module().zeros(tuple(shape), self._stored)

    def wide(self, x: Array) -> Array:
        """Return x as a contiguous array of float32, or float64 if that is the dtype."""
        x = make_contiguous(x)
        if x.dtype == self._wide:
            return x
        out = memory.array_module().empty(x.shape, self._wide)
        self._ops.launch_over(
            "to_wide", int(x.size), memory.pointer(x), memory.pointer(out), int(x.size)
        )
        return out

    def narrow(self, x: Array) -> Array:
        """Return a float32 or float64 array rounded to the dtype, in the type it is stored in."""
        x = make_contiguous(x)
        if x.dtype == self._stored:
            return x
        out, count = self._empty(*x.shape), int(x.size)
        self._ops.launch_over("from_wide", count, memory.pointer(x), memory.pointer(out), count)
        return out

    # element by element

    def _run_elementwise(self, name: str, x: Array, *rest: Any) -> Array:
        """Return the result of the kernel `name` on each element of x.

        `rest` are the kernel's arguments after the count.
        """
        x = make_contiguous(x)
        out, count = self._empty(*x.shape), int(x.size)
        self._ops.launch_over(name, count, memory.pointer(x), memory.pointer(out), count, *rest)
        return out

    def add(self, a: Array, b: Array) -> Array:
        """Return a + b; b is broadcast along missing first axes, or as numpy does."""
        if b.shape != a.shape[a.ndim - b.ndim :]:
            b = memory.array_module().broadcast_to(b, a.shape)
        a, b = make_contiguous(a), make_contiguous(b)
        out, count = self._empty(*a.shape), int(a.size)
        places = (memory.pointer(x) for x in (a, b, out))
        self._ops.launch_over("add", count, *places, count, int(b.size))
        return out

    def mul(self, a: Array, b: Array) -> Array:
        """Return a * b, broadcasting; b of shape [..., 1] is not copied to a's shape."""
        if a.size < b.size:
            a, b = b, a
        run = 1
        if b.shape != a.shape[a.ndim - b.ndim :]:
            if b.shape == (*a.shape[:-1], 1):
                run = int(a.shape[-1])
            else:
                shape = np.broadcast_shapes(a.shape, b.shape)
                a, b = (memory.array_module().broadcast_to(x, shape) for x in (a, b))
        a, b = make_contiguous(a), make_contiguous(b)
        out, count = self._empty(*a.shape), int(a.size)
        places = (memory.pointer(x) for x in (a, b, out))
        self._ops.launch_over("mul", count, *places, count, int(b.size), run)
        return out

    def scale(self, x: Array, factor: float) -> Array:
        """Return x * factor, rounded once."""
        return self._run_elementwise("scale", x, float(factor))

    def shift(self, x: Array, number: float) -> Array:
        """Return x + number, rounded once."""
        return self._run_elementwise("shift", x, float(number))

    def clip(self, x: Array, limit: float) -> Array:
        """Return x clamped to [-limit, limit]."""
        return self._run_elementwise("clip", x, -float(limit), float(limit))

    def clipped_gates(self, gate: Array, up: Array, limit: float) -> tuple[Array, Array]:
        """Return (gate, at most `limit`; up, clamped to [-limit, limit])."""
        return self._run_elementwise("clip", gate, -math.inf, float(limit)), self.clip(up, limit)

    def softcap(self, x: Array, cap: float) -> Array:
        """Return tanh(x / cap) * cap."""
        return self._run_elementwise("softcap", x, float(cap))

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Return act(x); `steps` rounds every step if there is a kernel for that.

        Raises ArchError for an activation that is not in ACTIVATIONS.
        """
        if kind not in ACTIVATIONS:
            raise ArchError(f"activation {kind!r}; expected one of {', '.join(ACTIVATIONS)}")
        return self._run_elementwise(f"{kind}_steps" if steps and kind in STEPS else kind, x)

    def sigmoid(self, x: Array) -> Array:
        """Return 1 / (1 + exp(-x))."""
        return self._run_elementwise("sigmoid", x)

    def swiglu_oai(self, gate: Array, up: Array, limit: float, alpha: float) -> Array:
        """Return (u + 1) * g * sigmoid(alpha * g) of clamped gate and up (gpt-oss)."""
        gate, up = make_contiguous(gate), make_contiguous(up)
        out, count = self._empty(*gate.shape), int(gate.size)
        places = (memory.pointer(x) for x in (gate, up, out))
        self._ops.launch_over("swiglu_oai", count, *places, count, float(limit), float(alpha))
        return out

    # norms

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return x normalised in float32 by its root mean square, times weight + offset.

        `cast` says whether it is rounded before or after the weight.
        """
        x, weight = make_contiguous(x), make_contiguous(weight)
        out, width = self._empty(*x.shape), int(x.shape[-1])
        self._ops.launch(
            "rms_norm",
            (int(x.size) // width,),
            *(memory.pointer(a) for a in (x, weight, out)),
            width,
            int(weight.size),
            offset,
            int(cast == "before_weight"),
            float(eps),
        )
        return out

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        """Return x normalised, weighted and shifted in float32, rounded last."""
        x, weight = make_contiguous(x), make_contiguous(weight)
        out, width = self._empty(*x.shape), int(x.shape[-1])
        self._ops.launch(
            "layer_norm",
            (int(x.size) // width,),
            memory.pointer(x),
            memory.pointer(weight),
            0 if bias is None else memory.pointer(bias),
            memory.pointer(out),
            width,
            int(weight.size),
            float(eps),
        )
        return out

    # shapes

    def concat(self, parts: Sequence[Array]) -> Array:
        """Return the arrays joined along the last axis."""
        return memory.array_module().concatenate(list(parts), axis=-1)

    def stack(self, parts: Sequence[Array]) -> Array:
        """Return the arrays joined along the first axis."""
        return memory.array_module().concatenate(list(parts))

    def repeat_heads(self, x: Array, n_heads: int) -> Array:
        """Return [tokens, n_heads, d] from [tokens, 1, d], copied."""
        return memory.array_module().repeat(x, n_heads, axis=1)

    def take(self, x: Array, rows: Numbers | Array) -> Array:
        """Return a copy of rows `rows` of x, in that order."""
        return x[self._uploads.row_numbers(rows)]

    def add_weighted(self, total: Array, rows: Numbers, y: Array, weights: Numbers) -> Array:
        """Add y [n, width] times weights [n] to n rows of total in place; return total.

        `rows` are the numbers of these rows of total, each at most once.
        """
        if len(rows):
            index = self._uploads.row_numbers(rows)
            factors = memory.copy_to_gpu(np.ascontiguousarray(weights, self._wide))
            y = make_contiguous(y)
            self._ops.launch(
                "add_weighted",
                (len(rows),),
                *(memory.pointer(a) for a in (total, index, y, factors)),
                int(y.shape[-1]),
            )
        return total


def make_contiguous(x: Array) -> Array:
    """Return x as a contiguous array, without a copy if it is one."""
    return x if x.flags.c_contiguous else memory.array_module().ascontiguousarray(x)
