"""Codes of bitsandbytes that were saved without the tensors that say what they count for.

Seen red: bitsandbytes was said to be decoded by nobody, and its claim to be untrue.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

STATE = "quant_state.bitsandbytes__nf4"
# the suffixes that are lost, the beginning of the names that lose them
LOST = {
    "all": (("absmax", "quant_map", STATE), ""),
    "state": ((STATE,), ""),
    "all-of-one-layer": (("absmax", "quant_map", STATE), "model.layers.1."),
}


def packed(folder: Path) -> tuple[Path, Path]:
    """Return a source and its copy in NF4."""
    llama_folder(folder / "a", "BF16", hidden=64, layers=2, ffn=96, heads=4, kv_heads=2)
    aprfmt.convert(folder / "a", folder / "good", encoding="NF4")
    return folder / "a", folder / "good"


@pytest.mark.parametrize("case", LOST)
def test_what_is_lost_is_named(case: str, tmp_path: Path) -> None:
    suffixes, begin = LOST[case]
    a, good = packed(tmp_path)
    b = tmp_path / "b"
    shutil.copytree(good, b)
    rows = tensors_of(good)
    kept = {
        name: row
        for name, row in rows.items()
        if not (name.startswith(begin) and name.endswith(tuple(f".{one}" for one in suffixes)))
    }
    assert len(kept) < len(rows)
    write_mixed(b / "model.safetensors", kept)
    for one in (a, good):
        told = command("diagnose", one, b, "--json").json
        assert told["verdict"] == "bug" and told["exit"] == 1
        (found,) = [row for row in told["causes"] if row["cause"] == "scales_missing"]
        assert found["says"].startswith("B")
        assert all(f".{suffix}" in found["says"] for suffix in suffixes)
        assert all(name.startswith(begin) for name in found["where"])
    checked = command("validate", b)
    assert checked.code == 1
    assert "save the model again with all its tensors" in checked.out
    assert "holds no packed weight" not in checked.out
    assert command("convert", b, tmp_path / "b.gguf").code != 0


def test_eight_bits_without_their_scales(tmp_path: Path) -> None:
    llama_folder(tmp_path / "b", "BF16", hidden=64, layers=1, ffn=96, heads=4, kv_heads=2)
    rows = tensors_of(tmp_path / "b")
    for name, (_, shape, _) in list(rows.items()):
        if name.endswith("_proj.weight"):
            codes = np.random.default_rng(0).integers(-127, 128, shape, np.int8)
            rows[name] = ("I8", shape, codes.tobytes())
    write_mixed(tmp_path / "b" / "model.safetensors", rows)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    assert "are codes alone, without .SCB" in command("validate", tmp_path / "b").out
