"""Layout steps of projections whose rows follow the heads: groups of q, k, v, tiled value heads.

A *part* is the rows of one of several joined projections: q, k, v, z. A *group* is the rows that
belong to one key head. Sources: transformers' `fix_query_key_value_ordering`, llama.cpp's converter
(conversion/qwen.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from aprfmt.arch.element_moves import Moves
from aprfmt.arch.layout_steps import MAX_MOVES, Shape, Shapes, Sizes, only_shape
from aprfmt.arch.size_expressions import size_of
from aprfmt.arch.spec import Array, Move
from aprfmt.errors import ArchError


@dataclass(frozen=True, slots=True)
class ByGroup:
    """One stored tensor has several parts group by group; logical tensors have whole parts.

    `groups` counts the groups; `parts` are the rows of each part over all groups; `outputs` lists
    for each logical tensor its parts, one after the other. qwen3_next keeps q, k, v and z of a key
    head together, and b and a; its gated attention keeps q and gate of a head together.
    """

    groups: str
    parts: tuple[str, ...]
    outputs: tuple[tuple[int, ...], ...]
    permutes: ClassVar[bool] = True

    def _group_sizes(self, hp: Sizes) -> tuple[int, list[int]]:
        """Return (number of groups, [rows of each part in one group]).

        ArchError unless the groups divide the parts.
        """
        groups = size_of(self.groups, hp)
        whole = [size_of(part, hp) for part in self.parts]
        if groups < 1 or any(size % groups for size in whole):
            raise ArchError(
                f"{self}: parts of {', '.join(map(str, whole))} rows in {groups} groups; expected "
                f"numbers that {self.groups} divides"
            )
        return groups, [size // groups for size in whole]

    def _output_rows(self, output: tuple[int, ...], groups: int, sizes: list[int]) -> int:
        """Return the rows of a logical tensor made of the parts in `output`."""
        return groups * sum(sizes[part] for part in output)

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the logical shapes; ArchError unless the stored rows are whole groups."""
        shape = only_shape(stored, self)
        groups, sizes = self._group_sizes(hp)
        rows = shape[0] if shape else 0
        if not shape or rows != groups * sum(sizes):
            raise ArchError(
                f"{self}: shape {list(shape)} has {rows} rows; expected {groups} groups of "
                f"{' + '.join(map(str, sizes))}"
            )
        return [(self._output_rows(output, groups, sizes), *shape[1:]) for output in self.outputs]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [the shape of the one stored tensor]; ArchError for other logical shapes.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        groups, sizes = self._group_sizes(hp)
        wanted = [self._output_rows(output, groups, sizes) for output in self.outputs]
        found = [shape[0] if shape else 0 for shape in logical]
        if found != wanted or len({tuple(shape[1:]) for shape in logical}) != 1:
            raise ArchError(
                f"{self}: got shapes {[list(shape) for shape in logical]}; expected "
                f"{', '.join(map(str, wanted))} rows of one width"
            )
        return [(sum(wanted), *logical[0][1:])]

    def moves(self, stored: Shapes, hp: Sizes) -> Moves | None:
        """Return for each logical tensor its runs of stored elements: one for each part and group.

        A run is elements that follow each other. The runs are in logical order. None for more than
        MAX_MOVES runs: the arrays are then decoded.
        """
        self.shapes(stored, hp)
        groups, sizes = self._group_sizes(hp)
        row, each = math.prod(stored[0][1:]), sum(sizes)
        if groups * len(sizes) > MAX_MOVES:
            return None
        return [
            [
                Move(0, (group * each + sum(sizes[:part])) * row, sizes[part] * row)
                for part in output
                for group in range(groups)
            ]
            for output in self.outputs
        ]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return the logical arrays: each part's rows of all groups joined."""
        import numpy as np

        x = stored[0]
        self.shapes([x.shape], hp)
        groups, sizes = self._group_sizes(hp)
        split = x.reshape(groups, sum(sizes), *x.shape[1:])
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        parts = [
            split[:, end - size : end].reshape(groups * size, *x.shape[1:])
            for size, end in zip(sizes, ends, strict=True)
        ]
        return [np.concatenate([parts[i] for i in output]) for output in self.outputs]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the stored array]: the rows of all parts group by group."""
        import numpy as np

        whole = self.stored_shapes([x.shape for x in logical], hp, 1)[0]
        groups, sizes = self._group_sizes(hp)
        parts: dict[int, Array] = {}
        for output, x in zip(self.outputs, logical, strict=True):
            start = 0
            for part in output:
                rows = groups * sizes[part]
                cut = x[start : start + rows]
                parts[part] = cut.reshape(groups, sizes[part], *x.shape[1:])
                start += rows
        return [np.concatenate([parts[i] for i in sorted(parts)], axis=1).reshape(whole)]

    def __str__(self) -> str:
        return f"ByGroup({self.groups}: {', '.join(self.parts)})"


@dataclass(frozen=True, slots=True)
class Grouped(ByGroup):
    """One stored tensor has q, k and v, group by group of the key heads.

    A group has the rows of its query heads, then of its key head, then of its value head. With as
    many key heads as query heads that is q, k and v head by head (bloom, gpt_neox); falcon has
    groups of several query heads. Used for weights and biases.
    """

    groups: str = "n_kv_heads"
    parts: tuple[str, ...] = ("n_heads*head_dim", "n_kv_heads*head_dim", "n_kv_heads*head_dim")
    outputs: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,))

    def _group_sizes(self, hp: Sizes) -> tuple[int, list[int]]:
        """Return (number of key heads, [rows of q, k and v in one group]).

        ArchError unless the query heads are whole groups.
        """
        heads, kv = size_of("n_heads", hp), size_of("n_kv_heads", hp)
        if kv < 1 or heads % kv:
            raise ArchError(f"{self}: {heads} query heads on {kv} key heads; expected whole groups")
        return ByGroup._group_sizes(self, hp)

    def __str__(self) -> str:
        return "Grouped(q, k, v)"


@dataclass(frozen=True, slots=True)
class Tiled:
    """Value heads are stored with the key heads running fastest; logical order is by key head.

    Stored head j*K + k is logical head k*R + j (K key heads, each with R value heads). `size` are
    the elements of a head along `axis`, `before` the elements before the heads, which stay.
    llama.cpp broadcasts key heads to value heads that way in qwen3_5.
    """

    size: str
    before: str = "0"
    axis: int = 0
    keys: str = "delta_key_heads"
    values: str = "delta_value_heads"
    permutes: ClassVar[bool] = True

    def _head_sizes(self, shape: Shape, hp: Sizes) -> tuple[int, int, int, int]:
        """Return (elements before the heads, key heads, value heads for each key head, head size).

        ArchError unless they add up to the shape's axis.
        """
        keys, values = size_of(self.keys, hp), size_of(self.values, hp)
        before, size = size_of(self.before, hp), size_of(self.size, hp)
        found = shape[self.axis] if self.axis < len(shape) else 0
        if keys < 1 or values % keys or found != before + values * size:
            raise ArchError(
                f"{self}: shape {list(shape)} has {found} on axis {self.axis}; expected {before} + "
                f"{values} value heads of {size}, in whole numbers a key head ({keys})"
            )
        return before, keys, values // keys, size

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [the stored shape]; ArchError unless the heads fit it."""
        shape = only_shape(stored, self)
        self._head_sizes(shape, hp)
        return [shape]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [the logical shape]; ArchError unless the heads fit it.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        return self.shapes(logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> Moves | None:
        """Return [runs of stored elements in logical order]: value heads of one key head together.

        One run for each head, and one for the elements before the heads. None for more than
        MAX_MOVES: the arrays are then decoded.
        """
        shape = only_shape(stored, self)
        before, keys, each, size = self._head_sizes(shape, hp)
        outer, inner = math.prod(shape[: self.axis]), math.prod(shape[self.axis + 1 :])
        if outer * (keys * each + 1) > MAX_MOVES:
            return None
        runs: list[Move] = []
        for o in range(outer):
            start = o * shape[self.axis] * inner
            runs.append(Move(0, start, before * inner))
            runs += [
                Move(0, start + (before + (j * keys + k) * size) * inner, size * inner)
                for k in range(keys)
                for j in range(each)
            ]
        return [runs]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the logical array]: the value heads of each key head together."""
        before, keys, each, size = self._head_sizes(stored[0].shape, hp)
        return [self._swap_head_axes(stored[0], before, (each, keys, size))]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the stored array]: value heads in turns, one of every key head."""
        before, keys, each, size = self._head_sizes(logical[0].shape, hp)
        return [self._swap_head_axes(logical[0], before, (keys, each, size))]

    def _swap_head_axes(self, x: Array, before: int, heads: tuple[int, int, int]) -> Array:
        """Return `x` with the two axes of its heads swapped; the `before` first elements stay.

        `heads` is the shape (two head axes, elements of a head) of the elements after them along
        `axis`.
        """
        import numpy as np

        at = self.axis
        first, rest = x.take(range(before), axis=at), x.take(range(before, x.shape[at]), axis=at)
        split = rest.reshape(*x.shape[:at], *heads, *x.shape[at + 1 :])
        return np.concatenate([first, split.swapaxes(at, at + 1).reshape(rest.shape)], axis=at)

    def __str__(self) -> str:
        where = f", axis {self.axis}" if self.axis else ""
        after = f", after {self.before}" if self.before != "0" else ""
        return f"Tiled({self.values} of {self.size}{after}{where})"
