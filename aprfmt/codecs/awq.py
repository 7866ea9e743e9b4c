"""AWQ (the gemm layout): four-bit codes packed along the output, eight to a word, out of order.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes. A *group* is the elements that share one scale.

qweight  int32 [in, out/8] qzeros   int32 [groups, out/8] scales   [groups, out]

Nibble k of a word, lowest first, is output 8w + (0, 2, 4, 6, 1, 3, 5, 7)[k]. value[o, i] =
scales[i/group_size, o] * (code - zero); the weight is [out, in]. Source: AutoAWQ,
utils/packing_utils.py.
"""

import numpy as np

from aprfmt.codecs.base import F32, Array
from aprfmt.codecs.dialect import (
    GROUP_SIZES,
    Config,
    Dialect,
    Parts,
    check_shape,
    config_integer,
    part_numbers,
    part_words,
    required_part,
    whole_numbers,
)
from aprfmt.codecs.weight_layout import GroupNumbers, PackedCodes, WeightLayout
from aprfmt.errors import CodecError, UnsupportedError

NAME = "awq"
_INT = ("I32",)
_FLOAT = ("F16", "BF16", "F32")
_NUMBERS = np.arange(16, dtype=np.float32)


def _recognizes(config: Config) -> bool:
    """Return whether a quantization section is one of AWQ."""
    return config.get("quant_method") == "awq"


def _weight_shape(parts: Parts, config: Config) -> tuple[int, ...]:
    """Return the shape [out, in] of the weight that these parts store.

    Raises UnsupportedError for another layout than gemm, CodecError for parts that do not fit.
    """
    config_integer(NAME, config, "bits", (4,))
    layout = str(config.get("version", "gemm")).lower()
    if layout != "gemm":
        raise UnsupportedError(
            f"{NAME}: the layout {layout!r} is not one we decode; convert the model to 'gemm'"
        )
    shape = required_part(NAME, parts, ".qweight").shape
    if len(shape) != 2:
        raise CodecError(f"{NAME}: part '.qweight' has shape {list(shape)}, expected [in, out/8]")
    return shape[1] * 8, shape[0]


def read_zero_points(
    parts: Parts, config: Config, outputs: int, inputs: int, scales: Array
) -> tuple[F32, int]:
    """Return (zero points float32 [outputs, groups], number of inputs in a group).

    `scales` [groups, outputs] are the weight's. Raises CodecError where the configuration's group
    size, the scales and the zero points do not fit each other.
    """
    size = config.get("group_size")
    size = config_integer(
        NAME, {"group_size": inputs if size == -1 else size}, "group_size", GROUP_SIZES
    )
    if inputs % size:
        raise CodecError(
            f"{NAME}: config says group_size {size}, part '.qweight' has {inputs} inputs; expected "
            "whole groups"
        )
    groups = inputs // size
    check_shape(
        f"{NAME}: config says group_size {size}", ".scales", scales.shape, (groups, outputs)
    )
    qzeros = part_words(NAME, parts, ".qzeros", _INT)
    check_shape(NAME, ".qzeros", qzeros.shape, (groups, outputs // 8))
    return WeightLayout((outputs, groups), wrap_words(qzeros), _NUMBERS, (1, groups)).decode(), size


def wrap_words(words: Array) -> PackedCodes:
    """Return the codes of uint32 words [inputs or groups, outputs / 8] in AWQ's order."""
    return PackedCodes(4, "awq", words[None])


def _lay_out(parts: Parts, config: Config, shape: tuple[int, ...]) -> WeightLayout:
    """Return the layout of a weight's codes, with its scales and zero points by group."""
    outputs, inputs = shape
    scale = part_numbers(NAME, parts, ".scales", _FLOAT)
    zeros, size = read_zero_points(parts, config, outputs, inputs, scale)
    packed = part_words(NAME, parts, ".qweight", _INT)
    scaled = GroupNumbers(scale.T[None]), GroupNumbers(zeros[None])
    return WeightLayout(shape, wrap_words(packed), _NUMBERS, (1, size), *scaled)


DIALECT = Dialect(
    name=NAME,
    main=".qweight",
    weight=".weight",
    parts=(".qzeros", ".scales"),
    optional=(),
    facts=("bits", "group_size", "version"),
    recognises=_recognizes,
    shape_of=_weight_shape,
    laid_out=_lay_out,
    codes=lambda parts, config: whole_numbers(4),
    signed=True,
)
