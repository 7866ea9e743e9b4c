"""Adapters as mlx-lm writes them: lora_a [in, r], lora_b [r, out], and a scale that is stated."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters.test_parts import base_folder
from tests.cli.run import aprfmt

RANK, SCALE, HIDDEN, HELD = 4, 20.0, 64, 320
QUERY = "model.layers.{}.self_attn.q_proj"
Factors = Mapping[str, torch.Tensor]


def factors(*, dora: bool = False, table: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter for q_proj of two layers, or for the embedding's table."""
    rng = torch.Generator().manual_seed(3)
    modules = ["model.embed_tokens"] if table else [QUERY.format(layer) for layer in range(2)]
    found = {}
    for module in modules:
        first = HELD if table else HIDDEN
        found[f"{module}.lora_a"] = torch.randn((first, RANK), generator=rng) * 0.02
        found[f"{module}.lora_b"] = torch.randn((RANK, HIDDEN), generator=rng) * 0.02
        if dora:
            found[f"{module}.m"] = torch.rand(first, generator=rng) + 0.5
    return found


def adapter_folder(folder: Path, held: Factors, **config: Any) -> Path:
    """Write the adapter as mlx_lm.lora does, with the keys of its training beside its own."""
    folder.mkdir()
    save_file(dict(held), folder / "adapters.safetensors")
    parameters = {"rank": RANK, "dropout": 0.0, "scale": SCALE, "keys": ["self_attn.q_proj"]}
    said = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters, "model": "x"}
    training = {"iters": 100, "batch_size": 4, "learning_rate": 1e-5, "seed": 0, "train": True}
    (folder / "adapter_config.json").write_text(json.dumps(said | training | config))
    return folder


def fused(base: Path, out: Path, held: Factors, scale: float = SCALE) -> Path:
    """Write the base with the adapter as mlx_lm.fuse adds it: scale * (lora_a @ lora_b).T."""
    shutil.copytree(base, out)
    tensors = load_file(base / "model.safetensors")
    for name in [name.removesuffix(".lora_a") for name in held if name.endswith(".lora_a")]:
        change = scale * (held[f"{name}.lora_a"] @ held[f"{name}.lora_b"])
        table = name.endswith("embed_tokens")
        full = tensors[f"{name}.weight"] + (change if table else change.T)
        if f"{name}.m" in held:
            full = full * (held[f"{name}.m"] / full.norm(dim=1))[:, None]
        tensors[f"{name}.weight"] = full.contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize(
    "kind", [{}, {"dora": True}, {"table": True}], ids=["lora", "dora", "table"]
)
def test_a_merge_is_what_mlx_fuses(kind: Mapping[str, bool], tmp_path: Path) -> None:
    """Seen red: "it can be merged by no program", for the factors are stored transposed."""
    held, base = factors(**kind), base_folder(tmp_path / "base")
    adapter = adapter_folder(tmp_path / "adapters", held)
    there = fused(base, tmp_path / "fused", held)
    shown = aprfmt("inspect", adapter).out
    assert "a LoRA adapter of MLX of rank 4, scale 20" in shown
    out = tmp_path / "out"
    assert aprfmt("convert", base, out, "--adapter", adapter, "--to", "safetensors").code == 0
    made, meant = (load_file(folder / "model.safetensors") for folder in (out, there))
    for name, values in meant.items():
        np.testing.assert_allclose(made[name].numpy(), values.numpy(), rtol=1e-5, atol=1e-6)
    done = aprfmt("diff", base, there, "--adapter", adapter)
    assert done.code == 0 and ": once (" in done.out, done.out


@pytest.mark.parametrize(
    ("scale", "says"),
    [(0.0, "not at all"), (2 * SCALE, "twice"), (-SCALE, "subtracted"),
     (SCALE / RANK, "divided by the rank"), (1.0, "the scale is left out")],
)  # fmt: skip
def test_wrong_merges_of_mlx_are_named(scale: float, says: str, tmp_path: Path) -> None:
    held, base = factors(), base_folder(tmp_path / "base")
    adapter = adapter_folder(tmp_path / "adapters", held)
    done = aprfmt("diff", base, fused(base, tmp_path / "fused", held, scale), "--adapter", adapter)
    assert done.code == 1 and says in done.out, done.out


def test_an_adapter_of_mlx_is_written_as_peft_has_it(tmp_path: Path) -> None:
    held, base = factors(), base_folder(tmp_path / "base")
    adapter, out = adapter_folder(tmp_path / "adapters", held), tmp_path / "peft"
    assert aprfmt("convert", adapter, out, "--base", base).code == 0
    done = aprfmt("diff", base, fused(base, tmp_path / "fused", held), "--adapter", out)
    assert done.code == 0 and ": once (" in done.out, done.out


def test_a_folder_with_checkpoints_is_the_last_state(tmp_path: Path) -> None:
    """mlx_lm loads adapters.safetensors, whatever checkpoints stand beside it."""
    adapter = adapter_folder(tmp_path / "adapters", factors())
    shutil.copyfile(adapter / "adapters.safetensors", adapter / "0000100_adapters.safetensors")
    assert "a LoRA adapter of MLX of rank 4" in aprfmt("inspect", adapter).out


def no_scale(folder: Path) -> Path:
    return adapter_folder(folder, factors(), lora_parameters={"rank": RANK})


def other_rank(folder: Path) -> Path:
    return adapter_folder(folder, factors(), lora_parameters={"rank": 8, "scale": SCALE})


def transposed(folder: Path) -> Path:
    return adapter_folder(folder, {name: x.T.contiguous() for name, x in factors().items()})


def single(folder: Path) -> Path:
    held = {name: x for name, x in factors().items() if name != f"{QUERY.format(1)}.lora_b"}
    return adapter_folder(folder, held)


def stacked(folder: Path) -> Path:
    held = {
        "model.layers.0.mlp.switch_mlp.up_proj.lora_a": torch.ones(2, RANK, HIDDEN),
        "model.layers.0.mlp.switch_mlp.up_proj.lora_b": torch.ones(2, 96, RANK),
    }
    return adapter_folder(folder, held)


REFUSED: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "no scale": (no_scale, "has no scale, by which MLX multiplies the pairs"),
    "another rank": (other_rank, "adapter_config.json says rank 8, its factors have 4"),
    "transposed": (
        transposed,
        "its factors have 64; both are transposed: exchanged, they have that rank",
    ),
    "one factor alone": (single, f"{QUERY.format(1)} has no b next to a"),
    "stacked experts": (stacked, "has MLX's factors of stacked experts, which are not read here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inspect_and_merge_say_why_an_adapter_is_refused(name: str, tmp_path: Path) -> None:
    write, why = REFUSED[name]
    base, adapter = base_folder(tmp_path / "base"), write(tmp_path / "adapters")
    assert why in aprfmt("inspect", adapter).out
    done = aprfmt("convert", base, tmp_path / "out", "--adapter", adapter)
    assert done.code == 2 and why in done.err
