"""NF4 and FP4: the very tensors and config.json that transformers with bitsandbytes saves."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.errors import ConversionError
from tests.conversion.folders import llama_folder, tensors_of
from tests.models import save_tiny

KINDS = [("NF4", False), ("NF4-double", True), ("FP4", False), ("FP4-double", True)]


def transformers_saves(source: Path, target: Path, kind: str, double: bool) -> Any:
    """Quantize with the libraries, save, and return the model."""
    transformers = pytest.importorskip("transformers", reason="NOT-RUN: transformers is missing")
    pytest.importorskip("bitsandbytes", reason="NOT-RUN: bitsandbytes is missing")
    wish = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, quantization_config=wish, device_map="cpu"
        )
        model.save_pretrained(target)
    return model


@pytest.mark.parametrize(("scheme", "double"), KINDS)
def test_what_transformers_saves(
    scheme: str, double: bool, demo_model: Path, tmp_path: Path
) -> None:
    kind = scheme.split("-")[0].lower()
    transformers_saves(demo_model, tmp_path / "theirs", kind, double)
    report = aprfmt.convert(demo_model, tmp_path / "ours", to="safetensors", quantize=scheme)
    assert tensors_of(tmp_path / "ours") == tensors_of(tmp_path / "theirs")
    texts = [(tmp_path / who / "config.json").read_text().strip() for who in ("ours", "theirs")]
    assert texts[0] == texts[1]
    packed = [tensor for tensor in report.tensors if tensor.encoding == kind.upper()]
    assert len(packed) == 4 * 7 and all(tensor.how == "lossy" for tensor in packed)
    sizes = sum(len(raw) for _, _, raw in tensors_of(tmp_path / "ours").values())
    assert sum(tensor.nbytes for tensor in report.tensors) == sizes


@pytest.mark.parametrize("arch", ["qwen2_moe", "phi3", "deepseek_v2"])
def test_which_modules_are_packed(arch: str, tmp_path: Path) -> None:
    """Fused projections and a shared expert's gate are; experts, routers and heads are not."""
    save_tiny(arch, tmp_path / "source", "bfloat16")
    transformers_saves(tmp_path / "source", tmp_path / "theirs", "nf4", False)
    aprfmt.convert(tmp_path / "source", tmp_path / "ours", to="safetensors", quantize="NF4")
    assert tensors_of(tmp_path / "ours") == tensors_of(tmp_path / "theirs")


@pytest.mark.parametrize("through", ["", "f32.gguf", "f32.apr"])
def test_conv1d_is_turned_before_it_is_packed(through: str, tmp_path: Path) -> None:
    """gpt2 keeps plain matrices as [in, out] and packed ones as [out, in]."""
    save_tiny("gpt2", tmp_path / "source")
    transformers_saves(tmp_path / "source", tmp_path / "theirs", "nf4", False)
    if through:
        aprfmt.convert(tmp_path / "source", tmp_path / through)
    aprfmt.convert(
        tmp_path / (through or "source"), tmp_path / "q", to="safetensors", quantize="NF4"
    )
    assert tensors_of(tmp_path / "q") == tensors_of(tmp_path / "theirs")
    # not against the library's decoder: on the CPU it is wrong for rows of 48
    with aprfmt.open(tmp_path / "source") as plain, aprfmt.open(tmp_path / "q") as packed:
        for role in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"):
            x, y = (model.roles[f"L1.{role}.weight"].numpy() for model in (plain, packed))
            assert np.linalg.norm(y - x) < 0.12 * np.linalg.norm(x), role
    aprfmt.convert(tmp_path / "q", tmp_path / "packed.apr")
    aprfmt.convert(tmp_path / "packed.apr", tmp_path / "again", to="safetensors")
    assert tensors_of(tmp_path / "again") == tensors_of(tmp_path / "q")


