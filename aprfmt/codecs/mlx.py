"""MLX: codes in a stream of 32-bit words by row, with scales and biases by group of inputs.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes. A *group* is the elements that share one scale.

weight  uint32 [..., out, in*bits/32]  codes of 2, 3, 4, 5, 6 or 8 bits, lowest bits first scales
[..., out, in/group_size] biases  the same shape; in mode "affine" only

mode affine   value = scale * code + bias mode mxfp4    E2M1 codes, groups of 32, scales are E8M0 in
uint8 mode nvfp4    E2M1 codes, groups of 16, scales are E4M3 in uint8 mode mxfp8    E4M3 codes,
groups of 32, scales are E8M0 in uint8

Source: MLX, mlx.core.quantize and dequantize.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aprfmt.codecs import f4, fp8
from aprfmt.codecs.dialect import (
    GROUP_SIZES,
    CodeTable,
    Config,
    Dialect,
    Parts,
    check_shape,
    config_integer,
    part_array,
    part_numbers,
    part_words,
    required_part,
    whole_numbers,
)
from aprfmt.codecs.minifloat import MinifloatCodec
from aprfmt.codecs.scope import Scope
from aprfmt.codecs.weight_layout import (
    GroupNumbers,
    PackedCodes,
    WeightLayout,
    broadcast_to_matrices,
)
from aprfmt.errors import CodecError

NAME = "mlx"
_BITS = (2, 3, 4, 5, 6, 8)
_WORDS = "U32"
_FLOATS = ("F16", "BF16", "F32")
_AFFINE = "affine"  # the mode where none is stated


@dataclass(frozen=True)
class Mode:
    """The minifloat codecs of a mode's codes and scales; None for integers and for float scales.

    `group` is the number of inputs of a group, 0 where a model states it freely.
    """

    codes: MinifloatCodec | None
    scales: MinifloatCodec | None
    group: int = 0


MODES = {
    _AFFINE: Mode(None, None),
    "mxfp4": Mode(f4.CODEC, fp8.E8M0, 32),
    "nvfp4": Mode(f4.CODEC, fp8.E4M3, 16),
    "mxfp8": Mode(fp8.E4M3, fp8.E8M0, 32),
}


def _recognizes(config: Config) -> bool:
    """Return whether a quantization section is MLX's: bits and group size, without a method."""
    return "quant_method" not in config and "bits" in config and "group_size" in config


def _weight_shape(parts: Parts, config: Config) -> tuple[int, ...]:
    """Return the shape [..., out, in] of the weight that these parts store; else CodecError.

    MissingPartError where integers have float scales and no biases.
    """
    bits = config_integer(NAME, config, "bits", _BITS)
    shape = required_part(NAME, parts, ".weight").shape
    if len(shape) < 2 or shape[-1] * 32 % bits:
        raise CodecError(f"{NAME}: part '.weight' has shape {list(shape)}, expected packed rows")
    scales = required_part(NAME, parts, ".scales")
    if config.get("mode", _AFFINE) == _AFFINE and scales.encoding in _FLOATS:
        required_part(NAME, parts, ".biases")
    return *shape[:-1], shape[-1] * 32 // bits


def _lay_out(parts: Parts, config: Config, shape: tuple[int, ...]) -> WeightLayout:
    """Return the layout of a weight's codes, with its scales and biases by group.

    Raises CodecError for a mode that is not known, for bits or a group size that do not fit mode or
    rows, and for parts of another shape.
    """
    bits = config_integer(NAME, config, "bits", _BITS)
    size = config_integer(NAME, config, "group_size", GROUP_SIZES)
    # Check mode, bits and group size against each other.
    name = config.get("mode", _AFFINE)
    if name not in MODES:
        raise CodecError(f"{NAME}: mode {name!r} is not one we decode: {', '.join(MODES)}")
    mode, columns = MODES[name], shape[-1]
    if mode.codes is not None and mode.codes.kind.bits != bits:
        raise CodecError(f"{NAME}: mode {name!r} has {mode.codes.kind.bits} bits, config {bits}")
    if mode.group not in (0, size):
        raise CodecError(f"{NAME}: mode {name!r} has groups of {mode.group}, config {size}")
    prefix = f"{NAME}: config says bits {bits}, group_size {size}"
    if columns % size:
        raise CodecError(f"{prefix}: part '.weight' has rows of {columns}, no whole groups")
    # Read codes and scales.
    groups = (*shape[:-1], columns // size)
    words = part_words(NAME, parts, ".weight", (_WORDS,))
    codes = PackedCodes(
        bits, "rows", words.view(np.uint8).reshape(-1, shape[-2], columns * bits // 8)
    )
    allowed = _FLOATS if mode.scales is None else ("U8",)
    read = part_numbers if mode.scales is None else part_array
    stored = read(NAME, parts, ".scales", allowed)
    check_shape(prefix, ".scales", stored.shape, groups)
    table = None if mode.scales is None else mode.scales.values[None]
    scale = GroupNumbers(broadcast_to_matrices(stored, shape, groups[-2:]), table)
    if mode.codes is not None:
        return WeightLayout(shape, codes, mode.codes.values, (1, size), scale)
    # Only integers have biases.
    found = part_numbers(NAME, parts, ".biases", allowed)
    check_shape(prefix, ".biases", found.shape, groups)
    values = np.arange(1 << bits, dtype=np.float32)
    offset = GroupNumbers(broadcast_to_matrices(found, shape, groups[-2:]))
    return WeightLayout(shape, codes, values, (1, size), scale, offset=offset)


def _code_table(parts: Parts, config: Config) -> CodeTable:
    """Return the number that each code of the weight stands for, by the mode."""
    mode = MODES.get(str(config.get("mode", _AFFINE)), MODES[_AFFINE])
    if mode.codes is None:
        return whole_numbers(config_integer(NAME, config, "bits", _BITS))
    return CodeTable(mode.codes.kind.bits, mode.codes.values)


DIALECT = Dialect(
    name=NAME,
    main=".weight",
    weight=".weight",
    parts=(".scales",),
    optional=(".biases",),
    facts=("bits", "group_size", "mode"),
    recognises=_recognizes,
    shape_of=_weight_shape,
    laid_out=_lay_out,
    codes=_code_table,
    coded=(_WORDS,),
    signed=True,
)


def _section_at(section: Config, module: str) -> Config | None:
    """Return the settings of one module: its own merged over the model's.

    None where the section says False for the module: it is not quantized.
    """
    base = {key: value for key, value in section.items() if not isinstance(value, Mapping | bool)}
    stated = section.get(module)
    if stated is False:
        return None
    return {**base, **stated} if isinstance(stated, Mapping) else base


def _all_sections(section: Config) -> Sequence[Config]:
    """Return the model's settings and those of each module that has its own."""
    own = [
        _section_at(section, key) for key, value in section.items() if isinstance(value, Mapping)
    ]
    return [found for found in (_section_at(section, ""), *own) if found is not None]


SCOPE = Scope(_section_at, _all_sections)
