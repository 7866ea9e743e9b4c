"""compressed-tensors: what llm-compressor and vLLM write, in the formats below.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

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

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from aprfmt.codecs import f4, f6, fp8
from aprfmt.codecs.base import F32, Array
from aprfmt.codecs.compressed_claims import (
    GROUPED,
    NAME,
    check_claims,
    scale_shapes,
    scale_strategy,
)
from aprfmt.codecs.dialect import (
    CodeTable,
    Config,
    Dialect,
    Parts,
    check_shape,
    config_integer,
    part_array,
    part_numbers,
    part_raw,
    part_scale_numbers,
    part_scales,
    part_words,
    required_part,
    whole_numbers,
)
from aprfmt.codecs.minifloat import MinifloatCodec
from aprfmt.codecs.weight_layout import (
    GroupNumbers,
    PackedCodes,
    Tile,
    WeightLayout,
    broadcast_to_matrices,
    spread_on_tiles,
    tile_grid,
    transpose_numbers,
    wrap_codes,
)
from aprfmt.errors import CodecError, UnsupportedError

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
_STORED: Mapping[str, tuple[str, ...]] = {"int": ("I8",), "float": tuple(_FP8)}  # by type
_PLAIN_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")


def _format_of(config: Config) -> str:
    """Return the format that a section names; "" for other methods than compressed-tensors."""
    return str(config.get("format")) if config.get("quant_method") == NAME else ""


def weight_arguments(config: Config) -> Mapping[str, Any]:
    """Return the mapping under "weights" of the config groups (num_bits, type, ...), equal in all.

    Raises CodecError where no group has one, and UnsupportedError where groups differ: the section
    alone does not say which tensor is in which group.
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


def _matrix_shape(parts: Parts, suffix: str) -> tuple[int, ...]:
    """Return the shape of a part, [out, in] or one with more axes in front; else CodecError."""
    shape = required_part(NAME, parts, suffix).shape
    if len(shape) < 2:
        raise CodecError(f"{NAME}: part {suffix!r} has shape {list(shape)}, expected [out, in]")
    return shape


