"""The text of models that also see, by their whole folders: transformers' logits.

Seen red: mistral3's head taken for missing, because its text's configuration says it is not tied
and the whole model's, which transformers goes by, that it is; published experts read as they are
stored; rope of type mrope refused; the layers that see not counted; the tower's other keys unknown.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import aprfmt
from aprfmt.arch import ARCHS
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.drawn import fill
from tests.inference.judge import backend, everything_float64, rel
from tests.model_values import YARN
from tests.models import IDS

_TEXT = {
    "vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 72, "max_position_embeddings": 64,
    "rms_norm_eps": 3e-4, "head_dim": 16,
}  # fmt: skip
_SEES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
_PIXTRAL = {**_SEES, "model_type": "pixtral"}
_TOWER = {"depth": 2, "hidden_size": 24, "intermediate_size": 40, "patch_size": 4}
_DEEP = {
    "num_heads": 6, "out_hidden_size": 48, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
_QWEN = {key: value for key, value in _TEXT.items() if key != "head_dim"}
# name -> (model type, configuration, our architecture)
CASES: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "mistral3": ("mistral3", {
        "vision_config": _PIXTRAL, "text_config": {
            **_TEXT, "model_type": "mistral", "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    }, "ministral3"),
    "mistral3-ministral3": ("mistral3", {
        "vision_config": _PIXTRAL, "text_config": {
            **_TEXT, "model_type": "ministral3",
            "rope_parameters": {
                **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
            },
        },
    }, "ministral3"),
    "gemma3": ("gemma3", {
        "vision_config": {**_SEES, "vision_use_head": False},
        "text_config": {**_TEXT, "sliding_window": 7},
        "image_token_index": 100, "boi_token_index": 98, "eoi_token_index": 99,
    }, "gemma3"),
    "qwen2_vl": ("qwen2_vl", {
        "vision_config": {
            "depth": 2, "embed_dim": 24, "num_heads": 6, "hidden_size": 48, "patch_size": 4,
        },
        "text_config": {**_QWEN, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 2, 2],
        }},
    }, "qwen2_vl"),
    "qwen2_5_vl": ("qwen2_5_vl", {
        "vision_config": {
            **_TOWER, "num_heads": 6, "out_hidden_size": 48, "fullatt_block_indexes": [1],
        },
        "text_config": {**_QWEN, "use_sliding_window": True, "sliding_window": 7,
            "max_window_layers": 1, "rope_parameters": {
                "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 3],
            }},
    }, "qwen2_5_vl"),
    "qwen3_vl": ("qwen3_vl", {
        "vision_config": {**_TOWER, **_DEEP}, "text_config": {**_TEXT, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        }},
    }, "qwen3_vl"),
    "qwen3_vl_moe": ("qwen3_vl_moe", {
        "vision_config": {**_TOWER, **_DEEP}, "text_config": {
            **_TEXT, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        },
    }, "qwen3_vl_moe"),
}  # fmt: skip


def saved(name: str, tied: bool | None, folder: Path) -> Any:
    """Write a whole model as transformers does; return its logits in float64."""
    import transformers

    auto: Any = transformers
    kind, values, _ = CASES[name]
    whole = deepcopy(dict(values)) | ({} if tied is None else {"tie_word_embeddings": tied})
    config = auto.AutoConfig.for_model(kind, **whole)
    loader = auto.AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = loader.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
    fill(model, 0)
    model.save_pretrained(folder)
    ids, model = torch.tensor([IDS]), model.double().eval()
    with torch.no_grad():
        model(ids)  # settles frequencies in float32
        with everything_float64(model):
            return model(ids).logits[0].numpy()


def check(folder: Path, arch: str, expected: Any) -> None:
    """Assert that a folder is of an architecture and gives these logits."""
    with open_model(folder) as opened:
        assert opened.spec.name == arch
        assert opened.resolution.report.unknown == ()
        with Session.open(opened, backend("numpy:float64")) as session:
            assert rel(session.logits(IDS), expected) < 1e-12


@pytest.mark.parametrize("tied", [None, False])
@pytest.mark.parametrize("name", CASES)
def test_the_text_of_a_whole_folder_runs(name: str, tied: bool | None, tmp_path: Path) -> None:
    check(tmp_path, CASES[name][2], saved(name, tied, tmp_path))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_the_first_forms_say_the_text_at_the_top(name: str, tmp_path: Path) -> None:
    """As published: a flat config.json with rope of type mrope, the text below `model.` alone."""
    expected = saved(name, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {
        **text,
        **config,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(flat))
    path = tmp_path / "model.safetensors"
    names = {
        key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): values
        for key, values in load_file(path).items()
    }
    assert "model.layers.2.mlp.up_proj.weight" in names
    save_file(names, path, {"format": "pt"})
    check(tmp_path, name, expected)


def test_published_experts_are_exchanged(tmp_path: Path) -> None:
    """qwen3_vl_moe's matrices are [experts, in, out] as published; transformers saves [out, in]."""
    expected = saved("qwen3_vl_moe", None, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert tensors["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 40, 48)
    turned = {
        key: np.ascontiguousarray(values.swapaxes(1, 2)) if ".experts." in key else values
        for key, values in tensors.items()
    }
    save_file(turned, path, {"format": "pt"})
    check(tmp_path, "qwen3_vl_moe", expected)
    aprfmt.convert(tmp_path, tmp_path / "text.gguf", drop=("model.visual*",))
    aprfmt.convert(tmp_path / "text.gguf", tmp_path / "back", to="safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    for key, values in back.items():
        source = key.replace("model.", "model.language_model.", 1)
        np.testing.assert_array_equal(values, turned[source], err_msg=key)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe"])
def test_a_gguf_says_how_many_layers_see(name: str, tmp_path: Path) -> None:
    import gguf

    saved(name, None, tmp_path)
    aprfmt.convert(tmp_path, tmp_path / "text.gguf", drop=("model.visual*",))
    arch = ARCHS[name].called["gguf"][0]
    fields = gguf.GGUFReader(tmp_path / "text.gguf").fields
    assert fields[f"{arch}.n_deepstack_layers"].contents() == 1
    sections = [4, 2, 2, 0] if name == "qwen3_vl" else [24, 20, 20, 0]
    assert fields[f"{arch}.rope.dimension_sections"].contents() == sections
    with open_model(tmp_path / "text.gguf") as opened:
        assert (opened.spec.name, opened.hyper["deepstack_layers"]) == (name, 1)
