"""compressed-tensors: what llm-compressor and vLLM write, in the formats below.

pack-quantized        weight_packed int32 [out, ceil(in*bits/32)], a dense stream of integers
                      offset by 2**(bits-1); weight_scale; weight_shape; where asymmetric
                      weight_zero_point, packed the same way along the outputs; weight_g_idx
nvfp4-pack-quantized  weight_packed uint8 [out, in/2] (E2M1, low nibble first), weight_scale E4M3
                      [out, in/16], weight_global_scale float32: value = code * (scale / global)
mxfp4-pack-quantized  weight_packed uint8, weight_scale E8M0 in uint8 [out, in/32]
mxfp6-pack-quantized  weight_packed uint8 [out, 3*in/4] (E2M3), weight_scale E8M0 [out, in/32]
int-quantized, float-quantized, naive-quantized, mxfp8-quantized
                      weight int8 or E4M3, weight_scale, weight_zero_point where asymmetric

A scale stands for the tensor, a row ("channel"), a group of a row, or a tile ("block"). Scales of
activations (input_scale, input_zero_point, input_global_scale) change no weight. Where groups of
modules differ, or the format is mixed-precision, `compressed_scope` gives each module its own.
Source: compressed-tensors 0.20, compressors/ and quantization/lifecycle/forward_helpers.py.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from aprfmt.codecs import f4, f6, fp8
from aprfmt.codecs.base import F32, Array
from aprfmt.codecs.dialect import (
    GROUP_SIZES,
    CodeTable,
    Config,
    Dialect,
    Parts,
    array,
    fact,
    fits,
    need,
    numbers,
    scales,
    unpack_dense,
    whole_numbers,
)
from aprfmt.codecs.minifloat import MinifloatCodec
from aprfmt.errors import CodecError, UnsupportedError

NAME = "compressed-tensors"
_FLOAT = ("F32", "BF16", "F16")
_PACKED, SCALE, _ZERO = ".weight_packed", ".weight_scale", ".weight_zero_point"
_SHAPE, _INDEX, _GLOBAL = ".weight_shape", ".weight_g_idx", ".weight_global_scale"
_ACTIVATION = (".input_scale", ".input_zero_point", ".input_global_scale")
# elements and bytes of one step of the stream, elements under a scale, what the scales are
_NVFP4 = "nvfp4-pack-quantized"
_MICRO: Mapping[str, tuple[MinifloatCodec, int, MinifloatCodec | None]] = {
    _NVFP4: (f4.CODEC, 16, None),
    "mxfp4-pack-quantized": (f4.CODEC, 32, fp8.E8M0),
    "mxfp6-pack-quantized": (f6.E2M3, 32, fp8.E8M0),
}
_FP8: Mapping[str, MinifloatCodec] = {kind.name: kind for kind in fp8.OF_TWO_SIGNS}
_ROWS = 1 << 8  # rows unpacked at a time
_PLAIN_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")


def _format(config: Config) -> str:
    return str(config.get("format")) if config.get("quant_method") == NAME else ""


def weights_of(config: Config) -> Mapping[str, Any]:
    """Return the weight arguments of the configuration's groups, which must be one and the same.

    Raises UnsupportedError where groups differ: which tensor is in which is not said here.
    """
    groups = config.get("config_groups")
    sections = list(groups.values()) if isinstance(groups, Mapping) else []
    found: list[Mapping[str, Any]] = [
        section["weights"]
        for section in sections
        if isinstance(section, Mapping) and isinstance(section.get("weights"), Mapping)
    ]
    if not found:
        raise CodecError(f"{NAME}: config has no config_groups with weights")
    if any(weights != found[0] for weights in found):
        raise UnsupportedError(f"{NAME}: {len(found)} groups of weights with different arguments")
    return found[0]


def _matrix(parts: Parts, suffix: str) -> tuple[int, ...]:
    shape = need(NAME, parts, suffix).shape
    if len(shape) < 2:
        raise CodecError(f"{NAME}: part {suffix!r} has shape {list(shape)}, expected [out, in]")
    return shape


def spread(values: Array, shape: tuple[int, ...], weights: Mapping[str, Any], part: str) -> Array:
    """Return scales or zero points as an array that broadcasts over the weight.

    Tensor, channel and group scales follow from their shape; tiles need `block_structure`.
    """
    if values.size == 1:
        return values.reshape((1,) * len(shape))
    if weights.get("strategy") == "block":
        size = weights.get("block_structure")
        if not isinstance(size, list | tuple) or [type(n) for n in size] != [int, int]:
            raise CodecError(f"{NAME}: config says block_structure {size!r}, expected two numbers")
        tall, wide = (max(1, n) for n in size)
        tiles = (*shape[:-2], -(-shape[-2] // tall), -(-shape[-1] // wide))
        fits(NAME, part, values.shape, tiles)
        rows = np.arange(shape[-2]) // tall
        return values[..., rows, :][..., np.arange(shape[-1]) // wide]
    values = _by_group(values, shape, part)
    times = shape[-1] // values.shape[-1]
    return np.repeat(values, times, axis=-1) if values.shape[-1] > 1 else values


def _by_group(values: Array, shape: tuple[int, ...], part: str) -> Array:
    """Return scales or zero points [..., out, groups]; CodecError where they are no such grid."""
    if values.size == 1:
        return values.reshape((1,) * len(shape))
    if values.shape == shape[:-1]:
        values = values[..., None]
    groups = values.shape[-1] if values.ndim == len(shape) else 0
    if not groups or shape[-1] % groups:
        raise CodecError(
            f"{NAME}: part {part!r} has shape {list(values.shape)}, which is no row, channel or "
            f"group of {list(shape)}"
        )
    fits(NAME, part, values.shape, (*shape[:-1], groups))
    return values


def _check_groups(shape: tuple[int, ...], parts: Parts, weights: Mapping[str, Any]) -> None:
    """Raise CodecError unless scales of groups are as many as the stated size asks for."""
    size = weights.get("group_size")
    if weights.get("strategy") != "group" or size in (None, -1):
        return
    size = fact(NAME, weights, "group_size", GROUP_SIZES)
    found, groups = need(NAME, parts, SCALE).shape, (*shape[:-1], -(-shape[-1] // size))
    if found != groups:
        raise CodecError(
            f"{NAME}: config says group_size {size}, part {SCALE!r} has shape {list(found)}; "
            f"expected {list(groups)} for a weight of {list(shape)}"
        )


def _shape_of_packed(parts: Parts, config: Config) -> tuple[int, ...]:
    stored = array(NAME, parts, _SHAPE, ("I64", "I32"))
    shape = tuple(int(n) for n in stored.reshape(-1))
    packed = _matrix(parts, _PACKED)
    bits = fact(NAME, weights_of(config), "num_bits", range(1, 9))
    if len(shape) != len(packed) or min(shape) < 0:
        raise CodecError(
            f"{NAME}: part {_SHAPE!r} says {list(shape)}, expected {len(packed)} sizes"
        )
    fits(NAME, _PACKED, packed, (*shape[:-1], -(-shape[-1] * bits // 32)))
    _check_groups(shape, parts, weights_of(config))
    return shape


def _zeros(parts: Parts, shape: tuple[int, ...], bits: int, scale: Array) -> F32 | None:
    """Return zero points as float32, counted from the middle of the codes; None without any."""
    if _ZERO not in parts:
        return None
    rows, groups = shape[-2], scale.shape[-1] if scale.ndim > 1 else 1
    stored = array(NAME, parts, _ZERO, ("I32", "I8"))
    if stored.dtype == np.int32:  # packed along the outputs
        fits(NAME, _ZERO, stored.shape, (*shape[:-2], -(-rows * bits // 32), groups))
        turned = np.ascontiguousarray(np.swapaxes(stored, -1, -2))
        stored = np.swapaxes(unpack_dense(turned, bits, rows), -1, -2) - (1 << bits - 1)
    return stored.astype(np.float32)


def group_numbers(parts: Parts, config: Config, shape: tuple[int, ...]) -> tuple[F32, F32 | None]:
    """Return scales [..., out, groups] of packed integers, and zero points where there are any.

    Raises CodecError for scales of tiles, and for inputs that are not in their order.
    """
    weights = weights_of(config)
    bits = fact(NAME, weights, "num_bits", range(1, 9))
    scale = numbers(NAME, parts, SCALE, _FLOAT)
    if weights.get("strategy") == "block":
        raise CodecError("its scales are those of tiles")
    _by_group(scale, shape, SCALE)
    index = array(NAME, parts, _INDEX, ("I32",)) if _INDEX in parts else np.empty(0)
    zero = _zeros(parts, shape, bits, scale)
    groups = scale.shape[-1] if scale.ndim == len(shape) and scale.size > 1 else 1
    if index.size and index.min() >= 0:
        size = shape[-1] // groups
        if not np.array_equal(index, np.arange(shape[-1]) // size):
            raise CodecError(f"its inputs are grouped in another order ({_INDEX[1:]})")
    full = (*shape[:-1], groups)
    if zero is not None:
        held = _by_group(zero, shape, _ZERO)
        if groups % held.shape[-1]:
            fits(NAME, _ZERO, held.shape, full)
        zero = np.broadcast_to(np.repeat(held, groups // held.shape[-1], axis=-1), full)
    if scale.size == 1 or scale.shape == shape[:-1]:
        return np.broadcast_to(scale.reshape(-1, 1) if scale.size == 1 else scale[..., None],
                               full), zero  # fmt: skip
    return scale, zero


def micro_of(config: Config) -> tuple[MinifloatCodec, int, MinifloatCodec | None]:
    """Return what the codes of a packed float format are, inputs a group, and what scales are."""
    return _MICRO[_format(config)]


def global_scale(parts: Parts) -> F32:
    """Return the number [1] by which scales of NVFP4 are divided; CodecError if it is not one."""
    whole = scales(NAME, parts, _GLOBAL, _FLOAT)
    if whole.size != 1 or not whole.all():
        raise CodecError(f"{NAME}: part {_GLOBAL!r} is {whole.tolist()}, expected one number")
    return whole.reshape(-1)


def _decode_packed(parts: Parts, config: Config, out: F32) -> None:
    weights = weights_of(config)
    bits = fact(NAME, weights, "num_bits", range(1, 9))
    packed = array(NAME, parts, _PACKED, ("I32",)).reshape(-1, parts[_PACKED].shape[-1])
    flat = out.reshape(len(packed), out.shape[-1])
    for start in range(0, len(packed), _ROWS):
        at = slice(start, start + _ROWS)
        flat[at] = unpack_dense(packed[at], bits, out.shape[-1]) - (1 << bits - 1)
    scale = numbers(NAME, parts, SCALE, _FLOAT)
    zero = _zeros(parts, out.shape, bits, scale)
    index = array(NAME, parts, _INDEX, ("I32",)) if _INDEX in parts else None
    if index is not None and index.size and index.min() >= 0:
        fits(NAME, _INDEX, index.shape, out.shape[-1:])
        if scale.ndim != out.ndim or index.max() >= scale.shape[-1]:
            raise CodecError(
                f"{NAME}: part {_INDEX!r} names group {index.max()}, which has no scale"
            )
        scale = scale[..., index]
        zero = zero[..., index] if zero is not None else None
    if zero is not None:
        out -= spread(zero, out.shape, weights, _ZERO)
    out *= spread(scale, out.shape, weights, SCALE)


def _shape_of_micro(parts: Parts, config: Config) -> tuple[int, ...]:
    codes, size, _ = _MICRO[_format(config)]
    shape = _matrix(parts, _PACKED)
    if parts[_PACKED].encoding != "U8":
        raise CodecError(
            f"{NAME}: config says {_format(config)}, part {_PACKED!r} is "
            f"{parts[_PACKED].encoding}, expected U8"
        )
    if shape[-1] % codes.type_size:
        raise CodecError(f"{NAME}: rows of {shape[-1]} bytes are no whole {codes.name} blocks")
    found = (*shape[:-1], shape[-1] // codes.type_size * codes.block_size)
    fits(NAME, SCALE, need(NAME, parts, SCALE).shape, (*found[:-1], -(-found[-1] // size)))
    if _format(config) == _NVFP4:
        need(NAME, parts, _GLOBAL)
    return found


def _decode_micro(parts: Parts, config: Config, out: F32) -> None:
    codes, size, exponents = _MICRO[_format(config)]
    codes.decode({"": need(NAME, parts, _PACKED).raw}, out.reshape(-1))
    if exponents is None:
        scale = scales(NAME, parts, SCALE, ("F8_E4M3", *_FLOAT))
        scale = scale / global_scale(parts)
    else:
        scale = scales(NAME, parts, SCALE, ("U8", "F8_E8M0"))
    fits(NAME, SCALE, scale.shape, (*out.shape[:-1], out.shape[-1] // size))
    out.reshape(*scale.shape, size)[:] *= scale[..., None]


def _shape_of_plain(parts: Parts, config: Config) -> tuple[int, ...]:
    shape = _matrix(parts, ".weight")
    _check_groups(shape, parts, weights_of(config))
    return shape


def _decode_plain(parts: Parts, config: Config, out: F32) -> None:
    weights = weights_of(config)
    out[:] = array(NAME, parts, ".weight", ("I8", *_FP8))
    floats = parts[".weight"].encoding in _FP8
    read, kinds = (scales, ("U8", "F8_E8M0", *_FLOAT)) if floats else (numbers, _FLOAT)
    scale = read(NAME, parts, SCALE, kinds)
    if _ZERO in parts:
        zero = array(NAME, parts, _ZERO, ("I8", "F8_E4M3", *_FLOAT)).astype(np.float32)
        out -= spread(zero, out.shape, weights, _ZERO)
    out *= spread(scale, out.shape, weights, SCALE)


def _codes_packed(parts: Parts, config: Config) -> CodeTable:
    return whole_numbers(fact(NAME, weights_of(config), "num_bits", range(1, 9)))


def _codes_micro(parts: Parts, config: Config) -> CodeTable:
    kind = _MICRO[_format(config)][0]
    return CodeTable(kind.kind.bits, kind.values)


def _codes_plain(parts: Parts, config: Config) -> CodeTable:
    kind = _FP8.get(need(NAME, parts, ".weight").encoding)
    return whole_numbers(8, signed=True) if kind is None else CodeTable(8, kind.values)


PACKED = Dialect(
    name="compressed_packed",
    main=_PACKED,
    weight=".weight",
    parts=(SCALE, _SHAPE),
    optional=(_ZERO, _INDEX, *_ACTIVATION),
    facts=("format", "config_groups"),
    recognises=lambda config: _format(config) == "pack-quantized",
    shape_of=_shape_of_packed,
    decode=_decode_packed,
    codes=_codes_packed,
)
PACKED_FLOAT = Dialect(
    name="compressed_packed_float",
    main=_PACKED,
    weight=".weight",
    parts=(SCALE,),
    optional=(_GLOBAL, *_ACTIVATION),
    facts=("format",),
    recognises=lambda config: _format(config) in _MICRO,
    shape_of=_shape_of_micro,
    decode=_decode_micro,
    codes=_codes_micro,
)
PLAIN = Dialect(
    name="compressed_plain",
    main=".weight",
    weight=".weight",
    parts=(SCALE,),
    optional=(_ZERO, *_ACTIVATION),
    facts=("format", "config_groups"),
    recognises=lambda config: _format(config) in _PLAIN_FORMATS,
    shape_of=_shape_of_plain,
    decode=_decode_plain,
    codes=_codes_plain,
    coded=("I8", *_FP8),
)
