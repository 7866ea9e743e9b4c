"""Steps between one tensor's stored layout (a file's) and its logical one (Hugging Face's).

A *run* is elements that follow each other both in the stored and in the logical tensor.

joining_steps.py has the steps between several tensors. All steps but `Added` only move elements. So
their `undo` and `apply` take arrays of any dtype, raw bit patterns included. Where every run would
be a single element (a transposition), `moves` returns None and callers use `undo` on the whole
array. Sources of the layouts: docs/reference/architectures.md, llama.cpp's converter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from aprfmt.arch.size_expressions import shape_of, size_of
from aprfmt.arch.spec import Array, Move
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

if TYPE_CHECKING:
    from aprfmt.arch.element_moves import Moves

Shape = tuple[int, ...]
Shapes = Sequence[tuple[int, ...]]
Sizes = Mapping[str, Value]

MAX_MOVES = 1 << 20  # longer lists cost more than moving the array at once


def only_shape(shapes: Shapes, step: object) -> Shape:
    """Return the only shape in `shapes`; ArchError, which names `step`, if there is not one."""
    if len(shapes) != 1:
        raise ArchError(f"{step}: got {len(shapes)} tensors; expected one")
    return tuple(shapes[0])


class Dividing(Protocol):
    """A step that divides one stored tensor into several logical ones."""

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the logical shapes of the parts of the one stored tensor."""


