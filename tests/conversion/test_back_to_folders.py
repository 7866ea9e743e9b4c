"""A folder by way of GGUF and APR and back: the tensors stand there as they were."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import aprfmt
from aprfmt.errors import ConversionError
from aprfmt.model import open_model
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
    if (name, form) == ("minimax", "gguf"):  # its buffers of decays are computed
        before = {k: v for k, v in before.items() if not k.endswith(("_decay", "slope_rate"))}
    if (name, form) == ("deepseek_v4", "gguf"):  # its names are those of published files
        with open_model(tmp_path / "a") as a, open_model(tmp_path / "c.safetensors") as c:
            before, after = ({k: v.numpy() for k, v in m.roles.items()} for m in (a, c))
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
    assert all((after[key] == value).all() for key, value in before.items())


def test_a_gguf_has_indices_of_32_bits(tmp_path: Path) -> None:
    """llama.cpp ends the process for others. Seen red: kept as I64, and a number cut to 32 bits."""
    save_tiny("deepseek_v4", tmp_path / "m")
    path, name = tmp_path / "m" / "model.safetensors", "L0.ffn_gate_tid2eid.weight"
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    with open_model(tmp_path / "m") as source, open_model(tmp_path / "m.gguf") as made:
        assert (source.roles[name].encoding, made.roles[name].encoding) == ("I64", "I32")
        assert (source.roles[name].numpy() == made.roles[name].numpy()).all()
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith("tid2eid"))
    save_file(tensors | {key: tensors[key] + (1 << 40)}, path, {"format": "pt"})
    with pytest.raises(ConversionError, match="which I32 cannot"):
        aprfmt.convert(tmp_path / "m", tmp_path / "large.gguf")


def test_a_draft_head_that_no_table_knows_is_kept_or_left_out(tmp_path: Path) -> None:
    """DeepSeek V4's: in an APR file and back as it was, in a GGUF only if it is left out."""
    save_tiny("deepseek_v4", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    head = {"mtp.0.enorm.weight": np.arange(48, dtype=np.float32),
            "mtp.0.e_proj.weight": np.eye(48, dtype=np.float32)}  # fmt: skip
    save_file(load_file(path) | head, path, {"format": "pt"})
    aprfmt.convert(tmp_path / "m", tmp_path / "m.apr")
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "back.safetensors", to="safetensors")
    found = load_file(tmp_path / "back.safetensors")
    assert all((found[name] == values).all() for name, values in head.items())
    with pytest.raises(ConversionError, match="leave it out with --drop 'mtp"):
        aprfmt.convert(tmp_path / "m", tmp_path / "refused.gguf")
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf", drop=("mtp.*",))
    with open_model(tmp_path / "m.gguf") as made, open_model(tmp_path / "m") as source:
        assert made.roles.keys() == source.roles.keys()