def test_transformers_loads_it_on_the_cpu(demo_model: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="NOT-RUN: transformers is missing")
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is missing")
    theirs = transformers_saves(demo_model, tmp_path / "theirs", "nf4", True)
    aprfmt.convert(demo_model, tmp_path / "ours", to="safetensors", quantize="NF4-double")
    ids = torch.arange(40)[None]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        ours = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours", device_map="cpu"
        )
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_a_dry_run_gives_the_exact_sizes(demo_model: Path, tmp_path: Path) -> None:
    wishes: dict[str, Any] = {"to": "safetensors", "quantize": "NF4-double"}
    planned = aprfmt.convert(demo_model, tmp_path / "q", dry_run=True, **wishes)
    assert not (tmp_path / "q").exists()
    written = aprfmt.convert(demo_model, tmp_path / "q", **wishes)
    assert [(t.name, t.nbytes) for t in planned.tensors] == [
        (t.name, t.nbytes) for t in written.tensors
    ]


def test_apr_carries_it_and_gives_it_back(demo_model: Path, tmp_path: Path) -> None:
    aprfmt.convert(demo_model, tmp_path / "q", to="safetensors", quantize="NF4")
    aprfmt.convert(demo_model, tmp_path / "direct.apr", quantize="NF4")
    aprfmt.convert(tmp_path / "q", tmp_path / "through.apr")
    for name in ("direct", "through"):
        aprfmt.convert(tmp_path / f"{name}.apr", tmp_path / name, to="safetensors")
        assert tensors_of(tmp_path / name) == tensors_of(tmp_path / "q")
        config = (tmp_path / name / "config.json").read_text()
        assert config == (tmp_path / "q" / "config.json").read_text()


def test_gguf_refuses_it_with_the_way_out(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"gguf has no code .*NF4.*Q4_K_M.*APR"):
        aprfmt.convert(demo_model, tmp_path / "q.gguf", quantize="NF4")


@pytest.mark.parametrize("target", ["f.gguf", "f.apr", "folder"])
def test_decoding_takes_the_claim_out_of_the_config(
    target: str, demo_model: Path, tmp_path: Path
) -> None:
    """A float model whose config says bitsandbytes would not load."""
    aprfmt.convert(demo_model, tmp_path / "q", to="safetensors", quantize="NF4")
    to = "safetensors" if target == "folder" else None
    report = aprfmt.convert(tmp_path / "q", tmp_path / target, to=to, encoding="F32")
    assert report.lossless
    with aprfmt.open(tmp_path / target) as model, aprfmt.open(tmp_path / "q") as packed:
        assert model.config is not None and "quantization_config" not in model.config
        for key, tensor in packed.roles.items():
            assert np.array_equal(model.roles[key].numpy(), tensor.numpy()), key
    back = aprfmt.convert(tmp_path / target, tmp_path / "back", to="safetensors")
    assert back.tensors
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_the_quant_state_names_the_sources_dtype(encoding: str, tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "s", encoding, hidden=64, layers=1)
    aprfmt.convert(source, tmp_path / "q", to="safetensors", quantize="NF4")
    name = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(tensors_of(tmp_path / "q")[name][2])
    assert state["dtype"] == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[encoding]
    assert state["shape"] == [64, 64]


def test_a_pattern_packs_single_weights(demo_model: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="NOT-RUN: transformers is missing")
    wishes = [("L1.ffn_up", "NF4")]
    aprfmt.convert(demo_model, tmp_path / "q", to="safetensors", tensor_encodings=wishes)
    with aprfmt.open(tmp_path / "q") as model:
        found = {name for name, tensor in model.items() if tensor.parts}
        assert found == {"model.layers.1.mlp.up_proj.weight"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", device_map="cpu")
    kinds = {name: type(module).__name__ for name, module in loaded.named_modules()}
    assert [n for n, kind in kinds.items() if kind == "Linear4bit"] == [
        "model.layers.1.mlp.up_proj"
    ]
