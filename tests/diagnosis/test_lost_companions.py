"""Codes that were saved without the tensors that say what they count for.

Seen red: bitsandbytes was said to be decoded by nobody, and its claim to be untrue; of NVFP4
another part was said to be lost, and the codes to be read as numbers, confirmed.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from tests.cli.run import aprfmt as command
from tests.conversion.dialect_floats import nvfp4
from tests.conversion.dialect_folders import stored_row, write_folder, write_mixture
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.diagnosis.packing import compressed_section

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


PARTS = (
    ("nvfp4", "weight_global_scale"),
    ("nvfp4", "weight_scale"),
    ("modelopt", "weight_scale_2"),
    ("gptq", "qzeros"),
    ("awq", "scales"),
    ("fp8_block", "weight_scale_inv"),
    ("compressed_plain", "weight_scale"),
    ("compressed_packed", "weight_shape"),
    ("mlx", "biases"),
)
NVFP4 = compressed_section(
    "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
) | {"ignore": ["lm_head", "re:.*gate$"]}


def global_scaled(
    shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[Mapping[str, Any], Any]:
    """Return NVFP4 as compressed-tensors stores it, whose global scale divides."""
    parts, values = nvfp4(shape, rng)
    return {
        "weight_packed": parts["weight"],
        "weight_scale": parts["weight_scale"],
        "weight_global_scale": 1 / parts["weight_scale_2"],
        "input_global_scale": np.array(np.float32(4.0)),
    }, values


def without(source: Path, made: Path, *ends: str) -> Path:
    """Return a copy of a folder without the tensors whose names end so."""
    shutil.copytree(source, made)
    rows = tensors_of(source)
    kept = {name: row for name, row in rows.items() if not name.endswith(ends)}
    assert len(kept) < len(rows)
    write_mixed(made / "model.safetensors", kept)
    return made


@pytest.mark.parametrize(("dialect", "part"), PARTS)
def test_the_side_that_lacks_a_part_is_accused(dialect: str, part: str, tmp_path: Path) -> None:
    good, plain = tmp_path / "good", tmp_path / "plain"
    if dialect == "nvfp4":
        config = {"quantization_config": NVFP4}
        write_mixture(good, lambda name: global_scaled if "_proj" in name else None, config)
    else:
        write_folder(good, dialect)
    inputs = ["--drop", "*input*scale"] if dialect in ("nvfp4", "modelopt") else []
    decode = ["--to", "safetensors", "--encoding", "F32", *inputs]
    assert command("convert", good, plain, *decode).code == 0
    lost = [f"model.layers.1.{name}.{part}" for name in ("self_attn.q_proj", "mlp.down_proj")]
    b = without(good, tmp_path / "b", *lost)
    weights = {name.removesuffix(part) + "weight" for name in lost}
    for pair, side in (((good, b), "B"), ((b, plain), "A")):
        (found,) = command("diagnose", *pair, "--json").json["causes"]
        assert found["cause"] == "scales_missing" and found["says"].startswith(f"{side}: ")
        assert f".{part} is not in the file" in found["says"] and {*found["where"]} == weights
        assert (found["level"] == "confirmed") == (good in pair)
        (seen,) = command("diff", *pair, "--json").json["causes"]
        assert seen["cause"] == "scales_missing" and seen["level"] == "located"
        assert f"{side} has codes without .{part}:" in seen["says"]


def test_all_that_lack_a_part_are_counted(tmp_path: Path) -> None:
    """Many weights of another dialect's model lack a part: their number is that of all."""
    a = tmp_path / "a"
    write_folder(a, "gptq")
    config = {"quantization_config": NVFP4}
    write_mixture(tmp_path / "good", lambda n: global_scaled if "_proj" in n else None, config)
    b = without(tmp_path / "good", tmp_path / "b", "weight_global_scale")
    for one in (a, tmp_path / "good"):
        told = command("diagnose", one, b, "--json").json["causes"]
        (found,) = [row for row in told if row["cause"] == "scales_missing"]
        assert len(found["where"]) == 14 and found["says"].endswith("and so in 13 more")
        assert (found["level"] == "confirmed") == (one != a)


def test_scales_of_what_goes_into_experts_are_compared(tmp_path: Path) -> None:
    """Experts are several tensors of one role: what one lacks is not equal."""
    a = tmp_path / "a"
    llama_folder(a, "BF16", layers=1)
    rows = tensors_of(a)
    rng = np.random.default_rng(0)
    at = "model.layers.0."
    rows = {name: row for name, row in rows.items() if ".mlp." not in name}
    rows[f"{at}block_sparse_moe.gate.weight"] = stored_row(np.zeros((2, 64), np.float16))
    for name in (f"{expert}.{w}." for expert in (0, 1) for w in ("w1", "w2", "w3")):
        parts, _ = global_scaled((64, 64), rng)
        stem = f"{at}block_sparse_moe.experts.{name}"
        rows |= {stem + suffix: stored_row(held) for suffix, held in parts.items()}
    write_mixed(a / "model.safetensors", rows)
    config = json.loads((a / "config.json").read_text())
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    config |= {"num_local_experts": 2, "num_experts_per_tok": 1, "quantization_config": NVFP4}
    (a / "config.json").write_text(json.dumps(config))
    assert command("diff", a, a).code == 0
    b = without(a, tmp_path / "b", "experts.1.w3.input_global_scale")
    for name in ("diff", "diagnose"):
        told = command(name, a, b, "--json").json
        assert told["exit"] == 1
        (left,) = [row for row in told["not_compared"] if row["kind"] == "scale of activations"]
        assert left["state"] == "only in A" and left["name"].endswith("input_global_scale")
        assert "experts.1.w3.weight" in left["why"]
