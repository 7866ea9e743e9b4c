"""Adapters of diffusion transformers in the original's names and in diffusers'."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.model.diffusion_modules import diffusers_module, has_exchanged_halves, joined_modules
from tests.cli.run import aprfmt

RANK, SIZE = 4, 32
# Original module -> diffusers' module, by model.
FLUX = {
    "double_blocks.1.img_attn.proj": "transformer_blocks.1.attn.to_out.0",
    "double_blocks.1.txt_mlp.2": "transformer_blocks.1.ff_context.net.2",
    "single_blocks.0.linear2": "single_transformer_blocks.0.proj_out",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
SD3 = {
    "joint_blocks.0.x_block.attn.proj": "transformer_blocks.0.attn.to_out.0",
    "joint_blocks.0.context_block.mlp.fc1": "transformer_blocks.0.ff_context.net.0.proj",
    "joint_blocks.0.x_block.adaLN_modulation.1": "transformer_blocks.0.norm1.linear",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
QKV = [f"transformer_blocks.0.attn.to_{part}" for part in "qkv"]
Pairs = dict[str, tuple[Any, Any]]
ADALN = "norm_out.linear"


def swapped(x: Any) -> Any:
    return np.roll(x, len(x) // 2, 0)


def pairs(names: dict[str, str]) -> tuple[Pairs, Pairs]:
    """Return {module: (A, B)} by the original's names and by diffusers', a sound conversion."""
    rng = np.random.default_rng(4)
    mine: Pairs = {}
    theirs: Pairs = {}
    for original, name in names.items():
        a = rng.normal(size=(RANK, SIZE)).astype(np.float32)
        b = rng.normal(size=(2 * SIZE, RANK)).astype(np.float32)
        mine[original] = a, b
        theirs[name] = a, swapped(b) if name == ADALN else b
    return mine, theirs


def kohya(path: Path, given: Pairs, alpha: float = RANK) -> Path:
    held = {}
    for module, (a, b) in given.items():
        name = "lora_unet_" + module.replace(".", "_")
        held[f"{name}.lora_down.weight"], held[f"{name}.lora_up.weight"] = a, b
        held[f"{name}.alpha"] = np.array(alpha, np.float32)
    save_file(held, path)
    return path


def peft(path: Path, given: Pairs, prefix: str = "transformer.") -> Path:
    held = {}
    for module, (a, b) in given.items():
        held[f"{prefix}{module}.lora_A.weight"] = np.ascontiguousarray(a)
        held[f"{prefix}{module}.lora_B.weight"] = np.ascontiguousarray(b)
    save_file(held, path)
    return path


@pytest.mark.parametrize("names", [FLUX, SD3], ids=["flux", "sd3"])
@pytest.mark.parametrize("original", ["kohya", "comfy"])
def test_a_sound_conversion_is_equal(names: dict[str, str], original: str, tmp_path: Path) -> None:
    """Seen red: nothing was paired, and alphas equal to the rank were differences."""
    mine, theirs = pairs(names)
    a = tmp_path / "a.safetensors"
    a = kohya(a, mine) if original == "kohya" else peft(a, mine, "diffusion_model.")
    b = peft(tmp_path / "b.safetensors", theirs)
    for sides in ((a, b), (b, a)):
        told = aprfmt("diff", *sides)
        assert told.code == 0 and told.out.startswith("equal, "), told.out


def halves_of_a(theirs: Pairs) -> Pairs:
    a, b = theirs[ADALN]
    return {**theirs, ADALN: (swapped(a), b)}


def not_exchanged(theirs: Pairs) -> Pairs:
    a, b = theirs[ADALN]
    return {**theirs, ADALN: (a, swapped(b))}


def other_output(theirs: Pairs) -> Pairs:
    a, b = theirs["proj_out"]
    return {**theirs, "proj_out": (a, swapped(b))}


@pytest.mark.parametrize(
    ("change", "wrong", "says"),
    [
        (halves_of_a, "norm_out.linear.lora_A.weight", "row i of B is row i-2 of A"),
        (not_exchanged, "norm_out.linear.lora_B.weight", "a conversion has to exchange them"),
        (other_output, "transformer.proj_out.lora_B.weight", "row i of B is row i-32 of A"),
    ],
)
def test_the_factor_that_is_wrong_is_named_alone(
    change: Callable[[Pairs], Pairs], wrong: str, says: str, tmp_path: Path
) -> None:
    mine, theirs = pairs(FLUX)
    a = kohya(tmp_path / "a.safetensors", mine)
    b = peft(tmp_path / "b.safetensors", change(theirs))
    told = aprfmt("diff", a, b, "--json").json
    [cause] = told["causes"]
    assert (told["exit"], cause["cause"], cause["level"]) == (1, "row_offset", "confirmed")
    ends = (wrong, "adaLN_modulation_1.lora_up.weight" if "lora_B" in wrong else wrong)
    assert says in cause["says"] and all(name.endswith(ends) for name in cause["where"])
    apart = [row for row in told["tensors"] if row["verdict"] == "DIFFERENT"]
    assert apart and all(wrong in row["name_b"] for row in apart)


@pytest.mark.parametrize("wrong", [False, True])
def test_q_k_and_v_are_one_projection_in_the_original(wrong: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    a = rng.normal(size=(RANK, SIZE)).astype(np.float32)
    b = rng.normal(size=(3 * SIZE, RANK)).astype(np.float32)
    mine, theirs = pairs(FLUX)
    mine["double_blocks.0.img_attn.qkv"] = a, b
    parts = np.split(b, 3)
    if wrong:
        parts[1] = -parts[1]
    theirs |= {name: (a, part) for name, part in zip(QKV, parts, strict=True)}
    first = kohya(tmp_path / "a.safetensors", mine)
    told = aprfmt("diff", first, peft(tmp_path / "b.safetensors", theirs))
    assert told.code == wrong, told.out


def test_another_alpha_is_another_scale(tmp_path: Path) -> None:
    mine, theirs = pairs(FLUX)
    b = peft(tmp_path / "b.safetensors", theirs)
    told = aprfmt("diff", kohya(tmp_path / "a.safetensors", mine, RANK / 2), b, "--json").json
    assert [one["cause"] for one in told["causes"]] == ["delta_scale"]


def test_names_of_no_transformer_keep_their_words() -> None:
    for name in ("down_blocks_0_attentions_0_proj_in", "mid_block_attentions_0_proj_in", ""):
        assert diffusers_module(name) == name and not joined_modules(name)
    assert has_exchanged_halves("final_layer_adaLN_modulation_1")
    assert not has_exchanged_halves("norm_out_linear") and not has_exchanged_halves("img_in")
    assert joined_modules("single_blocks_7_linear1")[3] == ("single_transformer_blocks_7_proj_mlp")
