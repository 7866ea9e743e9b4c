"""Scales that were rewritten by one rule between two files packed alike are no damage.

Seen red: the row left out of the table (damage is named), names of input scales not held for one.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.compare import diff
from tests.cli.run import aprfmt
from tests.conversion.dialect_floats import int4_awq
from tests.conversion.dialect_folders import (
    FOLDERS,
    Maker,
    Rows,
    stored_row,
    write_folder,
    write_mixture,
)
from tests.conversion.folders import tensors_of, write_mixed
from tests.diagnosis.test_modelopt import reciprocal, rounded
from tests.models import save_tiny

Array = Any
Change = Callable[[Array], Array]
_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def whole_fp8(shape: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Array], Array]:
    """compressed-tensors float-quantized: FP8 with one scale."""
    weight = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = np.float32(rng.uniform(0.01, 0.1))
    return {"weight": weight, "weight_scale": scale.reshape(1)}, weight.astype(np.float32) * scale


def made(folder: Path, dialect: str) -> Path:
    """Write a folder in a dialect of FOLDERS, or in one of this file."""
    more: dict[str, tuple[Maker, dict[str, Any]]] = {
        "fp8": (
            whole_fp8,
            {
                "quant_method": "compressed-tensors", "format": "float-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                    "symmetric": True, "num_bits": 8, "type": "float", "strategy": "tensor",
                }}},
            },
        ),
        "awq_smoothed": (int4_awq, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ",
                                    "group_size": 32}),
    }  # fmt: skip
    if dialect in FOLDERS:
        write_folder(folder, dialect)
    else:
        make, section = more[dialect]
        write_mixture(
            folder, lambda name: make if "_proj" in name else None, {"quantization_config": section}
        )
    return folder


def changed(source: Path, target: Path, suffix: str, change: Change, only: str = "") -> int:
    """Write a copy whose scales named `suffix` are `change` of the others; return how many."""
    shutil.copytree(source, target)
    rows, count = tensors_of(source), 0
    for name, (kind, shape, raw) in rows.items():
        if name.endswith(suffix) and only in name:
            values = np.frombuffer(raw, _TYPES[kind])
            rows[name] = kind, shape, change(values).astype(values.dtype).tobytes()
            count += 1
    write_mixed(target / "model.safetensors", rows)
    return count


def inverse(x: Array) -> Array:
    return 1 / x


# dialect, the scale, what is done to it, only in, what is said, confirmed
RULES: tuple[tuple[str, str, Change, str, str, bool], ...] = (
    ("modelopt", "weight_scale_2", inverse, "", "is inverted: 1/s stands for s", True),
    ("modelopt", "weight_scale_2", inverse, "1.mlp.up", "is inverted: 1/s stands for s", True),
    ("modelopt", "weight_scale_2", np.square, "", "the squares of A's", True),
    ("modelopt", "weight_scale_2", lambda x: x * np.float32(2688.1), "", "another number", False),
    ("fp8", "weight_scale", inverse, "", "is inverted: 1/s stands for s", True),
    ("fp8", "weight_scale", np.sqrt, "", "the square roots of A's", True),
    ("compressed_plain", "weight_scale", inverse, "", "are inverted: 1/s stands for s", True),
    ("compressed_plain", "weight_scale", lambda x: x * np.float32(2), "0.mlp", "each 2 times",
     True),
    ("awq_smoothed", "pre_quant_scale", inverse, "", "are inverted: 1/s stands for s", True),
    ("gptq", "scales", inverse, "", "are inverted: 1/s stands for s", True),
)  # fmt: skip


@pytest.mark.parametrize(("dialect", "suffix", "change", "only", "says", "sure"), RULES)
def test_a_rewritten_scale_is_named(
    dialect: str, suffix: str, change: Change, only: str, says: str, sure: bool, tmp_path: Path
) -> None:
    good = made(tmp_path / "good", dialect)
    count = changed(good, tmp_path / "bad", f".{suffix}", change, only)
    (found,) = diff(good, tmp_path / "bad").findings
    assert found.cause == "quant_scale" and len(found.keys) == count
    assert says in found.says and suffix in found.says
    assert (found.certainty == "confirmed") == sure


def grid_exchanged(x: Array) -> Array:
    """Exchange the first number of a part with the fourth."""
    made = x.copy()
    made[[0, 3]] = x[[3, 0]]
    return made


# The dialect, the scales, their columns, what is done to them, what is said.
MOVES: tuple[tuple[str, str, Change, str], ...] = (
    ("compressed_packed", "weight_scale", lambda x: x.reshape(-1, 2).T.reshape(-1), "transposed"),
    ("compressed_packed", "weight_scale", grid_exchanged, "at [0, 0] and [1, 1] exchanged"),
    ("mlx", "scales", grid_exchanged, "with those at [0, 0] and [1, 1] exchanged"),
    (
        "gptq",
        "scales",
        lambda x: np.roll(x.reshape(2, -1), 1, 0).reshape(-1),
        "with rows 0 and 1 exchanged",
    ),
)


@pytest.mark.parametrize(("dialect", "suffix", "change", "says"), MOVES)
def test_exchanged_scales_are_no_damage(
    dialect: str, suffix: str, change: Change, says: str, tmp_path: Path
) -> None:
    good = made(tmp_path / "good", dialect)
    changed(good, tmp_path / "bad", f".{suffix}", change, "0.mlp.up")
    (found,) = diff(good, tmp_path / "bad").findings
    assert (found.cause, found.certainty) == ("quant_scale", "confirmed")
    assert says in found.says and suffix in found.says


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_a_scale_inverted_in_another_type(kind: str, tmp_path: Path) -> None:
    good = made(tmp_path / "good", "fp8")
    shutil.copytree(good, tmp_path / "bad")
    rows = tensors_of(good)
    for name, (_, shape, raw) in rows.items():
        if name.endswith(".weight_scale"):
            value = (1 / np.frombuffer(raw, np.float32)).astype(_TYPES[kind])
            rows[name] = kind, shape, value.tobytes()
    write_mixed(tmp_path / "bad" / "model.safetensors", rows)
    (found,) = diff(good, tmp_path / "bad").findings
    assert found.cause == "quant_scale" and "is inverted" in found.says
    assert found.certainty == "explained"  # 16 bits of one number exclude no chance


@pytest.mark.parametrize("bit", [3, 22, 27])
def test_a_turned_bit_of_a_scale_is_damage(bit: int, tmp_path: Path) -> None:
    def turned(x: Array) -> Array:
        return (x.view(np.uint32) ^ np.uint32(1 << bit)).view(np.float32)

    good = made(tmp_path / "good", "modelopt")
    changed(good, tmp_path / "bad", ".weight_scale_2", turned, "0.mlp.up")
    assert [one.cause for one in diff(good, tmp_path / "bad").findings] == ["bit_rot"]


# What is done to A's input_scale, its name and type in B: whether both are one scale.
INPUTS: tuple[tuple[str, Change, str, int, str], ...] = (
    ("input_global_scale", inverse, "F32", 0, ""),
    ("input_global_scale", lambda x: x, "F32", 1, "1/s stands for s"),
    ("input_global_scale", lambda x: 2 / x, "F32", 1, ""),
    ("input_scale", inverse, "F32", 1, "1/s stands for s"),
    ("input_scale", lambda x: x, "BF16", 0, ""),
    ("input_scale", lambda x: x * np.float32(1.05), "BF16", 1, ""),
)


@pytest.mark.parametrize(("name", "change", "kind", "code", "says"), INPUTS)
def test_input_scales_of_two_dialects_are_one_thing(
    name: str, change: Change, kind: str, code: int, says: str, tmp_path: Path
) -> None:
    """compressed-tensors divides by its input_global_scale, ModelOpt multiplies by input_scale."""
    a = made(tmp_path / "a", "modelopt")
    b = shutil.copytree(a, tmp_path / "b")
    rows = {}
    for old, (dtype, shape, raw) in tensors_of(a).items():
        stem, _, last = old.rpartition(".")
        if last == "input_scale":
            value = np.asarray(change(np.frombuffer(raw, np.float32))).astype(_TYPES[kind])
            rows[f"{stem}.{name}"] = kind, shape, value.tobytes()
        elif last == "weight_scale_2" and name == "input_global_scale":
            value = 1 / np.frombuffer(raw, np.float32)
            rows[f"{stem}.weight_global_scale"] = dtype, (1,), value.tobytes()
        elif last == "weight" and name == "input_global_scale" and dtype == "U8":
            rows[f"{old}_packed"] = dtype, shape, raw
        else:
            rows[old] = dtype, shape, raw
    write_mixed(b / "model.safetensors", rows)
    if name == "input_global_scale":
        config = json.loads((b / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
                "group_size": 16,
            }}},
        }  # fmt: skip
        (b / "config.json").write_text(json.dumps(config))
    done = aprfmt("diagnose", a, b, "--ids", "1,5,9")
    assert "not compared: " in done.out if code else "activations" not in done.out
    assert done.code == code and says in done.out
    assert ("1/s stands for s" in done.out) == bool(says)


@pytest.mark.parametrize("base", ["packed", "float"])
def test_one_expert_of_many_has_its_scale_inverted(base: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48}
    save_tiny("qwen3_moe", tmp_path / "float", "float32", **sizes)

    def pack(folder: Path, wrong: str) -> Path:
        shutil.copytree(tmp_path / "float", folder)
        rows: Rows = {}
        for name, row in tensors_of(folder).items():
            if not name.endswith("_proj.weight"):
                rows[name] = row
                continue
            parts = rounded(np.frombuffer(row[2], np.float32).reshape(row[1]))
            if wrong and wrong in name:
                reciprocal(parts)
            stem = name.removesuffix("weight")
            rows |= {stem + suffix: stored_row(x) for suffix, x in parts.items()}
        write_mixed(folder / "model.safetensors", rows)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    good = pack(tmp_path / "packed", "")
    bad = pack(tmp_path / "bad", "0.mlp.experts.1.up")
    (found,) = diff(good if base == "packed" else tmp_path / "float", bad).findings
    assert (found.cause, found.certainty) == ("quant_scale", "confirmed")
    assert found.keys == ("L0.ffn_up_exps.weight",) and "weight_scale_2" in found.says
    assert base == "packed" or "in 1 of 6 tensors" in found.says
