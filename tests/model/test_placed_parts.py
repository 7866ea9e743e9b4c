"""A trainer's ranks hold parts of tensors, each with its place: they are put together by that."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from aprfmt.errors import FormatError
from aprfmt.model.placed_parts import JoinedParts, PlacedPart, _join
from tests.cli.run import aprfmt
from tests.diagnosis.engines import tiny_folder
from tests.model.engine_states import State, published

pytestmark = pytest.mark.filterwarnings("ignore")
DOWN = "model.layers.1.mlp.down_proj.weight"
Change = Callable[[int, str, torch.Tensor], torch.Tensor]


def unchanged(rank: int, name: str, part: torch.Tensor) -> torch.Tensor:
    """Return a rank's part as it is."""
    return part


def as_dtensors(
    given: Mapping[str, torch.Tensor], sizes: tuple[int, ...], dims: tuple[int, ...], change: Change
) -> list[State]:
    """Return each rank's state of DTensors; `dims` are divided by the axes of the mesh, -1 none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    placed = [Replicate() if dim < 0 else Shard(dim) for dim in dims]
    count, states = int(torch.tensor(sizes).prod()), []
    for rank in range(count):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
        mesh, state = init_device_mesh("cpu", sizes), {}
        at = mesh.get_coordinate() or ()
        for name, whole in given.items():
            local = whole
            for axis, dim in enumerate(dims):
                if dim >= 0:
                    chunks = local.chunk(sizes[axis], dim)
                    local = chunks[at[axis]] if at[axis] < len(chunks) else local.narrow(dim, 0, 0)
            local = change(rank, name, local.clone(memory_format=torch.contiguous_format))
            state[name] = DTensor.from_local(
                local, mesh, placed, run_check=False, shape=whole.shape, stride=whole.stride()
            )
        states.append(state)
        torch.distributed.destroy_process_group()
    return states


def save(folder: Path, states: list[State], name: str = "rank{}.pt") -> Path:
    """Write one file a rank."""
    folder.mkdir()
    for rank, state in enumerate(states):
        torch.save(state, folder / name.format(rank))
    return folder


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "two": ((2,), (0,)),
    "uneven chunks": ((3,), (0,)),
    "ranks without a part": ((60,), (0,)),
    "replicas": ((2, 2), (-1, 0)),
}


def trained(layout: str, change: Change = unchanged) -> list[State]:
    """Return the ranks' states of a tiny llama in one of LAYOUTS."""
    return as_dtensors(published(tiny_folder("llama")), *LAYOUTS[layout], change)


@pytest.mark.parametrize("name", ["rank{}.pt", "model_world_size_2_rank_{}.pt"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_a_trainer_are_the_model(layout: str, name: str, tmp_path: Path) -> None:
    """Seen red: rows of k and v were lost, and ranks of a mesh held other key heads."""
    path = save(tmp_path / "s", trained(layout), name)
    done = aprfmt("diff", tiny_folder("llama"), path, "--json")
    assert (done.code, done.json["causes"]) == (0, []), done.out[:2000]
    assert {one["verdict"] for one in done.json["tensors"]} == {"SAME_BYTES"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_value_of_one_part_is_the_only_difference(layout: str, tmp_path: Path) -> None:
    """Of the last rank that has a part, a replica among them."""

    def change(rank: int, name: str, part: torch.Tensor) -> torch.Tensor:
        return part + 1 if name == DOWN and rank == min(3, len(states) - 1) else part

    states: list[Any] = [None] * int(torch.tensor(LAYOUTS[layout][0]).prod())
    path = save(tmp_path / "s", trained(layout, change))
    done = aprfmt("diff", tiny_folder("llama"), path, "--json")
    apart = [one["key"] for one in done.json["tensors"] if one["verdict"] != "SAME_BYTES"]
    assert (done.code, apart) == (1, ["L1.ffn_down.weight"])
    assert ("rank 3's is compared" in done.err) == (layout == "replicas")


def test_a_part_that_no_file_has_is_an_error(tmp_path: Path) -> None:
    states = trained("uneven chunks")
    lost = save(tmp_path / "a", states)
    (lost / "rank1.pt").unlink()
    done = aprfmt("diff", tiny_folder("llama"), lost)
    assert done.code == 2 and "rank 1 is missing" in done.err
    last = save(tmp_path / "b", states)
    (last / "rank2.pt").unlink()
    for path in (last, last / "rank0.pt"):
        done = aprfmt("diff", tiny_folder("llama"), path)
        begin = 66 if path == last else 33
        assert done.code == 2 and f"no rank holds it from [{begin}, 0] on, of [97, 48]" in done.err


def test_shards_of_two_files_are_one_tensor(tmp_path: Path) -> None:
    """ShardedTensor, of which each rank has the rows of its own."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import (
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    given, cuts = published(tiny_folder("llama")), (0, 31, 48)
    for rank in range(2):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            shards = [
                Shard.from_tensor_and_offsets(given[DOWN][first:last].clone(), [first, 0], at)
                for at, (first, last) in enumerate(pairwise(cuts))
            ]
            said = ShardedTensorMetadata(
                [one.metadata for one in shards], torch.Size((48, 72)), TensorProperties()
            )
            whole = ShardedTensor._init_from_local_shards_and_global_metadata([shards[rank]], said)
            torch.save({**given, DOWN: whole}, tmp_path / f"rank{rank}.pt")
        finally:
            torch.distributed.destroy_process_group()
    done = aprfmt("diff", tiny_folder("llama"), tmp_path, "--json")
    assert (done.code, done.json["causes"]) == (0, []), done.out[:2000]


class Held:
    """A stored tensor of bytes in memory."""

    def __init__(self, shape: tuple[int, ...], value: int) -> None:
        from aprfmt.base.protocols import TensorInfo

        self.info = TensorInfo("t", shape, "U8", 0, int(torch.tensor(shape).prod()), 1)
        self._value = value

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return the bytes, all of one value."""
        return memoryview(bytes([self._value]) * self.info.nbytes)[start:stop]


def part(offsets: tuple[int, int], shape: tuple[int, int], value: int = 1, of: Any = (4, 6)) -> Any:
    """Return a rank's part of a tensor."""
    held: Any = Held(shape, value)
    return PlacedPart(value, held, of, offsets)


def test_parts_of_two_axes_are_put_in_their_places() -> None:
    parts = [part((0, 0), (3, 2), 1), part((0, 2), (3, 4), 2), part((3, 0), (1, 6), 3)]
    made = JoinedParts("t", parts)
    whole = [1, 1, 2, 2, 2, 2] * 3 + [3] * 6
    assert list(made.raw()) == whole and list(made.raw(5, 9)) == whole[5:9]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([part((0, 0), (4, 5))], r"no rank holds it from \[0, 5\] on, of \[4, 6\]"),
        ([part((0, 0), (3, 6)), part((2, 0), (2, 6))], "parts of two ranks overlap"),
        ([part((0, 0), (3, 6)), part((3, 0), (1, 6), of=(5, 6))], "ranks say other shapes of it"),
        ([part((0, 0), (0, 6))], "no rank holds any of it"),
    ],
)
def test_parts_that_do_not_cover_a_tensor_once_are_refused(parts: Any, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        _join("s: 't'", "t", parts)