def joined_shape(step: Dividing, parts: Shapes, axis: int, hp: Sizes) -> Shape:
    """Return the shape of `parts` joined along `axis`, the stored shape that `step` divides.

    Raises ArchError unless `step` divides a tensor of that shape into exactly `parts`.
    """
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
        """Return [the stored shape]; ArchError unless heads of even size fit the rows."""
        shape = only_shape(stored, self)
        self._heads(shape, hp)
        return [shape]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [the logical shape]; ArchError unless heads of even size fit the rows.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        return self.shapes(logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return [the stored rows in logical order, one run each].

        None for more than MAX_MOVES rows: the array is then decoded.
        """
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
        """Return [the stored array, its rows reordered from adjacent pairs to split halves]."""
        x = stored[0]
        heads = self._heads(x.shape, hp)
        split = x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:])
        return [split.swapaxes(1, 2).reshape(x.shape)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the logical array, its rows reordered from split halves to adjacent pairs]."""
        x = logical[0]
        heads = self._heads(x.shape, hp)
        split = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
        return [split.swapaxes(1, 2).reshape(x.shape)]

    def __str__(self) -> str:
        return f"RowsPermuted({self.heads})"


@dataclass(frozen=True, slots=True)
class Transposed:
    """The last two axes are stored swapped (gpt2's Conv1D, gpt-oss's experts)."""

    permutes: ClassVar[bool] = True

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [the stored shape with its last two axes swapped]; ArchError below two axes."""
        shape = only_shape(stored, self)
        if len(shape) < 2:
            raise ArchError(f"{self}: shape {list(shape)}; expected two axes or more")
        return [(*shape[:-2], shape[-1], shape[-2])]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [the logical shape with its last two axes swapped]; ArchError below two axes.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        return self.shapes(logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return [[one run of all elements]] if an axis has size 1: no element changes its place.

        Else None: the array is decoded.
        """
        shape = only_shape(self.shapes(stored, hp), self)
        return [[Move(0, 0, math.prod(shape))]] if 1 in shape[-2:] else None

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [a view of the stored array with its last two axes swapped]."""
        self.shapes([stored[0].shape], hp)
        return [stored[0].swapaxes(-1, -2)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [a view of the logical array with its last two axes swapped]."""
        return self.undo(logical, hp)

    def __str__(self) -> str:
        return "Transposed"


@dataclass(frozen=True, slots=True)
class HalvesBelow:
    """The right half of the columns is stored as further rows below the left half.

    SGLang keeps the positions of deepseek_v4's overlapping compressors so.
    """

    permutes: ClassVar[bool] = True

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [the stored shape]; ArchError without two axes or with an odd count of columns."""
        shape = only_shape(stored, self)
        if len(shape) != 2 or shape[1] % 2:
            raise ArchError(f"{self}: shape {list(shape)}; expected two axes, the last one even")
        return [shape]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [the logical shape]; ArchError without two axes or with an odd count of columns.

        `count`, the number of stored tensors, does not matter.
        """
        return self.shapes(logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return the runs of half a row of which the result is made."""
        rows, columns = only_shape(self.shapes(stored, hp), self)
        half = columns // 2
        places = [(row * columns + side * half) for side in (0, 1) for row in range(rows)]
        return [[Move(0, place, half) for place in places]]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the left half of the columns above the right one, in the stored shape]."""
        (shape,) = self.shapes([stored[0].shape], hp)
        halves = stored[0].reshape(shape[0], 2, shape[1] // 2)
        return [halves.swapaxes(0, 1).reshape(shape)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the halves joined along the columns again]."""
        (shape,) = self.shapes([logical[0].shape], hp)
        halves = logical[0].reshape(2, shape[0], shape[1] // 2)
        return [halves.swapaxes(0, 1).reshape(shape)]

    def __str__(self) -> str:
        return "HalvesBelow"


@dataclass(frozen=True, slots=True)
class TransposedEach:
    """The last two axes of every stored tensor are swapped, one tensor or several."""

    permutes: ClassVar[bool] = True

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the stored shapes, their last two axes swapped; ArchError below two axes."""
        return [Transposed().shapes([shape], hp)[0] for shape in stored]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return the logical shapes, their last two axes swapped; ArchError below two axes.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        return self.shapes(logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return None: every run would be a single element, so the arrays are decoded whole."""
        return None

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return the stored arrays, each with its last two axes swapped, as views."""
        self.shapes([one.shape for one in stored], hp)
        return [one.swapaxes(-1, -2) for one in stored]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return the logical arrays, each with its last two axes swapped, as views."""
        return self.undo(logical, hp)

    def __str__(self) -> str:
        return "TransposedEach"


@dataclass(frozen=True, slots=True)
class ChannelsLast:
    """A kernel [out, in, ...] is stored as [out, ..., in], as MLX has its convolutions."""

    permutes: ClassVar[bool] = True

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [the stored shape, its last axis second]; ArchError below three axes."""
        shape = only_shape(stored, self)
        if len(shape) < 3:
            raise ArchError(f"{self}: shape {list(shape)}; expected three axes or more")
        return [(shape[0], shape[-1], *shape[1:-1])]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [the logical shape, its second axis last]; ArchError below three axes.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        shape = only_shape(logical, self)
        self.shapes([shape], hp)
        return [(shape[0], *shape[2:], shape[1])]

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return None: every run would be a single element, so the array is decoded whole."""
        return None

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [a view of the stored array with its last axis second]."""
        import numpy as np

        self.shapes([stored[0].shape], hp)
        return [np.moveaxis(stored[0], -1, 1)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [a view of the logical array with its second axis last]."""
        import numpy as np

        self.shapes([logical[0].shape], hp)
        return [np.moveaxis(logical[0], 1, -1)]

    def __str__(self) -> str:
        return "ChannelsLast"


@dataclass(frozen=True, slots=True)
class Oriented(Transposed):
    """The last two axes are written swapped, but files store them either way: the shape decides.

    `rows` and `columns` are the logical sizes. qwen3_vl_moe is published with its experts' matrices
    swapped. transformers 5.23 reads both forms by their shape, and saves them without a change.
    Where both sizes are equal the shape says nothing: such a matrix is read and written unchanged.
    """

    rows: str
    columns: str

    def _is_swapped(self, shape: Shape, hp: Sizes) -> bool:
        """Return whether a stored shape has the last two axes swapped.

        Raises ArchError if the last two sizes are neither (rows, columns) nor (columns, rows).
        """
        rows, columns = size_of(self.rows, hp), size_of(self.columns, hp)
        if shape[-2:] not in ((rows, columns), (columns, rows)):
            raise ArchError(f"{self}: shape {list(shape)}; expected {rows} by {columns} at its end")
        return shape[-2:] != (rows, columns)

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [the logical shape]: (..., rows, columns), however the tensor is stored."""
        shape = only_shape(stored, self)
        return Transposed.shapes(self, stored, hp) if self._is_swapped(shape, hp) else [shape]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [the shape that is written]: the logical one with its last two axes swapped.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        self._is_swapped(only_shape(logical, self), hp)
        return Transposed.shapes(self, logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return [[one run of all elements]] if none changes its place, else None: decode whole."""
        shape = only_shape(stored, self)
        turned = self._is_swapped(shape, hp) and 1 not in shape[-2:]
        return None if turned else [[Move(0, 0, math.prod(shape))]]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the stored array, its last two axes swapped if the shape shows it]."""
        return [stored[0].swapaxes(-1, -2) if self._is_swapped(stored[0].shape, hp) else stored[0]]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the logical array, its last two axes swapped unless they are equally long]."""
        rows, columns = size_of(self.rows, hp), size_of(self.columns, hp)
        return [logical[0] if rows == columns else logical[0].swapaxes(-1, -2)]

    def __str__(self) -> str:
        return f"Oriented({self.rows}, {self.columns})"


@dataclass(frozen=True, slots=True)
class HalvesExchanged:
    """Every row is stored with its second half before its first (MiMo's join of a draft head)."""

    permutes: ClassVar[bool] = True

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [the stored shape]; ArchError unless rows have an even number of elements."""
        shape = only_shape(stored, self)
        if not shape or shape[-1] % 2:
            raise ArchError(f"{self}: shape {list(shape)}; expected rows of two equal halves")
        return [shape]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [the logical shape]; ArchError unless rows have an even number of elements.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        return self.shapes(logical, hp)

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return [two runs for each row of stored elements: its second half, then its first].

        None for more than MAX_MOVES runs: the array is then decoded.
        """
        shape = only_shape(self.shapes(stored, hp), self)
        half, rows = shape[-1] // 2, math.prod(shape[:-1])
        if 2 * rows > MAX_MOVES:
            return None
        return [[Move(0, at * half, half) for row in range(rows) for at in (2 * row + 1, 2 * row)]]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the stored array with the two halves of every row exchanged]."""
        import numpy as np

        shape = self.shapes([stored[0].shape], hp)[0]
        return [np.roll(stored[0], shape[-1] // 2, axis=-1)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the logical array with the two halves of every row exchanged]."""
        return self.undo(logical, hp)

    def __str__(self) -> str:
        return "HalvesExchanged"


class ChangesValues:
    """Base class of steps that change every value and move none: shapes stay."""

    __slots__ = ()
    permutes: ClassVar[bool] = False

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [the stored shape]: the step changes values, not shapes."""
        return [only_shape(stored, self)]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [the logical shape]: the step changes values, not shapes.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        return [only_shape(logical, self)]

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return None: values change, so the array has to be decoded."""
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
        """Return [the stored array minus the constant, as float32]."""
        import numpy as np

        return [np.asarray(stored[0], np.float32) - np.float32(self.amount)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the logical array plus the constant, as float32]."""
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

    def _checked_shape(self, shape: Shape, expressions: tuple[str, ...], hp: Sizes) -> Shape:
        """Return the sizes of `expressions`; ArchError unless `shape` has as many elements."""
        wanted = shape_of(expressions, hp)
        if math.prod(shape) != math.prod(wanted):
            raise ArchError(
                f"{self}: shape {list(shape)} has {math.prod(shape)} elements; expected "
                f"{list(wanted)}"
            )
        return wanted

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [the logical shape]; ArchError unless the element counts are equal."""
        return [self._checked_shape(only_shape(stored, self), self.logical, hp)]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [the shape that is written]; ArchError unless the element counts are equal.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        return [self._checked_shape(only_shape(logical, self), self.stored, hp)]

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return [[one run of all elements]]: none changes its place."""
        return [[Move(0, 0, math.prod(self.shapes(stored, hp)[0]))]]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the stored array reshaped to the logical shape]."""
        return [stored[0].reshape(self._checked_shape(stored[0].shape, self.logical, hp))]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the logical array reshaped to the shape that is written]."""
        return [logical[0].reshape(self._checked_shape(logical[0].shape, self.stored, hp))]

    def __str__(self) -> str:
        return f"Reshaped({', '.join(self.logical)})"
