"""Layout steps of recurrent layers: kernels of short convolutions, decay rates.

Sources: transformers' Qwen3NextGatedDeltaNet, llama.cpp's converter (conversion/qwen.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aprfmt.arch.layout_steps import ChangesValues, Shape, Shapes, Sizes, only_shape
from aprfmt.arch.size_expressions import size_of
from aprfmt.arch.spec import Array, Move
from aprfmt.errors import ArchError

if TYPE_CHECKING:
    from aprfmt.arch.element_moves import Moves


@dataclass(frozen=True, slots=True)
class Depthwise:
    """The kernel of a depthwise convolution, [channels, taps], stored with axes of size one.

    [channels, 1, taps] (torch's Conv1d) is written; [channels, taps, 1] (MLX), [channels, taps]
    and [1, channels, 1, taps] (GGUF's kimi-linear) are read too. Channels come before taps in
    all of them, so that no transposed kernel is accepted.
    """

    channels: str
    taps: str
    permutes: ClassVar[bool] = True

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return [(channels, taps)], the logical shape; ArchError for any other kernel."""
        shape = only_shape(stored, self)
        whole = size_of(self.channels, hp), size_of(self.taps, hp)
        channels, taps = whole
        accepted = whole, (channels, 1, taps), (*whole, 1), (1, channels, 1, taps)
        if shape not in accepted:
            raise ArchError(
                f"{self}: shape {list(shape)}; expected {[whole[0], 1, whole[1]]}: a kernel of "
                f"{whole[1]} taps for each of {whole[0]} channels"
            )
        return [whole]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return [(channels, 1, taps)], the shape that is written.

        `count`, the number of stored tensors, is used only by steps that join several of them.
        """
        channels, taps = self.shapes([only_shape(logical, self)], hp)[0]
        return [(channels, 1, taps)]

    def moves(self, stored: Shapes, hp: Sizes) -> "Moves | None":
        """Return [[one run of all elements]]: none changes its place."""
        return [[Move(0, 0, math.prod(self.shapes(stored, hp)[0]))]]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the kernel reshaped to [channels, taps]]."""
        return [stored[0].reshape(self.shapes([stored[0].shape], hp)[0])]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [the kernel reshaped to [channels, 1, taps]]."""
        return [logical[0].reshape(self.stored_shapes([logical[0].shape], hp, 1)[0])]

    def __str__(self) -> str:
        return f"Depthwise({self.taps})"


@dataclass(frozen=True, slots=True)
class NegativeExp(ChangesValues):
    """Files store the decay rate -exp(x); the logical value is its logarithm x.

    `undo(apply(x))` may differ in the last bits of float32, for rates far from 1 in more. A caller
    that must be exact compares, and stores the source's bits where they differ.
    """

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [log of the negated rate] as float32, rounded once; NaN for a rate above zero."""
        import numpy as np

        with np.errstate(all="ignore"):
            return [np.log(-np.asarray(stored[0], np.float64)).astype(np.float32)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Return [minus the exponential] as float32, rounded once."""
        import numpy as np

        with np.errstate(all="ignore"):
            return [-np.exp(np.asarray(logical[0], np.float64)).astype(np.float32)]

    def __str__(self) -> str:
        return "NegativeExp"
