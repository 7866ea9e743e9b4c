"""Layouts of others: Mistral's own files, a pipeline's folder, flags of layers that are not there.

Seen red: `validate` passed Mistral's own format, a pipeline was "no model", a flag of convolutions
contradicted a model without any.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.model import open_model
from tests.cli.run import aprfmt as command


def own_format(folder: Path, *, params: bool, config: bool) -> Path:
    folder.mkdir()
    names = [f"layers.0.attention.{n}.weight" for n in ("wq", "wk", "wv", "wo")]
    names += [f"layers.0.feed_forward.{n}.weight" for n in ("w1", "w2", "w3")]
    names += ["layers.0.attention_norm.weight", "tok_embeddings.weight", "output.weight"]
    path = folder / "consolidated.safetensors"
    save_file({name: np.ones((8, 8), np.float32) for name in names}, path)
    if params:
        (folder / "params.json").write_text(json.dumps({"dim": 8, "n_layers": 1}))
    if config:
        (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    return path


@pytest.mark.parametrize("config", [False, True])
@pytest.mark.parametrize("params", [False, True])
def test_mistrals_own_format_is_named(params: bool, config: bool, tmp_path: Path) -> None:
    path = own_format(tmp_path / "m", params=params, config=config)
    assert "own format" in command("inspect", path).out
    checked = command("validate", path, "--json").json
    assert [r["name"] for r in checked["checks"] if r["outcome"] == "FAIL"] == ["architecture"]
    for more in ((), ("--arch", "mistral")):
        done = command("convert", path, tmp_path / "x.gguf", *more)
        assert done.code == 2 and "convert_mistral_weights_to_hf.py" in done.err
        assert len(done.err.strip().splitlines()) == 1


def pipeline(folder: Path, *parts: str) -> Path:
    for part in parts:
        (folder / part).mkdir(parents=True)
        save_file({"x": np.ones(2, np.float32)}, folder / part / "model.safetensors")
    (folder / "scheduler").mkdir(parents=True, exist_ok=True)
    index = {"_class_name": "SomePipeline", "vae": ["diffusers", "X"], "unet": ["diffusers", "Y"],
             "scheduler": ["diffusers", "Z"]}  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("words", [("inspect",), ("validate",), ("diff", "."), ("diagnose", ".")])
def test_a_pipeline_names_its_parts(words: tuple[str, ...], tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "pipe", "vae", "unet", "text_encoder")
    name, *more = words
    done = command(name, folder, *([folder] if more else []))
    assert done.code == 2 and "is a pipeline (SomePipeline)" in done.err
    for part in ("vae", "unet", "text_encoder"):
        assert str(folder / part) in done.err
    assert "scheduler" not in done.err and "without weights" not in done.err


def test_a_part_without_weights_is_said(tmp_path: Path) -> None:
    done = command("inspect", pipeline(tmp_path / "pipe", "vae"))
    assert "without weights: unet" in done.err


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("projections", [True, False])
def test_flags_of_layers_that_are_not_there_contradict_nothing(
    conv: bool, projections: bool, tmp_path: Path
) -> None:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, shared_intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["attention", "attention"], num_local_experts=0, num_experts_per_tok=0,
        mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16,
        mamba_conv_bias=conv, mamba_proj_bias=projections, position_embedding_type="rope",
    )  # fmt: skip
    GraniteMoeHybridForCausalLM(config).save_pretrained(tmp_path / "m")
    with open_model(tmp_path / "m") as model:
        assert model.resolution.report.conflicts == () and not model.resolution.missing
