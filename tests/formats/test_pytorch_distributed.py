"""Tensors that ranks divide, and members of Enum classes: what a rank's file says of them."""

import enum
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aprfmt.formats import open_source
from aprfmt.formats.pytorch.distributed import rank_parts
from tests.formats import pytorch_files as files

pytestmark = pytest.mark.filterwarnings("ignore")
WHOLE = torch.arange(42.0).reshape(7, 6)


class Outer:
    """A class that holds another."""

    @dataclass
    class Inner:
        """A class in a class, which protocols 2 and 3 get by getattr."""

        weight: torch.Tensor


class Backend(enum.Enum):
    """Members whose values are words."""

    FLASH = "flash_attention-2"


class Level(enum.IntEnum):
    """Members whose values are numbers."""

    HIGH = 3


@dataclass
class Options:
    """Settings as trainers save them."""

    backend: Backend
    level: Level
    rate: float


@pytest.fixture(params=[(0, (4,)), (3, (4,)), (1, (2, 2)), (2, (2, 2)), (3, (2, 2)), (5, (3, 2))])
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A mesh of ranks, of which this process is one; nothing is exchanged."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, sizes = request.param
    count = int(torch.tensor(sizes).prod())
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        torch.distributed.destroy_process_group()


def split(whole: torch.Tensor, mesh: Any, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the chunk of a tensor that the process has, of each axis of the mesh in turn."""
    for axis, dim in enumerate(dims):
        if dim >= 0:
            chunks = whole.chunk(mesh.size(axis), dim)
            at = mesh.get_coordinate()[axis]
            whole = chunks[at] if at < len(chunks) else whole.narrow(dim, 0, 0)
    return whole.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0), (-1, 1)])
def test_a_rank_part_is_placed_in_its_tensor(
    dims: tuple[int, int], mesh: Any, tmp_path: Path
) -> None:
    """Offsets are those of the chunks that torch makes, one axis of the mesh after another."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    given = dims[-mesh.ndim :]
    placed = [Replicate() if dim < 0 else Shard(dim) for dim in given]
    local = split(WHOLE, mesh, given)
    made = DTensor.from_local(
        local, mesh, placed, run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
    )
    path = files.save({"w": made}, tmp_path / "x.pt", "zip", 2)
    with open_source(path) as source:
        held = source.tensors["w"]
        assert source.metadata["w.global_shape"] == [7, 6]
        row, column = source.metadata["w.shard_offsets"]
        rows, columns = held.info.shape
        assert bytes(held.raw()) == files.raw(
            WHOLE[row : row + rows, column : column + columns].contiguous()
        )


def test_a_sharded_tensor_is_its_local_shards(tmp_path: Path) -> None:
    """One shard has the tensor's name, several are numbered; each says where it begins."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        state = {}
        for name, cuts in (("one", (7,)), ("two", (3, 4))):
            begins = [sum(cuts[:at]) for at in range(len(cuts))]
            shards = [
                Shard.from_tensor_and_offsets(part.contiguous(), [at, 0], 0)
                for part, at in zip(torch.split(WHOLE, list(cuts)), begins, strict=True)
            ]
            state[name] = sharded_tensor.init_from_local_shards(shards, 7, 6)
        path = files.save(state, tmp_path / "x.pt", "zip", 2)
    finally:
        torch.distributed.destroy_process_group()
    with open_source(path) as source:
        assert sorted(source.tensors) == ["one", "two.0", "two.1"]
        assert bytes(source.tensors["one"].raw()) == files.raw(WHOLE)
        assert bytes(source.tensors["two.1"].raw()) == files.raw(WHOLE[3:].contiguous())
        assert source.metadata["two.0.shard_offsets"] == [0, 0]
        assert source.metadata["two.1.shard_offsets"] == [3, 0]
        assert source.metadata["two.1.global_shape"] == [7, 6]


def test_offsets_outside_of_the_tensor_are_not_said(tmp_path: Path) -> None:
    """A file whose shard would end behind its tensor has no offsets; its shard is read."""
    from aprfmt.formats.pytorch.distributed import SHARDED, SHARDS
    from aprfmt.formats.pytorch.pickle_values import (
        GlobalName,
        PickledDict,
        PickledObject,
        Storage,
        TensorValue,
    )

    part = TensorValue(Storage("0", "float32", 24), "float32", 0, (1, 6), (6, 1))
    for said, found in (([6, 0], (6, 0)), ([7, 0], None), ([0], None), ("x", None)):
        where = PickledObject(GlobalName("m", "S"), state=PickledDict([("shard_offsets", said)]))
        shard = PickledObject(
            GlobalName("m", "S"), state=PickledDict([("tensor", part), ("metadata", where)])
        )
        whole = TensorValue(None, "float32", 0, (7, 6), (6, 1), SHARDED, parts={SHARDS: [shard]})
        assert [one.offsets for one in rank_parts(whole)] == [found]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_members_of_enum_classes_are_their_values(protocol: int, tmp_path: Path) -> None:
    """Seen red: the whole file was refused, as trainers' options with an Enum are."""
    state = {
        "args": Namespace(backend=Backend.FLASH, level=Level.HIGH),
        "options": Options(Backend.FLASH, Level.HIGH, 0.5),
        "list": [Backend.FLASH, SimpleNamespace(level=Level.HIGH)],
        "by member": {Level.HIGH: torch.ones(2), Backend.FLASH: 7},
        "w": torch.zeros(3),
    }
    path = files.save(state, tmp_path / "x.pt", "zip", protocol)
    with open_source(path) as source:
        assert sorted(source.tensors) == ["by member.3", "w"]
        said = source.metadata
        assert (said["args.backend"], said["args.level"]) == ("flash_attention-2", 3)
        assert (said["options.backend"], said["options.rate"]) == ("flash_attention-2", 0.5)
        assert (said["list.0"], said["list.1.level"]) == ("flash_attention-2", 3)
        assert said["by member.flash_attention-2"] == 7
        assert any(f"{__name__}.Backend (" in note.text for note in source.notes)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_an_object_of_a_class_in_a_class_is_described(protocol: int, tmp_path: Path) -> None:
    path = files.save({"x": Outer.Inner(torch.ones(2))}, tmp_path / "x.pt", "zip", protocol)
    with open_source(path) as source:
        assert list(source.tensors) == ["x.weight"]
        assert any("Outer.Inner (1)" in note.text for note in source.notes)
