"""Tensors that a trainer's ranks hold in parts, each with its place: DTensor and ShardedTensor.

The reader of torch.save gives a rank's part under the tensor's name, and among the file's values
`NAME.global_shape` and `NAME.shard_offsets`. A trainer divides otherwise than an engine: every
tensor by its first axis, in chunks of unequal sizes, down to none.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import LazyTensor, Source, TensorInfo
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError
from aprfmt.model.rank_tensors import Cells, RankTensor, element_array
from aprfmt.tensors.runs import hold_same_bytes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlacedPart:
    """A rank's part of a tensor of `shape`, which begins at `offsets`, an index on each axis."""

    rank: int
    tensor: LazyTensor
    shape: Shape
    offsets: Shape


class JoinedParts(LazyTensor):
    """A whole tensor, put together from the parts of ranks when its bytes are read."""

    __slots__ = ("_parts", "info")

    info: TensorInfo
    makes = True

    def __init__(self, name: str, parts: Sequence[PlacedPart]) -> None:
        """Store the parts, which cover the tensor, each element once."""
        first, row = parts[0], ENCODINGS[parts[0].tensor.info.encoding]
        shape = first.shape
        size, width = row.nbytes(shape), row.row_bytes(shape)
        self.info = TensorInfo(name, shape, first.tensor.info.encoding, 0, size, width)
        self._parts = tuple(parts)

    @property
    def made_of(self) -> tuple[LazyTensor, ...]:
        """The parts of the ranks."""
        return tuple(one.tensor for one in self._parts)

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes [start, stop) of the whole tensor in row-major order."""
        size = self.info.nbytes // max(1, math.prod(self.info.shape))
        whole: Cells = np.empty(self.info.shape, f"V{size}")
        for one in self._parts:
            whole[_region(one)] = element_array(one.tensor)
        data = whole.reshape(-1).view(np.uint8).data.toreadonly()
        return data[start : self.info.nbytes if stop is None else stop]

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the pages of all parts."""
        for one in self._parts:
            one.tensor.drop()


def join_placed_parts(path: Path, sources: Sequence[tuple[Source, int]]) -> dict[str, RankTensor]:
    """Return {name: whole tensor} of those tensors of a state whose files say where parts belong.

    `sources` are the files, each with the number of its rank; `path` begins messages. Ranks that
    hold the same part are compared: a tensor of which they differ is there once for each value.
    Raises FormatError where a part is in no file, or parts overlap.
    """
    found: dict[str, list[PlacedPart]] = {}
    for source, rank in sources:
        for name, tensor in source.tensors.items():
            place = _place(source.metadata, name)
            if place is not None:
                found.setdefault(name, []).append(PlacedPart(rank, tensor, *place))
    for source, rank in sources:  # a rank that has all of it says no place
        for name in found.keys() & source.tensors.keys():
            tensor, shape = source.tensors[name], found[name][0].shape
            if tensor.info.shape == shape and _place(source.metadata, name) is None:
                found[name].append(PlacedPart(rank, tensor, shape, (0,) * len(shape)))
    return {
        name: _join(f"{path}: {shorten(name, 80)!r}", name, parts) for name, parts in found.items()
    }


def _place(values: Mapping[str, object], name: str) -> tuple[Shape, Shape] | None:
    """Return (shape of the whole, offsets) of a file's part of a tensor; None where it says none.

    `values` are those of the file other than its tensors.
    """
    shape, offsets = values.get(f"{name}.global_shape"), values.get(f"{name}.shard_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list):
        return None
    return tuple(shape), tuple(offsets)


def _region(part: PlacedPart) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that a part fills."""
    sizes = part.tensor.info.shape
    return tuple(slice(at, at + size) for at, size in zip(part.offsets, sizes, strict=True))


def _join(where: str, name: str, parts: Iterable[PlacedPart]) -> RankTensor:
    """Return the tensor `name` put together from its parts; `where` begins messages.

    Raises FormatError where the parts do not cover it, each element once.
    """
    places: dict[tuple[Shape, Shape], list[PlacedPart]] = {}
    for one in sorted(parts, key=lambda part: part.rank):
        shape = tuple(one.tensor.info.shape)
        if math.prod(shape):
            places.setdefault((one.offsets, shape), []).append(one)
    held = list(places.values())
    if not held:
        raise FormatError(f"{where}: no rank holds any of it")
    first = [each[0] for each in held]
    _check_cover(where, first)
    others = [one for each in held for one in each[1:]]
    unlike = [one for one in others if not _equals_first(one, held)]
    whole = [JoinedParts(name, first)]
    whole += [JoinedParts(name, [_part_or_first(one, each) for each in held]) for one in unlike]
    return RankTensor(name, tuple(whole), (first[0].rank, *(one.rank for one in unlike)))


def _check_cover(where: str, parts: Sequence[PlacedPart]) -> None:
    """Raise FormatError unless parts of a tensor cover it, each element once."""
    shape = parts[0].shape
    if any(one.shape != shape for one in parts):
        raise FormatError(f"{where}: ranks say other shapes of it; give the ranks of one run")
    grid = _edges(parts)  # cells between two edges are all in a part, or not at all
    counts = np.zeros(tuple(len(edges) - 1 for edges in grid), np.int64)
    for one in parts:
        sizes = one.tensor.info.shape
        cells = tuple(
            slice(edges.index(at), edges.index(at + size))
            for edges, at, size in zip(grid, one.offsets, sizes, strict=True)
        )
        counts[cells] += 1
    if counts.max(initial=0) > 1:
        raise FormatError(f"{where}: parts of two ranks overlap; give the ranks of one run")
    if counts.min(initial=1) < 1:
        gap = np.argwhere(counts == 0)[0]
        begin = [edges[at] for edges, at in zip(grid, gap, strict=True)]
        raise FormatError(
            f"{where}: no rank holds it from {begin} on, of {list(shape)}; give the folder with "
            "the files of all ranks"
        )


def _edges(parts: Sequence[PlacedPart]) -> list[list[int]]:
    """Return on each axis, in order, where parts of a tensor begin and end, with its own ends."""
    found = []
    for axis, size in enumerate(parts[0].shape):
        begins = {one.offsets[axis] for one in parts}
        ends = {one.offsets[axis] + one.tensor.info.shape[axis] for one in parts}
        found.append(sorted({0, size, *begins, *ends}))
    return found


def _equals_first(part: PlacedPart, held: Iterable[Sequence[PlacedPart]]) -> bool:
    """Return whether a part has the bytes of the first rank that holds the same place."""
    first = next(each[0] for each in held if part in each)
    return hold_same_bytes(first.tensor, part.tensor)


def _part_or_first(part: PlacedPart, each: Sequence[PlacedPart]) -> PlacedPart:
    """Return `part` if it is one of the parts of a place, else the first of them."""
    return part if part in each else each[0]
