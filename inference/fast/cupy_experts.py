"""Experts on the device: routing by CuPy's functions, rows in blocks by kernels of experts.cu.

A *stack* is the weight of all experts of a layer, [n_experts, out, in]. A *block* is a fixed number
of token rows that one expert multiplies.

Every shape follows from the numbers of tokens and experts, so nothing waits for the choice and a
pass can be recorded.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aprfmt.base.protocols import Value
from aprfmt.inference.backends.base import Array, Numbers
from aprfmt.inference.backends.hosted import ExpertBlocks
from aprfmt.inference.expert_blocks import block_shape
from aprfmt.inference.fast.cuda import gemm, memory
from aprfmt.inference.fast.cuda.ops import Ops
from aprfmt.inference.fast.cupy_elements import make_contiguous
from aprfmt.inference.fast.cupy_recurrent import CupyRecurrent
from aprfmt.inference.routing import choose_experts
from aprfmt.inference.weights import Weight


class CupyMaths:
    """CuPy's functions under the names of routing.Maths, and a kernel that ranks."""

    def __init__(self, ops: Ops) -> None:
        """Take the kernels of the dtype that routers compute in."""
        self._ops = ops

    def exp(self, x: Array) -> Array:
        """Return the exponential of each element."""
        return memory.array_module().exp(x)

    def log1p(self, x: Array) -> Array:
        """Return the logarithm of 1 + x of each element."""
        return memory.array_module().log1p(x)

    def where(self, mask: Array, x: Array, other: Array | float) -> Array:
        """Return x where the mask is True, `other` elsewhere."""
        return memory.array_module().where(mask, x, other)

    def minimum(self, a: Array, b: Array) -> Array:
        """Return the lower of two, element by element."""
        return memory.array_module().minimum(a, b)

    def maximum(self, a: Array, b: Array) -> Array:
        """Return the higher of two, element by element."""
        return memory.array_module().maximum(a, b)

    def highest(self, x: Array) -> Array:
        """Return the largest element of each row, last axis kept."""
        return x.max(axis=-1, keepdims=True)

    def total(self, x: Array) -> Array:
        """Return the sum of each row, last axis kept."""
        return x.sum(axis=-1, keepdims=True)

    def divisor(self, weights: Array) -> Array:
        """Return what each row of chosen weights is divided by: its sum, last axis of size 1."""
        return self.total(weights)

    def ranked(self, x: Array) -> Array:
        """Return the indices that sort each row, largest first; equal elements keep their order.

        A kernel counts how many elements come before each.
        """
        x = make_contiguous(x)
        out, count = memory.array_module().empty(x.shape, "int64"), int(x.size)
        places = (memory.pointer(x), memory.pointer(out))
        self._ops.launch_over("ranked", count, *places, count, int(x.shape[-1]))
        return out

    def pick(self, x: Array, places: Array) -> Array:
        """Return each row's elements at its indices `places`."""
        return memory.array_module().take_along_axis(x, places, -1)

    def marked(self, places: Array, count: int) -> Array:
        """Return a mask [..., count], True at each row's indices `places`."""
        return (places[..., None] == memory.array_module().arange(count)).any(axis=-2)

    def spread(self, x: Array, times: int) -> Array:
        """Return x with each element of its last axis repeated `times` times, next to itself."""
        repeated = memory.array_module().broadcast_to(x[..., None], (*x.shape, times))
        return repeated.reshape(*x.shape[:-1], -1)

    def joined(self, parts: Sequence[Array]) -> Array:
        """Return the arrays joined along the last axis."""
        return memory.array_module().concatenate(list(parts), axis=-1)


