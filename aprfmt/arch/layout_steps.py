"""Layout steps of one tensor: from the stored to the logical layout and back.

joining_steps.py has the steps between several tensors. All steps but `Added` only move elements.
So their `undo` and `apply` take arrays of any dtype, raw bit patterns included. Where every run
would be a single element (a transposition), `moves` returns None and callers use `undo` on the
whole array.
Sources of the layouts: docs/reference/architectures.md, llama.cpp's converter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from aprfmt.arch.element_moves import Moves
from aprfmt.arch.size_expressions import shape_of, size_of
from aprfmt.arch.spec import Array, Move
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Shape = tuple[int, ...]
Shapes = Sequence[tuple[int, ...]]
Sizes = Mapping[str, Value]

MAX_MOVES = 1 << 20  # longer lists cost more than moving the array at once


def only_shape(shapes: Shapes, step: object) -> Shape:
    """Return the only shape in `shapes`; ArchError if there is not exactly one."""
    if len(shapes) != 1:
        raise ArchError(f"{step}: got {len(shapes)} tensors; expected one")
    return tuple(shapes[0])


class Dividing(Protocol):
    """A step that divides one stored tensor."""

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the parts' shapes."""


def joined_shape(step: Dividing, parts: Shapes, axis: int, hp: Sizes) -> Shape:
    """Return the shape of `parts` joined along `axis`; ArchError unless `step` makes them of it."""
    first = parts[0]
    whole = (*first[:axis], sum(shape[axis] for shape in parts), *first[axis + 1 :])
    if step.shapes([whole], hp) != [tuple(shape) for shape in parts]:
        raise ArchError(
            f"{step}: shapes {[list(s) for s in parts]} are not the parts of one tensor "
            f"{list(whole)}"
        )
    return whole


