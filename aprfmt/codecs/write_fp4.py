"""Write weights as NVFP4 and MXFP4, uncalibrated, as compressed-tensors and as ModelOpt store them.

A *group* is the elements that share one scale.

NVFP4: both libraries map the largest magnitude to 6 * 448, that of all tensors which engines join
to one (q, k and v, gate and up), as these take one global scale for all. compressed-tensors divides
by it (NVFP4A16: inputs are not quantized); ModelOpt multiplies by weight_scale_2. Without scales of
inputs, which calibration gives, ModelOpt's algorithm is W4A16_NVFP4. MXFP4 (MXFP4A16): a quarter of
the power of two at or below the largest magnitude, of the next one above from 1.75 times it on. So
gpt-oss stores its experts, whatever else is left unquantized (config.json of openai/gpt-oss-20b).

Source: compressed-tensors 0.20, calculate_qparams and generate_gparam; nvidia-modelopt 0.47,
quantization/qtensor/nvfp4_tensor.py and export/convert_hf_config.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.base.version import __version__
from aprfmt.codecs.base import F32, U8, Array
from aprfmt.codecs.compressed_tensors import SCALE
from aprfmt.codecs.fp8 import E4M3
from aprfmt.codecs.grids import GridWeight, Groups
from aprfmt.codecs.modelopt_scope import METHOD
from aprfmt.codecs.rounding import E2M1_MAX, E4M3_MAX, e2m1_codes, e4m3_bytes, largest_magnitudes
from aprfmt.codecs.write_compressed import config_section
from aprfmt.codecs.writer import OutTensor, Settings, Writer
from aprfmt.errors import CodecError

_SIZE, _POWERS = 16, 32
_EIGHTH = 0x20  # E4M3 of its epsilon, 0.125, for a group of zeros
_TINY = np.finfo(np.float32).tiny
_WHOLE = np.float32(E2M1_MAX * E4M3_MAX)


def _choose_divided(values: F32, settings: Settings) -> Groups:
    """Return NVFP4 scales as compressed-tensors stores them: E4M3 for 16 values, and a divisor.

    The E4M3 scales are already multiplied by the global scale, which is `divisor` of the result.
    The global scale also covers `settings.most`, the largest magnitude of the weights that share
    it.
    """
    most = largest_magnitudes(values, _SIZE)
    whole = most.max(initial=np.float32(settings.most))
    divisor = np.float32(1) / np.maximum(whole, _TINY) * _WHOLE  # rounded twice
    if not np.isfinite(divisor):
        divisor = np.float32(1)
    scales = e4m3_bytes(divisor * (most / E2M1_MAX))
    scales[scales == 0] = _EIGHTH
    return Groups(_SIZE, scales, divisor=np.array([divisor], np.float32), codes="e2m1")


def _choose_multiplied(values: F32, settings: Settings) -> Groups:
    """Return NVFP4 scales as ModelOpt stores them: E4M3, one for 16 values, and a common factor.

    The scales are already divided by weight_scale_2, the common float32 factor, which is
    `tensor_scale` of the result. The factor also covers `settings.most`, the largest magnitude of
    the weights that share it.
    """
    most = largest_magnitudes(values, _SIZE)
    whole = most.max(initial=np.float32(settings.most)) / _WHOLE
    if not whole:
        whole = np.float32(1)  # the library divides by zero
    found = most / (E2M1_MAX * whole)
    found[found == 0] = 1
    scales = e4m3_bytes(np.maximum(found, np.float32(2.0**-9)))
    return Groups(_SIZE, scales, tensor_scale=np.array([whole], np.float32), codes="e2m1")


def _choose_powers(values: F32, settings: Settings) -> Groups:
    """Return MXFP4 scales for values [rows, inputs]: a power of two (E8M0) for each 32 inputs.

    `settings` is not used.
    """
    bits = np.ascontiguousarray(largest_magnitudes(values, _POWERS)).view(np.uint32) + np.uint32(
        1 << 21
    )
    exponents = np.maximum((bits >> 23).astype(np.int32) - 2, 0)
    return Groups(_POWERS, exponents.astype(np.uint8), codes="e2m1")


def _hold_powers(groups: Groups, settings: Settings) -> Groups:
    """Return `groups` unchanged if they are E2M1 codes in groups of 32, else CodecError."""
    _check_micro(groups, _POWERS)
    return groups


def _check_micro(groups: Groups, size: int = _SIZE) -> None:
    """Raise CodecError unless codes are E2M1 in groups of `size` with at most one outer scale."""
    if groups.codes != "e2m1" or groups.size != size:
        raise CodecError(f"its codes are no E2M1 in groups of {size}")
    if groups.tensor_scale is not None and len(groups.tensor_scale) != 1:
        raise CodecError(f"it has {len(groups.tensor_scale)} scales of scales, expected one")


def _hold_divided(groups: Groups, settings: Settings) -> Groups:
    """Return the scales of a weight to be repacked, with a global scale that divides them.

    A global scale that multiplies is replaced by its reciprocal. Raises CodecError where the weight
    has no global scale, or for codes that are not E2M1 in groups of 16.
    """
    _check_micro(groups)
    if groups.divisor is not None:
        return groups
    whole = np.ones(1, np.float32) if groups.tensor_scale is None else groups.tensor_scale
    with np.errstate(all="ignore"):
        divisor = np.float32(1) / whole
    if not np.isfinite(divisor).all() or not divisor.all():
        raise CodecError(f"its scale of scales is {whole[0]}, which has no reciprocal")
    return replace(groups, divisor=divisor)


def _hold_multiplied(groups: Groups, settings: Settings) -> Groups:
    """Return the scales of a weight to be repacked, with a global scale that multiplies them.

    It is 1 where the weight has none. Raises CodecError for codes that are not E2M1 in groups of
    16.
    """
    _check_micro(groups)
    whole = np.ones(1, np.float32) if groups.tensor_scale is None else groups.tensor_scale
    return replace(groups, tensor_scale=whole, divisor=None)


def _code_bytes(source: GridWeight, settings: Settings) -> U8:
    """Return all code bytes of the weight, uint8 [rows, in/2]."""
    return source.codes(0, source.shape[0])


def _scale_bytes(source: GridWeight, settings: Settings) -> U8:
    """Return the scales' bytes with the sign bit cleared, which ggml does not read."""
    return np.bitwise_and(source.groups.scale, np.uint8(0x7F))


