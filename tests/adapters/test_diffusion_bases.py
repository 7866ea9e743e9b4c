"""A base of diffusers: its adapters are not merged here, and the answer says why.

Seen red: "name it with --arch", for models that have no architecture here.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder

Arrays = Mapping[str, Any]
MODULES = ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.ff.net.2")
SIZE, RANK = 16, 4
CLASS = "FluxTransformer2DModel"


def drawn(*shape: int) -> Any:
    """Return fresh float32 numbers of a shape."""
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def diffusers_names(module: str) -> tuple[str, str]:
    """Return the names of a module's factors in a file of diffusers."""
    return f"transformer.{module}.lora_A.weight", f"transformer.{module}.lora_B.weight"


def kohya_names(module: str) -> tuple[str, str]:
    """Return the names of a module's factors in a file of kohya's."""
    stem = f"lora_unet_{module.replace('.', '_')}"
    return f"{stem}.lora_down.weight", f"{stem}.lora_up.weight"


def peft_names(module: str) -> tuple[str, str]:
    """Return the names of a module's factors in PEFT's own file."""
    stem = f"base_model.model.{module}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def adapter(into: Path, names: Callable[[str], tuple[str, str]]) -> Path:
    """Write an adapter of the base's modules under these names; return its folder."""
    into.mkdir()
    held: dict[str, Any] = {}
    for module in MODULES:
        down, up = names(module)
        held |= {down: drawn(RANK, SIZE), up: drawn(SIZE, RANK)}
    of_peft = names is peft_names
    save_file(held, into / ("adapter_model.safetensors" if of_peft else "lora.safetensors"))
    if of_peft:
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
        (into / "adapter_config.json").write_text(json.dumps(config))
    return into


def base(into: Path, config: Mapping[str, Any] | None) -> Path:
    """Write a small model with these modules; return its folder."""
    into.mkdir()
    held = {f"{module}.weight": drawn(SIZE, SIZE) for module in MODULES}
    save_file(held, into / "diffusion_pytorch_model.safetensors")
    if config is not None:
        (into / "config.json").write_text(json.dumps(config))
    return into


@pytest.mark.parametrize("config", [{"_class_name": CLASS}, None])
@pytest.mark.parametrize("names", [diffusers_names, kohya_names])
def test_an_adapter_of_a_pipeline_is_refused_as_such(
    names: Callable[[str], tuple[str, str]], config: Mapping[str, Any] | None, tmp_path: Path
) -> None:
    model, lora = base(tmp_path / "base", config), adapter(tmp_path / "lora", names)
    done = aprfmt("diff", model, model, "--adapter", lora)
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1
    assert "not merged here: it is of a diffusion pipeline" in done.err
    assert "--arch" not in done.err


@pytest.mark.parametrize("verb", ["diff", "convert"])
def test_peft_names_on_a_base_of_diffusers_are_refused_by_the_base(
    verb: str, tmp_path: Path
) -> None:
    model = base(tmp_path / "base", {"_class_name": CLASS})
    lora = adapter(tmp_path / "lora", peft_names)
    second = model if verb == "diff" else tmp_path / "out.safetensors"
    done = aprfmt(verb, model, second, "--adapter", lora)
    assert done.code == 2 and "--arch" not in done.err
    assert f"config.json is of diffusers ({CLASS})" in done.err


def test_a_config_without_a_name_is_not_called_absent(tmp_path: Path) -> None:
    model = base(tmp_path / "base", {"hidden_size": SIZE})
    done = aprfmt("convert", model, tmp_path / "out.gguf")
    assert done.code == 2 and "no model_type in config.json" in done.err
    assert "name it with --arch" in done.err


def test_adapters_of_pipelines_are_compared_with_each_other(tmp_path: Path) -> None:
    """Innocent of the refusal, which is about a merge."""
    one = adapter(tmp_path / "one", diffusers_names)
    assert aprfmt("diff", one, adapter(tmp_path / "same", diffusers_names)).code == 0


def test_an_adapter_of_a_language_model_is_still_judged(tmp_path: Path) -> None:
    """Innocent of the refusal: the base states its architecture."""
    model = llama_folder(tmp_path / "base", "F32")
    (weights,) = model.glob("*.safetensors")
    module = "model.layers.0.self_attn.q_proj"
    rows, columns = load_file(weights)[f"{module}.weight"].shape
    lora = tmp_path / "lora"
    lora.mkdir()
    down, up = peft_names(module)
    save_file(
        {down: drawn(RANK, columns), up: drawn(rows, RANK)}, lora / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    done = aprfmt("diff", model, model, "--adapter", lora)
    assert done.code == 1 and "not at all" in done.out
