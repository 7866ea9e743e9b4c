"""One rank's stored tensors of a parameter, and their bytes as arrays of whole elements.

A rank's *share* is what it holds of a parameter of an engine. A *part* of a parameter is what it
holds of one published tensor, as q, k and v in qkv_proj.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.element_moves import to_stored
from aprfmt.arch.engine_parameters import EngineParameter, Part, RankLayout
from aprfmt.base.protocols import LazyTensor, Value
from aprfmt.errors import FormatError

Cells = NDArray[np.void]


@dataclass(frozen=True)
class RankTensor:
    """A tensor of an engine's state: its stored share on each rank, and the ranks' numbers."""

    name: str
    parts: tuple[LazyTensor, ...]
    ranks: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first rank's share."""
        return self.parts[0].info.shape


@dataclass(frozen=True)
class EngineReading:
    """How a tensor of an engine's state is read: as which parameter, and how ranks divide it."""

    parameter: EngineParameter
    tensor: RankTensor
    layout: RankLayout

    def rank_arrays(self) -> list[Cells]:
        """Return each rank's share as an array of opaque elements, in the parameter's axes."""
        shape = self.parameter.shape
        return [
            element_array(part).reshape(in_published_axes(part.info.shape, shape))
            for part in self.tensor.parts
        ]

    def published_tensors(
        self, part: Part, hp: Mapping[str, Value], copy: int = 0
    ) -> Sequence[Cells]:
        """Return the published tensors of a part of the parameter, put together from all ranks.

        `copy` chooses among ranks that hold the same rows.
        """
        arrays = self.layout.join_ranks(self.rank_arrays(), copy)
        first = sum(len(one.shapes) for one in self.parameter.parts[: self.index_of(part)])
        return to_stored(part.steps, arrays[first : first + len(part.shapes)], hp)

    def index_of(self, part: Part) -> int:
        """Return the index of a part among the parameter's parts."""
        return next(at for at, one in enumerate(self.parameter.parts) if one is part)

    def copies_of(self, part: Part) -> int:
        """Return how many ranks hold the same rows of a part."""
        layout = self.layout
        if layout.axis is None:
            return layout.ranks
        if not layout.sections:
            return 1
        first = sum(len(one.shapes) for one in self.parameter.parts[: self.index_of(part)])
        sections = layout.sections[first : first + len(part.shapes)]
        return max((one.copies(layout.ranks) for each in sections for one in each), default=1)


def in_published_axes(shape: tuple[int, ...], published: tuple[int, ...]) -> tuple[int, ...]:
    """Return an engine's shape with the axes of the published one, where it has the same rows.

    A depthwise convolution's kernel is [channels, 1, taps] or [channels, taps], a vector [d] or
    [1, d]. Patches are embedded by a convolution or by a matrix of its flattened kernels: that is
    [out, in, height, width] or [out, in * height * width], in one order of elements.
    """
    if len(shape) == len(published) or not shape or not published:
        return shape
    if len(shape) + 1 == len(published) and 1 in published:
        axis = published.index(1)
        return (*shape[:axis], 1, *shape[axis:])
    if [one for one in shape if one != 1] == [one for one in published if one != 1]:
        return published
    if 2 in (len(shape), len(published)) and math.prod(shape[1:]) == math.prod(published[1:]):
        return (shape[0], *published[1:])
    return shape


def element_array(tensor: LazyTensor) -> Cells:
    """Return a stored tensor as an array of opaque elements, without decoding it.

    Raises FormatError for a block encoding, in which no bytes belong to a single element.
    """
    shape, count = tensor.info.shape, math.prod(tensor.info.shape)
    size, rest = divmod(tensor.info.nbytes, max(count, 1))
    if rest or (count and not size):
        raise FormatError(
            f"{tensor.info.name}: {tensor.info.encoding} has no bytes of its own for "
            "each element, and is not put together"
        )
    return np.frombuffer(tensor.raw(), f"V{max(size, 1)}").reshape(shape)
