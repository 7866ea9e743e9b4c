"""Packed copies of a tiny model, as the tools of the field write them, by short numpy code.

A weight becomes integer codes with a scale and a zero point for every group of inputs (`Packed`),
and these are stored as GPTQ, AWQ, compressed-tensors or MLX do, or decoded again. Sources of the
layouts: AutoGPTQ qlinear_cuda.pack, AutoAWQ packing_utils, compressed-tensors compressors/,
mlx.core.quantize; of the error feedback: GPTQ (arXiv 2210.17323), algorithm 1.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.codecs.packing import pack
from tests.conversion.folders import tensors_of, write_mixed
from tests.diagnosis.engines import place

Array = Any
Rows = dict[str, tuple[str, tuple[int, ...], bytes]]
LABELS = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "int8": "I8", "uint8": "U8", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}  # fmt: skip
TOPS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Packed:
    """Codes [out, in] from 0, scales and zero points [out, groups], the group [in] of an input."""

    codes: Array
    scales: Array
    zeros: Array
    group: Array
    bits: int

    def values(self) -> Array:
        """Return float32 [out, in]."""
        low = self.codes - self.zeros[:, self.group]
        return (low * self.scales[:, self.group]).astype(np.float32)

    @property
    def size(self) -> int:
        """Inputs in a group."""
        return int(self.codes.shape[1] // self.scales.shape[1])


def row(values: Array) -> tuple[str, tuple[int, ...], bytes]:
    """Return an array as a stored tensor."""
    values = np.ascontiguousarray(values)
    return LABELS[values.dtype.name], tuple(values.shape), values.tobytes()


def number(stored: tuple[str, tuple[int, ...], bytes]) -> Array:
    """Return a stored float tensor as float32."""
    dtype, shape, raw = stored
    return np.frombuffer(raw, TYPES[dtype]).reshape(shape).astype(np.float32)


# --- quantizers: values to codes ------------------------------------------------------------------


def grid(x: Array, bits: int, symmetric: bool, clip: float, dtype: Any) -> tuple[Array, Array]:
    """Return scale and zero point [out, groups] of x [out, groups, size], stored in `dtype`."""
    top = 2**bits - 1
    if symmetric:
        scales = 2 * clip * np.abs(x).max(-1) / top
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(x.min(-1), 0) * clip, np.maximum(x.max(-1), 0) * clip
        scales = (high - low) / top
        zeros = np.clip(np.round(-low / np.maximum(scales, 1e-9)), 0, top).astype(int)
    scales = np.maximum(scales, 1e-6).astype(dtype).astype(np.float32)
    return scales, zeros


def nearest(
    x: Array,
    bits: int = 4,
    size: int = 32,
    *,
    symmetric: bool = False,
    clip: float = 1.0,
    dtype: Any = np.float16,
) -> Packed:
    """Round to the nearest code: what MLX, AWQ (with `clip`) and one-shot quantizers do."""
    groups = x.reshape(len(x), -1, size)
    scales, zeros = grid(groups, bits, symmetric, clip, dtype)
    codes = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, 2**bits - 1)
    group = np.arange(x.shape[1]) // size
    return Packed(codes.reshape(x.shape).astype(int), scales, zeros, group, bits)


def fed_back(
    x: Array,
    bits: int = 4,
    size: int = 32,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    dependent: bool = False,
    dtype: Any = np.float16,
) -> Packed:
    """GPTQ: the error of every column is made up for by the columns after it.

    `dependent` inputs are sums of others and of unlike size, so that errors grow.
    """
    rng = np.random.default_rng(x.shape[1])
    inputs = rng.standard_normal((256, x.shape[1])) @ rng.standard_normal((x.shape[1],) * 2)
    if dependent:
        inputs = inputs * (1 + 2 * rng.uniform(size=x.shape[1]))
    else:
        inputs = inputs / np.sqrt(x.shape[1]) + rng.standard_normal(inputs.shape)
    hessian = inputs.T @ inputs
    hessian += 0.01 * np.diag(hessian).mean() * np.eye(len(hessian))
    order = np.argsort(-np.diag(hessian)) if act_order else np.arange(len(hessian))
    hessian = hessian[order][:, order]
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    left = x[:, order].astype(np.float64).copy()
    codes = np.empty(x.shape, int)
    scales, zeros = [], []
    for i in range(x.shape[1]):
        if i % size == 0:
            s, z = grid(left[:, None, i : i + size], bits, symmetric, 1.0, dtype)
            scales.append(s[:, 0])
            zeros.append(z[:, 0])
        s, z = scales[-1], zeros[-1]
        codes[:, i] = np.clip(np.round(left[:, i] / s) + z, 0, 2**bits - 1)
        error = (left[:, i] - (codes[:, i] - z) * s) / upper[i, i]
        left[:, i:] -= error[:, None] * upper[i, i:]
    back = np.argsort(order)
    group = (np.arange(x.shape[1]) // size)[back]
    return Packed(codes[:, back], np.stack(scales, 1), np.stack(zeros, 1), group, bits)


# --- writers: codes to stored tensors -------------------------------------------------------------

Writer = Callable[[str, Packed], Rows]
Fault = Callable[[Packed], Packed]


def gptq(
    name: str, p: Packed, *, offset: int = 1, dtype: Any = np.float16, order: bool = True
) -> Rows:
    """Return the tensors of GPTQ; `offset` is what the format takes from zero points."""
    zeros = (p.zeros.T - offset) & (2**p.bits - 1)
    found = {
        ".qweight": pack(p.codes, p.bits).T,
        ".qzeros": pack(zeros, p.bits),
        ".scales": p.scales.T.astype(dtype),
    }
    if order:
        found[".g_idx"] = p.group.astype(np.int32)
    return {name + suffix: row(values) for suffix, values in found.items()}


ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(name: str, p: Packed, *, order: tuple[int, ...] = ORDER, dtype: Any = np.float16) -> Rows:
    """Return the tensors of AutoAWQ's gemm layout, eight outputs a word in `order`."""

    def mixed(x: Array) -> Array:
        return pack(x.reshape(len(x), -1, 8)[:, :, list(order)].reshape(len(x), -1), 4)

    return {
        name + ".qweight": row(mixed(p.codes.T)),
        name + ".qzeros": row(mixed(p.zeros.T)),
        name + ".scales": row(p.scales.T.astype(dtype)),
    }