def _float32_number(number: F32 | None) -> Array:
    """Return a number, or an array of numbers, as little-endian float32."""
    return np.asarray(number, "<f4")


COMPRESSED = Writer(
    encoding="COMPRESSED_PACKED_FLOAT",
    choose=_choose_divided,
    codes=e2m1_codes,
    hold=_hold_divided,
    tensors={
        ".weight_packed": OutTensor("U8", lambda out, columns, n: (out, columns // 2), _code_bytes),
        SCALE: OutTensor(E4M3.name, lambda out, columns, n: (out, n), _scale_bytes),
        ".weight_global_scale": OutTensor(
            "F32",
            lambda out, columns, n: (1,),
            lambda source, s: _float32_number(source.groups.divisor),
        ),
    },
    section=lambda settings, left_out: config_section(
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": _SIZE,
            "scale_dtype": "torch.float8_e4m3fn",
            "zp_dtype": "torch.float8_e4m3fn",
        },
        left_out,
    ),
    shares=True,
)


MXFP4 = Writer(
    encoding="COMPRESSED_PACKED_FLOAT",
    choose=_choose_powers,
    codes=e2m1_codes,
    hold=_hold_powers,
    tensors={
        ".weight_packed": OutTensor("U8", lambda out, columns, n: (out, columns // 2), _code_bytes),
        SCALE: OutTensor(
            "U8", lambda out, columns, n: (out, n), lambda source, s: source.groups.scale
        ),
    },
    section=lambda settings, left_out: config_section(
        "mxfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": _POWERS,
            "scale_dtype": "torch.uint8",
            "zp_dtype": "torch.uint8",
        },
        left_out,
    ),
)


GPT_OSS = replace(
    MXFP4,
    encoding="GPT_OSS",
    tensors={
        "_blocks": OutTensor("U8", lambda out, columns, n: (out, n, _POWERS // 2), _code_bytes),
        "_scales": MXFP4.tensors[SCALE],
    },
    section=lambda settings, left_out: {
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        }
    },
    stacked=True,
)


def _algorithm(settings: Settings) -> str:
    """Return ModelOpt's algorithm name, by whether inputs have scales too."""
    return "NVFP4" if settings.activations else "W4A16_NVFP4"


def _section(settings: Settings, left_out: Sequence[str]) -> Mapping[str, Any]:
    """Return {"quantization_config": ...} of config.json as ModelOpt writes it."""
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": _SIZE}
    group = {"weights": numbers, "targets": ["Linear"]}
    if settings.activations:
        group = {"input_activations": dict(numbers), **group}
    return {
        "quantization_config": {
            "config_groups": {"group_0": group},
            "ignore": list(left_out),
            "quant_algo": _algorithm(settings),
            "producer": {"name": "aprfmt", "version": __version__},
            "quant_method": METHOD,
        }
    }


def _files(settings: Settings, left_out: Sequence[str]) -> Mapping[str, Any]:
    """Return {"hf_quant_config.json": its content} as ModelOpt writes it."""
    return {
        "hf_quant_config.json": {
            "producer": {"name": "aprfmt", "version": __version__},
            "quantization": {
                "quant_algo": _algorithm(settings),
                "kv_cache_quant_algo": None,
                "group_size": _SIZE,
                "exclude_modules": list(left_out),
            },
        }
    }


MODELOPT = Writer(
    encoding="MODELOPT",
    choose=_choose_multiplied,
    codes=e2m1_codes,
    hold=_hold_multiplied,
    tensors={
        ".weight": OutTensor("U8", lambda out, columns, n: (out, columns // 2), _code_bytes),
        SCALE: OutTensor(E4M3.name, lambda out, columns, n: (out, n), _scale_bytes),
        ".weight_scale_2": OutTensor(
            "F32",
            lambda out, columns, n: (),
            lambda source, s: _float32_number(source.groups.tensor_scale),
        ),
    },
    section=_section,
    files=_files,
    shares=True,
)
