"""Stored tensors of float dialects, made by hand: ModelOpt's, packed FP4, MXFP8, experts as one."""

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

Array = Any
Maker = Callable[[tuple[int, ...], np.random.Generator], tuple[Mapping[str, Array], Array]]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_E2M1, -_E2M1])
E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu


def pairs(codes: Array) -> Array:
    """Return codes two a byte, the even one low."""
    packed: Array = codes[..., ::2] | codes[..., 1::2] << 4
    return packed


def wide(scale: Array, size: int) -> Array:
    """Return scales of groups of inputs as one an input, float32."""
    return np.repeat(np.asarray(scale, np.float32), size, axis=-1)


def e4m3(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return random FP8 values."""
    return rng.standard_normal(shape).astype(E4M3)


def nvfp4(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """ModelOpt NVFP4: E2M1, E4M3 scales of 16 inputs, one float32 scale of those."""
    codes = rng.integers(0, 16, shape, np.uint8)
    scale = rng.uniform(1, 400, (*shape[:-1], shape[-1] // 16)).astype(E4M3)
    second = np.float32(rng.uniform(1e-4, 1e-3))
    step = scale.astype(np.float32) * second
    return {
        "weight": pairs(codes),
        "weight_scale": scale,
        "weight_scale_2": np.array(second),
        "input_scale": np.array(np.float32(0.25)),
    }, E2M1[codes] * wide(step, 16)


def fp8_tensor(
    shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[Mapping[str, Array], Array]:
    """ModelOpt FP8: one scale for the weight."""
    weight, scale = e4m3(shape, rng), np.array(np.float32(rng.uniform(0.01, 0.1)))
    return {
        "weight": weight,
        "weight_scale": scale,
        "input_scale": np.array(np.float32(0.5)),
    }, weight.astype(np.float32) * scale


def fp8_channel(
    shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[Mapping[str, Array], Array]:
    """ModelOpt FP8_PER_CHANNEL_PER_TOKEN: a scale a row."""
    weight = e4m3(shape, rng)
    scale = rng.uniform(0.01, 0.1, shape[:-1]).astype(np.float32)
    return {"weight": weight, "weight_scale": scale}, weight.astype(np.float32) * scale[..., None]


def fp8_tiles(
    shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[Mapping[str, Array], Array]:
    """ModelOpt FP8_PB_WO: a scale for 128 x 128, with axes of one between."""
    weight = e4m3(shape, rng)
    tall, across = (-(-n // 128) for n in shape)
    scale = rng.uniform(0.01, 0.1, (tall, 1, across, 1)).astype(np.float32)
    full = np.repeat(np.repeat(scale[:, 0, :, 0], 128, 0), 128, 1)[: shape[0], : shape[1]]
    return {"weight": weight, "weight_scale": scale}, weight.astype(np.float32) * full


def mxfp8(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """MXFP8: E4M3 under powers of two, as bytes, of 32 inputs."""
    weight = e4m3(shape, rng)
    power = rng.integers(110, 130, (*shape[:-1], shape[-1] // 32), np.uint8)
    step = np.exp2(power.astype(np.float32) - 127)
    return {"weight": weight, "weight_scale": power}, weight.astype(np.float32) * wide(step, 32)


def mxfp4(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """ModelOpt W4A8_MXFP4_FP8: E2M1 under powers of two of 32 inputs."""
    codes = rng.integers(0, 16, shape, np.uint8)
    power = rng.integers(110, 130, (*shape[:-1], shape[-1] // 32), np.uint8)
    step = np.exp2(power.astype(np.float32) - 127)
    return {"weight": pairs(codes), "weight_scale": power}, E2M1[codes] * wide(step, 32)


def int4_awq(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """ModelOpt W4A16_AWQ: two outputs a byte, groups of 32 inputs, inputs scaled before."""
    codes = rng.integers(-8, 8, shape)
    low, high = codes[::2] & 15, codes[1::2] & 15
    scale = rng.uniform(0.01, 0.1, (shape[0], shape[1] // 32)).astype(np.float32)
    smooth = rng.uniform(0.5, 2, shape[1]).astype(np.float32)
    return {
        "weight": (low | high << 4).astype(np.uint8),
        "weight_scale": scale,
        "pre_quant_scale": smooth,
    }, codes.astype(np.float32) * wide(scale, 32) * smooth


def int8(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Mapping[str, Array], Array]:
    """ModelOpt W8A16: a scale a row."""
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scale = rng.uniform(0.001, 0.01, shape[0]).astype(np.float32)
    return {"weight": codes, "weight_scale": scale}, codes.astype(np.float32) * scale[:, None]


def fp4_block(
    shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[Mapping[str, Array], Array]:
    """DeepSeek-V4's experts: E2M1 in int8 under E8M0 of 32 inputs, called `scale`."""
    parts, values = mxfp4(shape, rng)
    packed, power = parts["weight"].view(np.int8), parts["weight_scale"].view(E8M0)
    return {"weight": packed, "scale": power}, values


def fp8_block(
    shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[Mapping[str, Array], Array]:
    """DeepSeek-V4's other weights: E4M3 under E8M0 of 128 x 128, called `scale`."""
    weight = e4m3(shape, rng)
    power = rng.integers(110, 130, [-(-n // 128) for n in shape], np.uint8)
    step = np.exp2(power.astype(np.float32) - 127)
    full = np.repeat(np.repeat(step, 128, 0), 128, 1)[: shape[0], : shape[1]]
    return {"weight": weight, "scale": power.view(E8M0)}, weight.astype(np.float32) * full


def int4_bf16(
    shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[Mapping[str, Array], Array]:
    """Kimi K2: compressed-tensors' packed integers in groups of 32 under BF16 scales."""
    from tests.codecs.packing import pack

    codes = rng.integers(0, 16, shape)
    scale = rng.uniform(0.01, 0.1, (shape[0], shape[1] // 32)).astype(ml_dtypes.bfloat16)
    values = (codes - 8).astype(np.float32) * wide(scale, 32)
    return {
        "weight_packed": pack(codes, 4),
        "weight_scale": scale,
        "weight_shape": np.array(shape, np.int32),
    }, values


# algorithm of ModelOpt -> (maker, the group size it states)
MODELOPT: Mapping[str, tuple[Maker, int | None]] = {
    "FP8": (fp8_tensor, None),
    "FP8_PER_CHANNEL_PER_TOKEN": (fp8_channel, None),
    "FP8_PB_WO": (fp8_tiles, None),
    "NVFP4": (nvfp4, 16),
    "W4A16_NVFP4": (nvfp4, 16),
    "MXFP8": (mxfp8, 32),
    "W4A8_MXFP4_FP8": (mxfp4, 32),
    "W4A16_AWQ": (int4_awq, 32),
    "W8A16": (int8, None),
}
