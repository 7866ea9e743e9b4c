"""GPTQ: integer codes packed along the input, with scales and zero points by group of inputs.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes. A *group* is the elements that share one scale.

qweight  int32 [in*bits/32, out]   codes of one output, lowest bits first, along the input qzeros
int32 [groups, out*bits/32]  zero points along the output scales   [groups, out] g_idx    int32 [in]
the group of each input; without it input i is in i/group_size

value[o, i] = scales[g, o] * (code - zero); the weight is [out, in], the stored matrices are not.
The classic format ("gptq") stores zero - 1, "gptq_v2" the zero itself. Source: AutoGPTQ,
nn_modules/qlinear/qlinear_cuda.py (pack and forward).
"""

from collections.abc import Mapping

import numpy as np

from aprfmt.base.bounded_regex import matches_start
from aprfmt.codecs.base import F32, Array
from aprfmt.codecs.dialect import (
    GROUP_SIZES,
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
from aprfmt.codecs.scope import Scope, section_mapping
from aprfmt.codecs.weight_layout import GroupNumbers, PackedCodes, WeightLayout
from aprfmt.errors import CodecError

NAME = "gptq"
_BITS = range(2, 9)
_INT = ("I32",)
_FLOAT = ("F16", "BF16", "F32")
_ZERO_OFFSET = {"gptq": 1, "gptq_v2": 0}


def _recognizes(config: Config) -> bool:
    """Return whether a quantization section is one of GPTQ."""
    return config.get("quant_method") == "gptq"


def _weight_shape(parts: Parts, config: Config) -> tuple[int, ...]:
    """Return the shape [out, in] of the weight that these parts store.

    Raises CodecError where bits and packed words do not fit.
    """
    bits = config_integer(NAME, config, "bits", _BITS)
    shape = required_part(NAME, parts, ".qweight").shape
    if len(shape) != 2 or shape[0] * 32 % bits:
        raise CodecError(
            f"{NAME}: config says bits {bits}, part '.qweight' has shape {list(shape)}, expected "
            "[in * bits / 32, out]"
        )
    return shape[1], shape[0] * 32 // bits


def input_groups(parts: Parts, config: Config, inputs: int, groups: int) -> Array:
    """Return int [in]: the group of each input, from `g_idx` or the configured group size.

    `inputs` and `groups` are the numbers of inputs and of rows of scales. Raises CodecError for an
    input without a scale, and where the group size gives another number of groups.
    """
    stated = config.get("group_size")
    if type(stated) is int and stated > 0 and -(-inputs // stated) != groups:
        raise CodecError(
            f"{NAME}: config says group_size {stated}, part '.scales' has {groups} groups; "
            f"expected {-(-inputs // stated)} for {inputs} inputs"
        )
    if ".g_idx" in parts:
        index = part_array(NAME, parts, ".g_idx", _INT)
        check_shape(NAME, ".g_idx", index.shape, (inputs,))
    else:
        size = config.get("group_size")
        if size == -1:
            size = inputs
        size = config_integer(NAME, {"group_size": size}, "group_size", GROUP_SIZES)
        index = np.arange(inputs) // size
    if index.size and not 0 <= index.min() <= index.max() < groups:
        raise CodecError(
            f"{NAME}: groups go from {index.min()} to {index.max()}, but there are {groups} scales"
        )
    return index


def read_zero_points(parts: Parts, config: Config, outputs: int, scales: Array) -> F32:
    """Return the zero points, float32 [groups, outputs], one for each of the `scales`.

    Raises CodecError for an unknown checkpoint_format, or shapes that do not fit.
    """
    bits = config_integer(NAME, config, "bits", _BITS)
    kind = config.get("checkpoint_format", "gptq")
    if kind not in _ZERO_OFFSET:
        raise CodecError(
            f"{NAME}: checkpoint_format {kind!r} is not one we decode: {', '.join(_ZERO_OFFSET)}"
        )
    qzeros = part_words(NAME, parts, ".qzeros", _INT)
    if scales.ndim != 2:
        raise CodecError(f"{NAME}: part '.scales' has shape {list(scales.shape)}, expected 2 axes")
    check_shape(NAME, ".scales", scales.shape, (len(scales), outputs))
    prefix = f"{NAME}: config says bits {bits}"
    check_shape(prefix, ".qzeros", qzeros.shape, (len(scales), -(-outputs * bits // 32)))
    codes = PackedCodes(bits, "rows", qzeros.view(np.uint8)[None])
    values = np.arange(1 << bits, dtype=np.float32) + _ZERO_OFFSET[kind]
    return WeightLayout(scales.shape, codes, values, (1, outputs)).decode()


def contradicted_format(parts: Parts, config: Config) -> str | None:
    """Return the checkpoint_format that a weight's zero points show; None if `config` states it.

    A symmetric weight has every zero point in the middle of its codes, at 2 ** (bits - 1). If all
    are one off by the rule that `config` states, and in the middle by the other rule, the other is
    meant. None for any other weight, too. Raises CodecError as `read_zero_points` does. Source:
    AutoGPTQ, quantization/quantizer.py (find_params).
    """
    bits = config_integer(NAME, config, "bits", _BITS)
    outputs = _weight_shape(parts, config)[0]
    scales = part_numbers(NAME, parts, ".scales", _FLOAT)
    stated = config.get("checkpoint_format", "gptq")
    zeros = read_zero_points(parts, config, outputs, scales)
    for other, offset in _ZERO_OFFSET.items():
        moved = offset - _ZERO_OFFSET[str(stated)]
        if moved and zeros.size and bool((zeros + moved == 1 << (bits - 1)).all()):
            return other
    return None


def are_groups_in_order(parts: Parts) -> bool:
    """Return whether inputs belong to groups in order, so that `desc_act` changes nothing."""
    if ".g_idx" not in parts:
        return True
    index = part_array(NAME, parts, ".g_idx", _INT)
    return bool((index[1:] >= index[:-1]).all())


def are_zeros_in_middle(parts: Parts, config: Config) -> bool:
    """Return whether every zero point is 2 ** (bits - 1), so that `sym` changes nothing.

    Raises CodecError for an unknown checkpoint_format, or shapes that do not fit.
    """
    bits = config_integer(NAME, config, "bits", _BITS)
    scales = part_numbers(NAME, parts, ".scales", _FLOAT)
    zeros = read_zero_points(parts, config, _weight_shape(parts, config)[0], scales)
    return bool((zeros == 1 << (bits - 1)).all())


def _lay_out(parts: Parts, config: Config, shape: tuple[int, ...]) -> WeightLayout:
    """Return the layout of a weight's codes, with its scales, zero points and input groups."""
    bits, (outputs, inputs) = config_integer(NAME, config, "bits", _BITS), shape
    scale = part_numbers(NAME, parts, ".scales", _FLOAT)
    zeros = read_zero_points(parts, config, outputs, scale)
    packed = part_words(NAME, parts, ".qweight", _INT)
    group = input_groups(parts, config, inputs, len(scale))
    size = inputs // max(len(scale), 1)
    in_order = size * len(scale) == inputs and np.array_equal(group, np.arange(inputs) // size)
    return WeightLayout(
        shape,
        PackedCodes(bits, "columns", packed[None]),
        np.arange(1 << bits, dtype=np.float32),
        (1, max(size, 1)),
        GroupNumbers(scale.T[None]),
        GroupNumbers(zeros.T[None]),
        group=None if in_order else group.astype(np.int32),
    )


DIALECT = Dialect(
    name=NAME,
    main=".qweight",
    weight=".weight",
    parts=(".qzeros", ".scales"),
    optional=(".g_idx",),
    facts=("bits", "group_size", "checkpoint_format"),
    recognises=_recognizes,
    shape_of=_weight_shape,
    laid_out=_lay_out,
    codes=lambda parts, config: whole_numbers(config_integer(NAME, config, "bits", _BITS)),
    signed=True,
)


def _section_at(section: Config, module: str) -> Config | None:
    """Return the section that holds for one module; None where the module is not quantized.

    Source: GPTQModel's `dynamic`. The first rule whose pattern matches counts. A pattern after `-:`
    is one for modules that are not quantized.
    """
    for pattern, own in section_mapping(section, "dynamic").items():
        if not matches_start(pattern.removeprefix("-:").removeprefix("+:"), module):
            continue
        if pattern.startswith("-:"):
            return None
        return {**section, **own} if isinstance(own, Mapping) else section
    return section


SCOPE = Scope(
    _section_at,
    lambda section: [
        section,
        *(
            {**section, **own}
            for own in section_mapping(section, "dynamic").values()
            if isinstance(own, Mapping)
        ),
    ],
)
