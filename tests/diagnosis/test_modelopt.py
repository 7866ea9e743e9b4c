"""A ModelOpt copy is a quantized copy, and the faults such files have met are named."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.conversion.dialect_floats import E2M1, pairs
from tests.conversion.dialect_folders import Rows, stored_row
from tests.conversion.folders import tensors_of, write_mixed
from tests.models import save_tiny

Parts = dict[str, Any]


def rounded(weight: Any) -> Parts:
    """Return NVFP4 rounded to the nearest: codes still one a byte, scales and their scale."""
    second = np.float32(np.abs(weight).max() / (6 * 448))
    groups = weight.reshape(len(weight), -1, 16)
    scale = (np.abs(groups).max(2) / 6 / second).astype(ml_dtypes.float8_e4m3fn)
    step = scale.astype(np.float32) * second
    far = np.abs((groups / step[..., None])[..., None] - E2M1)
    codes = far.argmin(-1).astype(np.uint8).reshape(weight.shape)
    return {"weight": pairs(codes), "weight_scale": scale, "weight_scale_2": np.array(second)}


def high_first(parts: Parts) -> None:
    parts["weight"] = parts["weight"] >> 4 | parts["weight"] << 4


def reciprocal(parts: Parts) -> None:
    """Store the scale of scales as compressed-tensors does."""
    parts["weight_scale_2"] = np.array(1 / parts["weight_scale_2"], np.float32)


def late(parts: Parts) -> None:
    parts["weight_scale"] = np.roll(parts["weight_scale"], 1, axis=1)


FAULTS: Mapping[str, tuple[Callable[[Parts], None] | None, str]] = {
    "none": (None, "quantisation"),
    "high nibble first": (high_first, "packing_order"),
    "reciprocal scale of scales": (reciprocal, "quant_scale"),
    "scales a group late": (late, "quant_scale"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_copy_and_its_faults(name: str, tmp_path: Path) -> None:
    change, cause = FAULTS[name]
    for folder in ("base", "copy"):
        save_tiny("llama", tmp_path / folder, "float32", hidden_size=64, intermediate_size=96)
    rows: Rows = {}
    for stored, row in tensors_of(tmp_path / "base").items():
        rows[stored] = row
        if "_proj" in stored:
            parts = rounded(np.frombuffer(row[2], np.float32).reshape(row[1]))
            if change is not None:
                change(parts)
            del rows[stored]
            prefix = stored.removesuffix("weight")
            rows |= {prefix + suffix: stored_row(x) for suffix, x in parts.items()}
    write_mixed(tmp_path / "copy" / "model.safetensors", rows)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    found = aprfmt("diagnose", tmp_path / "base", tmp_path / "copy", "--ids", "1,5,9", "--json")
    assert found.code == (0 if change is None else 1)
    assert found.json["verdict"] == ("precision" if change is None else "bug")
    assert [(row["cause"], row["confirmed"]) for row in found.json["findings"]] == [(cause, True)]


def halved(parts: Parts) -> None:
    """Make scales of the packed bytes, of which a row has half as many as weights."""
    parts["weight_scale"] = parts["weight_scale"][:, ::2]


def lengthened(parts: Parts) -> None:
    parts["weight_scale"] = np.repeat(parts["weight_scale"], 2, axis=1)


@pytest.mark.parametrize("change", [halved, lengthened])
@pytest.mark.parametrize("swapped", [False, True])
def test_scales_that_fit_no_codes_are_the_cause(
    change: Callable[[Parts], None], swapped: bool, tmp_path: Path
) -> None:
    """Seen red: no cause, and "the file holds no packed weight", though `validate` had both."""
    for folder in ("base", "copy"):
        save_tiny("llama", tmp_path / folder, "float32", hidden_size=64, intermediate_size=96)
    rows: Rows = {}
    packed = 0
    for stored, row in tensors_of(tmp_path / "base").items():
        if "_proj" not in stored:
            rows[stored] = row
            continue
        parts = rounded(np.frombuffer(row[2], np.float32).reshape(row[1]))
        change(parts)
        prefix = stored.removesuffix("weight")
        rows |= {prefix + suffix: stored_row(x) for suffix, x in parts.items()}
        packed += 1
    write_mixed(tmp_path / "copy" / "model.safetensors", rows)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    sides = [tmp_path / "base", tmp_path / "copy"]
    told = aprfmt("diagnose", *(sides[::-1] if swapped else sides), "--json")
    (found,) = told.json["causes"]
    assert (told.code, found["cause"], found["level"]) == (1, "scales_shape", "located")
    side = "A" if swapped else "B"
    assert found["says"].startswith(f"packed weights of {side} cannot be decoded: ")
    assert "weight_scale" in found["says"] and f"so {packed - 1} more" in found["says"]
    assert "no packed weight" not in told.out and "validate" in told.json["next"][0]
