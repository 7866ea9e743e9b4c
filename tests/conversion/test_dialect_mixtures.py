"""Folders whose weights are packed in several ways, or with exceptions: each read as its own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.diagnosis import diagnose
from aprfmt.errors import CodecError, ConversionError
from tests.cli.run import aprfmt as command
from tests.conversion import dialect_floats as floats
from tests.conversion.dialect_folders import (
    Maker,
    awq,
    channel,
    gptq,
    mlx,
    mxfp4,
    of_inputs,
    packed,
    write_folder,
    write_mixture,
)
from tests.conversion.folders import tensors_of, write_mixed

Chosen = Mapping[str, Maker]  # by a part of the name, first that fits


def written(
    folder: Path, chosen: Chosen, section: Mapping[str, Any], key: str = "quantization_config"
) -> dict[str, Any]:
    def of(name: str) -> Maker | None:
        return next((make for part, make in chosen.items() if part in name), None)

    return write_mixture(folder, of, {key: section})


def holds(folder: Path, expected: Mapping[str, Any], *encodings: str) -> None:
    """Check values, that nothing else is packed or unclaimed, and the way there and back."""
    with aprfmt.open(folder) as model:
        assert not model.resolution.unbound and not model.resolution.missing
        assert {name for name, tensor in model.items() if tensor.parts} == set(expected)
        for name, values in expected.items():
            assert model[name].shape == values.shape
            np.testing.assert_array_equal(model[name].numpy(), values)
        assert {model[name].encoding for name in expected} == set(encodings)
    apr, back, plain = (folder.with_name(name) for name in ("m.apr", "back", "plain.gguf"))
    aprfmt.convert(folder, apr)
    aprfmt.convert(apr, back, to="safetensors")
    assert tensors_of(back) == tensors_of(folder)
    aprfmt.convert(folder, plain, encoding="F32", drop=of_inputs(folder))
    assert aprfmt.diff(folder, plain).equal


def test_a_size_of_groups_that_only_modelopts_own_file_says(tmp_path: Path) -> None:
    """So is W4A16_AWQ exported: config.json says no size, and no weight could be read."""
    make, size = floats.MODELOPT["W4A16_AWQ"]
    section = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}
    expected = written(tmp_path / "m", {"_proj": make}, section)
    own = {"quantization": {"quant_algo": "W4A16_AWQ", "group_size": size}}
    (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps(own))
    holds(tmp_path / "m", expected, "MODELOPT")


def test_two_files_that_name_other_algorithms_are_told(tmp_path: Path) -> None:
    """config.json is true of the bytes; vLLM reads the other file first."""
    write_folder(tmp_path / "m", "modelopt")
    for stated, keys in (("NVFP4", []), ("FP8", ["two_packings"])):
        own = {"quantization": {"quant_algo": stated, "group_size": 16}}
        (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps(own))
        with aprfmt.open(tmp_path / "m") as model:
            notes = [note for note in model.notes if note.key == "two_packings"]
        assert [note.key for note in notes] == keys
        assert all("'NVFP4'" in note.text and "'FP8'" in note.text for note in notes)


@pytest.mark.parametrize("algorithm", floats.MODELOPT)
def test_algorithms_of_modelopt(algorithm: str, tmp_path: Path) -> None:
    make, size = floats.MODELOPT[algorithm]
    section = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": size}
    holds(tmp_path / "m", written(tmp_path / "m", {"_proj": make}, section), "MODELOPT")


def test_modelopt_mixes_algorithms_and_leaves_some_out(tmp_path: Path) -> None:
    layers: dict[str, Any] = {}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name in "qkv":
            layers[f"{at}self_attn.{name}_proj"] = {"quant_algo": "FP8"}
        for name in ("gate", "up", "down"):
            layers[f"{at}mlp.{name}_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
    section = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": [],
        "quantized_layers": layers,
    }
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj"), floats.fp8_tensor)
    expected = written(tmp_path / "m", {**attention, "mlp": floats.nvfp4}, section)
    holds(tmp_path / "m", expected, "MODELOPT")


def test_modelopts_own_file_says_it_where_config_json_does_not(tmp_path: Path) -> None:
    said = {
        "producer": {"name": "modelopt", "version": "0.47"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head", "model.layers.1.self_attn*"],
        },
    }

    def of(name: str) -> Maker | None:
        left = "_proj" not in name or name.startswith("model.layers.1.self_attn")
        return None if left else floats.nvfp4

    expected = write_mixture(tmp_path / "m", of, {})
    (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps(said))
    holds(tmp_path / "m", expected, "MODELOPT")
    back = json.loads((tmp_path / "back" / "hf_quant_config.json").read_text())
    assert back == said
    aprfmt.convert(
        tmp_path / "m",
        tmp_path / "decoded",
        to="safetensors",
        encoding="F32",
        drop=["*input_scale"],
    )
    assert not (tmp_path / "decoded" / "hf_quant_config.json").exists()


def test_scales_of_the_kv_cache_are_kept_and_shown(tmp_path: Path) -> None:
    section = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    }
    written(tmp_path / "m", {"_proj": floats.fp8_tensor}, section)
    rows = dict(tensors_of(tmp_path / "m"))
    scales = {}
    for layer in range(2):
        for kind in "kv":
            name = f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale"
            rows[name] = scales[name] = ("F32", (), np.float32(0.5 + layer).tobytes())
    write_mixed(tmp_path / "m" / "model.safetensors", rows)
    with aprfmt.open(tmp_path / "m") as model:
        assert set(model.resolution.unbound) == set(scales)
        assert model["model.layers.1.self_attn.v_proj.v_scale"].numpy() == 1.5
    aprfmt.convert(tmp_path / "m", tmp_path / "m.apr")
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "back", to="safetensors")
    assert tensors_of(tmp_path / "back") == rows


def group(targets: list[str], form: str | None, **weights: Any) -> dict[str, Any]:
    return {"targets": targets, "format": form, "weights": {"symmetric": True, **weights}}


FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
MX4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}


def compressed(form: str, *groups: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> Any:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": list(ignore),
        "config_groups": {f"group_{i}": one for i, one in enumerate(groups)},
    }


def test_groups_of_compressed_tensors_by_name_pattern_and_class(tmp_path: Path) -> None:
    section = compressed(
        "mixed-precision",
        group(["Linear"], "mxfp4-pack-quantized", **MX4),
        group([r"re:.*self_attn\.(q|k|v)_proj$"], "float-quantized", **FP8),
        group(["model.layers.0.self_attn.q_proj"], "pack-quantized", **INT4),
        group(["re:.*mlp.gate_proj"], "dense", **FP8),
        ignore=("lm_head", "re:.*o_proj"),
    )
    chosen = {
        "layers.0.self_attn.q_proj": packed,
        "o_proj": None,
        "gate_proj": None,
        "self_attn": channel,
        "mlp": mxfp4,
    }
    expected = written(tmp_path / "m", chosen, section)  # type: ignore[arg-type]
    holds(
        tmp_path / "m", expected, "COMPRESSED_PACKED", "COMPRESSED_PLAIN", "COMPRESSED_PACKED_FLOAT"
    )


def test_int4_under_bf16_scales_said_in_the_text_part(tmp_path: Path) -> None:
    left = ("lm_head", "re:.*self_attn.*")
    section = compressed("pack-quantized", group(["Linear"], None, **INT4), ignore=left)
    expected = written(tmp_path / "m", {"mlp": floats.int4_bf16}, section)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["text_config"] = {"quantization_config": config.pop("quantization_config")}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    holds(tmp_path / "m", expected, "COMPRESSED_PACKED")
    aprfmt.convert(tmp_path / "m", tmp_path / "decoded", to="safetensors", encoding="F32")
    assert "quantization_config" not in (tmp_path / "decoded" / "config.json").read_text()


def test_deepseek_v4_packs_some_and_tiles_the_others(tmp_path: Path) -> None:
    section = {
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
        "weight_block_size": [128, 128],
    }
    chosen = {"mlp": floats.fp4_block, "self_attn": floats.fp8_block}
    holds(tmp_path / "m", written(tmp_path / "m", chosen, section), "FP8_BLOCK")


@pytest.mark.parametrize("section", [
    {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, {"quant_method": "mxfp8"},
    {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
])  # fmt: skip
def test_mxfp8_of_transformers(section: Mapping[str, Any], tmp_path: Path) -> None:
    def make(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
        parts, values = floats.mxfp8(shape, rng)
        return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}, values

    holds(tmp_path / "m", written(tmp_path / "m", {"_proj": make}, section), "FP8_BLOCK")


def test_experts_stored_as_one_tensor_with_its_scales(tmp_path: Path) -> None:
    section = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    written(tmp_path / "m", {}, section)
    rng = np.random.default_rng(0)
    weight = floats.e4m3((3, 32, 64), rng)
    scale = rng.uniform(0.1, 1, (3, 1, 2)).astype(np.float32)
    from tests.conversion.dialect_folders import stored_row

    rows = dict(tensors_of(tmp_path / "m"))
    at = "model.layers.0.mlp.experts.gate_up_proj"
    rows |= {at: stored_row(weight), at + "_scale_inv": stored_row(scale)}
    write_mixed(tmp_path / "m" / "model.safetensors", rows)
    with aprfmt.open(tmp_path / "m") as model:
        assert (model[at].encoding, model[at].shape) == ("FP8_EXPERTS", (3, 32, 64))
        expected = weight.astype(np.float32) * floats.wide(scale, 32)
        np.testing.assert_array_equal(model[at].numpy(), expected)


def gptq_v2(shape: tuple[int, int], rng: np.random.Generator) -> Any:
    """GPTQ as stored by AutoRound: zero points as they are, no index."""
    from tests.codecs.packing import pack
    from tests.conversion.dialect_folders import _affine

    codes, zeros, scales, values = _affine(shape, rng)
    return {"qweight": pack(codes, 4).T, "qzeros": pack(zeros, 4), "scales": scales}, values


ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False,
         "data_type": "int", "block_name_to_quantize": "model.layers"}  # fmt: skip


@pytest.mark.parametrize(
    ("packing", "make", "encoding", "more"),
    [
        ("auto_round:auto_gptq", gptq, "GPTQ", {}),
        ("auto_round:gptqmodel", gptq_v2, "GPTQ", {}),
        ("auto_round", gptq_v2, "GPTQ", {}),
        ("auto_round:auto_awq", awq, "AWQ", {}),
        ("auto_round:llm_compressor", mxfp4, "COMPRESSED_PACKED_FLOAT", {"data_type": "mx_fp"}),
        ("auto_round:fp8_static", channel, "COMPRESSED_PLAIN", {"data_type": "fp8", "bits": 8}),
    ],
)
def test_packings_of_auto_round(
    packing: str, make: Maker, encoding: str, more: Mapping[str, Any], tmp_path: Path
) -> None:
    extra = {"model.layers.0.self_attn.q_proj": {"bits": 16}, r".*\.o_proj": {"bits": 16}}
    section = {**ROUND, "packing_format": packing, "extra_config": extra, **more}
    chosen = {"layers.0.self_attn.q_proj": None, "o_proj": None, "_proj": make}
    expected = written(tmp_path / "m", chosen, section)  # type: ignore[arg-type]
    holds(tmp_path / "m", expected, encoding)


def test_gptqs_dynamic_rules(tmp_path: Path) -> None:
    section = {
        "quant_method": "gptq",
        "bits": 8,
        "group_size": 128,
        "dynamic": {r"-:.*\.o_proj": {}, r"+:.*_proj": {"bits": 4, "group_size": 32}},
    }
    expected = written(tmp_path / "m", {"o_proj": None, "_proj": gptq}, section)  # type: ignore[dict-item]
    holds(tmp_path / "m", expected, "GPTQ")


def test_modules_of_mlx_with_settings_of_their_own(tmp_path: Path) -> None:
    own = {
        f"model.layers.{layer}.mlp.{name}_proj": {"group_size": 32, "bits": 4}
        for layer in range(2)
        for name in ("gate", "up", "down")
    }
    section = {"group_size": 64, "bits": 8, "mode": "affine", **own, "lm_head": False}
    expected = written(tmp_path / "m", {"mlp": mlx}, section, key="quantization")
    holds(tmp_path / "m", expected, "MLX")


def test_what_is_said_to_be_left_but_is_packed_is_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "modelopt")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"]["exclude_modules"] = ["*.o_proj"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    says = r"layers.0.self_attn.o_proj.weight: is a packed weight \(U8.*left as it is"
    with pytest.raises(CodecError, match=says):
        aprfmt.open(tmp_path / "m")


def int8_blocks(shape: tuple[int, int], rng: np.random.Generator) -> Any:
    """Make torchao's Int8Tensor: a scale and a zero point for 32 inputs."""
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (shape[0], shape[1] // 32)).astype(np.float32)
    zero = rng.integers(-9, 9, scale.shape).astype(np.int8)
    values = (codes - floats.wide(zero, 32)) * floats.wide(scale, 32)
    return {"_weight_qdata": codes, "_weight_scale": scale, "_weight_zero_point": zero}, values


def test_classes_of_torchao_are_described_by_the_file(tmp_path: Path) -> None:
    section = {"quant_method": "torchao", "quant_type": {"default": {}}}
    expected = written(tmp_path / "m", {"_proj": int8_blocks}, section)
    said = {"_type": "Int8Tensor", "_data": {"block_size": [1, 32]}}
    metadata = {name: json.dumps(said) for name in expected}
    metadata["tensor_names"] = json.dumps(list(expected))
    weights = tmp_path / "m" / "model.safetensors"
    write_mixed(weights, tensors_of(tmp_path / "m"), metadata)
    holds(tmp_path / "m", expected, "TORCHAO")
    with aprfmt.open(tmp_path / "m") as model, aprfmt.open(tmp_path / "back") as back:
        assert (
            metadata.items() <= model.metadata.items() and metadata.items() <= back.metadata.items()
        )
    aprfmt.convert(tmp_path / "m", tmp_path / "plain", to="safetensors", encoding="F32")
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "too", to="safetensors", encoding="F32")
    for folder in ("plain", "too"):
        with aprfmt.open(tmp_path / folder) as model:
            assert not set(metadata) & set(model.metadata)
    metadata[next(iter(expected))] = json.dumps({"_type": "Int8Tensor", "_data": {}})
    write_mixed(weights, tensors_of(tmp_path / "m"), metadata)
    with pytest.raises(CodecError, match=r"_proj.weight: torchao: metadata says block_size None"):
        aprfmt.open(tmp_path / "m")


