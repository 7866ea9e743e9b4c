"""Factors moved between a norm and products: into the right norm, a wrong one, stored coarsely."""

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from aprfmt.compare import diff
from tests.cli.run import aprfmt
from tests.conversion.folders import tensors_of
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder

RIGHT = "pre_feedforward_layernorm"
OTHERS = ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")


def folded(name: str, norm: str, dtype: str = "F32", spread: float = 1.0) -> tuple[Path, Path]:
    """Return (a tiny Gemma, its copy with factors in gate and up and taken out of `norm`)."""
    source = tiny_folder("gemma2")
    wide = tensors_of(source)[f"model.layers.0.{RIGHT}.weight"][1][0]
    rng = np.random.default_rng(9)

    def fold(rows: files.Rows) -> None:
        for layer in range(2):
            start = f"model.layers.{layer}."
            factor = np.exp(rng.standard_normal(wide) * spread)
            files.edit(f"{start}{norm}.weight", lambda w: (1 + w) / factor - 1)(rows)  # noqa: B023
            for product in ("gate_proj", "up_proj"):
                files.edit(f"{start}mlp.{product}.weight", lambda w: w * factor)(rows)  # noqa: B023

    def store(rows: files.Rows) -> None:
        for key, (_, shape, _) in list(rows.items()):
            values = files.values(rows, key).astype(ml_dtypes.bfloat16)
            rows[key] = ("BF16", shape, values.tobytes())

    def both(rows: files.Rows) -> None:
        fold(rows)
        store(rows)

    if dtype == "F32":
        return source, files.copy(source, f"folds-{name}", tensors=fold)
    return (
        files.copy(source, f"folds-{name}-a", tensors=store),
        files.copy(source, f"folds-{name}", tensors=both),
    )


def causes(pair: tuple[Path, Path]) -> dict[str, str]:
    """Return {tensor key: cause} of every explained tensor, "" where it is not confirmed."""
    found = ((row.key, row.explanation) for row in diff(*pair).tensors)
    return {key: one.cause if one.certainty == "confirmed" else "" for key, one in found if one}


@pytest.mark.parametrize("norm", OTHERS)
def test_factors_taken_out_of_a_norm_that_does_not_feed_the_products(norm: str) -> None:
    found = causes(folded(f"wrong-{norm}", norm))
    assert len(found) == 6 and set(found.values()) == {"partial_fold"}, found


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_factors_taken_out_of_the_norm_that_feeds_them_are_no_bug(dtype: str) -> None:
    """1 + w near 0 is rounded coarsely in BF16: that is rounding, and no other cause."""
    found = causes(folded(f"right-{dtype}", RIGHT, dtype, 1.2))
    assert set(found.values()) <= {"scales_folded", "rounding"} and len(found) == 6, found


def test_a_wrong_factor_is_no_rounding_of_a_norm() -> None:
    """A column that is off by more than its norm's rounding is still seen."""
    pair = folded("off", RIGHT, "BF16", 0.3)

    def lift(rows: files.Rows) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        _, shape, raw = rows[name]
        values = np.frombuffer(raw, ml_dtypes.bfloat16).reshape(shape).astype(np.float32)
        values[:, 3] *= 1.2
        rows[name] = ("BF16", shape, values.astype(ml_dtypes.bfloat16).tobytes())

    found = causes((pair[0], files.copy(pair[1], "folds-off-b", tensors=lift)))
    assert found.get("L0.ffn_up.weight") not in ("scales_folded", "rounding"), found


@pytest.mark.parametrize("spread", [0.02, 0.05, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("turned", [False, True])
def test_factors_in_a_coarse_copy_are_no_bug(
    spread: float, turned: bool, tmp_path: Path, demo_model: Path
) -> None:
    """As AWQ leaves them: a product of four bits is within a rounding of A with them or without."""
    rng = np.random.default_rng(4)
    readers = {
        "input_layernorm": tuple(f"self_attn.{n}_proj" for n in "qkv"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }

    made = tmp_path / "folded"
    shutil.copytree(demo_model, made)
    values = {k: v.float() for k, v in load_file(made / "model.safetensors").items()}
    for norm in [key for key in values if key.endswith(tuple(f"{n}.weight" for n in readers))]:
        start, name = norm.removesuffix(".weight").rsplit(".", 1)
        factor = torch.tensor(np.exp(rng.uniform(-spread, spread, values[norm].numel()))).float()
        values[norm] /= factor
        for product in readers[name]:
            values[f"{start}.{product}.weight"] *= factor
    save_file(values, made / "model.safetensors", metadata={"format": "pt"})
    assert aprfmt("quantize", made, tmp_path / "q", "--type", "AWQ-g32").code == 0
    sides = (tmp_path / "q", demo_model) if turned else (demo_model, tmp_path / "q")
    done = aprfmt("diagnose", *sides, "--json")
    assert (done.code, done.json["verdict"]) == (0, "precision"), done.json["causes"]
    assert "scales_folded" in {one["cause"] for one in done.json["causes"]}


@pytest.mark.parametrize("spread", [0.02, 0.05, 0.2])
def test_norms_trained_before_a_coarse_copy_are_no_fold(
    spread: float, tmp_path: Path, demo_model: Path
) -> None:
    """Seen red: a product within its rounding of both readings taken for one that undoes."""
    rng = np.random.default_rng(5)
    made = tmp_path / "trained"
    shutil.copytree(demo_model, made)
    values = {k: v.float() for k, v in load_file(made / "model.safetensors").items()}
    for norm in [key for key in values if key.endswith("layernorm.weight")]:
        values[norm] *= torch.tensor(np.exp(rng.uniform(-spread, spread, values[norm].numel())))
    save_file(
        {k: v.contiguous().float() for k, v in values.items()},
        made / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert aprfmt("quantize", made, tmp_path / "q", "--type", "AWQ-g32").code == 0
    found = diff(demo_model, tmp_path / "q").findings
    assert not {one.cause for one in found} & {"scales_folded", "norm_folded", "partial_fold"}


def test_a_vector_of_nearly_equal_values_has_no_order(tmp_path: Path, demo_model: Path) -> None:
    """Seen red: values of a norm that others are within the rounding of, matched by sorting."""
    rng = np.random.default_rng(6)
    values = load_file(demo_model / "model.safetensors")
    name = "model.layers.1.input_layernorm.weight"
    sides = []
    for side, noise in (("a", 0.0), ("b", 0.008)):
        shutil.copytree(demo_model, tmp_path / side)
        made = torch.linspace(0.99, 1.01, values[name].numel())[
            torch.randperm(values[name].numel(), generator=torch.Generator().manual_seed(1))
        ]
        made = made * torch.tensor(np.exp(rng.uniform(-noise, noise, made.numel()))).float()
        kind = torch.bfloat16 if side == "a" else torch.float16
        sides.append(tmp_path / side)
        save_file(values | {name: made.to(kind)}, sides[-1] / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
    assert "row_offset" not in {one.cause for one in diff(*sides).findings}
