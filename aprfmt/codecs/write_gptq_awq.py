"""Write weights in the layouts of GPTQ and AWQ, uncalibrated: words of eight 4-bit codes.

A *group* is the elements that share one scale.

GPTQ: words go along inputs; symmetric, scale = 2 * largest magnitude / 15, zero point 8, stored
less one (version 2: unchanged), g_idx in order. AWQ: words go along outputs; scale = (largest -
smallest) / 15, at least 1e-5 / 15, zero point -round(smallest / scale) within 0 to 15. Scales are
F16, as the libraries' kernels take them.

Source: AutoGPTQ 0.7.1, quantization/quantizer.py and nn_modules/qlinear; AutoAWQ 0.2.7,
quantize/quantizer.py and modules/linear/gemm.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aprfmt.codecs import native_kernels
from aprfmt.codecs.base import F32, Array
from aprfmt.codecs.grids import GridWeight, Groups
from aprfmt.codecs.rounding import group_values, integer_codes, largest_magnitudes
from aprfmt.codecs.weight_layout import AWQ_ORDER
from aprfmt.codecs.writer import OutTensor, Settings, Writer, round_numbers
from aprfmt.errors import CodecError

_SMALLEST = np.float32(2.0**-24)  # F16's, for a scale that it rounds to nothing
_ROWS = 512  # outputs turned at a time


def _float16_scale(scale: F32) -> F32:
    """Return scales rounded to float16, as float32; the smallest float16 where that gives 0."""
    found = round_numbers("scale", scale, "F16")
    return np.where(found == 0, _SMALLEST, found)


def _choose_symmetric(values: F32, settings: Settings) -> Groups:
    """Return GPTQ scales for values [rows, inputs], one for each group; all zero points are 8.

    A group of zeros gets the scale for a largest magnitude of 1.
    """
    most = largest_magnitudes(values, settings.size)
    most = np.where(most == 0, np.float32(1), most)
    return Groups(settings.size, _float16_scale((most + most) / np.float32(15)))


def _choose_affine(values: F32, settings: Settings) -> Groups:
    """Return AWQ scales and integer zero points for values [rows, inputs], one for each group."""
    groups = group_values(values, settings.size)
    high, low = groups.max(axis=2), groups.min(axis=2)
    scale = _float16_scale(np.maximum(high - low, np.float32(1e-5)) / np.float32(15))
    zeros = np.clip(-np.rint(low / scale), 0, 15).astype(np.int32)
    return Groups(settings.size, scale, -(zeros * scale), "it has zero points", zeros=zeros)


def _round_scales(groups: Groups, settings: Settings) -> Groups:
    """Return the scales of a weight to be repacked, rounded to float16.

    Raises CodecError for codes that are not integers, and for offsets that are not those of integer
    zero points.
    """
    if groups.codes != "int" or groups.scale.dtype != np.float32:
        raise CodecError("its codes are no integers")
    if groups.offset is not None and groups.zeros is None:
        raise CodecError(f"{groups.why or 'it has minimums'}, which are no zero points")
    scale = round_numbers("scale", groups.scale, "F16")
    if groups.zeros is None:
        return Groups(groups.size, scale)
    return Groups(groups.size, scale, -(groups.zeros * scale), groups.why, zeros=groups.zeros)


def _hold_from_one(groups: Groups, settings: Settings) -> Groups:
    """Return the scales of a weight to be repacked as GPTQ, rounded to float16.

    Raises CodecError for a zero point 0, which version 1 of the layout cannot store: it stores zero
    points less one.
    """
    held = _round_scales(groups, settings)
    zeros = held.zeros
    if zeros is not None and settings.version == 1 and (zeros == 0).any():
        raise CodecError(
            "its zero points go down to 0, which a layout that stores them less one "
            "has not: write version 2"
        )
    return held


def _zero_points(source: GridWeight) -> Array:
    """Return the zero points as uint8 [groups, outputs], 8 where the source has none."""
    groups = source.groups
    zeros = np.full(groups.scale.shape, 8, np.uint8) if groups.zeros is None else groups.zeros
    return np.ascontiguousarray(zeros.T.astype(np.uint8))


def _pack_words(codes: Array) -> Array:
    """Return nibbles [rows, 8 * words] as int32 words [rows, words], the first nibble lowest."""
    return np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4).view("<i4")


def _gptq_qweight(source: GridWeight, settings: Settings) -> Array:
    """Return GPTQ's qweight, int32 [in / 8, out].

    Each word holds the 4-bit codes of eight consecutive inputs of an output.
    """
    outputs, inputs = source.shape
    made = np.empty((inputs // 8, outputs), "<i4")
    native = native_kernels()
    for start in range(0, outputs, _ROWS):
        stop = min(start + _ROWS, outputs)
        words = source.codes(start, stop).view("<i4")
        if native is None:
            made[:, start:stop] = words.T
        else:
            native.turn("columns", words, 0, made.view(np.uint8)[:, 4 * start : 4 * stop])
    return made


def _awq_qweight(source: GridWeight, settings: Settings) -> Array:
    """Return qweight int32 [in, out / 8]: words of eight outputs in AWQ's order."""
    outputs, inputs = source.shape
    made = np.empty((inputs, outputs // 8), "<i4")
    step = _ROWS
    for start in range(0, outputs, step):
        stop = min(start + step, outputs)
        made[:, start // 8 : stop // 8] = _awq_words(source.codes(start, stop))
    return made


def _awq_words(pairs: Array) -> Array:
    """Return codes [outputs, in / 2], two a byte, as AWQ's words int32 [in, outputs / 8]."""
    eight = pairs.reshape(-1, 8, pairs.shape[1])  # outputs of a word
    words = np.zeros((len(eight), pairs.shape[1], 2), "<u4")  # by byte: the even input, the odd one
    for place, output in enumerate(AWQ_ORDER):
        codes = eight[:, output].astype("<u4")
        words[..., 0] |= (codes & 15) << np.uint32(4 * place)
        words[..., 1] |= codes >> 4 << np.uint32(4 * place)
    found: Array = words.reshape(len(eight), -1).T.view("<i4")
    return found


def _scales(source: GridWeight, settings: Settings) -> Array:
    """Return the scales [groups, out], transposed as GPTQ and AWQ store them."""
    return np.ascontiguousarray(source.groups.scale.T)


def _group_index(source: GridWeight, settings: Settings) -> Array:
    """Return g_idx int32 [in]: the group of each input, in order."""
    return (np.arange(source.shape[1]) // settings.size).astype("<i4")


def _gptq_section(settings: Settings, left_out: Sequence[str]) -> Mapping[str, Any]:
    """Return {"quantization_config": ...} as GPTQModel writes it.

    Modules in `left_out`, besides the head, become negative rules of `dynamic`.
    """
    rules: dict[str, Any] = {
        f"-:^{_escape_dots(name)}$": {} for name in left_out if name != "lm_head"
    }
    return {
        "quantization_config": {
            "bits": 4,
            "group_size": settings.size,
            "desc_act": False,
            "sym": True,
            "quant_method": "gptq",
            "checkpoint_format": "gptq" if settings.version == 1 else "gptq_v2",
            "lm_head": False,
            **({"dynamic": rules} if rules else {}),
        }
    }


def _escape_dots(name: str) -> str:
    """Return a module's name with its dots escaped for a pattern."""
    return name.replace(".", r"\.")


def _awq_section(settings: Settings, left_out: Sequence[str]) -> Mapping[str, Any]:
    """Return {"quantization_config": ...} as AutoAWQ writes it."""
    return {
        "quantization_config": {
            "quant_method": "awq",
            "zero_point": True,
            "group_size": settings.size,
            "bits": 4,
            "version": "gemm",
            "modules_to_not_convert": list(left_out) or None,
        }
    }


GPTQ = Writer(
    encoding="GPTQ",
    choose=_choose_symmetric,
    codes=integer_codes,
    hold=_hold_from_one,
    tensors={
        ".qweight": OutTensor("I32", lambda out, columns, n: (columns // 8, out), _gptq_qweight),
        ".qzeros": OutTensor(
            "I32",
            lambda out, columns, n: (n, out // 8),
            lambda source, s: _pack_words(_zero_points(source) - (s.version == 1)),
        ),
        ".scales": OutTensor("F16", lambda out, columns, n: (n, out), _scales),
        ".g_idx": OutTensor("I32", lambda out, columns, n: (columns,), _group_index),
    },
    section=_gptq_section,
    scales="F16",
)
AWQ = Writer(
    encoding="AWQ",
    choose=_choose_affine,
    codes=integer_codes,
    hold=_round_scales,
    tensors={
        ".qweight": OutTensor("I32", lambda out, columns, n: (columns, out // 8), _awq_qweight),
        ".qzeros": OutTensor(
            "I32",
            lambda out, columns, n: (n, out // 8),
            lambda source, s: _pack_words(_awq_order(_zero_points(source))),
        ),
        ".scales": OutTensor("F16", lambda out, columns, n: (n, out), _scales),
    },
    section=_awq_section,
    scales="F16",
)


def _awq_order(codes: Array) -> Array:
    """Return codes [rows, outputs], those of each eight outputs in the order of AWQ's words."""
    found: Array = codes.reshape(len(codes), -1, 8)[:, :, list(AWQ_ORDER)]
    return found.reshape(len(codes), -1)
