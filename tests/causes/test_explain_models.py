"""Explanations on trained models, and on the layouts of other architectures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.compare import diff
from aprfmt.formats import FORMATS, writable_formats
from tests.causes.faults import flipped
from tests.compare.damage import patched
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder
from tests.models import save_tiny


def exchanged(first: str, second: str) -> Any:
    """Return a change that exchanges two layers, tensor for tensor of equal length."""

    def change(data: dict[str, bytes]) -> None:
        for name in list(data):
            other = name.replace(first, second)
            if first in name and other in data and len(data[other]) == len(data[name]):
                data[name], data[other] = data[other], data[name]

    return change


@pytest.mark.parametrize("target", writable_formats())
def test_layers_and_a_bit_of_the_demo_model(target: str, demo_model: Path, tmp_path: Path) -> None:
    """Biases are permuted in no format here, norms are widened in one: all are found again."""
    folder = tmp_path / "clean"
    folder.mkdir()
    clean = folder / f"m{FORMATS[target].extensions[0]}"
    aprfmt.convert(demo_model, clean, to=target)
    name = ".1." if target == "gguf" else "layers.1."
    with aprfmt.open(clean) as model:
        up = model.roles["L3.ffn_up.weight"].stored[0].info.name

    def change(data: dict[str, bytes]) -> None:
        exchanged(name, name.replace("1", "2"))(data)
        data[up] = flipped(4321, 6)(data[up])

    source = folder if target == "safetensors" else clean
    broken = patched(source, tmp_path / f"broken{clean.suffix}", change)
    report = aprfmt.diff(demo_model, broken)
    layers, bit = report.findings
    assert layers.says == "layers 1 and 2 are exchanged (12 tensors each)" and layers.confirmed
    assert (bit.cause, bit.keys, bit.confirmed) == ("bit_rot", ("L3.ffn_up.weight",), True)
    assert report.counts["DIFFERENT"] == 25


def test_layers_of_a_quantized_model_somebody_made(smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2 Q4_1: neighbours exchanged; and a scale's bit, found against its own clean file."""

    def change(data: dict[str, bytes]) -> None:
        exchanged("blk.3.", "blk.4.")(data)
        data["blk.9.ffn_up.weight"] = flipped(20 * 1000 + 1, 2)(data["blk.9.ffn_up.weight"])

    broken = patched(smollm2, tmp_path / "b.gguf", change)
    patterns = ["blk.3", "blk.4", "blk.9"]
    report = aprfmt.diff(smollm2, broken, tensors=patterns)
    by_cause = {finding.cause: finding for finding in report.findings}
    assert set(by_cause) == {"layer_order", "bit_rot"}
    assert by_cause["layer_order"].says.startswith("layers 3 and 4 are exchanged")
    (row,) = [t for t in report.tensors if t.cause == "bit_rot"]
    assert row.explanation is not None
    assert "bit 2 of byte 1 of the Q4_1 block" in row.explanation.evidence[1]


@pytest.mark.parametrize("arch", ["gemma", "gemma2", "gemma3"])
def test_gemma_norms_stored_without_the_one_they_should_have(arch: str, tmp_path: Path) -> None:
    """GGUF holds 1 + w, the checkpoint w: a converter that forgets it loses one everywhere."""
    save_tiny(arch, tmp_path / "a")
    aprfmt.convert(tmp_path / "a", tmp_path / "a.gguf", source_hash=False)
    assert not aprfmt.diff(tmp_path / "a", tmp_path / "a.gguf").findings

    def change(data: dict[str, bytes]) -> None:
        for name in data:
            if name.endswith("norm.weight"):
                data[name] = (np.frombuffer(data[name], np.float32) - 1).tobytes()

    broken = patched(tmp_path / "a.gguf", tmp_path / "b.gguf", change)
    report = aprfmt.diff(tmp_path / "a", broken)
    (finding,) = report.findings
    assert (finding.cause, finding.confirmed) == ("norm_offset", True)
    assert "minus 1" in finding.says
    assert {t.key for t in report.tensors if t.key.endswith("norm.weight")} == set(finding.keys)


