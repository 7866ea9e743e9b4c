"""Write weights in MLX's affine mode of four bits, bit for bit what mx.quantize makes.

A *group* is the elements that share one scale.

Per group: scale = (largest - smallest) / 15, at least 1e-7, negative where the largest magnitude is
above; that end is the bias, and the scale is changed so that it has a code without error. Codes
follow from both in float32, before they are stored in the weight's dtype.

Source: mlx 0.32, backend/cpu/quantized.cpp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.codecs.base import F32, U8
from aprfmt.codecs.bits import pack_pairs
from aprfmt.codecs.grids import Groups
from aprfmt.codecs.rounding import group_values
from aprfmt.codecs.writer import OutTensor, Settings, Writer, round_numbers
from aprfmt.errors import CodecError

_LEAST = np.float32(1e-7)


def _affine_numbers(values: F32, size: int) -> tuple[F32, F32]:
    """Return (scales, biases), each float32 [rows, groups], before they are rounded for storing."""
    groups = group_values(values, size)
    high, low = groups.max(axis=2), groups.min(axis=2)
    below = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / np.float32(15), _LEAST)
    scale = np.where(below, scale, -scale)
    edge = np.where(below, low, high)
    code = np.rint(edge / scale)
    some = code != 0
    scale = np.where(some, edge / np.where(some, code, np.float32(1)), scale)
    return scale.astype(np.float32), np.where(some, edge, np.float32(0))


def _choose(values: F32, settings: Settings) -> Groups:
    """Return MLX scales and biases for values [rows, inputs], rounded to their stored encoding."""
    scale, bias = _affine_numbers(values, settings.size)
    return Groups(
        settings.size,
        round_numbers("scale", scale, settings.scales),
        round_numbers("bias", bias, settings.scales),
        "it has biases",
    )


def _codes(values: F32, groups: Groups) -> U8:
    """Return the codes of values, uint8 [rows, in/2], the low nibble first.

    MLX chooses codes by the scales before these are rounded; of `groups` only the size is used.
    """
    scale, bias = _affine_numbers(values, groups.size)
    found = group_values(values, groups.size) - bias[..., None]
    found /= scale[..., None]
    np.rint(found, out=found)
    np.clip(found, 0, 15, out=found)
    made: U8 = pack_pairs(found.reshape(len(values), -1).astype(np.uint8)).astype(np.uint8)
    return made


def _round_scales(groups: Groups, settings: Settings) -> Groups:
    """Return the scales and biases of a weight to be repacked, rounded to their stored encoding.

    Without an offset the bias is -8 times the scale. Raises CodecError for codes that are not
    integers.
    """
    if groups.codes != "int" or groups.scale.dtype != np.float32:
        raise CodecError("its codes are no integers")
    bias = groups.scale * np.float32(-8) if groups.offset is None else groups.offset
    return replace(
        groups,
        scale=round_numbers("scale", groups.scale, settings.scales),
        offset=round_numbers("bias", bias, settings.scales),
        why="it has biases",
        zeros=None,
    )


def _section(settings: Settings, left_out: Sequence[str]) -> Mapping[str, Any]:
    """Return the keys of config.json as mlx-lm writes them; `left_out` is not used."""
    stated = {"group_size": settings.size, "bits": 4, "mode": "affine"}
    return {"quantization": stated, "quantization_config": dict(stated)}


MLX = Writer(
    encoding="MLX",
    choose=_choose,
    codes=_codes,
    hold=_round_scales,
    tensors={
        ".weight": OutTensor(
            "U32",
            lambda out, columns, n: (out, columns // 8),
            lambda source, s: source.codes(0, source.shape[0]).view("<u4"),
        ),
        ".scales": OutTensor(
            "", lambda out, columns, n: (out, n), lambda source, s: source.groups.scale
        ),
        ".biases": OutTensor(
            "", lambda out, columns, n: (out, n), lambda source, s: np.asarray(source.groups.offset)
        ),
    },
    section=_section,
)