def numbers_by_tile(
    values: Array, shape: tuple[int, ...], weights: Mapping[str, Any], part: str
) -> tuple[Array, Tile]:
    """Return (scales or zero points by tile [matrices, down, across], (rows, columns) of a tile).

    A tile is the part of a matrix [out, in] under one scale. `down` and `across` count the tiles.
    `values` are the numbers as stored, `shape` is the weight's. Tiles of tensor, channel and group
    scales follow from the shape of `values`; those of block scales are `block_structure` of
    `weights`. `part` is the suffix named in errors. Raises CodecError for a `block_structure` that
    is not two integers, and for values of another shape.
    """
    tile: Tile = (shape[-2], shape[-1])
    if values.size == 1:
        values = values.reshape(1, 1)
    elif weights.get("strategy") == "block":
        size = weights.get("block_structure")
        if not isinstance(size, list | tuple) or [type(n) for n in size] != [int, int]:
            raise CodecError(f"{NAME}: config says block_structure {size!r}, expected two numbers")
        tile = (max(1, size[0]), max(1, size[1]))
        check_shape(NAME, part, values.shape, (*shape[:-2], *tile_grid(shape, tile)))
    else:
        values = _numbers_by_group(values, shape, part)
        tile = (1, shape[-1] // values.shape[-1])
    return broadcast_to_matrices(values, shape, tile_grid(shape, tile)), tile


def _lay_out_codes(
    shape: tuple[int, ...],
    codes: PackedCodes,
    values: F32,
    scale: GroupNumbers,
    zero: F32 | None,
    weights: Mapping[str, Any],
) -> WeightLayout:
    """Return the layout of a weight whose scales and zero points may have tiles of different size.

    Both are repeated for tiles whose sides are the greatest common divisors. `values` holds the
    number that each code stands for.
    """
    held, tile = numbers_by_tile(scale.array, shape, weights, SCALE)
    if zero is None:
        return WeightLayout(shape, codes, values, tile, scale._replace(array=held))
    zeros, other = numbers_by_tile(zero, shape, weights, _ZERO)
    finer = (math.gcd(tile[0], other[0]), math.gcd(tile[1], other[1]))
    scale = scale._replace(array=spread_on_tiles(held, tile, finer, shape))
    return WeightLayout(
        shape,
        codes,
        values,
        finer,
        scale,
        GroupNumbers(spread_on_tiles(zeros, other, finer, shape)),
    )


def _numbers_by_group(values: Array, shape: tuple[int, ...], part: str) -> Array:
    """Return scales or zero points as [..., out, groups], or with all axes 1 for a single number.

    `shape` is the weight's, `part` the suffix named in errors. Raises CodecError for a shape that
    is not a number for each row or for each group of a row.
    """
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
    check_shape(NAME, part, values.shape, (*shape[:-1], groups))
    return values


def _check_parts(shape: tuple[int, ...], parts: Parts, weights: Mapping[str, Any]) -> None:
    """Raise CodecError unless scales and zero points are what the configuration asks for.

    `weights` is its mapping under "weights". Scales must be one for all, one a row or one a group
    of the configured size. Zero points must exist where it says `symmetric: false`.
    """
    if weights.get("symmetric") is False:
        required_part(f"{NAME}: config says symmetric false", parts, _ZERO)
    found = required_part(NAME, parts, SCALE).shape
    strategy = scale_strategy(weights, found)
    allowed = scale_shapes(shape, weights, strategy)
    if allowed and found not in allowed:
        key = "group_size" if strategy == "group" else "strategy"
        raise CodecError(
            f"{NAME}: config says {key} {weights.get(key)!r}, part {SCALE!r} has shape "
            f"{list(found)}; expected {list(allowed[0])} for a weight of {list(shape)}"
        )


def _packed_shape(parts: Parts, config: Config) -> tuple[int, ...]:
    """Return the shape of a weight of packed integers; its parts are checked.

    Raises CodecError where a part is missing, has another dtype or shape, or contradicts the
    config.
    """
    stored = part_array(NAME, parts, _SHAPE, ("I64", "I32"))
    shape = tuple(int(n) for n in stored.reshape(-1))
    packed = _matrix_shape(parts, _PACKED)
    bits = config_integer(NAME, weight_arguments(config), "num_bits", range(1, 9))
    check_claims(weight_arguments(config), f"part {_PACKED!r}", type="int")
    if len(shape) != len(packed) or min(shape) < 0:
        raise CodecError(
            f"{NAME}: part {_SHAPE!r} says {list(shape)}, expected {len(packed)} sizes"
        )
    prefix = f"{NAME}: config says num_bits {bits}"
    check_shape(prefix, _PACKED, packed, (*shape[:-1], -(-shape[-1] * bits // 32)))
    _check_parts(shape, parts, weight_arguments(config))
    return shape


def _zero_points(parts: Parts, shape: tuple[int, ...], bits: int, scale: Array) -> F32 | None:
    """Return zero points as float32 [..., out, groups]; None without any.

    0 stands for the middle code, 2 ** (bits - 1). int32 ones are packed along the outputs, and
    int8 ones are not packed.
    """
    if _ZERO not in parts:
        return None
    rows, groups = shape[-2], scale.shape[-1] if scale.ndim > 1 else 1
    stored = part_array(NAME, parts, _ZERO, ("I32", "I8"))
    if stored.dtype == np.int32:  # packed along the outputs
        check_shape(NAME, _ZERO, stored.shape, (*shape[:-2], -(-rows * bits // 32), groups))
        words = stored.view(np.uint32).reshape(-1, *stored.shape[-2:])
        values = np.arange(1 << bits, dtype=np.float32) - np.float32(1 << bits - 1)
        full = (*shape[:-2], groups, rows)
        along = WeightLayout(full, PackedCodes(bits, "columns", words), values, (1, rows))
        every = along.decode().reshape(-1, groups, rows)
        return np.stack([transpose_numbers(one) for one in every]).reshape(*shape[:-1], groups)
    return stored.astype(np.float32)


def group_numbers(parts: Parts, config: Config, shape: tuple[int, ...]) -> tuple[F32, F32 | None]:
    """Return (scales, zero points or None) of packed integers, both float32 [..., out, groups].

    Raises CodecError for scales of tiles, and for inputs that `weight_g_idx` reorders.
    """
    # Scales must be of groups of inputs, in the order of inputs.
    weights = weight_arguments(config)
    bits = config_integer(NAME, weights, "num_bits", range(1, 9))
    scale = part_numbers(NAME, parts, SCALE, _FLOAT)
    if weights.get("strategy") == "block":
        raise CodecError("its scales are those of tiles")
    _numbers_by_group(scale, shape, SCALE)
    index = part_array(NAME, parts, _INDEX, ("I32",)) if _INDEX in parts else np.empty(0)
    zero = _zero_points(parts, shape, bits, scale)
    groups = scale.shape[-1] if scale.ndim == len(shape) and scale.size > 1 else 1
    if index.size and index.min() >= 0:
        size = shape[-1] // groups
        if not np.array_equal(index, np.arange(shape[-1]) // size):
            raise CodecError(f"its inputs are grouped in another order ({_INDEX[1:]})")
    # Zero points and scales, repeated for each group.
    full = (*shape[:-1], groups)
    if zero is not None:
        zeros = _numbers_by_group(zero, shape, _ZERO)
        if groups % zeros.shape[-1]:
            check_shape(NAME, _ZERO, zeros.shape, full)
        zero = np.broadcast_to(np.repeat(zeros, groups // zeros.shape[-1], axis=-1), full)
    if scale.size == 1 or scale.shape == shape[:-1]:
        return np.broadcast_to(
            scale.reshape(-1, 1) if scale.size == 1 else scale[..., None], full
        ), zero
    return scale, zero


def micro_format(config: Config) -> tuple[MinifloatCodec, int, MinifloatCodec | None]:
    """Return (codec of the codes, inputs in a group, codec of the scales) of a packed float format.

    The codec of the scales is None where they are E4M3 or floats under a global scale.
    """
    return _MICRO[_format_of(config)]


def global_scale(parts: Parts) -> F32:
    """Return float32 [1], the number that NVFP4's scales are divided by.

    Raises CodecError unless the part holds one number other than 0.
    """
    whole = part_scales(NAME, parts, _GLOBAL, _FLOAT)
    if whole.size != 1 or not whole.all():
        raise CodecError(f"{NAME}: part {_GLOBAL!r} is {whole.tolist()}, expected one number")
    return whole.reshape(-1)


def _lay_out_packed(parts: Parts, config: Config, shape: tuple[int, ...]) -> WeightLayout:
    """Return the layout of packed integers, with their scales, zero points and input groups.

    Raises CodecError where a part has another shape, or where an input group has no scale.
    """
    weights = weight_arguments(config)
    bits = config_integer(NAME, weights, "num_bits", range(1, 9))
    words = part_words(NAME, parts, _PACKED, ("I32",))
    codes = PackedCodes(
        bits, "rows", words.view(np.uint8).reshape(-1, shape[-2], 4 * words.shape[-1])
    )
    values = np.arange(1 << bits, dtype=np.float32) - np.float32(1 << bits - 1)
    scale = part_numbers(NAME, parts, SCALE, _FLOAT)
    zero = _zero_points(parts, shape, bits, scale)
    index = part_array(NAME, parts, _INDEX, ("I32",)) if _INDEX in parts else None
    if index is None or not index.size or index.min() < 0:
        return _lay_out_codes(shape, codes, values, GroupNumbers(scale), zero, weights)
    check_shape(NAME, _INDEX, index.shape, shape[-1:])
    if scale.ndim != len(shape) or index.max() >= scale.shape[-1]:
        raise CodecError(f"{NAME}: part {_INDEX!r} names group {index.max()}, which has no scale")
    check_shape(NAME, SCALE, scale.shape[:-1], shape[:-1])
    if zero is not None:
        check_shape(NAME, _ZERO, zero.shape, scale.shape)
    by_matrix = GroupNumbers(scale.reshape(-1, *scale.shape[-2:]))
    zeros = None if zero is None else GroupNumbers(zero.reshape(-1, *zero.shape[-2:]))
    return WeightLayout(shape, codes, values, (1, 1), by_matrix, zeros, group=index)


def _micro_shape(parts: Parts, config: Config) -> tuple[int, ...]:
    """Return the shape of a weight of packed floats; its parts are checked.

    Raises CodecError where a part has another dtype or shape, or contradicts the config.
    """
    codes, size, _ = _MICRO[_format_of(config)]
    shape = _matrix_shape(parts, _PACKED)
    if parts[_PACKED].encoding != "U8":
        raise CodecError(
            f"{NAME}: config says {_format_of(config)}, part {_PACKED!r} is "
            f"{parts[_PACKED].encoding}, expected U8"
        )
    if shape[-1] % codes.type_size:
        raise CodecError(f"{NAME}: rows of {shape[-1]} bytes are no whole {codes.name} blocks")
    found = (*shape[:-1], shape[-1] // codes.type_size * codes.block_size)
    scale = required_part(NAME, parts, SCALE).shape
    prefix = f"{NAME}: config says format {_format_of(config)!r}"
    check_shape(prefix, SCALE, scale, (*found[:-1], -(-found[-1] // size)))
    if _format_of(config) == _NVFP4:
        required_part(NAME, parts, _GLOBAL)
    if config.get("config_groups"):
        where, bits = f"format {_format_of(config)!r}", codes.kind.bits
        scale_strategy(weight_arguments(config), scale, GROUPED)
        check_claims(weight_arguments(config), where, num_bits=bits, type="float", group_size=size)
    return found


def _lay_out_micro(parts: Parts, config: Config, shape: tuple[int, ...]) -> WeightLayout:
    """Return the layout of packed floats, with their scales."""
    kind, size, exponents = _MICRO[_format_of(config)]
    raw = part_raw(NAME, parts, _PACKED, ("U8",))
    codes, values = wrap_codes(raw, kind.kind.bits, shape, kind.values)
    if exponents is None:
        scale = part_scale_numbers(NAME, parts, SCALE, ("F8_E4M3", *_FLOAT))
        whole = global_scale(parts)
        scale = (
            GroupNumbers(scale.array / whole)
            if scale.table is None
            else GroupNumbers(scale.array, scale.table / whole)
        )
    else:
        scale = part_scale_numbers(NAME, parts, SCALE, ("U8", "F8_E8M0"))
    check_shape(NAME, SCALE, scale.array.shape, (*shape[:-1], shape[-1] // size))
    scales = broadcast_to_matrices(scale.array, shape, tile_grid(shape, (1, size)))
    return WeightLayout(shape, codes, values, (1, size), GroupNumbers(scales, scale.table))


def _plain_shape(parts: Parts, config: Config) -> tuple[int, ...]:
    """Return the shape of a weight with one code a byte, after checking its parts.

    Raises CodecError where the dtype or shape of a part contradicts the config.
    """
    shape, weights = _matrix_shape(parts, ".weight"), weight_arguments(config)
    found, kind = parts[".weight"].encoding, str(weights.get("type"))
    expected = _STORED.get(kind, (found,))
    if found not in expected:
        raise CodecError(
            f"{NAME}: config says type {kind!r}, part '.weight' is {found}, expected "
            f"{' or '.join(expected)}"
        )
    if found in _FP8:
        check_claims(weights, f"{found} of part '.weight'", num_bits=8)
    _check_parts(shape, parts, weights)
    return shape


def _lay_out_plain(parts: Parts, config: Config, shape: tuple[int, ...]) -> WeightLayout:
    """Return the layout of codes of whole bytes, with their scales and zero points."""
    known, weights = _plain_codes(parts, config), weight_arguments(config)
    raw = part_raw(NAME, parts, ".weight", ("I8", *_FP8))
    codes, values = wrap_codes(raw, known.bits, shape, known.values)
    if parts[".weight"].encoding in _FP8:
        scale = part_scale_numbers(NAME, parts, SCALE, ("U8", "F8_E8M0", *_FLOAT))
    else:
        scale = GroupNumbers(part_numbers(NAME, parts, SCALE, _FLOAT))
    zero = None
    if _ZERO in parts:
        zero = part_numbers(NAME, parts, _ZERO, ("I8", "F8_E4M3", *_FLOAT)).astype(np.float32)
    return _lay_out_codes(shape, codes, values, scale, zero, weights)


def _packed_codes(parts: Parts, config: Config) -> CodeTable:
    """Return the number that each code of packed integers stands for."""
    return whole_numbers(config_integer(NAME, weight_arguments(config), "num_bits", range(1, 9)))


def _micro_codes(parts: Parts, config: Config) -> CodeTable:
    """Return the number that each code of a packed float format stands for."""
    kind = _MICRO[_format_of(config)][0]
    return CodeTable(kind.kind.bits, kind.values)


def _plain_codes(parts: Parts, config: Config) -> CodeTable:
    """Return the number that each one-byte code stands for: int8, or the FP8 type of the part."""
    kind = _FP8.get(required_part(NAME, parts, ".weight").encoding)
    return whole_numbers(8, signed=True) if kind is None else CodeTable(8, kind.values)


PACKED = Dialect(
    name="compressed_packed",
    main=_PACKED,
    weight=".weight",
    parts=(SCALE, _SHAPE),
    optional=(_ZERO, _INDEX, *_ACTIVATION),
    facts=("format", "config_groups"),
    recognises=lambda config: _format_of(config) == "pack-quantized",
    shape_of=_packed_shape,
    laid_out=_lay_out_packed,
    codes=_packed_codes,
)
PACKED_FLOAT = Dialect(
    name="compressed_packed_float",
    main=_PACKED,
    weight=".weight",
    parts=(SCALE,),
    optional=(_GLOBAL, *_ACTIVATION),
    facts=("format",),
    recognises=lambda config: _format_of(config) in _MICRO,
    shape_of=_micro_shape,
    laid_out=_lay_out_micro,
    codes=_micro_codes,
)
PLAIN = Dialect(
    name="compressed_plain",
    main=".weight",
    weight=".weight",
    parts=(SCALE,),
    optional=(_ZERO, *_ACTIVATION),
    facts=("format", "config_groups"),
    recognises=lambda config: _format_of(config) in _PLAIN_FORMATS,
    shape_of=_plain_shape,
    laid_out=_lay_out_plain,
    codes=_plain_codes,
    coded=("I8", *_FP8),
)
