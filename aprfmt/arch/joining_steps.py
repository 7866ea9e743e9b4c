"""Layout steps between several tensors: one stored tensor holds several, or several make one.

layout_steps.py explains steps. A *part* is one of the tensors that are joined. Moves are runs of
elements that follow each other; interleaved rows give one run each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aprfmt.arch.layout_steps import MAX_MOVES, Shape, Shapes, Sizes, joined_shape, only_shape
from aprfmt.arch.size_expressions import shape_of, size_of
from aprfmt.arch.spec import Array, Move
from aprfmt.errors import ArchError

if TYPE_CHECKING:
    from aprfmt.arch.element_moves import Moves


@dataclass(frozen=True, slots=True)
class Split:
    """One stored tensor is several logical ones joined along an axis.

    One after the other (fused qkv, phi3's gate_up), or alternating with `interleaved` (gpt-oss:
    even rows are gate, odd rows up). `sizes` are size expressions, one for each logical tensor.
    """

    sizes: tuple[str, ...]
    axis: int = 0
    interleaved: bool = False
    permutes: ClassVar[bool] = True

    def _part_sizes(self, shape: Shape, hp: Sizes) -> list[int]:
        """Return the size of each part on the axis; ArchError unless they add up to the shape's."""
        parts = [size_of(size, hp) for size in self.sizes]
        found = shape[self.axis] if self.axis < len(shape) else 0
        if found != sum(parts) or (self.interleaved and len(set(parts)) != 1):
            raise ArchError(
                f"{self}: shape {list(shape)} has {found} on axis {self.axis}; expected "
                f"{' + '.join(map(str, parts))}"
            )
        return parts

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return one logical shape for each part of the stored tensor."""
        shape = only_shape(stored, self)
        at = self.axis
        return [(*shape[:at], part, *shape[at + 1 :]) for part in self._part_sizes(shape, hp)]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [the shape of the parts joined along the axis].

        `count`, the number of stored tensors, is used only by steps that join several of them.
        Raises ArchError for another number of parts, or for parts without that axis.
        """
        at = self.axis
        if len(logical) != len(self.sizes) or any(len(shape) <= at for shape in logical):
            raise ArchError(
                f"{self}: got shapes {[list(s) for s in logical]}; expected {len(self.sizes)} "
                f"with an axis {at}"
            )
        return [joined_shape(self, logical, at, hp)]

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return for each part its runs of stored elements: one for each index before the axis.

        With `interleaved` one for each row. None for more than MAX_MOVES runs: the arrays are then
        decoded.
        """
        shape = only_shape(stored, self)
        parts = self._part_sizes(shape, hp)
        outer, inner = math.prod(shape[: self.axis]), math.prod(shape[self.axis + 1 :])
        total, n = sum(parts), len(parts)
        if outer * (total if self.interleaved else n) > MAX_MOVES:
            return None
        out: Moves = []
        for k, part in enumerate(parts):
            if self.interleaved:
                rows = (o * total + row * n + k for o in range(outer) for row in range(part))
                out.append([Move(0, row * inner, inner) for row in rows])
            else:
                before = sum(parts[:k])
                starts = ((o * total + before) * inner for o in range(outer))
                out.append([Move(0, start, part * inner) for start in starts])
        return out

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return the parts of the stored array, as views."""
        x = stored[0]
        parts = self._part_sizes(x.shape, hp)
        before = (slice(None),) * self.axis
        if self.interleaved:
            return [x[(*before, slice(k, None, len(parts)))] for k in range(len(parts))]
        ends = [sum(parts[: k + 1]) for k in range(len(parts))]
        return [x[(*before, slice(end - part, end))] for part, end in zip(parts, ends, strict=True)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the parts joined along the axis]."""
        import numpy as np

        whole = self.stored_shapes([x.shape for x in logical], hp, 1)[0]
        if self.interleaved:
            return [np.stack(list(logical), axis=self.axis + 1).reshape(whole)]
        return [np.concatenate(list(logical), axis=self.axis)]

    def __str__(self) -> str:
        how = ", interleaved" if self.interleaved else ""
        where = f", axis {self.axis}" if self.axis else ""
        return f"Split({', '.join(self.sizes)}{where}{how})"


@dataclass(frozen=True, slots=True)
class Joined:
    """Several stored tensors are joined to one logical tensor along the first axis.

    `sizes` are size expressions of the parts that are written. Other parts are read too if they add
    up to the same size: transformers 5 saves a kernel's channels in equal thirds.
    """

    sizes: tuple[str, ...]
    permutes: ClassVar[bool] = True

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [the shape of the joined parts]; ArchError if they do not add up to it."""
        shapes = [tuple(shape) for shape in stored]
        parts = [size_of(size, hp) for size in self.sizes]
        rest = {shape[1:] for shape in shapes}
        if (
            len(shapes) != len(parts) or len(rest) != 1 or not all(shapes)
            or sum(shape[0] for shape in shapes) != sum(parts)
        ):  # fmt: skip
            raise ArchError(
                f"{self}: shapes {[list(shape) for shape in shapes]}; expected {len(parts)} parts "
                f"of {' + '.join(map(str, parts))} rows together, otherwise alike"
            )
        return [(sum(parts), *shapes[0][1:])]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return one stored shape for each part of the logical tensor.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        Raises ArchError where the rows of the parts do not add up to those of the logical tensor.
        """
        shape = only_shape(logical, self)
        parts = [(size_of(size, hp), *shape[1:]) for size in self.sizes]
        self.shapes(parts, hp)
        if sum(part[0] for part in parts) != shape[0]:
            raise ArchError(
                f"{self}: shape {list(shape)}; expected {sum(p[0] for p in parts)} rows"
            )
        return parts

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return [the runs of the logical tensor]: each part whole, one after the other."""
        self.shapes(stored, hp)
        return [[Move(i, 0, math.prod(shape)) for i, shape in enumerate(stored)]]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the stored parts joined on the first axis]."""
        import numpy as np

        self.shapes([x.shape for x in stored], hp)
        return [np.concatenate(list(stored))]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return the parts of the logical array, as views."""
        parts = self.stored_shapes([logical[0].shape], hp, len(self.sizes))
        ends = [sum(part[0] for part in parts[: k + 1]) for k in range(len(parts))]
        return [logical[0][end - part[0] : end] for end, part in zip(ends, parts, strict=True)]

    def __str__(self) -> str:
        return f"Joined({', '.join(self.sizes)})"


