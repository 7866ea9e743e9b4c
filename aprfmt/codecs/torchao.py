"""torchao: tensor subclasses flattened into plain tensors, described in the file's metadata.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

A weight M.weight is M._weight_qdata, M._weight_scale and what its class has more; `__metadata__`
has under its name the class and its attributes, as JSON.

Int8Tensor                 qdata int8, scale float32 and perhaps zero_point, one for each block
IntxUnpackedToInt8Tensor   the same for integers of fewer bits, each in a byte of its own
Float8Tensor               qdata E4M3 or E5M2, scale for each block MXTensor                   qdata
E4M3, E5M2, or E2M1 two a byte; scale E8M0 for 32 inputs NVFP4Tensor                qdata E2M1 two a
byte, scale E4M3 for 16 inputs, and per_tensor_scale

A block is `block_size` elements of each axis. Scales that are swizzled stand as tensor cores take
them: of 128 rows and 4 columns at a time, row 32*i + j at byte 16*j + 4*i. Int4Tensor and its kin
are packed by a library of kernels and are not decoded here. act_pre_scale [in] multiplies what goes
into the layer, and so the columns of its weight. Source: torchao 0.18, prototype/safetensors/ and
quantization/quantize_/workflows/.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aprfmt.codecs import f4, fp8
from aprfmt.codecs.base import Array
from aprfmt.codecs.dialect import (
    CodeTable,
    Config,
    Dialect,
    Parts,
    check_shape,
    part_numbers,
    part_raw,
    part_scale_numbers,
    part_scales,
    required_part,
    whole_numbers,
)
from aprfmt.codecs.minifloat import MinifloatCodec
from aprfmt.codecs.scope import Scope, section_mapping
from aprfmt.codecs.weight_layout import GroupNumbers, WeightLayout, wrap_codes
from aprfmt.errors import CodecError, UnsupportedError

NAME = METHOD = "torchao"
_NAMES = "_tensor_data_names"  # of a weight's metadata: its tensors
TENSORS = "tensors"  # of the section: weight -> what the file's metadata say of it
_MAIN, _SCALE, _ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
_WHOLE, _SMOOTH = "._weight_per_tensor_scale", "._weight_act_pre_scale"
_ACTIVATION = ("._weight_act_per_tensor_scale", "._weight_act_quant_scale",
               "._weight_act_quant_zero_point")  # fmt: skip
_FLOAT = ("F32", "BF16", "F16")
_FP8: Mapping[str, MinifloatCodec] = {kind.name: kind for kind in fp8.OF_TWO_SIGNS}
_INTEGERS = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
# class -> encodings of its codes; U8 is E2M1, two a byte, the low nibble first
_CLASSES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_INTEGERS, ("I8",)),
    "Float8Tensor": tuple(_FP8),
    "MXTensor": (*_FP8, "U8"),
    "NVFP4Tensor": ("U8",),
}
_PACKED = "U8"
_TALL, _WIDE = 128, 4  # of a tile of swizzled scales,
_TILE_ROWS = 32  # which is stored as so many rows


def _class_name(config: Config) -> str:
    """Return the tensor class that a section names.

    Raises UnsupportedError for one that is not decoded.
    """
    name = config.get("_type")
    if name not in _CLASSES:
        raise UnsupportedError(
            f"{NAME}: weights of class {name!r} are not decoded: {', '.join(_CLASSES)}"
        )
    return str(name)


def _block_size(config: Config, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the size of a block along each axis; CodecError where it does not divide the shape.

    A single number is the size along the last axis, 1 along the others.
    """
    size = config.get("block_size")
    stated = [1] * (len(shape) - 1) + [size] if isinstance(size, int) else size
    if (
        not isinstance(stated, list)
        or len(stated) != len(shape)
        or not all(type(n) is int and n > 0 for n in stated)
        or any(whole % n for whole, n in zip(shape, stated, strict=True))
    ):
        raise CodecError(f"{NAME}: metadata says block_size {size!r}, of a weight {list(shape)}")
    return tuple(stated)


def _has_swizzled_scales(config: Config) -> bool:
    """Return whether scales are stored in tiles of 128 x 4, as tensor cores read them."""
    return config.get("is_swizzled_scales") is True


def _weight_shape(parts: Parts, config: Config) -> tuple[int, ...]:
    """Return the shape [..., out, in] of the weight that these parts store.

    Raises CodecError for parts that contradict the metadata.
    """
    main, allowed = required_part(NAME, parts, _MAIN), _CLASSES[_class_name(config)]
    if main.encoding not in allowed:
        raise CodecError(
            f"{NAME}: metadata says {config['_type']}, part {_MAIN!r} is {main.encoding}, "
            f"expected {' or '.join(allowed)}"
        )
    names = config.get(_NAMES)
    for name in names if isinstance(names, list) else ():
        required_part(f"{NAME}: metadata says {name!r}", parts, f"._weight_{name}")
    packed = main.encoding == _PACKED
    if len(main.shape) < 2:
        raise CodecError(f"{NAME}: part {_MAIN!r} has shape {list(main.shape)}, expected [out, in]")
    shape = (*main.shape[:-1], main.shape[-1] * (2 if packed else 1))
    _block_counts(parts, config, shape)
    return shape