@dataclass(frozen=True, slots=True)
class RowsPermuted:
    """Rows of each head in adjacent-pair rope order; logical rows are split-half.

    Logical row j*(d/2)+i of a head is stored row 2i+j (j: 0 or 1, d: rows a head). `heads` names
    the hyperparameter that counts heads. Used for GGUF llama's Q and K, weights and biases.
    """

    heads: str
    permutes: ClassVar[bool] = True

    def _heads(self, shape: Shape, hp: Sizes) -> int:
        """Return the number of heads; ArchError unless rows divide into heads of even size."""
        heads = size_of(self.heads, hp)
        rows = shape[0] if shape else 0
        if not shape or heads < 1 or rows % (2 * heads):
            raise ArchError(
                f"{self}: shape {list(shape)} has {rows} rows; expected {heads} heads with an "
                f"even number of rows each; {self.heads} does not fit this tensor"
            )
        return heads

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the stored shape."""
        shape = only_shape(stored, self)
        self._heads(shape, hp)
        return [shape]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return the logical shape."""
        return self.shapes(logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> Moves | None:
        """One run per row."""
        shape = only_shape(stored, self)
        heads = self._heads(shape, hp)
        row = math.prod(shape[1:])
        size = shape[0] // heads
        if shape[0] > MAX_MOVES:
            return None
        rows = (
            head * size + 2 * i + j
            for head in range(heads)
            for j in range(2)
            for i in range(size // 2)
        )
        return [[Move(0, at * row, row) for at in rows]]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Adjacent pairs to split halves."""
        x = stored[0]
        heads = self._heads(x.shape, hp)
        split = x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:])
        return [split.swapaxes(1, 2).reshape(x.shape)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Split halves to adjacent pairs."""
        x = logical[0]
        heads = self._heads(x.shape, hp)
        split = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
        return [split.swapaxes(1, 2).reshape(x.shape)]

    def __str__(self) -> str:
        return f"RowsPermuted({self.heads})"


@dataclass(frozen=True, slots=True)
class Transposed:
    """The last two axes are stored the other way round (gpt2's Conv1D, gpt-oss's experts)."""

    permutes: ClassVar[bool] = True

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the shape with the last two axes swapped."""
        shape = only_shape(stored, self)
        if len(shape) < 2:
            raise ArchError(f"{self}: shape {list(shape)}; expected two axes or more")
        return [(*shape[:-2], shape[-1], shape[-2])]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return the shape with the last two axes swapped."""
        return self.shapes(logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> Moves | None:
        """None, unless one of the two axes has size 1 and nothing moves."""
        shape = only_shape(self.shapes(stored, hp), self)
        return [[Move(0, 0, math.prod(shape))]] if 1 in shape[-2:] else None

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Swap the last two axes."""
        self.shapes([stored[0].shape], hp)
        return [stored[0].swapaxes(-1, -2)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Swap the last two axes."""
        return self.undo(logical, hp)

    def __str__(self) -> str:
        return "Transposed"


@dataclass(frozen=True, slots=True)
class TransposedEach:
    """The last two axes of every stored tensor are stored the other way round."""

    permutes: ClassVar[bool] = True

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the shapes with the last two axes swapped."""
        return [Transposed().shapes([shape], hp)[0] for shape in stored]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return the shapes with the last two axes swapped."""
        return self.shapes(logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> Moves | None:
        """None: elements change places."""
        return None

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Swap the last two axes."""
        self.shapes([one.shape for one in stored], hp)
        return [one.swapaxes(-1, -2) for one in stored]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Swap the last two axes."""
        return self.undo(logical, hp)

    def __str__(self) -> str:
        return "TransposedEach"


@dataclass(frozen=True, slots=True)
class Oriented(Transposed):
    """The last two axes are written exchanged, but stored either way: the shape tells.

    `rows` and `columns` are the logical sizes. qwen3_vl_moe is published with its experts' matrices
    exchanged; transformers 5.23 reads both forms by their shape, and saves them as they are. Where
    both sizes are equal nothing tells: such a matrix is read and written as it is.
    """

    rows: str
    columns: str

    def _turned(self, shape: Shape, hp: Sizes) -> bool:
        """Say whether a stored shape is exchanged; ArchError where it is of other sizes."""
        rows, columns = size_of(self.rows, hp), size_of(self.columns, hp)
        if shape[-2:] not in ((rows, columns), (columns, rows)):
            raise ArchError(f"{self}: shape {list(shape)}; expected {rows} by {columns} at its end")
        return shape[-2:] != (rows, columns)

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the logical shape."""
        shape = only_shape(stored, self)
        return Transposed.shapes(self, stored, hp) if self._turned(shape, hp) else [shape]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return the shape that is written."""
        self._turned(only_shape(logical, self), hp)
        return Transposed.shapes(self, logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> Moves | None:
        """One run where nothing moves."""
        shape = only_shape(stored, self)
        turned = self._turned(shape, hp) and 1 not in shape[-2:]
        return None if turned else [[Move(0, 0, math.prod(shape))]]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Exchange the last two axes if they are exchanged."""
        return [stored[0].swapaxes(-1, -2) if self._turned(stored[0].shape, hp) else stored[0]]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Exchange the last two axes, unless they are equally long: then it cannot be told."""
        rows, columns = size_of(self.rows, hp), size_of(self.columns, hp)
        return [logical[0] if rows == columns else logical[0].swapaxes(-1, -2)]

    def __str__(self) -> str:
        return f"Oriented({self.rows}, {self.columns})"


@dataclass(frozen=True, slots=True)
class HalvesExchanged:
    """The second half of every row stands before the first (MiMo's join of a draft head)."""

    permutes: ClassVar[bool] = True

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the stored shape; ArchError unless rows have two halves."""
        shape = only_shape(stored, self)
        if not shape or shape[-1] % 2:
            raise ArchError(f"{self}: shape {list(shape)}; expected rows of two equal halves")
        return [shape]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return the logical shape."""
        return self.shapes(logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> Moves | None:
        """Two runs per row."""
        shape = only_shape(self.shapes(stored, hp), self)
        half, rows = shape[-1] // 2, math.prod(shape[:-1])
        if 2 * rows > MAX_MOVES:
            return None
        return [[Move(0, at * half, half) for row in range(rows) for at in (2 * row + 1, 2 * row)]]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Exchange the halves."""
        import numpy as np

        shape = self.shapes([stored[0].shape], hp)[0]
        return [np.roll(stored[0], shape[-1] // 2, axis=-1)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Exchange the halves."""
        return self.undo(logical, hp)

    def __str__(self) -> str:
        return "HalvesExchanged"


class ChangesValues:
    """What steps share that change every value in its place."""

    __slots__ = ()
    permutes: ClassVar[bool] = False

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the stored shape."""
        return [only_shape(stored, self)]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return the logical shape."""
        return [only_shape(logical, self)]

    def moves(self, stored: Shapes, hp: Sizes) -> Moves | None:
        """None: values change."""
        return None


@dataclass(frozen=True, slots=True)
class Added(ChangesValues):
    """A constant was added in float32 (GGUF gemma: norm weights are stored as 1 + w).

    `undo(apply(x)) == x` holds if |x| is not small against the constant: adding 1 loses BF16
    values below about 1.5e-5 in magnitude and float32 values that need bits below 2^-24. A
    caller that must be exact compares, and stores the source's bits where they differ.
    """

    amount: float

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Subtract the constant in float32."""
        import numpy as np

        return [np.asarray(stored[0], np.float32) - np.float32(self.amount)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Add the constant in float32."""
        import numpy as np

        return [np.asarray(logical[0], np.float32) + np.float32(self.amount)]

    def __str__(self) -> str:
        return f"Added({self.amount:g})"


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The same elements in the same order with another shape; any stored shape is accepted.

    `logical` and `stored` are size expressions; `stored` is the shape that is written.
    """

    logical: tuple[str, ...]
    stored: tuple[str, ...]
    permutes: ClassVar[bool] = True

    def _to(self, shape: Shape, expressions: tuple[str, ...], hp: Sizes) -> Shape:
        wanted = shape_of(expressions, hp)
        if math.prod(shape) != math.prod(wanted):
            raise ArchError(
                f"{self}: shape {list(shape)} has {math.prod(shape)} elements; expected "
                f"{list(wanted)}"
            )
        return wanted

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the logical shape; ArchError unless the element counts are equal."""
        return [self._to(only_shape(stored, self), self.logical, hp)]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return the shape that is written."""
        return [self._to(only_shape(logical, self), self.stored, hp)]

    def moves(self, stored: Shapes, hp: Sizes) -> Moves | None:
        """One run: everything."""
        return [[Move(0, 0, math.prod(self.shapes(stored, hp)[0]))]]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Reshape."""
        return [stored[0].reshape(self._to(stored[0].shape, self.logical, hp))]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Reshape back."""
        return [logical[0].reshape(self._to(logical[0].shape, self.stored, hp))]

    def __str__(self) -> str:
        return f"Reshaped({', '.join(self.logical)})"
