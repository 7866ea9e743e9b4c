"""Adapters whose scale nothing states, and those of diffusion pipelines.

Seen red: two adapters without a configuration called equal, for a scale of 0; a merge that changed
nothing and said so to nobody; factors of one adapter in two spellings that had no partner.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder

Arrays = Mapping[str, Any]
RANK, ALPHA = 4, 8  # of PEFT's LoraConfig, where the file has no lora_alpha
CONFIG = {"peft_type": "LORA", "r": RANK}
MODULES = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]


def factors(modules: Mapping[str, tuple[int, int]], seed: int = 0) -> dict[str, tuple[Any, Any]]:
    """Return {module: (A [r, in], B [out, r])} of modules with these sizes (out, in)."""
    draw = np.random.default_rng(seed)

    def drawn(*shape: int) -> Any:
        """Return fresh float32 numbers."""
        return draw.normal(size=shape).astype(np.float32)

    return {
        module: (drawn(RANK, size), drawn(out, RANK)) for module, (out, size) in modules.items()
    }


def peft(folder: Path, config: Mapping[str, Any] | None, seed: int = 0) -> Path:
    """Write PEFT's adapter of a small llama, with or without its configuration."""
    folder.mkdir()
    arrays = {}
    for module, (a, b) in factors(dict.fromkeys(MODULES, (64, 64)), seed).items():
        arrays[f"base_model.model.{module}.lora_A.weight"] = a
        arrays[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(arrays, folder / "adapter_model.safetensors")
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def exit_of(*words: object) -> int:
    """Return the exit code of a command."""
    return aprfmt(*words).code


# --- PEFT without a configuration, or without alpha ----------------------------------------------


def test_adapters_without_a_configuration_are_compared_by_their_factors(tmp_path: Path) -> None:
    one, same, other = (peft(tmp_path / n, None, int(n == "other")) for n in ("a", "b", "other"))
    assert (exit_of("diff", one, same), exit_of("diff", one, other)) == (0, 1)
    assert exit_of("diagnose", one, other) == 1
    stated = peft(tmp_path / "stated", CONFIG | {"lora_alpha": RANK})
    assert exit_of("diff", one, stated) == 1
    assert "lora_alpha" in aprfmt("diff", one, stated, "-v").out


@pytest.mark.parametrize("words", [[], ["--base"]])
def test_an_adapter_without_its_configuration_is_not_merged(
    words: list[str], tmp_path: Path
) -> None:
    base, adapter = llama_folder(tmp_path / "base", "F32"), peft(tmp_path / "a", None)
    sides = (adapter, tmp_path / "o.gguf", "--base", base) if words else (
        base, tmp_path / "o", "--adapter", adapter
    )  # fmt: skip
    found = aprfmt("convert", *sides)
    assert found.code == 2 and "adapter_config.json" in found.err
    assert "it is not merged here" in aprfmt("inspect", adapter).out


def test_an_alpha_that_is_not_stated_is_pefts_own(tmp_path: Path) -> None:
    base = llama_folder(tmp_path / "base", "F32")
    for name, config in (("plain", CONFIG), ("stated", CONFIG | {"lora_alpha": ALPHA})):
        aprfmt("convert", base, tmp_path / f"merged-{name}", "--adapter",
               peft(tmp_path / name, config))  # fmt: skip
    merged, stated = (
        load_file(tmp_path / f"merged-{n}" / "model.safetensors") for n in ("plain", "stated")
    )
    held = load_file(base / "model.safetensors")
    for module, (a, b) in factors(dict.fromkeys(MODULES, (64, 64))).items():
        name = f"{module}.weight"
        wanted = held[name] + ALPHA / RANK * (b @ a)
        assert np.allclose(merged[name], wanted, rtol=1e-5, atol=1e-5)
        assert np.array_equal(merged[name], stated[name])
    assert exit_of("diff", tmp_path / "plain", tmp_path / "stated") == 0


# --- diffusion pipelines -------------------------------------------------------------------------

UNET = {"down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (64, 64),
        "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k": (64, 96),
        "mid_block.attentions.0.proj_in": (64, 64)}  # fmt: skip
TEXT = {"text_model.encoder.layers.0.self_attn.q_proj": (48, 48)}


def diffusers(path: Path, prefix: str = "unet.", seed: int = 0) -> Path:
    """Write a pipeline's adapter as diffusers does."""
    arrays = {}
    for before, modules in ((prefix, UNET), ("text_encoder.", TEXT)):
        for module, (a, b) in factors(modules, seed).items():
            arrays[f"{before}{module}.lora_A.weight"] = a
            arrays[f"{before}{module}.lora_B.weight"] = b
    save_file(arrays, path)
    return path


def kohya(
    path: Path, prefix: str = "lora_unet_", alpha: float = RANK, turned: bool = False
) -> Path:
    """Write the same adapter as sd-scripts does; `turned`: one module's change has other signs."""
    arrays = {}
    for before, modules in ((prefix, UNET), ("lora_te1_", TEXT)):
        for module, (a, b) in factors(modules).items():
            name = before + module.replace(".", "_")
            arrays[f"{name}.lora_down.weight"] = -a if turned and "to_k" in module else a
            arrays[f"{name}.lora_up.weight"] = b
            arrays[f"{name}.alpha"] = np.array(alpha, np.float32)
    save_file(arrays, path)
    return path


@pytest.mark.parametrize("prefix", ["unet.", "transformer.", "diffusion_model.", "lora_unet_"])
def test_an_adapter_of_a_pipeline_is_called_that_and_no_merge_promised(
    prefix: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    (kohya if "_unet_" in prefix else diffusers)(path, prefix)
    said = aprfmt("inspect", path).out
    assert "of a diffusion pipeline (modules: " in said and "denoiser 3" in said
    assert "aprfmt convert" not in said
    base = llama_folder(tmp_path / "base", "F32")
    found = aprfmt("convert", base, tmp_path / "out", "--adapter", path)
    assert found.code == 2 and "diffusion pipeline" in found.err


@pytest.mark.parametrize("prefix", ["unet.", "transformer.", "diffusion_model."])
def test_two_spellings_of_a_pipelines_adapter_are_paired_by_module(
    prefix: str, tmp_path: Path
) -> None:
    mine = diffusers(tmp_path / "a.safetensors", prefix)
    assert exit_of("diff", mine, kohya(tmp_path / "b.safetensors")) == 0
    assert exit_of("diagnose", mine, tmp_path / "b.safetensors") == 0
    found = aprfmt("diff", mine, kohya(tmp_path / "c.safetensors", turned=True), "--json").json
    apart = [row["name_b"] for row in found["tensors"] if row["verdict"] == "DIFFERENT"]
    assert found["pronounced"]["exit"] == 1 and apart and all("to_k" in name for name in apart)


def test_another_alpha_and_another_adapter_differ(tmp_path: Path) -> None:
    mine = diffusers(tmp_path / "a.safetensors")
    half = aprfmt("diff", mine, kohya(tmp_path / "half.safetensors", alpha=RANK / 2), "--json").json
    assert [one["cause"] for one in half["causes"]] == ["delta_scale"]
    assert exit_of("diff", mine, diffusers(tmp_path / "b.safetensors", seed=1)) == 1


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("transformer.h.0.attn.c_attn", ("base_model.model.", "")),
        ("transformer.encoder.layers.0.attention.q", ("base_model.model.", "")),
        ("model.layers.0.self_attn.q_proj", ("base_model.model.", "")),
        ("transformer.blocks.0.attn.Wqkv", ("base_model.model.",)),
    ],
)
def test_adapters_of_language_models_are_no_pipelines(
    name: str, prefixes: tuple[str, ...], tmp_path: Path
) -> None:
    for at, before in enumerate(prefixes):
        folder = tmp_path / str(at)
        folder.mkdir()
        (a, b) = factors({name: (64, 64)})[name]
        arrays = {f"{before}{name}.lora_A.weight": a, f"{before}{name}.lora_B.weight": b}
        save_file(arrays, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
        assert "diffusion" not in aprfmt("inspect", folder).out


NO_ALPHA = "adapter_config.json has no lora_alpha"


def test_an_alpha_that_nothing_states_is_said_by_all_that_read_it(tmp_path: Path) -> None:
    """Seen red: no word of it, and a merge by PEFT's default."""
    base, adapter = llama_folder(tmp_path / "base", "F32"), peft(tmp_path / "a", CONFIG)
    assert "no alpha stated (PEFT takes 8, other loaders" in aprfmt("inspect", adapter).out
    checked = aprfmt("validate", adapter)
    assert checked.code == 0 and f"warning: {adapter}" in checked.out and NO_ALPHA in checked.out
    merged = aprfmt("convert", base, tmp_path / "o", "--adapter", adapter)
    assert merged.code == 0 and NO_ALPHA in merged.err and "explain assumed_alpha" in merged.err
    assert "State the number" in aprfmt("explain", "assumed_alpha").out


@pytest.mark.parametrize(
    "more", [{"lora_alpha": 8}, {"lora_alpha": 0}, {"alpha_pattern": {"q_proj": 16}}]
)
def test_of_a_stated_alpha_nothing_is_said(more: Mapping[str, Any], tmp_path: Path) -> None:
    base, adapter = llama_folder(tmp_path / "base", "F32"), peft(tmp_path / "a", {**CONFIG, **more})
    for command in (("inspect", adapter), ("validate", adapter),
                    ("convert", base, tmp_path / "o", "--adapter", adapter)):  # fmt: skip
        found = aprfmt(*command)
        assert "no alpha stated" not in found.out and NO_ALPHA not in found.out + found.err


def test_alphas_beside_the_factors_are_stated(tmp_path: Path) -> None:
    adapter = peft(tmp_path / "a", CONFIG)
    path = adapter / "adapter_model.safetensors"
    alphas = {f"base_model.model.{one}.alpha": np.array(4, np.float32) for one in MODULES}
    save_file({**load_file(path), **alphas}, path)
    assert "no alpha stated" not in aprfmt("inspect", adapter).out
