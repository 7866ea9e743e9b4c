"""Names of arrays as scripts and file systems change them: they are read as the modules' paths."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.inference.engines.plain_names import is_module_name, plain_names
from tests.inference.engine_dumps import state
from tests.inference.engines.test_rank_dumps import (
    WHOLE,
    equal_points,
    of_rank,
    opened,
    own_of,
    written,
)
from tests.models import IDS

LAYER = "model.layers.0"
RENAMED = {
    "model_layers_0_self_attn_qkv_proj": f"{LAYER}.self_attn.qkv_proj",
    "model_layers_0_self_attn_attn": f"{LAYER}.self_attn.attn",
    "model_layers_0_mlp_gate_up_proj": f"{LAYER}.mlp.gate_up_proj",
    "model_layers_10_mlp_act_fn": "model.layers.10.mlp.act_fn",
    "model_layers_0_block_sparse_moe_experts": f"{LAYER}.block_sparse_moe.experts",
    "model_layers_0_post_attention_layernorm_1": f"{LAYER}.post_attention_layernorm.1",
    "layers_0_self_attn_o_proj": "layers.0.self_attn.o_proj",
    "model_layers_0_self_attn_o_proj#in": f"{LAYER}.self_attn.o_proj#in",
    "model_layers_0_0": f"{LAYER}.0",
    "model_embed_tokens": "model.embed_tokens",
    "model_norm_1": "model.norm.1",
    "model_norm.1": "model.norm.1",
    "transformer_h_0_attn_c_proj": "transformer.h.0.attn.c_proj",
    "tensors.model.norm.0": "model.norm.0",
    "activations.model.layers.0.mlp": f"{LAYER}.mlp",
    f"{LAYER}.post_attention_layernorm.output.1": f"{LAYER}.post_attention_layernorm.1",
    f"{LAYER}.self_attn.o_proj.input": f"{LAYER}.self_attn.o_proj#in",
}
AS_THEY_ARE = (
    "logits_processor", "input_ids", "hidden_states_3", "attn_norm-0", "ffn_out", "l_out-3",
    "post_attention_layernorm", "my_own_thing", "model_of_mine", "x_layers_0_of_mine", "tensors.x",
    f"{LAYER}.self_attn.qkv_proj", "L0.attn_out", "layers_0", "7", "", "_", "model_" * 500,
)  # fmt: skip


@pytest.mark.parametrize("name", RENAMED)
def test_a_changed_name_is_the_modules_path(name: str) -> None:
    assert plain_names([name]) == {RENAMED[name]: name}
    assert is_module_name(RENAMED[name].partition("#")[0])


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_other_names_stay_as_they_are(name: str) -> None:
    (plain,) = plain_names([name])
    assert plain == name or (name == "layers_0" and plain == "layers.0")


def test_a_name_that_another_array_has_is_not_taken() -> None:
    names = ["model_norm", "model.norm", "tensors.model.norm", "model_embed_tokens"]
    assert plain_names(names) == {
        "model_norm": "model_norm", "model.norm": "model.norm",
        "tensors.model.norm": "tensors.model.norm", "model.embed_tokens": "model_embed_tokens",
    }  # fmt: skip


def members(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of a pass, those of a tuple numbered."""
    for name, value in found.items():
        for number, one in enumerate(value if isinstance(value, list) else [value]):
            yield f"{name}.{number}" if isinstance(value, list) else name, one


def underscored(folder: Path) -> None:
    """Two ranks with a file for each array, whose name has underscores for the dots."""
    for rank in range(2):
        place = folder / f"rank{rank}"
        place.mkdir(parents=True)
        ids = {"input_ids": torch.tensor(IDS), "positions": torch.arange(len(IDS))}
        for name, value in members({**ids, **state(written(), of_rank(rank, 2))}):
            torch.save(value, place / f"{name.replace('.', '_')}.pt")


def underscored_alone(folder: Path) -> None:
    """The same of one process, as .npy."""
    folder.mkdir()
    for name, value in members({"input_ids": torch.tensor(IDS), **state(written())}):
        np.save(folder / f"{name.replace('.', '_')}.npy", value.numpy())


def below_a_word(folder: Path) -> None:
    """vLLM's file of a rank and pass, the arrays beside what is said of the batch."""
    (folder / "rank0").mkdir(parents=True)
    said = {"input_ids": list(IDS), "positions": list(range(len(IDS))), "req_ids": ["a"]}
    torch.save({"metadata": said, "tensors": state(written())}, folder / "rank0" / "Pass1.pt")


def with_outputs(folder: Path) -> None:
    """A script's hooks, which call what a module returns NAME.output.N."""
    folder.mkdir()
    held = {
        f"{name}.output.{number}" if isinstance(value, list) else name: one
        for name, value in state(written()).items()
        for number, one in enumerate(value if isinstance(value, list) else [value])
    }
    torch.save({"input_ids": torch.tensor(IDS), **held}, folder / "Pass0.pt")


def of_tensorrt(folder: Path) -> None:
    """TensorRT-LLM's folders of ranks and iterations, below the one that is given."""
    for rank in range(2):
        place = folder / "tllm_debug" / "PP_0" / f"TP_{rank}" / "CP_0" / "iteration_1"
        place.mkdir(parents=True)
        for name, value in members({**WHOLE, **state(written(), of_rank(rank, 2))}):
            np.save(place / f"{name}.npy", value.numpy())


def of_numpy(folder: Path) -> None:
    """Arrays of numpy in a file of torch.save."""
    folder.mkdir()
    held = {name: value.numpy() for name, value in members({**WHOLE, **state(written())})}
    torch.save(held, folder / "Pass0.pt")


WRITERS: list[Callable[[Path], None]] = [
    underscored, underscored_alone, below_a_word, with_outputs, of_tensorrt, of_numpy,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITERS, ids=lambda one: one.__name__)
def test_all_points_of_a_dump_are_read(write: Callable[[Path], None], tmp_path: Path) -> None:
    """Seen red: arrays were called no capture point, or a gated product an activation."""
    write(tmp_path / "d")
    with opened(tmp_path / "d") as trace:
        found = equal_points(trace, own_of(), len(IDS))
        assert not trace.run["unknown"], trace.run["unknown"]
    assert {"embd", "q", "k", "v", "attn", "attn_out", "mid", "ffn_norm", "ffn_mul", "ffn_gate",
            "ffn_up", "ffn_out", "out", "final_norm", "logits"} <= found  # fmt: skip