@dataclass(frozen=True, slots=True)
class Stacked:
    """`count` stored tensors of one shape are one logical tensor with an axis more.

    Used for the experts of a layer and for stablelm's norms per head, where that axis is the first,
    and for the frames of a patch. `count` is the name of the hyperparameter that counts them.
    """

    count: str
    axis: int = 0
    permutes: ClassVar[bool] = True

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [the stored shape with `count` inserted at the axis].

        Raises ArchError for another number of stored tensors, or for stored tensors of different
        shapes.
        """
        count = size_of(self.count, hp)
        if len(stored) != count:
            raise ArchError(f"{self}: {len(stored)} tensors; expected {count} ({self.count})")
        first = tuple(stored[0]) if stored else ()
        for i, shape in enumerate(stored):
            if tuple(shape) != first:
                raise ArchError(
                    f"{self}: number {i} has shape {list(shape)}; expected {list(first)} like "
                    "number 0"
                )
        return [(*first[: self.axis], count, *first[self.axis :])]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return the logical shape without the axis, `count` times: one for each stored tensor.

        Raises ArchError where the axis is missing or has another size than `count`.
        """
        shape, at = only_shape(logical, self), self.axis
        if len(shape) <= at or shape[at] != count:
            where = f"axis {at}" if at else "the first axis"
            raise ArchError(f"{self}: shape {list(shape)}; expected {count} on {where}")
        return [(*shape[:at], *shape[at + 1 :])] * count

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return [the runs of the logical tensor]: by index before the axis, one for each tensor.

        None for more than MAX_MOVES runs: the arrays are then decoded.
        """
        self.shapes(stored, hp)
        if not stored:
            return [[]]
        outer, inner = math.prod(stored[0][: self.axis]), math.prod(stored[0][self.axis :])
        if outer * len(stored) > MAX_MOVES:
            return None
        return [[Move(i, o * inner, inner) for o in range(outer) for i in range(len(stored))]]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the stored arrays stacked along a new axis]."""
        import numpy as np

        self.shapes([x.shape for x in stored], hp)
        return [np.stack(list(stored), axis=self.axis)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return the slices of the logical array along the axis, as views."""
        x = logical[0]
        self.stored_shapes([x.shape], hp, size_of(self.count, hp))
        return [x[(slice(None),) * self.axis + (i,)] for i in range(x.shape[self.axis])]

    def __str__(self) -> str:
        return f"Stacked({self.count}{f', axis {self.axis}' if self.axis else ''})"


@dataclass(frozen=True, slots=True)
class KvB:
    """MLA's kv_b cut by head into k_b, transposed, and v_b (GGUF deepseek2).

    Stored: k_b [heads, rank, nope] and v_b [heads, v, rank]; logical: [heads*(nope+v), rank],
    each head's key rows before its value rows.
    """

    permutes: ClassVar[bool] = True

    def _expected_shapes(self, hp: Sizes) -> tuple[Shape, Shape, Shape]:
        """Return the shapes of (k_b, v_b, the logical kv_b), by the hyperparameters."""
        k = shape_of(("n_heads", "kv_lora_rank", "qk_nope_head_dim"), hp)
        v = shape_of(("n_heads", "value_head_dim", "kv_lora_rank"), hp)
        return k, v, (k[0] * (k[2] + v[1]), k[1])

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [the shape of kv_b]; ArchError unless k_b and v_b fit the hyperparameters."""
        k, v, whole = self._expected_shapes(hp)
        found = [tuple(shape) for shape in stored]
        if found != [k, v]:
            raise ArchError(
                f"{self}: shapes {[list(s) for s in found]}; expected k_b {list(k)} and v_b "
                f"{list(v)}"
            )
        return [whole]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return the shapes of k_b and v_b; ArchError unless kv_b fits the hyperparameters.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        k, v, whole = self._expected_shapes(hp)
        if only_shape(logical, self) != whole:
            raise ArchError(f"{self}: shape {list(logical[0])}; expected {list(whole)}")
        return [k, v]

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return None: k_b is transposed, so the arrays are decoded."""
        return None

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [kv_b]: k_b transposed and joined with v_b, head by head."""
        import numpy as np

        whole = self.shapes([x.shape for x in stored], hp)[0]
        return [np.concatenate([stored[0].swapaxes(1, 2), stored[1]], axis=1).reshape(whole)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [k_b, v_b]: kv_b cut head by head, the key rows transposed."""
        x = logical[0]
        k, v, _ = self._expected_shapes(hp)
        self.stored_shapes([x.shape], hp, 2)
        heads = x.reshape(k[0], k[2] + v[1], k[1])
        return [heads[:, : k[2]].swapaxes(1, 2), heads[:, k[2] :]]

    def __str__(self) -> str:
        return "KvB"