def _block_counts(parts: Parts, config: Config, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks along each axis of the weight, one scale for each block.

    Raises CodecError where the stored scales have another shape, swizzled or plain.
    """
    grid = tuple(n // size for n, size in zip(shape, _block_size(config, shape), strict=True))
    found = required_part(NAME, parts, _SCALE).shape
    if _has_swizzled_scales(config):
        rows = int(np.prod(grid[:-1]))
        tall, wide = -(-rows // _TALL), -(-grid[-1] // _WIDE)
        if found != (tall * wide * _TALL * _WIDE,):  # as one row, or as they are stored
            stored = (int(np.prod(found[:-1])), *found[-1:])
            check_shape(
                NAME, _SCALE, stored, (tall * _TILE_ROWS, wide * _TALL * _WIDE // _TILE_ROWS)
            )
    elif found != grid[:-1] or grid[-1] != 1:  # one a row may come without its axis
        check_shape(NAME, _SCALE, found if any(n != 1 for n in (*found, *grid)) else grid, grid)
    return grid


def _unswizzle(values: Array, grid: tuple[int, ...]) -> Array:
    """Return scales of shape `grid`, by rows and columns, from tiles of 128 x 4."""
    rows = int(np.prod(grid[:-1]))
    tall, wide = -(-rows // _TALL), -(-grid[-1] // _WIDE)
    tiles = values.reshape(-1, 32, 4, 4).swapaxes(1, 2).reshape(tall, wide, _TALL, _WIDE)
    plain = tiles.swapaxes(1, 2).reshape(tall * _TALL, wide * _WIDE)
    return plain[:rows, : grid[-1]].reshape(grid)


def _lay_out(parts: Parts, config: Config, shape: tuple[int, ...]) -> WeightLayout:
    """Return the layout of a weight's codes, with its scales, zero points and column factors."""
    kind, known = _class_name(config), _code_table(parts, config)
    grid = _block_counts(parts, config, shape)
    raw = part_raw(NAME, parts, _MAIN, _CLASSES[kind])
    codes, values = wrap_codes(raw, known.bits, shape, known.values)
    encodings = _FLOAT if kind in _INTEGERS else ("F8_E4M3", "F8_E8M0", *_FLOAT)
    # Scales by block, multiplied by the scale of the whole tensor.
    scale = part_scale_numbers(NAME, parts, _SCALE, encodings)
    scales, table = scale
    scales = _unswizzle(scales, grid) if _has_swizzled_scales(config) else scales.reshape(grid)
    if _WHOLE in parts:
        whole = part_scales(NAME, parts, _WHOLE, ("F32",))
        check_shape(NAME, _WHOLE, (whole.size,), (1,))
        scales, table = (
            (scales * whole.reshape(()), None)
            if table is None
            else (scales, table * whole.reshape(()))
        )
    # Zero points and factors of columns are optional.
    block, zero, smooth = _block_size(config, shape), None, None
    if _ZERO in parts:
        stored = part_numbers(NAME, parts, _ZERO, ("I8", "I32", *_FLOAT)).astype(np.float32)
        check_shape(NAME, _ZERO, (stored.size,), (scales.size,))
        zero = GroupNumbers(_numbers_of_matrices(stored.reshape(grid), block))
    if _SMOOTH in parts:
        smooth = part_scales(NAME, parts, _SMOOTH, _FLOAT)
        check_shape(NAME, _SMOOTH, (smooth.size,), shape[-1:])
        smooth = smooth.reshape(-1)
    scaled = GroupNumbers(_numbers_of_matrices(scales, block), table)
    return WeightLayout(shape, codes, values, (block[-2], block[-1]), scaled, zero, factor=smooth)


def _numbers_of_matrices(values: Array, sizes: Sequence[int]) -> Array:
    """Return numbers of blocks as [matrices, down, across], the last two axes those of one matrix.

    `sizes` is the size of a block along each axis. A block of several matrices gives each of them
    its number.
    """
    for axis, size in enumerate(sizes[:-2]):
        if size > 1:
            values = np.repeat(values, size, axis=axis)
    return values.reshape(-1, *values.shape[-2:])


def _code_table(parts: Parts, config: Config) -> CodeTable:
    """Return the number that each code of the weight stands for, by the main part's encoding."""
    name = required_part(NAME, parts, _MAIN).encoding
    if name == _PACKED:
        return CodeTable(4, f4.CODEC.values)
    return CodeTable(8, _FP8[name].values) if name in _FP8 else whole_numbers(8, signed=True)


DIALECT = Dialect(
    name=NAME,
    main=_MAIN,
    weight=".weight",
    parts=(_SCALE,),
    optional=(_ZERO, _WHOLE, _SMOOTH, *_ACTIVATION),
    facts=("_type", "block_size", "is_swizzled_scales"),
    recognises=lambda config: config.get("quant_method") == METHOD,
    shape_of=_weight_shape,
    laid_out=_lay_out,
    codes=_code_table,
)


def _weight_section(own: Any) -> Config:
    """Return the section of one weight from its metadata: class, attributes and tensors' names.

    Raises CodecError for anything but a class with attributes.
    """
    attributes = own.get("_data") if isinstance(own, Mapping) else None
    if not isinstance(attributes, Mapping):
        raise CodecError(f"metadata says {own!r} of a weight, expected a class and its attributes")
    return {
        **attributes,
        "_type": own.get("_type"),
        "quant_method": METHOD,
        _NAMES: own.get(_NAMES),
    }


def _section_at(section: Config, module: str) -> Config | None:
    """Return the section that applies to one module; None where the module is not quantized."""
    stated = section_mapping(section, TENSORS).get(f"{module}.weight")
    return None if stated is None else _weight_section(stated)


def _all_sections(section: Config) -> Sequence[Config]:
    """Return [a section with only the method], which all weights share.

    Every weight has its section in the metadata, all with the same method. Raises UnsupportedError
    where the metadata describe no weight.
    """
    if not section_mapping(section, TENSORS):
        raise UnsupportedError("the file's metadata describe none of its weights")
    return [{"quant_method": METHOD}]


SCOPE = Scope(_section_at, _all_sections)
