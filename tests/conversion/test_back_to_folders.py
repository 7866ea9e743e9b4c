"""A folder by way of GGUF and APR and back: the tensors stand there as they were."""

import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import aprfmt
from tests.models import IN_GGUF, MAKERS, save_tiny


@pytest.mark.parametrize(
    ("name", "form"), [(name, "apr") for name in MAKERS] + [(name, "gguf") for name in IN_GGUF]
)
def test_fused_and_turned_tensors_come_back(name: str, form: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "a")
    aprfmt.convert(tmp_path / "a", tmp_path / f"b.{form}")
    aprfmt.convert(tmp_path / f"b.{form}", tmp_path / "c.safetensors", to="safetensors")
    before, after = (
        load_file(tmp_path / "a" / "model.safetensors"),
        load_file(tmp_path / "c.safetensors"),
    )
    if (name, form) == ("qwen3_vl_moe", "gguf"):  # written as published, which transformers turned
        before = {k: v.swapaxes(1, 2) if ".experts." in k else v for k, v in before.items()}
    if (name, form) == ("kimi_linear", "gguf"):  # its dense MLPs are written as published files
        dense = re.compile(r"block_sparse_moe(\.(gate|up|down)_proj)")
        before = {dense.sub(r"mlp\1", k): v for k, v in before.items()}
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
    assert all((after[key] == value).all() for key, value in before.items())
