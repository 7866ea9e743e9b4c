"""Parts of packed weights under other weights' names, in every form of packed weight.

Seen red: "other ones stand there", "every row of B is A's times a factor of its own", and
`stale_tensor`, "taken from another checkpoint".
"""

import shlex
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aprfmt
from aprfmt.causes.tensor import exchanged_parts
from aprfmt.compare import diff
from aprfmt.compare.diffs import DiffReport
from tests.causes.tensor.exchanged_parts import DOWN, GATE, UP, exchanged, moved_parts
from tests.cli.run import aprfmt as command
from tests.conversion.folders import tensors_of
from tests.diagnosis import faults_packed as packs
from tests.diagnosis import packing
from tests.diagnosis.engines import tiny_folder

Array = Any
INT4 = packs.nearest(packing.compressed, symmetric=True, dtype=ml_dtypes.bfloat16)
# name: (section, maker of tensors, the codes, what stands beside them, the section's key)
FORMS: dict[str, tuple[Any, packs.Write, str, tuple[str, ...], str]] = {
    "gptq": (packs.GPTQ, packs.nearest(packing.gptq), "qweight", ("scales", "qzeros"), ""),
    "awq": (packing.awq_section(), packs.nearest(packing.awq), "qweight", ("scales",), ""),
    "mlx": ({"group_size": 32, "bits": 4}, packs.nearest(packing.mlx), "weight",
            ("scales", "biases"), "quantization"),
    "int4": (packs.INT4, INT4, "weight_packed", ("weight_scale",), ""),
    "fp8": (packs.ROW, packs.fp8(per="row"), "weight", ("weight_scale",), ""),
    "tiles": (packs.TILES, packs.fp8(per="tile", suffix=".weight_scale_inv"), "weight",
              ("weight_scale_inv",), ""),
}  # fmt: skip
LAYER_0 = UP.replace("1.", "0.")


def packed(form: str, name: str) -> tuple[Path, Path]:
    """Return (the model in BF16, its packed copy)."""
    section, make, _, _, key = FORMS[form]
    original = packs.source("llama")
    key = key or "quantization_config"
    return original, packing.folder(original, f"moved-{form}-{name}", section, make, key=key)


def broken(whole: Path, places: Mapping[str, str], folder: Path) -> Path:
    """Return a copy of a folder whose parts stand under other names."""
    shutil.copytree(whole, folder)
    moved_parts(folder, places)
    return folder


def explained(report: DiffReport) -> dict[str, Any]:
    """Return {tensor: its explanation} of those that differ."""
    return {row.key: row.explanation for row in report.tensors if row.verdict == "DIFFERENT"}


def mended(report: DiffReport, b: Path, out: Path) -> Path:
    """Return the model that the command of the first finding writes of B."""
    words = shlex.split(report.findings[0].next)
    assert words[:2] == ["aprfmt", "convert"] and words[2].startswith(str(b)), words
    done = command(*words[1:3], out, *words[4:])
    assert not done.code, done.err
    return out


@pytest.mark.parametrize("of", ["source", "copy"])
@pytest.mark.parametrize("other", [GATE, LAYER_0], ids=["role", "layer"])
@pytest.mark.parametrize("moved", ["codes", "beside"])
@pytest.mark.parametrize("form", FORMS)
def test_parts_of_two_weights_exchanged(
    form: str, moved: str, other: str, of: str, tmp_path: Path
) -> None:
    _, _, codes, beside, _ = FORMS[form]
    original, whole = packed(form, f"{moved}-{of}-{other}")
    places: dict[str, str] = {}
    for part in (codes,) if moved == "codes" else beside:
        places |= exchanged(part, UP, other)
    b = broken(whole, places, tmp_path / "b")
    report = diff(original if of == "source" else whole, b)
    found = explained(report)
    keys = {
        f"L{one[0]}.ffn_{one.split('.')[-1].removesuffix('_proj')}.weight" for one in (UP, other)
    }
    assert set(found) == keys
    for key, one in found.items():
        assert (one.cause, one.certainty, one.side) == ("exchanged_parts", "confirmed", "B"), one
        assert one.evidence[0].startswith("B's codes" if moved == "codes" else "B's "), key
    there = mended(report, b, tmp_path / "mended")
    assert tensors_of(there) == tensors_of(whole)


@pytest.mark.parametrize("of", ["source", "copy"])
def test_absmax_of_two_weights_exchanged(of: str, tmp_path: Path) -> None:
    """A codec decodes such a weight, without a dialect. Seen red: "other ones stand there"."""
    original = packs.source("llama")
    assert not command("quantize", original, tmp_path / "a", "--type", "NF4").code
    b = broken(tmp_path / "a", exchanged("weight.absmax", UP, GATE), tmp_path / "b")
    report = diff(original if of == "source" else tmp_path / "a", b)
    assert {one.cause for one in explained(report).values()} == {"exchanged_parts"}
    there = mended(report, b, tmp_path / "mended")
    assert tensors_of(there) == tensors_of(tmp_path / "a")


