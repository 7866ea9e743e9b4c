"""FP8 codes with scales in a folder whose config.json says nothing of quantization.

ComfyUI's markers say by themselves that codes have scales; without a marker, codes have no values.

Seen red: a marked weight left unread beside config.json, an unmarked one read, codes compared as
numbers with the tensors of the other file.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aprfmt.diagnosis import diagnose
from tests.cli.run import aprfmt

Tensors = dict[str, torch.Tensor]
MOST = 448  # the largest number of F8_E4M3


def scaled(held: Mapping[str, torch.Tensor], scale_name: str) -> tuple[Tensors, Tensors, Tensors]:
    """Return the tensors as FP8 codes with scales, as the numbers of the codes, and as F16."""
    coded: Tensors = {}
    ignored: Tensors = {}
    right: Tensors = {}
    for name, tensor in held.items():
        if not name.endswith("proj.weight"):
            coded[name] = tensor
            ignored[name] = right[name] = tensor
            continue
        scale = tensor.float().abs().max().reshape(1) / MOST
        codes = (tensor.float() / scale).to(torch.float8_e4m3fn)
        coded |= {name: codes, name.removesuffix(".weight") + scale_name: scale}
        ignored[name] = codes.to(torch.float16)
        right[name] = (codes.float() * scale).to(torch.float16)
    return coded, ignored, right


def marked_file(held: Tensors) -> tuple[str, Tensors]:
    """Return ComfyUI's older form: one tensor marks the file."""
    return ".scale_weight", {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}


def marked_weights(held: Tensors) -> tuple[str, Tensors]:
    """Return ComfyUI's newer form: a tensor of JSON bytes marks each weight."""
    said = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
    names = (name for name in held if name.endswith("proj.weight"))
    return ".weight_scale", {
        name.removesuffix(".weight") + ".comfy_quant": said.clone() for name in names
    }


def unmarked_scale_weight(held: Tensors) -> tuple[str, Tensors]:
    """Return the older form without its marker."""
    return ".scale_weight", {}


def unmarked_weight_scale(held: Tensors) -> tuple[str, Tensors]:
    """Return the names of compressed-tensors without its section in config.json."""
    return ".weight_scale", {}


MARKED = (marked_file, marked_weights)
UNMARKED = (unmarked_scale_weight, unmarked_weight_scale)
Form = Callable[[Tensors], tuple[str, Tensors]]


def folders(model: Path, into: Path, form: Form) -> tuple[Path, Path, Path]:
    """Write three folders: the codes, F16 with the scales ignored, and the right F16."""
    held = load_file(model / "model.safetensors")
    name, marks = form(held)
    coded, ignored, right = scaled(held, name)
    made = []
    for label, tensors in (("coded", coded | marks), ("ignored", ignored), ("right", right)):
        folder = into / label
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(tensors, folder / "model.safetensors")
        made.append(folder)
    return made[0], made[1], made[2]


@pytest.mark.parametrize("form", MARKED)
def test_marked_codes_are_read_beside_a_config(
    form: Form, demo_model: Path, tmp_path: Path
) -> None:
    coded, ignored, right = folders(demo_model, tmp_path, form)
    assert diagnose(str(coded), str(right)).verdict == "precision"
    found = diagnose(str(coded), str(ignored))
    assert (found.cause, found.confidence) == ("quant_scale", "confirmed")
    assert "B holds the codes of A as numbers" in found.sentence
    assert not [one for one in found.findings if one.side == "A"]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("form", UNMARKED)
def test_unmarked_codes_are_not_compared(
    form: Form, turned: bool, demo_model: Path, tmp_path: Path
) -> None:
    coded, *decoded = folders(demo_model, tmp_path, form)
    for other in decoded:
        pair = (other, coded) if turned else (coded, other)
        found = diagnose(*map(str, pair))
        assert found.exit_code == 2, found.sentence
        assert "weights are packed" in found.sentence
        assert {one.cause for one in found.findings} <= {"rounding"}


def test_a_section_in_the_config_comes_before_a_marker(demo_model: Path, tmp_path: Path) -> None:
    coded, _, _ = folders(demo_model, tmp_path, marked_file)
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (coded / "config.json").write_text(json.dumps(config))
    done = aprfmt("convert", coded, tmp_path / "out.safetensors", "--encoding", "F32")
    assert done.code == 2 and "hqq" in done.err
