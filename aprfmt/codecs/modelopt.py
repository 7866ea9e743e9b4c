"""ModelOpt: what NVIDIA publishes, one dialect for its algorithms below.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes. A *group* is the elements that share one scale.

FP8, FP8_PER_CHANNEL_PER_TOKEN   weight E4M3, weight_scale one number, or one a row
FP8_PB_WO                        weight E4M3, weight_scale one number for 128 x 128 elements
NVFP4 and its variants           weight uint8 [out, in/2] (E2M1, low nibble first), weight_scale
                                 E4M3 [out, in/16], weight_scale_2 float32: one number, or one an
                                 expert; value = code * (weight_scale * weight_scale_2), and the
                                 code 8 is a zero without sign
MXFP8                            weight E4M3, weight_scale uint8 [out, in/32] (E8M0)
W4A8_MXFP4_FP8                   weight uint8 [out, in/2], weight_scale uint8 [out, in/32] (E8M0)
W4A16_AWQ                        weight uint8 [out/2, in] (two's complement, the even output low),
                                 weight_scale [out, in/group_size]
W8A16, W8A8_SQ_PER_CHANNEL       weight int8, weight_scale one number a row

Experts of gpt-oss are one tensor NAME [experts, in, out], bytes along in, with NAME_weight_scale
and its kind in the same order of axes; the weight is [experts, out, in], as it is everywhere else.
input_scale is that of activations and changes no weight. pre_quant_scale [in] multiplies what goes
into the layer, and so the columns of its weight. Source: nvidia-modelopt 0.47,
export/quant_utils.py and quantization/qtensor/.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from aprfmt.codecs import f4, fp8
from aprfmt.codecs.base import F32, Array
from aprfmt.codecs.dialect import (
    GROUP_SIZES,
    CodeTable,
    Config,
    Dialect,
    Parts,
    check_shape,
    config_integer,
    part_raw,
    part_scale_numbers,
    part_scales,
    required_part,
    whole_numbers,
)
from aprfmt.codecs.modelopt_scope import METHOD
from aprfmt.codecs.weight_layout import (
    GroupNumbers,
    PackedCodes,
    Tile,
    WeightLayout,
    broadcast_to_matrices,
    tile_grid,
    wrap_codes,
)
from aprfmt.errors import CodecError, UnsupportedError

NAME = "modelopt"
_MAIN, SCALE, _SECOND = ".weight", ".weight_scale", ".weight_scale_2"
SMOOTH, _INPUT = ".pre_quant_scale", ".input_scale"
_FLOAT = ("F32", "BF16", "F16")
_TILE = 128


class Algorithm(NamedTuple):
    """How one ModelOpt algorithm stores a weight: a row of the table of algorithms.

    `encodings` are those of the main part, `packs` the axis along which a byte has two codes (0 for
    none). `group` is the number of inputs under a scale, 0 where the section says it, None for
    scales of rows, tiles or all. `scale` reads the scales; where `second` is true they have a scale
    of their own.
    """

    encodings: tuple[str, ...]
    packs: int
    group: int | None
    scale: Callable[[Parts], GroupNumbers]
    codes: CodeTable
    second: bool = False


def _scale_reader(*encodings: str) -> Callable[[Parts], GroupNumbers]:
    """Return a function that reads a weight's scales from its parts, stored in these encodings."""
    return lambda parts: part_scale_numbers(NAME, parts, SCALE, encodings)


_FP8 = Algorithm(("F8_E4M3",), 0, None, _scale_reader(*_FLOAT), CodeTable(8, fp8.E4M3.values))
_E2M1 = CodeTable(4, f4.CODEC.values)
_ONE_ZERO = CodeTable(4, f4.CODEC.values + np.float32(0))  # code 8 is 0, not -0
_NVFP4 = Algorithm(("U8",), -1, 16, _scale_reader("F8_E4M3"), _ONE_ZERO, second=True)
_INT4 = Algorithm(("U8",), -2, 0, _scale_reader(*_FLOAT), whole_numbers(4, signed=True))
_INT8 = Algorithm(("I8",), 0, None, _scale_reader(*_FLOAT), whole_numbers(8, signed=True))
ALGORITHMS: Mapping[str, Algorithm] = {
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8,
    "FP8_PB_WO": _FP8,
    "NVFP4": _NVFP4,
    "NVFP4_AWQ": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "W4A8_NVFP4_FP8": _NVFP4,
    "MXFP8": _FP8._replace(group=32, scale=_scale_reader("U8", "F8_E8M0")),
    "W4A8_MXFP4_FP8": Algorithm(("U8",), -1, 32, _scale_reader("U8", "F8_E8M0"), _E2M1),
    "W4A16_AWQ": _INT4,
    "W8A16": _INT8,
    "W8A8_SQ_PER_CHANNEL": _INT8,
}
_TILED = ("FP8_PB_WO",)


