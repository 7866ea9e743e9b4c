"""Write weights as compressed-tensors, uncalibrated: INT4 in groups, and FP8 with a scale a row.

A *group* is the elements that share one scale.

Scales are compressed-tensors' calculate_qparams for symmetric weights: the largest magnitude over
half the range of the codes (15/2, 896/2), and its dtype's epsilon for a group of zeros.

Source: compressed-tensors 0.20, quantization/utils/helpers.py and compressors/.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aprfmt.codecs.base import F32, U8, Array
from aprfmt.codecs.compressed_claims import NAME
from aprfmt.codecs.compressed_tensors import SCALE
from aprfmt.codecs.grids import GridWeight, Groups
from aprfmt.codecs.rounding import E4M3_MAX, e4m3_bytes, integer_codes, largest_magnitudes
from aprfmt.codecs.writer import OutTensor, Settings, Writer, round_numbers
from aprfmt.errors import CodecError

EPSILON: Mapping[str, float] = {"F32": 2.0**-23, "BF16": 2.0**-7, "F16": 2.0**-10}


def config_section(
    form: str,
    weights: Mapping[str, Any],
    left_out: Sequence[str],
    inputs: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Return {"quantization_config": ...} of config.json for one group of weights.

    `form` is the format's name, `weights` the arguments of the weights, `inputs` those of the
    activations or None, `left_out` the modules that are not quantized.
    """
    group = {
        "format": form, "input_activations": inputs, "output_activations": None,
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
    }  # fmt: skip
    return {
        "quantization_config": {
            "config_groups": {"group_0": group},
            "format": form,
            "ignore": list(left_out),
            "kv_cache_scheme": None,
            "quant_method": NAME,
            "quantization_status": "compressed",
        }
    }


def _stored_scale(most: F32, half_range: float, settings: Settings) -> F32:
    """Return the scales most / half_range, rounded to the encoding that `settings` give scales.

    A scale that would be 0 becomes the epsilon of that encoding. `most` is the largest magnitude of
    each group, `half_range` half the range of the codes.
    """
    found = round_numbers("scale", most / np.float32(half_range), settings.scales)
    return np.where(found == 0, np.float32(EPSILON[settings.scales]), found)


def _choose_integers(values: F32, settings: Settings) -> Groups:
    """Return INT4 scales for values [rows, inputs], one for each group of inputs, as `Groups`."""
    most = largest_magnitudes(values, settings.size)
    return Groups(settings.size, _stored_scale(most, 7.5, settings))


def _hold_integers(groups: Groups, settings: Settings) -> Groups:
    """Return the scales of a weight to be repacked as INT4, rounded to their stored encoding.

    Raises CodecError for codes that are not integers, and for offsets.
    """
    if groups.codes != "int" or groups.scale.dtype != np.float32:
        raise CodecError("its codes are no integers")
    if groups.offset is not None:
        raise CodecError(f"{groups.why or 'it has minimums'}, and this layout is symmetric")
    return Groups(groups.size, round_numbers("scale", groups.scale, settings.scales))


def _int32_words(source: GridWeight, settings: Settings) -> Array:
    """Return all codes as int32 words [out, in/8]."""
    return source.codes(0, source.shape[0]).view("<i4")


INT4 = Writer(
    encoding="COMPRESSED_PACKED",
    choose=_choose_integers,
    codes=integer_codes,
    hold=_hold_integers,
    tensors={
        ".weight_packed": OutTensor(
            "I32", lambda out, columns, n: (out, columns // 8), _int32_words
        ),
        SCALE: OutTensor(
            "", lambda out, columns, n: (out, n), lambda source, s: source.groups.scale
        ),
        ".weight_shape": OutTensor(
            "I64", lambda out, columns, n: (2,), lambda source, s: np.array(source.shape, "<i8")
        ),
    },
    section=lambda settings, left_out: config_section(
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": settings.size},
        left_out,
    ),
)


def _choose_rows(values: F32, settings: Settings) -> Groups:
    """Return FP8 scales for values [rows, inputs], one a row: the largest magnitude / 448."""
    scale = _stored_scale(largest_magnitudes(values, settings.size), float(E4M3_MAX), settings)
    return Groups(settings.size, scale, codes="e4m3")


def _e4m3_codes(values: F32, groups: Groups) -> U8:
    """Return values / scale as E4M3 bytes, [rows, inputs]."""
    return e4m3_bytes((values / groups.scale).astype(np.float32, copy=False))


def _refuse_repack(groups: Groups, settings: Settings) -> Groups:
    """Raise CodecError: no weight is repacked as FP8."""
    raise CodecError("nothing is repacked as FP8")


FP8 = Writer(
    encoding="COMPRESSED_PLAIN",
    choose=_choose_rows,
    codes=_e4m3_codes,
    hold=_refuse_repack,
    tensors={
        ".weight": OutTensor(
            "F8_E4M3",
            lambda out, columns, n: (out, columns),
            lambda source, s: source.codes(0, source.shape[0]),
        ),
        SCALE: OutTensor(
            "", lambda out, columns, n: (out, 1), lambda source, s: source.groups.scale
        ),
    },
    section=lambda settings, left_out: config_section(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        left_out,
        {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    ),
)
