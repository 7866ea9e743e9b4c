"""Our files read by other projects' libraries: gguf, safetensors, transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from tests.conversion.folders import llama_folder, tensors_of

ARCHS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]


def logits(folder: Path, **options: Any) -> Any:
    """Return float32 logits of transformers on fixed ids."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.models import IDS

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


@pytest.mark.parametrize("arch", ARCHS)
def test_transformers_loads_our_folder(arch: str, tmp_path: Path) -> None:
    """Safetensors to APR to a folder: identical logits."""
    from tests.models import save_tiny

    save_tiny(arch, tmp_path / "source", "bfloat16")
    aprfmt.convert(tmp_path / "source", tmp_path / "m.apr")
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "back", to="safetensors")
    np.testing.assert_array_equal(logits(tmp_path / "source"), logits(tmp_path / "back"))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_transformers_reads_our_gguf(arch: str, tmp_path: Path) -> None:
    """Safetensors to GGUF, read by transformers' own GGUF reader: every weight equal.

    qwen3 has the head size transformers assumes, because its reader ignores the key for it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tests.models import save_tiny

    options = {"head_dim": 128} if arch == "qwen3" else {}
    theirs = save_tiny(arch, tmp_path / "source", "float32", **options).state_dict()
    aprfmt.convert(tmp_path / "source", tmp_path / "m.gguf")
    ours = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # gemma's norms lose bits where one is added: transformers cannot restore them, we do
        atol = 1.2e-7 if arch.startswith("gemma") and "norm" in name else 0.0
        assert float((ours[name] - tensor).abs().max()) <= atol, name


def test_demo_gives_identical_logits_from_folder_and_gguf(demo_model: Path, tmp_path: Path) -> None:
    aprfmt.convert(demo_model, tmp_path / "demo.gguf")
    np.testing.assert_array_equal(logits(tmp_path, gguf_file="demo.gguf"), logits(demo_model))


def test_gguf_py_sees_permuted_rows(tmp_path: Path) -> None:
    """Q and K rows as llama.cpp's converter orders them: row j*(d/2)+i of a head goes to 2i+j."""
    from gguf import GGUFReader

    source = llama_folder(tmp_path / "source", "F32")
    aprfmt.convert(source, tmp_path / "m.gguf")
    stored = {t.name: np.asarray(t.data) for t in GGUFReader(tmp_path / "m.gguf").tensors}
    for name, gguf_name, heads in (("q", "attn_q", 4), ("k", "attn_k", 2)):
        _, shape, raw = tensors_of(source)[f"model.layers.1.self_attn.{name}_proj.weight"]
        w = np.frombuffer(raw, np.float32).reshape(shape)
        expected = w.reshape(heads, 2, shape[0] // heads // 2, shape[1]).swapaxes(1, 2)
        np.testing.assert_array_equal(stored[f"blk.1.{gguf_name}.weight"], expected.reshape(shape))


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_gguf_py_reads_any_alignment(alignment: int, tmp_path: Path) -> None:
    from gguf import GGUFReader

    source = llama_folder(tmp_path / "source", "F16", vocab=31)
    aprfmt.convert(source, tmp_path / "m.gguf", alignment=alignment)
    reader = GGUFReader(tmp_path / "m.gguf")
    assert reader.alignment == alignment
    assert len(reader.tensors) == len(tensors_of(source))
    for tensor in reader.tensors:
        assert int(tensor.data_offset) % alignment == 0
    embedding = next(t for t in reader.tensors if t.name == "token_embd.weight")
    assert embedding.data.tobytes() == tensors_of(source)["model.embed_tokens.weight"][2]


def test_safetensors_reads_our_folder(tmp_path: Path) -> None:
    from safetensors import safe_open

    source = llama_folder(tmp_path / "source", "F16")
    aprfmt.convert(source, tmp_path / "m.gguf")
    aprfmt.convert(tmp_path / "m.gguf", tmp_path / "back", to="safetensors")
    with safe_open(tmp_path / "back" / "model.safetensors", framework="np") as file:
        assert file.metadata()["format"] == "pt"
        for name, (_, _, raw) in tensors_of(source).items():
            assert file.get_tensor(name).tobytes() == raw


def test_split_and_merged_files_are_the_same_model(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    for name in ("gguf", "apr"):
        whole, one = tmp_path / f"whole.{name}", tmp_path / f"one.{name}"
        aprfmt.convert(source, whole)
        report = aprfmt.convert(whole, tmp_path / f"part.{name}", max_shard_size=40_000)
        assert len([f for f in report.files if f.suffix == f".{name}"]) > 2
        assert aprfmt.diff(whole, report.files[1]).equal
        aprfmt.convert(report.files[0], one)
        assert aprfmt.diff(source, one).equal
        with aprfmt.open(whole) as a, aprfmt.open(one) as b:
            assert {k: bytes(t.raw()) for k, t in a.items()} == {
                k: bytes(t.raw()) for k, t in b.items()
            }
