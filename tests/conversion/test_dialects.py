"""Weights that are several tensors by a dialect of config.json: one logical tensor everywhere."""

import json
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt.errors import CodecError, ConversionError
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

Values = dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]


def mlx_folder(folder: Path) -> Values:
    """Write a llama folder whose projections are MLX affine, 4 bits, groups of 32, by hand."""
    rng = np.random.default_rng(0)
    llama_folder(folder, "F16", hidden=64)
    expected: Values = {}
    rows: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, row in tensors_of(folder).items():
        if "_proj" not in name:
            rows[name] = row
            continue
        shape = row[1]
        codes = rng.integers(0, 16, shape).astype(np.uint32)
        words = np.zeros((shape[0], shape[1] // 8), np.uint32)
        for k in range(8):
            words |= codes[:, k::8] << np.uint32(4 * k)
        scales, biases = (
            rng.random((shape[0], shape[1] // 32)).astype(np.float16) for _ in range(2)
        )
        prefix = name.removesuffix("weight")
        rows[name] = ("U32", words.shape, words.tobytes())
        rows[prefix + "scales"] = ("F16", scales.shape, scales.tobytes())
        rows[prefix + "biases"] = ("F16", biases.shape, biases.tobytes())
        wide = [np.repeat(x.astype(np.float32), 32, axis=1) for x in (scales, biases)]
        expected[name] = codes.astype(np.float32) * wide[0] + wide[1]
    write_mixed(folder / "model.safetensors", rows)
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def test_one_logical_tensor_with_its_values(tmp_path: Path) -> None:
    expected = mlx_folder(tmp_path / "mlx")
    with aprfmt.open(tmp_path / "mlx") as model:
        assert len(model) == 21
        for name, values in expected.items():
            tensor = model[name]
            assert (tensor.encoding, tensor.shape) == ("MLX", values.shape)
            np.testing.assert_array_equal(tensor.numpy(), values)
            with pytest.raises(CodecError, match="scales"):
                tensor.raw()


def test_through_apr_every_stored_byte_comes_back(tmp_path: Path) -> None:
    mlx_folder(tmp_path / "mlx")
    aprfmt.convert(tmp_path / "mlx", tmp_path / "m.apr")
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "back", to="safetensors")
    assert tensors_of(tmp_path / "back") == tensors_of(tmp_path / "mlx")
    assert aprfmt.diff(tmp_path / "mlx", tmp_path / "m.apr").counts["SAME_BYTES"] == 21


def test_decoded_it_converts_to_the_others(tmp_path: Path) -> None:
    mlx_folder(tmp_path / "mlx")
    with pytest.raises(ConversionError, match="--encoding"):
        aprfmt.convert(tmp_path / "mlx", tmp_path / "m.gguf")
    report = aprfmt.convert(tmp_path / "mlx", tmp_path / "m.gguf", encoding="F32")
    assert report.lossless
    assert aprfmt.diff(tmp_path / "mlx", tmp_path / "m.gguf").equal
    aprfmt.convert(tmp_path / "mlx", tmp_path / "hf", to="safetensors", encoding="F32")
    assert "quantization" not in json.loads((tmp_path / "hf" / "config.json").read_text())


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
