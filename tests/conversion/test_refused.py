"""Conversions that would lose something are refused, and damage of the source is reported.

Seen red: tensors without a place dropped silently, two tensors written under one name, a source
with a wrong checksum converted without a warning, a damaged record used as a valid one.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.conversion.outputs import Output, make_info
from aprfmt.conversion.plan import _check_names
from aprfmt.errors import ArchError, CodecError, ConversionError, OutputError
from aprfmt.formats import FORMATS
from aprfmt.model.packing import unclaimed_part_text
from aprfmt.tensors.restoration import (
    ENCODINGS_KEY,
    RESTORE_KEY,
    STORED_KEY,
    Restoration,
    restore_bits,
)
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.models import save_tiny

EXTRA = "model.layers.0.self_attn.extra.weight"


def test_a_tensor_without_a_place_is_refused_until_it_is_dropped(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "s", "F32")
    write_mixed(source / "model.safetensors", tensors_of(source) | {EXTRA: ("F32", (1,), bytes(4))})
    with pytest.raises(ConversionError, match=rf"tensor '{EXTRA}' has no place .* --drop"):
        aprfmt.convert(source, tmp_path / "m.gguf")
    report = aprfmt.convert(source, tmp_path / "m.gguf", drop=(EXTRA,))
    assert [(note.where, note.text) for note in report.notes if note.level == "warning"] == [
        (EXTRA, "left out, as --drop asks")
    ]


def test_what_the_target_has_no_key_for_is_said(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "s", "F32")
    told = json.loads((source / "config.json").read_text()) | {"hidden_act": "gelu"}
    (source / "config.json").write_text(json.dumps(told))
    report = aprfmt.convert(source, tmp_path / "m.gguf")
    [note] = [note for note in report.notes if note.level == "warning"]
    assert (note.where, note.key) == ("activation", "not_expressible")
    assert "llama.cpp computes silu" in note.text


def test_another_models_config_is_not_replaced(tmp_path: Path) -> None:
    """It is said whose it may be, where a model lies beside it."""
    source, target = llama_folder(tmp_path / "s", "BF16"), tmp_path / "t" / "m.safetensors"
    target.parent.mkdir()
    (target.parent / "config.json").write_text("{}")
    with pytest.raises(OutputError, match=r"something else \(of another model\?\); give m"):
        aprfmt.convert(source, target)
    shutil.copy(source / "model.safetensors", target.with_name("other.safetensors"))
    with pytest.raises(OutputError, match=r"something else \(that of other.safetensors\?\)"):
        aprfmt.convert(source, target)
    assert (target.parent / "config.json").read_text() == "{}" and not target.exists()


def output(name: str, *shape: int) -> Output:
    return Output(make_info(name, shape, "F32"), "F32", None, lambda: np.zeros(0), (name,))


@pytest.mark.parametrize(("outputs", "message"), [
    ((output("a", 2), output("b", 2), output("a", 3)), "a: two tensors of the output"),
    ((output("n" * 63, 2), output("n" * 64, 2)), "n{64}: 64 bytes; gguf allows 63"),
    ((output("é" * 32, 2),), "é{32}: 64 bytes; gguf allows 63"),
    ((output("a", 1, 1, 1, 1), output("b", 1, 1, 1, 1, 1)), "b: 5 dimensions; gguf allows 4"),
])  # fmt: skip
def test_names_and_shapes_must_fit_the_target(outputs: tuple[Output, ...], message: str) -> None:
    _check_names(outputs[:-1], FORMATS["gguf"])
    with pytest.raises(ConversionError, match=message):
        _check_names(outputs, FORMATS["gguf"])


def test_a_source_whose_checksum_is_wrong_is_said_to_be(tmp_path: Path) -> None:
    aprfmt.convert(llama_folder(tmp_path / "s", "F32"), tmp_path / "m.apr")
    with aprfmt.open(tmp_path / "m.apr") as model:
        place = model[
            "blk.0.ffn_up.weight"
            if "blk.0.ffn_up.weight" in model
            else "model.layers.0.mlp.up_proj.weight"
        ].offset
    raw = bytearray((tmp_path / "m.apr").read_bytes())
    raw[place] ^= 1
    (tmp_path / "m.apr").write_bytes(raw)
    found = aprfmt.convert(tmp_path / "m.apr", tmp_path / "m.gguf")
    assert any("checksum" in note.text or "CRC" in note.text for note in found.notes), found.notes
    quick = aprfmt.convert(tmp_path / "m.apr", tmp_path / "n.gguf", verify=False)
    assert not any("checksum" in n.text or "CRC" in n.text for n in quick.notes)


@pytest.mark.parametrize(
    "patch", ["AAA!AAAAA", "AAAA", "AAAAAAAAAAA=", [[4, 1]], [[1]], [[0, "x"]], [[0, 1 << 70]]]
)
def test_a_damaged_record_is_refused(patch: Any) -> None:
    bits = np.arange(3, dtype=np.uint16)
    assert restore_bits(bits, [[1, 9]], "x").tolist() == [0, 9, 2]
    assert restore_bits(bits, "CQAIAAcA", "x").tolist() == [9, 8, 7]
    with pytest.raises(CodecError, match=r"x: its record under aprfmt\.source"):
        restore_bits(bits, patch, "x")


@pytest.mark.parametrize(("name", "says"), [
    ("falcon_rw", r"parallel_residual is False, which no gguf file of falcon_rw says: llama\.cpp"),
    ("falcon_rw_40b", r"alibi_max_bias is 8\.0, .*adds no distances to the scores"),
    ("falcon-serial", r"parallel_residual is False, .*reads attention and MLP side by side"),
])  # fmt: skip
def test_what_a_target_has_no_form_of_is_refused(name: str, says: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "m")
    with pytest.raises(ArchError, match=says):
        aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    aprfmt.convert(tmp_path / "m", tmp_path / "m.apr")


@pytest.mark.parametrize(
    ("config", "name", "says"),
    [
        ({}, EXTRA, ""),
        ({}, "model.layers.0.self_attn.extra.weight_scale", "nothing of packing"),
        ({}, "model.layers.0.self_attn.extra.qweight", "nothing of packing"),
        ({"quantization_config": {"bits": 4}}, "x.weight_scale", "'unnamed'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "x.weight_scale", "'fp8'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "x.weight", ""),
        (None, "x.weight_scale", "nothing of packing"),
    ],
)
def test_a_part_of_packed_weights_without_a_claim_is_called_one(
    config: dict[str, Any] | None, name: str, says: str
) -> None:
    found = unclaimed_part_text(config, name)
    assert found == says or found.endswith(f"packed weights, of which config.json says {says}")
    assert bool(found) == bool(says)


@pytest.mark.parametrize("kind", ["<u2", "<u4", ">u2"])
@pytest.mark.parametrize("changed", [0, 1, 3, 4, 5, 32])
def test_bits_that_differ_are_kept_one_by_one_up_to_an_eighth(kind: str, changed: int) -> None:
    """Of 32: four as pairs, five as all bits; both give them back."""
    source = np.arange(1, 33).astype(kind).reshape(4, 8)
    made = source.copy()
    made.reshape(-1)[:changed] ^= 0x55
    kept = Restoration()
    kept.record("L0.q", "F16", source, made)
    kept.record_stored("L0.q", source, made)
    texts = kept.metadata()
    assert json.loads(str(texts[ENCODINGS_KEY])) == {"L0.q": "F16"}
    assert (RESTORE_KEY in texts) == (STORED_KEY in texts) == bool(changed)
    if not changed:
        return
    patch = json.loads(str(texts[RESTORE_KEY]))["L0.q"]
    assert patch == json.loads(str(texts[STORED_KEY]))["L0.q"]
    assert isinstance(patch, list) == (changed <= 4)
    again = restore_bits(made.astype(source.dtype.newbyteorder("=")), patch, "x")
    assert np.array_equal(again, source)
