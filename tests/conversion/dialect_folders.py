"""Hugging Face folders whose weights are stored in a dialect's several tensors, made by hand."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.codecs.packing import pack
from tests.conversion import dialect_floats
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

Array = Any
Rows = dict[str, tuple[str, tuple[int, ...], bytes]]
# Makes the stored tensors of a weight [out, in], by suffix of the module's name, and its values.
Maker = Callable[[tuple[int, int], np.random.Generator], tuple[Mapping[str, Array], Array]]

GROUP = 32
_DTYPES = {
    "int32": "I32", "uint32": "U32", "int64": "I64", "uint8": "U8", "int8": "I8", "int16": "I16",
    "float16": "F16", "float32": "F32", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def _affine(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
    """Return codes [out, in], zero points and scales [in / GROUP, out], and the values."""
    out, columns = shape
    codes = rng.integers(0, 16, shape)
    zeros = rng.integers(1, 16, (columns // GROUP, out))
    scales = rng.random((columns // GROUP, out)).astype(np.float16)
    wide: list[Array] = [np.repeat(x, GROUP, 0).T for x in (zeros, scales.astype(np.float32))]
    return codes, zeros, scales, ((codes - wide[0]) * wide[1]).astype(np.float32)


def gptq(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """GPTQ v1, 4 bits, act-order index in order."""
    codes, zeros, scales, values = _affine(shape, rng)
    return {
        "qweight": pack(codes, 4).T,
        "qzeros": pack(zeros - 1, 4),
        "scales": scales,
        "g_idx": (np.arange(shape[1]) // GROUP).astype(np.int32),
    }, values


def awq(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """AWQ GEMM layout: eight columns of a word stand in the order 0 2 4 6 1 3 5 7."""
    codes, zeros, scales, values = _affine(shape, rng)

    def mixed(x: Array) -> Array:
        turned = x.reshape(len(x), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack(turned.reshape(len(x), -1), 4)

    return {"qweight": mixed(codes.T), "qzeros": mixed(zeros), "scales": scales}, values


def fp8(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """FP8 in blocks of 128 x 128 with an inverse scale."""
    import ml_dtypes

    weight = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.random([-(-n // 128) for n in shape]).astype(np.float32)
    wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: shape[0], : shape[1]]
    return {"weight": weight, "weight_scale_inv": scale}, weight.astype(np.float32) * wide


def packed(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """compressed-tensors pack-quantized: symmetric integers of 4 bits in groups."""
    codes = rng.integers(0, 16, shape)
    scale = rng.random((shape[0], shape[1] // GROUP)).astype(np.float32)
    values = (codes - 8) * np.repeat(scale, GROUP, axis=1)
    return {
        "weight_packed": pack(codes, 4),
        "weight_scale": scale,
        "weight_shape": np.array(shape, np.int64),
    }, values.astype(np.float32)


def mlx(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """MLX affine, 4 bits."""
    codes = rng.integers(0, 16, shape)
    scales, biases = (rng.random((shape[0], shape[1] // GROUP)).astype(np.float16) for _ in "sb")
    wide = [np.repeat(x.astype(np.float32), GROUP, axis=1) for x in (scales, biases)]
    return {
        "weight": pack(codes, 4).view(np.uint32),
        "scales": scales,
        "biases": biases,
    }, codes.astype(np.float32) * wide[0] + wide[1]


def mxfp4(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """compressed-tensors mxfp4-pack-quantized: E2M1, the low nibble first, and E8M0."""
    codes = rng.integers(0, 16, shape, np.uint8)
    scale = rng.integers(120, 130, (shape[0], shape[1] // 32), np.uint8)
    code = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([code, -code])
    values = table[codes] * np.repeat(np.exp2(scale.astype(np.float32) - 127), 32, axis=1)
    return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale}, values


def channel(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """compressed-tensors float-quantized: FP8 with a scale a row."""
    import ml_dtypes

    weight = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.random((shape[0], 1)).astype(np.float32)
    return {"weight": weight, "weight_scale": scale}, weight.astype(np.float32) * scale


def _compressed(form: str, **weights: Any) -> Mapping[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "symmetric": True, **weights,
        }}},
    }  # fmt: skip


_INT4 = _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP)
_MX = _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
_FP8 = _compressed("float-quantized", num_bits=8, type="float", strategy="channel")
# dialect of aprfmt.codecs.dialects -> (maker, key of config.json, what it says)
FOLDERS: Mapping[str, tuple[Maker, str, Mapping[str, Any]]] = {
    "gptq": (gptq, "quantization_config",
             {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "awq": (awq, "quantization_config",
            {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "fp8_block": (fp8, "quantization_config",
                  {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "compressed_packed": (packed, "quantization_config", _INT4),
    "compressed_packed_float": (mxfp4, "quantization_config", _MX),
    "compressed_plain": (channel, "quantization_config", _FP8),
    "mlx": (mlx, "quantization", {"group_size": GROUP, "bits": 4}),
    "modelopt": (dialect_floats.nvfp4, "quantization_config",
                 {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
}  # fmt: skip


def stored_row(x: Array) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes of an array as safetensors stores it."""
    x = np.asarray(x, order="C")
    return _DTYPES[x.dtype.name], x.shape, x.tobytes()