def mlx(name: str, p: Packed, *, dtype: Any = np.float16) -> Rows:
    """Return the tensors of MLX: value = scale * code + bias."""
    words = pack(p.codes, p.bits).view(np.uint32)
    return {
        name + ".weight": row(words),
        name + ".scales": row(p.scales.astype(dtype)),
        name + ".biases": row((-p.zeros * p.scales).astype(dtype)),
    }


# The magnitudes of E2M1, by code. Source: OCP Microscaling Formats, table 5.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def mlx_mxfp4(name: str, x: Array) -> Rows:
    """Return the tensors of MLX's mode mxfp4: E2M1 times a power of two for 32 inputs."""
    groups = x.reshape(len(x), -1, 32)
    powers = np.floor(np.log2(np.maximum(np.abs(groups).max(2), 1e-30))).astype(int) - 2
    units = groups / np.exp2(powers)[..., None]
    codes = np.abs(np.abs(units)[..., None] - E2M1).argmin(-1) + 8 * (units < 0)
    words = pack(codes.reshape(x.shape), 4).view(np.uint32)
    return {name + ".weight": row(words), name + ".scales": row((powers + 127).astype(np.uint8))}


def compressed(
    name: str, p: Packed, *, dtype: Any = ml_dtypes.bfloat16, asymmetric: bool = False
) -> Rows:
    """Return the tensors of compressed-tensors' pack-quantized."""
    found = {
        ".weight_packed": pack(p.codes, p.bits),
        ".weight_scale": p.scales.astype(dtype),
        ".weight_shape": np.array(p.codes.shape, np.int64),
    }
    if asymmetric:
        found[".weight_zero_point"] = pack(np.ascontiguousarray(p.zeros.T), p.bits).T
    return {name + suffix: row(values) for suffix, values in found.items()}


