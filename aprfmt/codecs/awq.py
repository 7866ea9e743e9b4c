"""AWQ (the gemm layout): four-bit codes packed along the output, eight to a word, out of order.

qweight  int32 [in, out/8]
qzeros   int32 [groups, out/8]
scales   [groups, out]

Nibble k of a word, lowest first, is output 8w + (0, 2, 4, 6, 1, 3, 5, 7)[k].
value[o, i] = scales[i/group_size, o] * (code - zero); the weight is [out, in].
Source: AutoAWQ, utils/packing_utils.py.
"""

import numpy as np

from aprfmt.codecs.base import F32, U8, Array, Codes
from aprfmt.codecs.dialect import (
    GROUP_SIZES,
    Config,
    Dialect,
    Parts,
    array,
    fact,
    fits,
    need,
    numbers,
    whole_numbers,
)
from aprfmt.errors import CodecError, UnsupportedError

NAME = "awq"
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INT = ("I32",)
_FLOAT = ("F16", "BF16", "F32")
_ROWS = 1 << 8  # inputs unpacked at a time


def _recognises(config: Config) -> bool:
    return config.get("quant_method") == "awq"


def _shape_of(parts: Parts, config: Config) -> tuple[int, ...]:
    fact(NAME, config, "bits", (4,))
    layout = str(config.get("version", "gemm")).lower()
    if layout != "gemm":
        raise UnsupportedError(
            f"{NAME}: the layout {layout!r} is not one we decode; convert the model to 'gemm'"
        )
    shape = need(NAME, parts, ".qweight").shape
    if len(shape) != 2:
        raise CodecError(f"{NAME}: part '.qweight' has shape {list(shape)}, expected [in, out/8]")
    return shape[1] * 8, shape[0]


def unpack(words: Array) -> Codes:
    """Return codes [rows, 8 * words] in the order of the outputs."""
    codes = np.empty((*words.shape, 8), np.int32)
    for place, output in enumerate(_ORDER):
        np.right_shift(words, 4 * place, out=codes[..., output])
    codes &= 15
    return codes.reshape(len(words), -1)


def rows_of(words: Array) -> U8:
    """Return codes of words [in, n] by output, two inputs a byte: uint8 [8 * n, in / 2]."""
    made = np.empty((words.shape[1], 8, len(words) // 2), np.uint8)
    for place, output in enumerate(_ORDER):
        codes = (words >> 4 * place).astype(np.uint8) & 15
        made[:, output] = (codes[0::2] | codes[1::2] << 4).T
    return made.reshape(-1, made.shape[2])


def zeros_of(
    parts: Parts, config: Config, outputs: int, inputs: int, scales: Array
) -> tuple[Codes, int]:
    """Return the zero points [groups, outputs] beside scales of that shape, and inputs a group."""
    size = config.get("group_size")
    size = fact(NAME, {"group_size": inputs if size == -1 else size}, "group_size", GROUP_SIZES)
    groups = -(-inputs // size)
    fits(NAME, ".scales", scales.shape, (groups, outputs))
    qzeros = array(NAME, parts, ".qzeros", _INT)
    fits(NAME, ".qzeros", qzeros.shape, (groups, outputs // 8))
    return unpack(qzeros), size


def _decode(parts: Parts, config: Config, out: F32) -> None:
    outputs, inputs = out.shape
    scales = numbers(NAME, parts, ".scales", _FLOAT)
    zeros, size = zeros_of(parts, config, outputs, inputs, scales)
    packed = array(NAME, parts, ".qweight", _INT)
    for start in range(0, inputs, _ROWS):
        group = np.arange(start, min(start + _ROWS, inputs)) // size
        codes = unpack(packed[start : start + _ROWS]) - zeros[group]
        out[:, start : start + _ROWS] = (codes * scales[group]).T


DIALECT = Dialect(
    name=NAME,
    main=".qweight",
    weight=".weight",
    parts=(".qzeros", ".scales"),
    optional=(),
    facts=("bits", "group_size", "version"),
    recognises=_recognises,
    shape_of=_shape_of,
    decode=_decode,
    codes=lambda parts, config: whole_numbers(4),
)