def of_inputs(folder: Path) -> list[str]:
    """Return the --drop patterns that decoding a folder's weights needs: scales of activations."""
    named = any(name.endswith("input_scale") for name in tensors_of(folder))
    return ["*input_scale"] if named else []


def write_folder(folder: Path, dialect: str) -> dict[str, Array]:
    """Write a llama folder with every projection in a dialect; return their values by name."""
    make, key, section = FOLDERS[dialect]
    return write_mixture(folder, lambda name: make if "_proj" in name else None, {key: section})


def write_mixture(
    folder: Path, chosen: Callable[[str], Maker | None], config: Mapping[str, Any]
) -> dict[str, Array]:
    """Write a llama folder whose weights are stored as `chosen(name)` makes them, if it does.

    `config` are keys added to config.json. Returns the packed weights' values by name.
    """
    rng = np.random.default_rng(0)
    llama_folder(folder, "F16", hidden=64)
    rows: Rows = {}
    expected = {}
    for name, row in tensors_of(folder).items():
        make = chosen(name)
        if make is None:
            rows[name] = row
            continue
        rows_, columns = row[1]
        parts, expected[name] = make((rows_, columns), rng)
        prefix = name.removesuffix("weight")
        rows.update({prefix + suffix: stored_row(x) for suffix, x in parts.items()})
    write_mixed(folder / "model.safetensors", rows)
    said = json.loads((folder / "config.json").read_text()) | dict(config)
    (folder / "config.json").write_text(json.dumps(said))
    return expected


def write_gpt_oss(folder: Path, method: str = "mxfp4") -> dict[str, Array]:
    """Write a tiny gpt-oss folder whose experts are MXFP4; return their values [E, out, in].

    With the method `modelopt` they are NVFP4, as ModelOpt stores them: inputs before outputs.
    """
    from tests.models import save_tiny

    save_tiny("gpt_oss", folder, "bfloat16", hidden_size=64, intermediate_size=32)
    rng = np.random.default_rng(0)
    rows: Rows = {}
    expected = {}
    for name, row in tensors_of(folder).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            rows[name] = row
            continue
        experts, columns, out = row[1]
        if method == "modelopt":
            made, expected[name] = dialect_floats.nvfp4((experts, out, columns), rng)
            rows[name] = stored_row(made["weight"].swapaxes(1, 2))
            rows[f"{name}_weight_scale"] = stored_row(made["weight_scale"].swapaxes(1, 2))
            rows[f"{name}_weight_scale_2"] = stored_row(made["weight_scale_2"])
            continue
        parts, values = mxfp4((experts * out, columns), rng)
        shape = (experts, out, columns // 32)
        blocks = parts["weight_packed"].reshape(*shape, 16)
        rows[name + "_blocks"] = stored_row(blocks)
        rows[name + "_scales"] = stored_row(parts["weight_scale"].reshape(shape))
        expected[name] = values.reshape(experts, out, columns)
    write_mixed(folder / "model.safetensors", rows)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    if method == "modelopt":
        config["quantization_config"] |= {"quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return expected