def test_gpt2_matrices_stored_the_way_of_linear_layers(tmp_path: Path) -> None:
    """gpt2's checkpoint has [in, out]; one who writes [out, in] there transposes them."""
    from tests.conversion.folders import tensors_of, write_mixed

    save_tiny("gpt2", tmp_path / "a")
    rows = tensors_of(tmp_path / "a")
    name = next(n for n in rows if n.endswith("h.1.mlp.c_fc.weight"))
    square = next(n for n in rows if n.endswith("h.1.attn.c_proj.weight"))
    broken = tmp_path / "b"
    broken.mkdir()
    (broken / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    for key in (name, square):
        dtype, shape, raw = rows[key]
        turned = np.frombuffer(raw, np.uint32).reshape(shape).T
        rows[key] = (dtype, shape[::-1], turned.tobytes())
    write_mixed(broken / "model.safetensors", rows)
    found = {t.key: t for t in aprfmt.diff(tmp_path / "a", broken).tensors if t.cause}
    assert {key: (t.verdict, t.cause) for key, t in found.items()} == {
        "L1.ffn_up.weight": ("SHAPE_DIFFERS", "transpose"),
        "L1.attn_output.weight": ("DIFFERENT", "transpose"),
    }


def test_llama_rows_permuted_twice_or_not_at_all(tmp_path: Path) -> None:
    """A GGUF whose Q and K were left in the checkpoint's order: both are rope_pairing, no more."""
    save_tiny("llama", tmp_path / "a")
    aprfmt.convert(tmp_path / "a", tmp_path / "a.gguf")
    from tests.conversion.folders import tensors_of

    hf = tensors_of(tmp_path / "a")

    def change(data: dict[str, bytes]) -> None:
        for name in data:
            if "attn_q." in name or "attn_k." in name:
                layer, kind = name.split(".")[1], name.split("_")[1][0]
                data[name] = hf[f"model.layers.{layer}.self_attn.{kind}_proj.weight"][2]

    report = aprfmt.diff(tmp_path / "a", patched(tmp_path / "a.gguf", tmp_path / "b.gguf", change))
    (finding,) = report.findings
    assert (finding.cause, finding.confirmed, len(finding.keys)) == ("rope_pairing", True, 6)


def test_factors_that_leave_a_norm_leave_its_bias_too() -> None:
    """As SmoothQuant and AWQ move them in OPT, whose norms take the mean away."""
    at = "model.decoder.layers.1."
    readers = {
        "self_attn_layer_norm": [f"self_attn.{part}_proj" for part in "qkv"],
        "final_layer_norm": ["fc1"],
    }

    def smoothed(found: files.Rows) -> None:
        factors = np.exp(np.random.default_rng(8).normal(0, 0.4, 64))
        for norm, names in readers.items():
            for part in ("weight", "bias"):
                files.edit(f"{at}{norm}.{part}", lambda x: x / factors[: len(x)])(found)
            for name in names:
                files.edit(f"{at}{name}.weight", lambda x: x * factors[: x.shape[1]])(found)

    folder = tiny_folder("opt")
    [found] = diff(folder, files.copy(folder, "smoothed-opt", tensors=smoothed)).findings
    assert (found.cause, found.confirmed) == ("scales_folded", True)
    assert {"L1.attn_norm.bias", "L1.ffn_norm.bias", "L1.ffn_up.weight"} <= set(found.keys)


def test_two_finetunes_of_one_model_are_not_explained_away(tmp_path: Path) -> None:
    """Every tensor is a little different, and no transformation is reported."""
    for seed, label in ((0, "a"), (1, "b")):
        save_tiny("qwen2", tmp_path / label, seed=seed)
    report = aprfmt.diff(tmp_path / "a", tmp_path / "b")
    assert report.counts["DIFFERENT"] > 20
    assert not [finding for finding in report.findings if finding.confirmed]


def test_one_byte_of_a_quantized_model_is_damage(demo_model: Path, tmp_path: Path) -> None:
    """Its values move by less than a step: another quantizer would not leave all other rows."""
    path = tmp_path / "q.gguf"
    aprfmt.convert(demo_model, path, quantize="Q5_0", pure=True)
    with aprfmt.open(path) as model:
        [tensor] = model["blk.1.ffn_up.weight"].stored
        at = tensor.info.offset + 40 * 22 + 10  # of block 40, behind its scale and high bits
    data = bytearray(path.read_bytes())
    data[at] ^= 0x13  # two values, by few codes
    (tmp_path / "damaged.gguf").write_bytes(data)
    [row] = [
        row for row in aprfmt.diff(path, tmp_path / "damaged.gguf").tensors if row.stats is not None
    ]
    assert row.explanation is not None and row.explanation.cause == "bit_rot"
