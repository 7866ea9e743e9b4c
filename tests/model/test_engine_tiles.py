"""Tiles in which engines store matrices for their kernels, laid out as the engines' sources do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.model.engine_repacks import REPACKS
from tests.cli.run import aprfmt
from tests.diagnosis.engines import tiny_folder
from tests.model.engine_states import State, of_rank, published, save

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
HEAD = 16
# Where shuffle_matrix_a of FlashInfer puts the rows of 32.
PLACES = [8 * (row % 4) + row // 4 for row in range(32)]
Chosen = Callable[[str, Any], bool]


def folder(arch: str) -> Path:
    """Return a tiny model of bfloat16, the dtype of these kernels."""
    return tiny_folder(arch, "bfloat16", **SIZES)


def aiter(x: Any) -> Any:
    """Return a matrix, or a stack of them, as AITER's shuffle_weight((16, 16)) lays it out."""
    run = 16 // x.element_size()
    view = x.reshape(-1, x.shape[-2] // 16, 16, x.shape[-1] // 32, 32 // run, run)
    return view.permute(0, 1, 3, 4, 2, 5).reshape(x.shape).contiguous()


def amx(x: Any) -> Any:
    """Return a matrix, or a stack of them, as convert_weight_packed writes it."""
    if x.ndim == 3:
        return torch.stack([amx(one) for one in x])
    blocks = [
        x[n : n + 32].reshape(-1, x.shape[1] // 2, 2).permute(1, 0, 2).reshape(-1)
        for n in range(0, len(x), 32)
    ]
    return torch.cat(blocks).reshape(x.shape)


def shuffled(x: Any) -> Any:
    """Return a matrix with its rows exchanged as shuffle_matrix_a(x, 128) does."""
    order = torch.empty(len(x), dtype=torch.long)
    for row in range(len(x)):
        order[row // 32 * 32 + PLACES[row % 32]] = row
    return x[order]


def in_turn(x: Any) -> Any:
    """Return a matrix whose rows alternate, up before gate: swap_w13_to_w31, then reordered."""
    gate, up = x.chunk(2)
    return torch.stack([up, gate], 1).reshape(x.shape)


def blocks(x: Any) -> Any:
    """Return a matrix as convert_to_block_layout of its bytes, 128 at a time, lays it out."""
    return x.view(torch.uint8).reshape(len(x), -1, 128).permute(1, 0, 2).contiguous().view(x.dtype)


def of_experts(gates: Callable[[Any], Any], down: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return what lays out each expert's matrix, gate and up otherwise than down."""

    def change(name: str, x: Any) -> Any:
        return torch.stack([(gates if name.endswith("w13_weight") else down)(one) for one in x])

    return change


def experts(name: str, x: Any) -> bool:
    """Choose stacks of experts."""
    return bool(x.ndim > 2)


def dense(name: str, x: Any) -> bool:
    """Choose the matrices of layers."""
    return bool(".layers." in name and x.ndim == 2 and not name.endswith("gate.weight"))


LAID_OUT: dict[str, tuple[str, Chosen, Callable[[str, Any], Any], list[str]]] = {
    "aiter, experts": (
        "mixtral", experts, lambda name, x: aiter(x),
        ["6 stacks of experts hold tiles of 16 rows and 32 columns: right for AITER's kernels"],
    ),
    "aiter, dense": (
        "llama", dense, lambda name, x: aiter(x), ["12 matrices hold tiles of 16 rows"],
    ),
    "amx, experts": (
        "mixtral", experts, lambda name, x: amx(x),
        ["6 stacks of experts hold pairs of columns of 32 rows at a time: right for AMX"],
    ),
    "amx, dense": ("llama", dense, lambda name, x: amx(x), ["12 matrices hold pairs of columns"]),
    "amx, with the output": (
        "llama", lambda name, x: dense(name, x) or name == "lm_head.weight",
        lambda name, x: amx(x), ["12 matrices hold pairs", "1 output matrices hold pairs"],
    ),
    "TensorRT-LLM, FP8's rows": (
        "mixtral", experts, of_experts(lambda x: shuffled(in_turn(x)), shuffled),
        ["hold up before gate, rows in turn and exchanged in 32", "hold rows exchanged in 32 at"],
    ),
    "TensorRT-LLM, blocks": (
        "mixtral", experts,
        of_experts(lambda x: blocks(shuffled(in_turn(x))), lambda x: blocks(shuffled(x))),
        ["hold up before gate in blocks of 128 bytes", "experts hold blocks of 128 bytes"],
    ),
}  # fmt: skip


def states(kind: str, ranks: int, layers: str = "") -> list[State]:
    """Return the ranks' states in an engine's tiles, of the layers with this in their names."""
    arch, chosen, change, _ = LAID_OUT[kind]
    given = published(folder(arch))
    return [
        {
            name: change(name, x) if chosen(name, x) and layers in name else x
            for name, x in of_rank(given, rank, ranks, HEAD, False).items()
        }
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", LAID_OUT)
def test_tiles_of_all_matrices_are_the_engines(kind: str, ranks: int, tmp_path: Path) -> None:
    """Seen red: other values in every matrix, or shapes that differ."""
    arch, *_, says = LAID_OUT[kind]
    done = aprfmt("diff", folder(arch), save(tmp_path / "s", states(kind, ranks)), "--json")
    assert (done.code, done.json["causes"]) == (0, []), done.out[:2000]
    assert {one["verdict"] for one in done.json["tensors"]} == {"SAME_BYTES"}
    for one in says:
        assert one in done.err, done.err


@pytest.mark.parametrize("kind", LAID_OUT)
def test_tiles_of_one_layer_are_a_fault(kind: str, tmp_path: Path) -> None:
    arch = LAID_OUT[kind][0]
    state = save(tmp_path / "s", states(kind, 1, ".layers.1."))
    done = aprfmt("diff", folder(arch), state, "--json")
    assert done.code == 1 and "right for" not in done.err
    apart = {one["key"] for one in done.json["tensors"] if one["verdict"] != "SAME_BYTES"}
    assert apart and {key.partition(".")[0] for key in apart} == {"L1"}


@pytest.mark.parametrize("kind", LAID_OUT)
def test_another_value_in_tiles_is_the_only_difference(kind: str, tmp_path: Path) -> None:
    """A matrix of layer 2 that was loaded wrongly does not make a fault of the tiles."""
    arch, chosen, *_ = LAID_OUT[kind]
    held = states(kind, 1)
    name = next(name for name, x in held[0].items() if ".2." in name and chosen(name, x))
    held[0][name][..., 0] += 1
    done = aprfmt("diff", folder(arch), save(tmp_path / "s", held), "--json")
    apart = {one["key"] for one in done.json["tensors"] if one["verdict"] != "SAME_BYTES"}
    assert done.code == 1 and "right for" in done.err
    assert apart and {key.partition(".")[0] for key in apart} == {"L2"}


def test_gate_before_up_in_blocks_is_no_layout(tmp_path: Path) -> None:
    """The kernels want up first: the other order is not read as theirs."""
    swapped = [
        {name: x.roll(x.shape[1] // 2, 1) if name.endswith("w13_weight") else x
         for name, x in of_rank(published(folder("mixtral")), 0, 1, HEAD, False).items()}
    ]  # fmt: skip
    _, chosen, change, _ = LAID_OUT["TensorRT-LLM, FP8's rows"]
    held = [{name: change(name, x) if chosen(name, x) else x for name, x in swapped[0].items()}]
    done = aprfmt("diff", folder("mixtral"), save(tmp_path / "s", held), "--json")
    assert done.code == 1 and "up before gate" not in done.err


@pytest.mark.parametrize("repack", REPACKS, ids=lambda one: one.says[:20])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(3, 64, 64), (3, 48, 64), (3, 30, 10), (3, 2, 64, 64)])
def test_a_layout_says_the_shape_that_its_undoing_has(
    repack: Any, size: int, shape: tuple[int, ...]
) -> None:
    """Every element comes once."""
    if len(shape) != 3 + repack.axes:
        return
    try:
        loaded = repack.loaded_shape(shape, size)
    except ValueError:
        return
    cells = np.frombuffer(np.random.RandomState(0).bytes(int(np.prod(shape)) * size), f"V{size}")
    made = repack.undo(cells.reshape(shape))
    assert made.shape == loaded
    assert sorted(made.reshape(-1).tolist()) == sorted(cells.tolist())