@pytest.mark.parametrize("described", [True, False])
def test_what_no_metadata_describe_is_copied_and_not_guessed(
    described: bool, tmp_path: Path
) -> None:
    """torchao's Int4Tensor, or any other whose metadata are lost: it was not even copied."""
    section = {"quant_method": "torchao", "quant_type": {"default": {}}}
    expected = written(tmp_path / "m", {"_proj": int8_blocks}, section)
    said = {"_type": "Int4Tensor", "_data": {"block_size": [1, 32]}}
    metadata = {name: json.dumps(said) for name in expected}
    metadata["tensor_names"] = json.dumps(list(expected))
    weights = tmp_path / "m" / "model.safetensors"
    write_mixed(weights, tensors_of(tmp_path / "m"), metadata if described else {})
    says = "of class 'Int4Tensor'" if described else "the file's metadata describe none"
    for out in ("m.gguf", "m.apr"):
        with pytest.raises(ConversionError, match=f"'torchao' .*{says}.*14 weights in 42 tensors"):
            aprfmt.convert(tmp_path / "m", tmp_path / out, encoding="F32")
    aprfmt.convert(tmp_path / "m", tmp_path / "m.apr")
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "back", to="safetensors")
    assert tensors_of(tmp_path / "back") == tensors_of(tmp_path / "m")
    found = command("inspect", tmp_path / "m")
    assert "14 weights packed by 'torchao', not decoded here" in found.out


def test_metadata_that_are_lost_are_the_cause(tmp_path: Path) -> None:
    section = {"quant_method": "torchao", "quant_type": {"default": {}}}
    expected = written(tmp_path / "good", {"_proj": int8_blocks}, section)
    written(tmp_path / "bad", {"_proj": int8_blocks}, section)
    said = {"_type": "Int8Tensor", "_data": {"block_size": [1, 32]}}
    metadata = {name: json.dumps(said) for name in expected}
    metadata["tensor_names"] = json.dumps(list(expected))
    write_mixed(tmp_path / "good" / "model.safetensors", tensors_of(tmp_path / "good"), metadata)
    for sides in (("good", "bad"), ("bad", "good")):
        found = diagnose(*(str(tmp_path / side) for side in sides), ids=(1, 2, 3))
        assert (found.cause, found.confidence) == ("packing_claim", "confirmed")
        assert found.findings[0].side == "AB"[sides.index("bad")]