class CupyExperts(CupyRecurrent):
    """Routing and products of a layer's experts, all at once where all weights are held."""

    _tf32: bool

    @abstractmethod
    def matrix(self, w: Weight) -> Array | None:
        """Return a weight [rows, columns] decoded in the dtype; None if it is not kept decoded."""

    def route_blocks(
        self,
        logits: Array,
        bias: Numbers | None,
        hp: Mapping[str, Value],
        *,
        rounds: bool,
        scale: Numbers | None = None,
    ) -> ExpertBlocks:
        """Return the rows that each expert multiplies by the router's logits, and their weights.

        Everything stays on the device. `bias` [n_experts] is added to the scores for the choice
        only, `scale` [n_experts] multiplies the weights. `rounds`: the weights are rounded to the
        dtype.
        """
        wide = self.wide(logits)
        given = None if bias is None else self._uploads.constant(bias, wide.dtype)
        factors = None if scale is None else self._uploads.constant(scale, wide.dtype)
        routing = choose_experts(wide, given, hp, CupyMaths(self._ops), factors)
        weights = self.wide(self.narrow(routing.weights)) if rounds else routing.weights
        return self._lay_out_blocks(routing.experts, weights, logits.shape[-1])

    def pack_blocks(self, experts: Numbers, weights: Numbers, n_experts: int) -> ExpertBlocks:
        """Return the rows that each expert multiplies, in blocks, by a choice made on the host.

        `experts` are the chosen experts and `weights` their weights, both [tokens, used].
        """
        given = memory.copy_to_gpu(np.ascontiguousarray(weights, self._wide))
        return self._lay_out_blocks(self._uploads.row_numbers(experts), given, n_experts)

    def _lay_out_blocks(self, experts: Array, weights: Array, n_experts: int) -> ExpertBlocks:
        """Return the rows that each chosen expert multiplies, in blocks, on the device.

        `experts` and `weights` are the choice and its weights, both [tokens, used].
        """
        arrays, (tokens, used) = memory.array_module(), experts.shape
        count, size = block_shape(tokens, used, n_experts)
        owners, rows, places = (
            arrays.empty(shape, "int64") for shape in (count, count * size, (tokens, used))
        )
        padded = arrays.empty(count * size, self._wide)
        given = make_contiguous(experts), make_contiguous(weights)
        self._ops.launch(
            "lay_out",
            (n_experts,),
            *(memory.pointer(x) for x in (*given, owners, rows, padded, places)),
            tokens * used,
            used,
            size,
            count,
            shared=4 * n_experts,
        )
        return ExpertBlocks(owners, rows, padded, places, size)

    def multiply_stack(self, x: Array, stack: Weight, experts: Any) -> Array:
        """Return [n, rows, out]: x[i] [rows, in] times the transposed weight of expert experts[i].

        All blocks are multiplied at once, by the addresses of the weights.
        """
        weights, x = self._expert_addresses(stack), make_contiguous(x)
        assert weights is not None
        (count, rows, depth), columns = x.shape, stack.shape[1]
        y, lists = (
            self._empty(count, rows, columns),
            memory.array_module().empty((3, count), "int64"),
        )
        self._ops.launch_over(
            "addresses",
            count,
            *(memory.pointer(each) for each in (weights, experts, lists)),
            count,
            memory.pointer(x),
            rows * depth * self.itemsize,
            memory.pointer(y),
            rows * columns * self.itemsize,
        )
        gemm.multiply_addressed(
            self.dtype,
            *(memory.pointer(each) for each in lists),
            count=count,
            rows=rows,
            columns=columns,
            depth=depth,
            tf32=self._tf32,
        )
        return y

    def combine(self, y: Array, places: Array, weights: Array | None) -> Array:
        """Return each token's weighted sum of its experts' outputs [tokens, width].

        These are the rows `places` [tokens, used] of y, and `weights` are their factors.
        """
        y, used = make_contiguous(y), int(places.shape[-1])
        out, width = self._empty(len(places), int(y.shape[-1])), int(y.shape[-1])
        self._ops.launch_over(
            "combine",
            int(out.size),
            memory.pointer(y),
            memory.pointer(places),
            0 if weights is None else memory.pointer(weights),
            memory.pointer(out),
            int(out.size),
            width,
            used,
        )
        return out

    def column(self, weights: Numbers | Array) -> Array:
        """Return an expert's weights [n] as [n, 1], rounded to the dtype."""
        if not memory.is_on_gpu(weights):
            return super().column(weights)
        return self.narrow(weights[:, None])

    def _expert_addresses(self, stack: Weight) -> Array | None:
        """Return the addresses [n_experts] of a stack's weights; None where not all are decoded.

        They are looked up at the first call, which places the weights.
        """
        if self not in stack.notes:
            stack.notes[self] = self._place_experts(stack) if stack.fits_budget(self) else None
        return stack.notes[self]

    def _place_experts(self, stack: Weight) -> Array | None:
        """Place a stack's weights, and return their addresses [n_experts] on the device.

        None if one of them is not decoded in the dtype.
        """
        self._uploads.refuse_in_recording("addresses are brought to the device")
        found = []
        for each in range(stack.shape[0]):
            held = self.matrix(stack.expert(each))
            if held is None:
                return None
            found.append(memory.pointer(held))
        return memory.copy_to_gpu(np.array(found, np.int64))
