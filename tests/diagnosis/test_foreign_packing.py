"""FP8 weights of a method that is not decoded here: nobody says what is wrong with them.

Seen red: "config.json says groups of None; the weight is stored with groups of 16", confirmed, of a
sound file of Quark; codes "whose scale is not in the file" beside their scale.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder

WEIGHTS = "model.safetensors"
QUARK = {
    "quant_method": "quark",
    "exclude": ["lm_head"],
    "global_quant_config": {
        "weight": {
            "dtype": "fp8_e4m3",
            "qscheme": "per_tensor",
            "group_size": None,
            "ch_axis": None,
        }
    },
}
SECTIONS: dict[str, dict[str, Any]] = {
    "quark": QUARK,
    "quark in groups": {**QUARK, "group_size": 32},
    "another method": {"quant_method": "quanto", "weights": "float8"},
    "a method of no name here": {"quant_method": "house", "group_size": 64, "bits": 8},
}  # fmt: skip


def packed(
    source: Path,
    folder: Path,
    section: dict[str, Any] | None,
    scales: bool = True,
    change: Callable[[dict[str, Any]], None] = lambda arrays: None,
) -> Path:
    """Write a model with FP8 codes of its projections, each with one scale where `scales`.

    `change` edits the arrays in place.
    """
    folder.mkdir()
    arrays: dict[str, Any] = {}
    for name, values in load_file(source / WEIGHTS).items():
        if "proj" not in name:
            arrays[name] = values
            continue
        scale = np.abs(values).max() / 448
        arrays[name] = (values / scale).astype(ml_dtypes.float8_e4m3fn)
        if scales:
            arrays[f"{name}_scale"] = np.float32(scale).reshape(1)
    change(arrays)
    save_file(arrays, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    stated = {} if section is None else {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config | stated))
    return folder


@pytest.mark.parametrize("name", SECTIONS)
def test_a_sound_file_of_a_foreign_method_is_not_accused(name: str, tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "a", "F32")
    there = packed(source, tmp_path / "b", SECTIONS[name])
    for verb in ("diagnose", "diff"):
        found = aprfmt(verb, source, there, "--json").json
        assert found["pronounced"]["exit"] == 2 and not found["causes"], (verb, found["causes"])
    failed = {row["check"] for row in aprfmt("validate", there, "--json").json["findings"]
              if row["level"] == "fail"}  # fmt: skip
    assert failed == {"completeness"}
    assert "not decoded here" in aprfmt("inspect", there).out


def test_codes_without_a_claim_and_without_a_scale_are_told(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "a", "F32")
    there = packed(source, tmp_path / "b", None, scales=False)
    failed = {row["check"] for row in aprfmt("validate", there, "--json").json["findings"]}
    assert "values" in failed
    assert aprfmt("diagnose", source, there).code == 1


SCALE = "model.layers.1.mlp.up_proj.weight_scale"


def without_scale(arrays: dict[str, Any]) -> None:
    del arrays[SCALE]


def without_weight(arrays: dict[str, Any]) -> None:
    del arrays[SCALE], arrays[SCALE.removesuffix("_scale")]


@pytest.mark.parametrize("change", [without_scale, without_weight])
@pytest.mark.parametrize("turned", [False, True])
def test_a_part_that_one_of_two_packed_files_lacks_is_lost(
    change: Callable[[dict[str, Any]], None], turned: bool, tmp_path: Path
) -> None:
    """Seen red: `diff` ended with an error, and `diagnose` said the same in every quantity."""
    source = llama_folder(tmp_path / "a", "F32")
    whole = packed(source, tmp_path / "b", QUARK)
    sides = (whole, packed(source, tmp_path / "c", QUARK, change=change))
    for verb in ("diff", "diagnose"):
        told = aprfmt(verb, *(sides[::-1] if turned else sides), "--json")
        assert told.code == 1, (verb, told.out, told.err)
    assert told.json["verdict"] == "bug"
    (found,) = told.json["causes"]
    assert found["cause"] == "missing_tensors" and SCALE in found["where"]
    assert found["says"].startswith("A lacks" if turned else "B lacks")


def test_two_packed_files_alike_are_the_same_and_other_scales_are_not(tmp_path: Path) -> None:
    def other_scale(arrays: dict[str, Any]) -> None:
        arrays[SCALE] = 2 * arrays[SCALE]

    source = llama_folder(tmp_path / "a", "F32")
    whole, alike = (packed(source, tmp_path / name, QUARK) for name in "bc")
    assert aprfmt("diff", whole, alike).code == 0
    assert aprfmt("diagnose", whole, alike).code == 0
    other = packed(source, tmp_path / "d", QUARK, change=other_scale)
    assert aprfmt("diff", whole, other).code == 1
    assert aprfmt("diagnose", whole, other).code == 1


def int8_of_bitsandbytes(module: str, x: Any) -> dict[str, Any]:
    top = np.abs(x).max(1)
    codes = np.rint(x * (127 / top)[:, None]).astype(np.int8)
    weight = {f"{module}.weight": codes, f"{module}.SCB": top}
    return weight | {f"{module}.weight_format": np.zeros((), np.uint8)}


def int8_of_quanto(module: str, x: Any) -> dict[str, Any]:
    scale = np.abs(x).max(1, keepdims=True) / 127
    codes, one = np.rint(x / scale).astype(np.int8), np.ones((), np.float32)
    weight = {f"{module}.weight._data": codes, f"{module}.weight._scale": scale}
    return weight | {f"{module}.input_scale": one, f"{module}.output_scale": one}


def int4_of_quanto(module: str, x: Any) -> dict[str, Any]:
    codes, low, step = four_bits(x)
    parts = {"_data._data": codes, "_scale": step, "_shift": -low}
    return {f"{module}.weight.{part}": values for part, values in parts.items()}


def int4_of_hqq(module: str, x: Any) -> dict[str, Any]:
    codes, low, step = four_bits(x)
    facts = {"nbits": np.int64(4), "group_size": np.int64(32), "axis": np.int64(1)}
    parts = {"W_q": codes, "scale": step, "zero": -low / step, "shape": np.array(x.shape)}
    return {f"{module}.{part}": np.asarray(one) for part, one in (parts | facts).items()}


def four_bits(x: Any) -> tuple[Any, Any, Any]:
    """Return codes of groups of 32, two a byte, and the lowest value and the step of each group."""
    groups = x.reshape(-1, 32)
    low, top = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    step = (top - low) / 15
    first, second = np.split(np.rint((groups - low) / step).astype(np.uint8), 2)
    return first << 4 | second, low, step


@pytest.mark.parametrize(
    ("store", "tool"),
    [
        (int8_of_bitsandbytes, "bitsandbytes"),
        (int8_of_quanto, "quanto"),
        (int4_of_quanto, "quanto"),
        (int4_of_hqq, "HQQ"),
    ],
)
def test_weights_of_a_tool_without_a_claim_are_told_by_its_names(
    store: Callable[[str, Any], dict[str, Any]], tool: str, tmp_path: Path
) -> None:
    """Seen red: a scale "not in the file" beside it, "ignored" and confirmed, codes to rename."""
    source = llama_folder(tmp_path / "a", "F32", hidden=64, ffn=64)

    def stored_by_tool(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if "proj" in name]:
            del arrays[name]
            arrays |= store(name.removesuffix(".weight"), load_file(source / WEIGHTS)[name])

    there = packed(source, tmp_path / "b", None, scales=False, change=stored_by_tool)
    found = aprfmt("diff", source, there, "--json").json
    assert found["pronounced"]["exit"] == 2 and not found["causes"]
    failed = {row["check"]: row for row in aprfmt("validate", there, "--json").json["findings"]
              if row["level"] == "fail"}  # fmt: skip
    assert failed.keys() <= {"completeness", "quantization"}
    assert f"decode them with {tool}" in str(failed["completeness"])
    told = aprfmt("convert", there, tmp_path / "c.gguf")
    assert told.code == 2 and f"decode them with {tool}" in told.err


def test_codes_whose_parts_do_not_fit_are_no_weight_of_another_name(tmp_path: Path) -> None:
    """Seen red: "_weight_qdata stands for weight", its scales "ignored", confirmed."""
    source = llama_folder(tmp_path / "a", "F32", layers=1)
    there, arrays, stated = tmp_path / "b", dict[str, Any](), {"format": "pt"}
    there.mkdir()
    for name, values in load_file(source / WEIGHTS).items():
        if "proj" not in name:
            arrays[name] = values
            continue
        scale = np.abs(values).max(1, keepdims=True) / 448
        stem = name.removesuffix(".weight")
        arrays[f"{stem}._weight_qdata"] = (values / scale).astype(ml_dtypes.float8_e4m3fn)
        arrays[f"{stem}._weight_scale"] = scale
        wide = values.shape[1] - ("down_proj" in name)
        facts = {"block_size": [1, wide], "act_quant_kwargs": None}
        described = {"_type": "Float8Tensor", "_data": facts}
        stated[name] = json.dumps(described | {"_tensor_data_names": ["qdata", "scale"]})
    stated["tensor_names"] = json.dumps([*load_file(source / WEIGHTS)])
    save_file(arrays, there / WEIGHTS, stated)
    config = json.loads((source / "config.json").read_text())
    claim = {"quantization_config": {"quant_method": "torchao"}}
    (there / "config.json").write_text(json.dumps(config | claim))
    found = aprfmt("diff", source, there, "--json")
    assert not {one["cause"] for one in found.json["causes"]} & {"tensor_names", "quant_scale"}
    assert "block_size" in found.out and found.code
