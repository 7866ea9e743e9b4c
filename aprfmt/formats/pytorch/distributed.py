"""What a rank's file holds of tensors that ranks divide: DTensor and ShardedTensor of torch.

A *part* is what one rank's file holds of a tensor that ranks divide; the *whole* is the tensor.

Names as in torch/distributed/tensor/_dtensor_spec.py, torch/distributed/device_mesh.py and
torch/distributed/_shard/sharded_tensor/api.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aprfmt.formats.pytorch.pickle_values import PickledDict, PickledObject, TensorValue

LOCAL = "_local_tensor"  # of a DTensor: what the rank holds
SHARDS = "local_shards"  # of a ShardedTensor: the same, as a list
SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_PLACED = ("Shard", "Replicate")  # placements by which that is a part of the tensor, or all of it


@dataclass(frozen=True)
class RankPart:
    """A part of a distributed tensor, and where it begins in that: an index on each axis.

    `offsets` is None where the file does not say it.
    """

    tensor: TensorValue
    offsets: tuple[int, ...] | None


def rank_parts(value: TensorValue) -> list[RankPart]:
    """Return the parts that a file has of a distributed tensor; [] for any other tensor.

    [], too, for a summand of a DTensor, whose numbers are not those of the tensor.
    """
    if value.storage is not None:
        return []
    if value.kind == SHARDED:
        return _shards(value)
    local, spec = value.parts.get(LOCAL), _state(value.parts.get("_spec"))
    placed = spec.get("placements")
    if not isinstance(local, TensorValue) or not placed:
        return []
    kinds = placed if isinstance(placed, list | tuple) else [placed]
    if not all(isinstance(one, PickledObject) and one.kind.name in _PLACED for one in kinds):
        return []
    return [RankPart(local, _offsets(value.shape, local.shape, kinds, _state(spec.get("mesh"))))]


def _state(value: Any) -> PickledDict:
    """Return the attributes of a described object; no attributes for anything else."""
    state = value.state if isinstance(value, PickledObject) else None
    if isinstance(state, tuple):  # attributes without and with slots
        pairs = [pair for one in state if isinstance(one, PickledDict) for pair in one.pairs]
        return PickledDict(pairs)
    return state if isinstance(state, PickledDict) else PickledDict()


def _shards(value: TensorValue) -> list[RankPart]:
    """Return the shards of a ShardedTensor; [] where one of them is no tensor in a shard."""
    held = value.parts.get(SHARDS)
    found = []
    for shard in held if isinstance(held, list) else []:
        tensor = _state(shard).get("tensor")
        if not isinstance(tensor, TensorValue):
            return []
        said = _state(_state(shard).get("metadata")).get("shard_offsets")
        found.append(RankPart(tensor, _offsets_inside(said, tensor.shape, value.shape)))
    return found


def _offsets_inside(
    offsets: Any, part: Sequence[int], whole: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the offsets of a part as a tuple; None unless the part is inside the whole by them."""
    if not isinstance(offsets, list | tuple) or not len(offsets) == len(part) == len(whole):
        return None
    if any(type(one) is not int or one < 0 for one in offsets):
        return None
    fits = all(at + n <= size for at, n, size in zip(offsets, part, whole, strict=True))
    return tuple(offsets) if fits else None


def _offsets(
    whole: Sequence[int], part: Sequence[int], placed: Sequence[PickledObject], mesh: PickledDict
) -> tuple[int, ...] | None:
    """Return where a rank's part of a DTensor begins; None where its mesh does not say that.

    Each axis of the mesh divides a dimension further, in chunks as torch.chunk makes them. None,
    too, where the part would have another size by that.
    """
    at, sizes = mesh.get("_coordinate_on_dim"), _mesh_sizes(mesh)
    if not isinstance(at, list | tuple) or not len(at) == len(sizes) == len(placed):
        return None
    offsets, left = [0] * len(whole), list(whole)
    for number, ranks, placement in zip(at, sizes, placed, strict=True):
        if placement.kind.name != "Shard":
            continue
        axis = _state(placement).get("dim")
        if type(axis) is not int or not 0 <= axis < len(left) or type(number) is not int:
            return None
        chunk = -(-left[axis] // ranks)
        begin = min(number * chunk, left[axis])
        offsets[axis] += begin
        left[axis] = min(chunk, left[axis] - begin)
    return _offsets_inside(offsets, part, whole) if list(part) == left else None


def _mesh_sizes(mesh: PickledDict) -> list[int]:
    """Return the number of ranks on each axis of a DeviceMesh; [] where it does not say that."""
    ranks = mesh.get("mesh")
    if isinstance(ranks, TensorValue):  # before torch 2.10
        return list(ranks.shape)
    axes = _state(mesh.get("_layout")).get("axes")
    found = []
    for axis in axes if isinstance(axes, list | tuple) else ():
        shape = _state(axis).get("shape")
        each = shape if isinstance(shape, list | tuple) else [shape]
        if not all(type(one) is int and one > 0 for one in each):
            return []
        found.append(math.prod(each))
    return found
