"""States as DeepSpeed and servers with adapters save them: what is beside the weights is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.run import aprfmt
from tests.diagnosis.engines import tiny_folder
from tests.model.engine_states import State, of_rank, published, save

DOWN = "model.layers.1.mlp.down_proj.weight"


def given() -> State:
    """Return the published tensors of the tiny llama."""
    return published(tiny_folder("llama"))


def checkpoint(folder: Path, state: State) -> Path:
    """Write DeepSpeed's checkpoint of ZeRO stage 1: the module whole, moments by rank."""
    folder.mkdir()
    shapes = [{name: value.shape for name, value in state.items()}]
    held = {"module": state, "optimizer": None, "param_shapes": shapes, "global_steps": 10}
    torch.save(held, folder / "mp_rank_00_model_states.pt")
    for rank in range(2):
        moments: Any = {"state": {0: {"exp_avg": torch.ones(10)}}}
        of_optimizer = {
            "single_partition_of_fp32_groups": [torch.ones(10)], "base_optimizer_state": moments,
        }  # fmt: skip
        torch.save(
            {"optimizer_state_dict": of_optimizer},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return folder


def test_moments_beside_the_weights_are_no_difference(tmp_path: Path) -> None:
    """Seen red: two tensors "only in B"."""
    done = aprfmt("diff", tiny_folder("llama"), checkpoint(tmp_path / "a", given()), "--json")
    assert (done.code, done.json["equal"]) == (0, True), done.out[:2000]
    other = checkpoint(tmp_path / "b", {**given(), DOWN: given()[DOWN] + 1})
    done = aprfmt("diff", tiny_folder("llama"), other, "--json")
    apart = [one["key"] for one in done.json["tensors"] if one["verdict"] != "SAME_BYTES"]
    assert (done.code, apart) == (1, ["L1.ffn_down.weight"])


def test_weights_that_zero_divides_are_not_an_engines(tmp_path: Path) -> None:
    """Seen red: "the engine packed it for its kernel"."""
    folder = tmp_path / "s"
    folder.mkdir()
    for rank in range(2):
        empty = {name: torch.empty(0, dtype=value.dtype) for name, value in given().items()}
        file = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        torch.save({"module": empty}, file)
    done = aprfmt("diff", tiny_folder("llama"), folder, "-v")
    assert done.code == 2 and "zero_to_fp32.py" in done.out and "kernel" not in done.out


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_that_may_have_adapters_are_the_layers(ranks: int, tmp_path: Path) -> None:
    """Seen red: every matrix was "only in" one of the two."""
    states = [
        {name.replace("_proj.weight", "_proj.base_layer.weight"): value
         for name, value in of_rank(given(), rank, ranks, 16, False).items()}
        for rank in range(ranks)
    ]  # fmt: skip
    done = aprfmt("diff", tiny_folder("llama"), save(tmp_path / "a", states), "--json")
    assert (done.code, done.json["causes"]) == (0, []), done.out[:2000]
    name = DOWN.replace(".weight", ".base_layer.weight")
    states[-1][name] = states[-1][name] + 1
    done = aprfmt("diff", tiny_folder("llama"), save(tmp_path / "b", states), "--json")
    apart = [one["key"] for one in done.json["tensors"] if one["verdict"] != "SAME_BYTES"]
    assert (done.code, apart) == (1, ["L1.ffn_down.weight"])