def algorithm_of(config: Config) -> Algorithm:
    """Return the algorithm that a section names, its group size set.

    Raises UnsupportedError for an unknown algorithm, CodecError for a group size that is not valid.
    """
    name = config.get("quant_algo")
    if name not in ALGORITHMS:
        raise UnsupportedError(
            f"{NAME}: quant_algo {name!r} is not one we decode: {', '.join(ALGORITHMS)}"
        )
    found = ALGORITHMS[str(name)]
    if found.group is None:
        return found
    allowed = (found.group,) if found.group else GROUP_SIZES
    return found._replace(
        group=config_integer(NAME, config, "group_size", allowed, found.group or None)
    )


def _weight_shape(parts: Parts, config: Config) -> tuple[int, ...]:
    """Return the shape [..., out, in] of the weight that these parts store.

    Raises CodecError where none fits.
    """
    algorithm, main = algorithm_of(config), required_part(NAME, parts, _MAIN)
    if main.encoding not in algorithm.encodings:
        raise CodecError(
            f"{NAME}: config says {config['quant_algo']}, part {_MAIN!r} is {main.encoding}, "
            f"expected {' or '.join(algorithm.encodings)}"
        )
    shape = list(main.shape)
    if len(shape) < 2:
        raise CodecError(f"{NAME}: part {_MAIN!r} has shape {shape}, expected [out, in]")
    if algorithm.packs:
        shape[algorithm.packs] *= 2
    if algorithm.second:
        required_part(NAME, parts, _SECOND)
    if algorithm.group is not None:
        prefix = f"{NAME}: config says {config['quant_algo']}, group_size {algorithm.group}"
        if shape[-1] % algorithm.group:
            raise CodecError(f"{prefix}: part {_MAIN!r} has rows of {shape[-1]}, no whole groups")
        groups = (*shape[:-1], shape[-1] // algorithm.group)
        check_shape(prefix, SCALE, required_part(NAME, parts, SCALE).shape, groups)
    return tuple(shape)


def _scales_and_tile(
    found: GroupNumbers, shape: tuple[int, ...], config: Config
) -> tuple[GroupNumbers, Tile]:
    """Return (scales by tile, (rows, columns) of a tile) where the algorithm has no input groups.

    A tile is the part of a matrix under one scale: a square, a row, or a whole matrix. Raises
    CodecError where the shape of the scales is that of no tile.
    """
    values = found.array
    tile: Tile = (1, shape[-1])
    if config.get("quant_algo") in _TILED:
        tile = (_TILE, _TILE)
        tiles = (*shape[:-2], *tile_grid(shape, tile))
        if values.shape != (*tiles[:-1], 1, tiles[-1], 1):  # as it is exported
            check_shape(NAME, SCALE, values.shape, tiles)
        values = values.reshape(tiles)
    elif values.size == 1:
        values, tile = values.reshape(1, 1), (shape[-2], shape[-1])
    else:
        kept = values.reshape(values.shape[:-1]) if values.shape[-1] == 1 else values
        axes = next((n for n in range(1, len(shape)) if kept.shape == shape[:n]), None)
        if axes is None:  # neither one an expert, nor one a row
            raise CodecError(
                f"{NAME}: part {SCALE!r} has shape {list(values.shape)}, which is no scale of the "
                f"whole or of the rows of {list(shape)}"
            )
        values = kept.reshape(*kept.shape, *(1,) * (len(shape) - axes))
    return GroupNumbers(
        broadcast_to_matrices(values, shape, tile_grid(shape, tile)), found.table
    ), tile


def _lay_out_codes(
    parts: Parts, algorithm: Algorithm, shape: tuple[int, ...]
) -> tuple[PackedCodes, F32]:
    """Return (a weight's codes, float32 number of each code)."""
    raw = part_raw(NAME, parts, _MAIN, algorithm.encodings)
    if algorithm.packs == -2:
        held = raw.reshape(-1, *parts[_MAIN].shape[-2:])
        return PackedCodes(4, "pairs", held), algorithm.codes.values.astype(np.float32)
    return wrap_codes(raw, algorithm.codes.bits, shape, algorithm.codes.values)


def _lay_out(parts: Parts, config: Config, shape: tuple[int, ...]) -> WeightLayout:
    """Return the layout of a weight's codes, with its scales and the factor of each column."""
    algorithm = algorithm_of(config)
    codes, values = _lay_out_codes(parts, algorithm, shape)
    scale, smooth = algorithm.scale(parts), None
    if algorithm.group is None:
        scale, tile = _scales_and_tile(scale, shape, config)
    else:
        tile = (1, algorithm.group)
        second = second_scale(parts, shape) if algorithm.second else None
        scales = broadcast_to_matrices(scale.array, shape, tile_grid(shape, tile))
        table = scale.table
        if second is not None and table is not None:
            table = table * second.reshape(-1, 1)
        scale = GroupNumbers(scales, table)
    if SMOOTH in parts:
        smooth = part_scales(NAME, parts, SMOOTH, _FLOAT)
        check_shape(NAME, SMOOTH, smooth.shape, shape[-1:])
    return WeightLayout(shape, codes, values, tile, scale, factor=smooth)


def second_scale(parts: Parts, shape: tuple[int, ...]) -> Array:
    """Return NVFP4's scale of scales, one number or one for each expert.

    Its shape broadcasts over the weight's `shape`.
    """
    second = part_scales(NAME, parts, _SECOND, ("F32",))
    if second.size != 1:
        check_shape(NAME, _SECOND, (second.size,), shape[:1] if len(shape) > 2 else (1,))
    return second.reshape(-1, *(1,) * (len(shape) - 1))


DIALECT = Dialect(
    name=NAME,
    main=_MAIN,
    weight=_MAIN,
    parts=(SCALE,),
    optional=(_SECOND, _INPUT, SMOOTH),
    facts=("quant_algo", "group_size"),
    recognises=lambda config: config.get("quant_method") == METHOD,
    shape_of=_weight_shape,
    laid_out=_lay_out,
    codes=lambda parts, config: algorithm_of(config).codes,
    coded=("F8_E4M3", "U8", "I8"),
)


# suffixes next to experts that are one tensor -> those of a weight
_TOGETHER: Mapping[str, str] = {
    "": _MAIN, "_weight_scale": SCALE, "_weight_scale_2": _SECOND, "_input_scale": _INPUT,
}  # fmt: skip


def as_weight_parts(parts: Parts, *, transpose: bool) -> Parts:
    """Return the parts of stacked experts under a weight's suffixes, as [experts, out, in].

    Experts are stored as [experts, in, out]. With `transpose` the bytes are transposed too, else
    only the shapes are swapped.
    """
    found = {_TOGETHER[suffix]: part for suffix, part in parts.items()}
    for suffix, part in found.items():
        if len(part.shape) != 3 or part.encoding in _FLOAT:
            continue  # numbers for the whole, an expert or a row
        experts, columns, rows = part.shape
        raw = part.raw
        if transpose:
            stored = np.frombuffer(raw, np.uint8).reshape(part.shape)
            raw = np.ascontiguousarray(stored.swapaxes(1, 2)).tobytes()
        found[suffix] = part._replace(raw=raw, shape=(experts, rows, columns))
    return found


def _lay_out_experts(parts: Parts, config: Config, shape: tuple[int, ...]) -> WeightLayout:
    """Return the layout of the codes of stacked experts, with their scales.

    Codes go down columns as they are stored, but 4-bit integers are transposed first.
    """
    if algorithm_of(config).packs == -2:
        return _lay_out(as_weight_parts(parts, transpose=True), config, shape)
    found = _lay_out(as_weight_parts(parts, transpose=False), config, shape)
    stored = parts[""]
    codes = np.frombuffer(stored.raw, np.uint8).reshape(stored.shape)
    scale, power = found.scale, parts["_weight_scale"]
    if len(power.shape) == 3 and power.encoding not in _FLOAT and scale is not None:
        powers = np.frombuffer(power.raw, np.uint8).reshape(power.shape).swapaxes(1, 2)
        scale = GroupNumbers(powers, scale.table)
    return replace(found, codes=found.codes._replace(order="columns", array=codes), scale=scale)


EXPERTS = Dialect(
    name="modelopt_experts",
    main="",
    weight="",
    parts=("_weight_scale",),
    optional=("_weight_scale_2", "_input_scale"),
    facts=DIALECT.facts,
    recognises=DIALECT.recognises,
    shape_of=lambda parts, config: _weight_shape(as_weight_parts(parts, transpose=False), config),
    laid_out=_lay_out_experts,
    codes=DIALECT.codes,
    coded=DIALECT.coded,
)
