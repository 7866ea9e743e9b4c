"""MXFP4 as gpt-oss stores its experts: E2M1 codes and E8M0 exponents in two tensors.

NAME_blocks  uint8 [experts, out, in/32, 16]  two codes a byte, the low nibble first
NAME_scales  uint8 [experts, out, in/32]      exponents, biased by 127

value = E2M1[code] * 2**(exponent - 127). The weight is [experts, out, in] as it is stored;
transformers turns the two last axes, as unquantized checkpoints hold it. Not GGUF's MXFP4: there
the nibbles of a block are its two halves.
Source: transformers, integrations/mxfp4.py (convert_moe_packed_tensors).
"""

import numpy as np

from aprfmt.codecs import f4
from aprfmt.codecs.base import F32, Array
from aprfmt.codecs.dialect import CodeTable, Config, Dialect, Parts, array, fits, need
from aprfmt.codecs.dialect import scales as check_scales
from aprfmt.errors import CodecError

NAME = "gpt_oss"
_ROWS = 1 << 8


def _recognises(config: Config) -> bool:
    return config.get("quant_method") == "mxfp4"


def _shape_of(parts: Parts, config: Config) -> tuple[int, ...]:
    shape = need(NAME, parts, "_blocks").shape
    if len(shape) != 4 or shape[3] != 16:
        raise CodecError(
            f"{NAME}: part '_blocks' has shape {list(shape)}, expected [experts, out, in/32, 16]"
        )
    return shape[0], shape[1], shape[2] * 32


def scaled_pairs(packed: Array, exponents: Array) -> F32:
    """Return float32 [rows, 2*bytes]: E2M1 codes, low nibble first, times 2**(exponent - 127).

    `packed` is uint8 [rows, bytes], `exponents` uint8 [rows, groups].
    """
    codes = np.stack([packed & 15, packed >> 4], axis=-1)
    values = f4.CODEC.values[codes].reshape(*exponents.shape, -1)
    power = exponents.astype(np.int32)[..., None] - 127
    scaled: F32 = np.ldexp(values, power).reshape(len(packed), -1)
    return scaled


def _decode(parts: Parts, config: Config, out: F32) -> None:
    blocks = array(NAME, parts, "_blocks", ("U8",))
    scales = array(NAME, parts, "_scales", ("U8",))
    fits(NAME, "_scales", scales.shape, blocks.shape[:3])
    check_scales(NAME, parts, "_scales", ("U8",))
    for expert in range(len(blocks)):
        for start in range(0, blocks.shape[1], _ROWS):
            rows, at = blocks[expert, start : start + _ROWS], slice(start, start + _ROWS)
            out[expert, at] = scaled_pairs(rows.reshape(len(rows), -1), scales[expert, at])


DIALECT = Dialect(
    name=NAME,
    main="_blocks",
    weight="",
    parts=("_scales",),
    optional=(),
    facts=(),
    recognises=_recognises,
    shape_of=_shape_of,
    decode=_decode,
    codes=lambda parts, config: CodeTable(4, f4.CODEC.values),
)
