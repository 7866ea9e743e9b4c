"""Weights that are several tensors by a dialect of config.json: one logical tensor everywhere.

Seen red: AutoFP8's name of the scales unknown; no remark on scales of activations, or none on those
that one side alone has.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aprfmt
from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs.dialects import DIALECTS
from aprfmt.errors import CodecError, ConversionError
from tests.cli.run import aprfmt as command
from tests.conversion.dialect_folders import (
    FOLDERS,
    of_inputs,
    write_folder,
    write_gpt_oss,
    write_mixture,
)
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

EXACT = {"compressed_packed_float", "mlx", "modelopt"}  # as these folders have them
FOLDER = pytest.mark.parametrize("dialect", FOLDERS)


def test_every_dialect_has_its_folder() -> None:
    assert {*FOLDERS, "gpt_oss", "fp8_experts", "torchao", "modelopt_experts"} == set(DIALECTS)
    for name in DIALECTS:  # the name is that of the encoding which everybody sees
        assert DIALECTS[name].name == name and name.upper() in ENCODINGS


@FOLDER
def test_one_logical_tensor_with_its_values(dialect: str, tmp_path: Path) -> None:
    expected = write_folder(tmp_path / "m", dialect)
    with aprfmt.open(tmp_path / "m") as model:
        assert len(model) == 21 and not model.resolution.unbound
        for name, values in expected.items():
            tensor = model[name]
            assert (tensor.encoding, tensor.shape) == (DIALECTS[dialect].name.upper(), values.shape)
            np.testing.assert_array_equal(tensor.numpy(), values)
            with pytest.raises(CodecError, match=r"read them through \.parts"):
                tensor.raw()


@FOLDER
def test_statistics_are_of_the_values(dialect: str, tmp_path: Path) -> None:
    expected = write_folder(tmp_path / "m", dialect)
    done = command("tensors", tmp_path / "m", "--stats", "--json").json
    rows = {row["name"]: row for row in done["tensors"]}
    for name, values in expected.items():
        found = rows[name]["stats"]
        assert (found["min"], found["max"]) == (values.min(), values.max())
        assert abs(found["mean"] - values.mean(dtype=np.float64)) < 1e-6


@FOLDER
def test_through_apr_every_stored_byte_comes_back(dialect: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "m", dialect)
    aprfmt.convert(tmp_path / "m", tmp_path / "m.apr")
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "back", to="safetensors")
    assert tensors_of(tmp_path / "back") == tensors_of(tmp_path / "m")
    assert aprfmt.diff(tmp_path / "m", tmp_path / "m.apr").counts["SAME_BYTES"] == 21


@FOLDER
def test_decoded_it_converts_to_the_others(dialect: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "m", dialect)
    wishes: Any = {"encoding": "F32", "drop": of_inputs(tmp_path / "m")}
    if dialect not in EXACT:
        with pytest.raises(ConversionError, match="--encoding"):
            aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    report = aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf", **wishes)
    assert report.lossless
    assert aprfmt.diff(tmp_path / "m", tmp_path / "m.gguf").equal
    aprfmt.convert(tmp_path / "m", tmp_path / "hf", to="safetensors", **wishes)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & config.keys()


@FOLDER
def test_one_bit_of_any_part_is_a_difference(dialect: str, tmp_path: Path) -> None:
    """Companions take part in the comparison, each that the values depend on."""
    write_folder(tmp_path / "a", dialect)
    rows = tensors_of(tmp_path / "a")
    prefix = "model.layers.1.mlp.up_proj"
    parts = [
        name
        for name in rows
        if name.startswith(prefix) and not name.endswith(("weight_shape", "g_idx", "input_scale"))
    ]
    assert len(parts) > 1
    for name in parts:
        encoding, shape, raw = rows[name]
        write_folder(tmp_path / "b", dialect)
        flipped = bytes([raw[0] ^ 1]) + raw[1:]
        write_mixed(
            tmp_path / "b" / "model.safetensors", {**rows, name: (encoding, shape, flipped)}
        )
        report = aprfmt.diff(tmp_path / "a", tmp_path / "b")
        different = [pair.key for pair in report.tensors if pair.verdict == "DIFFERENT"]
        assert different == ["L1.ffn_up.weight"], name


@pytest.mark.parametrize("method", ["mxfp4", "modelopt"])
def test_the_experts_of_gpt_oss(method: str, tmp_path: Path) -> None:
    expected = write_gpt_oss(tmp_path / "m", method)
    with aprfmt.open(tmp_path / "m") as model:
        assert not model.resolution.unbound and not model.resolution.missing
        for name, values in expected.items():
            np.testing.assert_array_equal(model[name].numpy(), values)
            layer, kind = name.split(".")[2], name.rpartition(".")[2]
            if kind == "down_proj":
                found = model.roles[f"L{layer}.ffn_down_exps.weight"].numpy()
                np.testing.assert_array_equal(found, values)
            else:  # gate and up alternate
                for at, part in enumerate(("gate", "up")):
                    found = model.roles[f"L{layer}.ffn_{part}_exps.weight"].numpy()
                    np.testing.assert_array_equal(found, values[:, at::2])
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf", encoding="F32")
    assert aprfmt.diff(tmp_path / "m", tmp_path / "m.gguf").equal
    aprfmt.convert(tmp_path / "m", tmp_path / "m.apr")
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "back", to="safetensors")
    assert tensors_of(tmp_path / "back") == tensors_of(tmp_path / "m")


def test_a_dialects_missing_part_is_named(tmp_path: Path) -> None:
    llama_folder(tmp_path / "g", "F16", hidden=64)
    rows = dict(tensors_of(tmp_path / "g"))
    rows["model.layers.0.self_attn.q_proj.qweight"] = ("I32", (8, 64), bytes(2048))
    write_mixed(tmp_path / "g" / "model.safetensors", rows)
    config = json.loads((tmp_path / "g" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "g" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CodecError, match=r"q_proj\.qzeros"):
        aprfmt.open(tmp_path / "g")


@pytest.mark.parametrize("rows", [False, True], ids=["one scale", "one a row"])
def test_fp8_whose_scales_are_called_as_autofp8_calls_them(rows: bool, tmp_path: Path) -> None:
    def make(shape: tuple[int, int], rng: Any) -> tuple[Mapping[str, Any], Any]:
        weight = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.random((shape[0], 1) if rows else 1).astype(np.float32)
        stored = {"weight": weight, "weight_scale": scale, "input_scale": np.ones(1, np.float32)}
        return stored, weight.astype(np.float32) * scale

    section = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    expected = write_mixture(
        tmp_path / "m",
        lambda name: make if "_proj" in name else None,
        {"quantization_config": section},
    )
    with aprfmt.open(tmp_path / "m") as model:
        assert len(model) == 21 and not model.resolution.unbound
        for name, values in expected.items():
            np.testing.assert_array_equal(model[name].numpy(), values)


def test_scales_of_activations_that_differ_are_said(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "modelopt")
    rows = dict(tensors_of(tmp_path / "m"))
    name = "model.layers.0.self_attn.q_proj.input_scale"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_bytes((tmp_path / "m" / "config.json").read_bytes())
    rows[name] = ("F32", (), np.float32(np.nan).tobytes())
    write_mixed(tmp_path / "other" / "model.safetensors", rows)
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    for copy in ("m", "m.gguf"):
        done = command("diff", tmp_path / copy, tmp_path / "other")
        said = "scale of activations L0.attn_q.weight: input_scale unequal"
        assert said in done.out and done.code == 1
    assert "activations" not in command("diff", tmp_path / "m", tmp_path / "m.gguf").out
    less = tmp_path / "less.gguf"
    aprfmt.convert(tmp_path / "m", less, drop=["model.layers.0.*input_scale"])
    for pair, side in (((tmp_path / "m", less), "A"), ((less, tmp_path / "m.gguf"), "B")):
        done = command("diff", *pair, "--json")
        left = [row for row in done.json["not_compared"] if row["state"] == f"only in {side}"]
        assert len(left) == 7 and left[0]["name"] == "L0.attn_q.weight: input_scale"
        assert (done.code, done.json["equal"]) == (1, False)
        accepted = command("diff", *pair, "--accept", "unread:scale of activations")
        assert accepted.code == 0 and "accepted, not compared" in accepted.out