@pytest.mark.parametrize("of", ["source", "copy"])
@pytest.mark.parametrize("form", ["gptq", "int4", "fp8"])
def test_scales_of_another_weight_written_over_its_own(form: str, of: str, tmp_path: Path) -> None:
    original, whole = packed(form, f"copied-{of}")
    part = FORMS[form][3][0]
    places = {f"model.layers.{UP}.{part}": f"model.layers.{GATE}.{part}"}
    b = broken(whole, places, tmp_path / "b")
    report = diff(original if of == "source" else whole, b)
    (one,) = explained(report).values()
    assert (one.cause, one.certainty, one.side) == ("exchanged_parts", "confirmed", "B"), one
    assert "copies of those of other packed weights" in one.evidence[0]
    assert one.evidence[1] == f"model.layers.{UP}.{part} has those of model.layers.{GATE}.{part}"
    assert "--rename" not in report.findings[0].next


@pytest.mark.parametrize("of", ["source", "copy"])
def test_the_scale_of_a_whole_tensor_goes_round(of: str, tmp_path: Path) -> None:
    """One number may be near any other; two that each belong to the other are exchanged."""
    original = packs.source("llama")
    make = packs.fp8()
    whole = packing.folder(original, f"moved-whole-{of}", packs.WHOLE, make)
    a = original if of == "source" else whole
    b = broken(whole, exchanged("weight_scale", UP, DOWN), tmp_path / "b")
    rows = tensors_of(whole)
    names = [f"model.layers.{one}.weight_scale" for one in (UP, DOWN)]
    scales = [np.frombuffer(rows[name][2], np.float32)[0] for name in names]
    found = explained(diff(a, b))
    for one in found.values():
        if rows[names[0]][1:] == rows[names[1]][1:]:
            assert one.confirmed, (one, scales)
            assert one.cause in ("exchanged_parts", "quant_scale", "scale"), one


@pytest.mark.parametrize("of", ["source", "copy"])
@pytest.mark.parametrize("moved", ["codes", "beside"])
def test_parts_of_experts_exchanged(moved: str, of: str, tmp_path: Path) -> None:
    """Every expert is a weight of its own in a file, and all are one tensor of the model."""
    sizes = {"hidden_size": 96, "moe_intermediate_size": 96, "num_hidden_layers": 1}
    original = tiny_folder("qwen3_moe", "bfloat16", **sizes)
    section, make, codes, _, _ = FORMS["gptq"]
    whole = packing.folder(original, f"moved-experts-{moved}-{of}", section, make)
    part = codes if moved == "codes" else "scales"
    places = exchanged(part, "0.mlp.experts.0.up_proj", "0.mlp.experts.3.up_proj")
    assert set(places) <= set(tensors_of(whole)), sorted(tensors_of(whole))[:40]
    b = broken(whole, places, tmp_path / "b")
    report = diff(original if of == "source" else whole, b)
    (one,) = explained(report).values()
    assert (one.cause, one.certainty) == ("exchanged_parts", "confirmed"), one
    assert "those of other experts" in one.evidence[0]
    assert tensors_of(mended(report, b, tmp_path / "mended")) == tensors_of(whole)


def test_whole_weights_exchanged_are_no_parts(tmp_path: Path) -> None:
    original, whole = packed("gptq", "whole")
    places: dict[str, str] = {}
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        places |= exchanged(part, UP, GATE)
    for a in (original, whole):
        b = broken(whole, places, tmp_path / f"b-{a.name}")
        assert {one.cause for one in explained(diff(a, b)).values()} == {"swapped_tensors"}


@pytest.mark.parametrize("form", ["gptq", "int4", "fp8"])
def test_scales_of_no_weight_are_no_others(form: str, tmp_path: Path) -> None:
    """Scales that are no weight's, while two weights of the file share theirs by chance."""
    section, _, _, _, _ = FORMS[form]
    original = packs.source("llama")
    unlike = packing.with_scales(lambda s: s[:, ::-1] * np.linspace(0.6, 1.7, s.shape[1]))
    write = partial(packing.gptq if form == "gptq" else packing.compressed)
    if form == "fp8":
        make = packs.fp8(per="row", stored=lambda s: s * np.linspace(0.6, 1.7, len(s))[:, None])
    elif form == "int4":
        make = packs.nearest(write, unlike, only="1.mlp.up", symmetric=True,
                             dtype=ml_dtypes.bfloat16)  # fmt: skip
    else:
        make = packs.nearest(write, unlike, only="1.mlp.up")
    b = packing.folder(original, f"unlike-{form}", section, make)
    causes = {one.cause for one in explained(diff(original, b)).values() if one is not None}
    assert causes and "exchanged_parts" not in causes


def test_an_index_finds_parts_by_their_bytes() -> None:
    _, whole = packed("gptq", "index")
    with aprfmt.open(whole) as model:
        index = exchanged_parts.PartIndex(model.roles)
        key, suffix = "L1.ffn_up.weight", ".scales"
        part = index.part(exchanged_parts.Place(key, 0, suffix))
        assert part is not None
        assert index.places_of(part, suffix) == [exchanged_parts.Place(key, 0, suffix)]