def decoded(name: str, p: Packed, *, dtype: Any = ml_dtypes.bfloat16) -> Rows:
    """Return the values again: no packed tensor is left."""
    return {name + ".weight": row(p.values().astype(dtype))}


def fp8(
    name: str,
    x: Array,
    *,
    per: str = "tensor",
    suffix: str = ".weight_scale",
    kind: Any = ml_dtypes.float8_e4m3fn,
    tile: int = 32,
    dtype: Any = np.float32,
    top: float = 0.0,
    stored: Callable[[Array], Array] = lambda scale: scale,
) -> Rows:
    """Return an FP8 weight with its scales: of the tensor, of its rows or of its tiles."""
    top = top or TOPS[np.dtype(kind).name]
    if per == "tile":
        tall, wide = (-(-n // tile) for n in x.shape)
        padded = np.zeros((tall * tile, wide * tile), np.float32)
        padded[: x.shape[0], : x.shape[1]] = x
        most = np.abs(padded.reshape(tall, tile, wide, tile)).max((1, 3))
        scale = (most / top).astype(dtype).astype(np.float32)
        spread = scale.repeat(tile, 0).repeat(tile, 1)[: x.shape[0], : x.shape[1]]
    else:
        axis = 1 if per == "row" else None
        scale = (np.abs(x).max(axis, keepdims=True) / top).astype(dtype).astype(np.float32)
        spread = scale
        scale = scale if per == "row" else scale.reshape(1)
    codes = np.clip(x / spread, -top, top).astype(kind)
    return {name + ".weight": row(codes), name + suffix: row(stored(scale).astype(dtype))}


# --- folders --------------------------------------------------------------------------------------


def folder(
    source: Path,
    name: str,
    section: Mapping[str, Any] | None,
    make: Callable[[str, Array], Rows],
    *,
    key: str = "quantization_config",
    chosen: Callable[[str], bool] = lambda name: True,
) -> Path:
    """Copy a folder with every linear weight that is `chosen` written by `make(prefix, values)`."""
    made = place(name)
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    rows: Rows = {}
    for tensor, stored in tensors_of(source).items():
        if tensor.endswith("_proj.weight") and len(stored[1]) == 2 and chosen(tensor):
            rows |= make(tensor.removesuffix(".weight"), number(stored))
        else:
            rows[tensor] = stored
    write_mixed(made / "model.safetensors", rows)
    config = json.loads((source / "config.json").read_text())
    if section is not None:
        config[key] = dict(section)
    (made / "config.json").write_text(json.dumps(config))
    for other in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / other).exists():
            shutil.copy(source / other, made / other)
    return made


def gptq_section(bits: int = 4, size: int = 32, **more: Any) -> dict[str, Any]:
    """Return what AutoGPTQ writes into config.json."""
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "sym": False,
        "desc_act": False,
    } | more


def awq_section(size: int = 32) -> dict[str, Any]:
    """Return what AutoAWQ writes into config.json."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size,
        "version": "gemm",
        "zero_point": True,
    }


def compressed_section(form: str, **weights: Any) -> dict[str, Any]:
    """Return what llm-compressor writes into config.json."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def relabelled(rows: Rows, dtype: str) -> Rows:
    """Return tensors with the label of another 8-bit float."""
    return {
        name: (dtype if was.startswith("F8") else was, shape, raw)
        for name, (was, shape, raw) in rows.items()
    }


def with_scales(change: Callable[[Array], Array]) -> Fault:
    """Return a fault of the scales."""
    return lambda p: replace(p, scales=change(p.scales))
