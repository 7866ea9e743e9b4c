"""A matrix of zeros is found in a file alone, also without a role, where zeros are not usual.

Seen red: PASS of a position table and of two weights of zeros; a LoRA's second factor found.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from aprfmt.model.usual_zeros import is_usually_zero
from tests.cli.run import aprfmt
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder

WEIGHT = "features.1.1.attn.qkv.weight"


def weights() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    names = (WEIGHT, "features.3.0.mlp.0.weight", "visual.positional_embedding", "conv.weight")
    shapes = {names[3]: (8, 4, 3, 3)}
    made = {name: torch.randn(shapes.get(name, (8, 12)), generator=drawn) for name in names}
    return made | {"norm.weight": torch.ones(8), "norm.bias": torch.zeros(8)}


def saved(folder: Path, kind: str, held: dict[str, torch.Tensor]) -> Path:
    path = folder / f"model.{kind}"
    if kind == "pth":
        torch.save(held, path)
    elif kind == "safetensors":
        save_file(held, path)
    else:
        writer = GGUFWriter(path, "clip")
        for name, values in held.items():
            writer.add_tensor(name, values.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def checked(path: Path) -> tuple[str, Any]:
    told = aprfmt("validate", path, "--json")
    (row,) = [one for one in told.json["checks"] if one["name"] == "filled"]
    return row["outcome"], [
        (one["level"], one["where"]) for one in told.json["findings"] if one["check"] == "filled"
    ]


@pytest.mark.parametrize("kind", ["safetensors", "pth", "gguf"])
def test_a_matrix_of_zeros_without_a_role_fails(kind: str, tmp_path: Path) -> None:
    held = weights()
    assert checked(saved(tmp_path, kind, held)) == ("PASS", [])
    for name in (WEIGHT, "visual.positional_embedding", "conv.weight"):
        zeroed = held | {name: torch.zeros_like(held[name])}
        assert checked(saved(tmp_path, kind, zeroed)) == ("FAIL", [("fail", name)])
    every = {name: torch.zeros_like(values) for name, values in held.items()}
    (found,) = checked(saved(tmp_path, kind, every))[1]
    assert found[1].endswith(" and 1 more")


def test_the_next_command_names_one_tensor(tmp_path: Path) -> None:
    held = {name: torch.zeros_like(values) for name, values in weights().items()}
    said = aprfmt("validate", saved(tmp_path, "pth", held)).out
    assert said.endswith(f"model.pth {WEIGHT} --stats\n"), said


def test_what_may_be_zero_is_no_failure(tmp_path: Path) -> None:
    zeros = torch.zeros(8, 12)
    held = weights()
    for name in USUAL:
        assert checked(saved(tmp_path, "pth", held | {name: zeros})) == ("PASS", []), name
    for name in (
        "down.0.proj_out.weight", "blocks.0.adaLN_modulation.1.weight", "table_of_ages",
        "multi_modal_projector.mm_input_projection_weight",
    ):  # fmt: skip
        found = checked(saved(tmp_path, "pth", held | {name: zeros}))
        assert found == ("PASS", [("warning", name)]), name


USUAL = (
    "base_model.model.layers.0.q_proj.lora_B.weight", "lora_unet_down_0.lora_up.weight",
    "lora_te_layer.hada_w2_a", "controlnet_down_blocks.3.weight",
    "control_model.zero_convs.1.0.weight",
    "control_model.input_hint_block.14.weight", "vace_blocks.0.after_proj.weight",
    "relative_position_bias_table", "experts.gate_up_proj_bias", "exp_avg.layers.0.weight",
    "optimizer.state.0.momentum_buffer", "layers.0.k_cache", "attn_mask",
    "embeddings.token_type_embeddings.weight", "mlp.gate.weight",
)  # fmt: skip


def test_names_of_layers_are_not_taken_for_usual_zeros() -> None:
    for name in (
        "mask_decoder.transformer.layers.0.mlp.weight", "state_dict.blocks.0.fc.weight",
        "blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight", "cache_encoder.fc.weight",
        "control_model.input_blocks.1.1.proj_in.weight", "model.embed_tokens.weight", "kernel",
    ):  # fmt: skip
        assert not is_usually_zero(name), name


def test_a_tower_beside_a_known_model_is_looked_at(tmp_path: Path) -> None:
    """Its tensors have no role of the model's."""

    def add(rows: files.Rows, value: float) -> None:
        data = np.full((8, 4), value, "<f4")
        data[0, 0] += value
        rows["visual.pos_embed.weight"] = ("F32", (8, 4), data.tobytes())

    for value, expected in ((0.5, []), (0.0, [("fail", "visual.pos_embed.weight")])):
        made = files.copy(tiny_folder("llama"), f"tower-{value}", tensors=lambda r: add(r, value))  # noqa: B023
        assert checked(made)[1] == expected


def test_the_next_command_shows_no_tensor_that_is_missing() -> None:
    """Seen red: `tensors FILE output.weight --stats` of a head that is not there."""

    def lose(rows: files.Rows) -> None:
        del rows["model.layers.1.mlp.up_proj.weight"]

    lost = files.copy(tiny_folder("llama"), "no-up", tensors=lose)
    said = aprfmt("validate", lost).out
    assert ": missing" in said and "--stats" not in said, said
