"""Read and check the quant state of bitsandbytes: the companions of packed 4-bit weights.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

For a weight `W`, next to the packed bytes:

W.absmax                              float32 a block; uint8 codes with double quantization
W.quant_map                           16 float32: the code, value by nibble
W.quant_state.bitsandbytes__nf4       JSON: quant_type, blocksize, dtype, shape, and with double
                                      quantization nested_blocksize, nested_dtype, nested_offset
W.nested_absmax, W.nested_quant_map   float32 for 256 absmax codes each; 256 float32

Source: bitsandbytes, functional.QuantState.as_dict(packed=True) and utils.pack_dict_to_tensor.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import double_quant
from aprfmt.codecs.base import F32, U8, Bytes, check_length, part_bytes
from aprfmt.errors import CodecError

ABSMAX, QUANT_MAP = "absmax", "quant_map"
NESTED_ABSMAX, NESTED_QUANT_MAP = "nested_absmax", "nested_quant_map"
DTYPES = ("float32", "float16", "bfloat16")
_JSON_LIMIT = 1 << 16  # the library writes about 200 bytes
_DIMENSIONS = 8


@dataclass(frozen=True)
class QuantState:
    """The checked JSON of a quant state; `nested_blocksize` is 0 without double quantization."""

    blocksize: int
    dtype: str
    shape: tuple[int, ...]
    nested_blocksize: int
    nested_offset: float

    @property
    def count(self) -> int:
        """Number of elements of the weight."""
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        """Number of blocks of the flattened weight; the last may be short."""
        return -(-self.count // self.blocksize)


def _parse_state(name: str, raw: Mapping[str, Bytes]) -> dict[str, Any]:
    """Return the quant state's JSON object, its values unchecked; CodecError if there is none."""
    suffix = ENCODINGS[name].claim
    text = bytes(part_bytes(name, raw, suffix)[: _JSON_LIMIT + 1])
    if len(text) > _JSON_LIMIT:
        raise CodecError(f"{name}: {suffix} has more than {_JSON_LIMIT} bytes; expected about 200")
    try:
        found = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CodecError(f"{name}: {suffix} is not JSON in UTF-8: {error}") from error
    if not isinstance(found, dict):
        raise CodecError(f"{name}: {suffix} holds a {type(found).__name__}, expected an object")
    return found


def shape_of(name: str, raw: Mapping[str, Bytes]) -> tuple[int, ...]:
    """Return the weight's shape from the quant state; CodecError where it has none.

    Other values of the state are not checked.
    """
    return _check_shape(name, _parse_state(name, raw).get("shape"))


def is_nested(name: str, raw: Mapping[str, Bytes]) -> bool:
    """Return whether the absmax values are quantized as well (double quantization).

    Raises CodecError for parts without a quant state.
    """
    return "nested_blocksize" in _parse_state(name, raw)


def read_state(name: str, raw: Mapping[str, Bytes]) -> QuantState:
    """Return the checked quant state: block size, dtype, shape, and nested block size and offset.

    `raw` is {suffix: bytes} of the weight's parts. Raises CodecError for anything the library would
    not have written.
    """
    suffix, found = ENCODINGS[name].claim, _parse_state(name, raw)
    if found.get("quant_type") != name.lower():
        raise CodecError(
            f"{name}: {suffix} says quant_type {found.get('quant_type')!r}, "
            f"expected {name.lower()!r}"
        )
    if found.get("dtype") not in DTYPES:
        raise CodecError(
            f"{name}: {suffix} says dtype {found.get('dtype')!r}, expected {', '.join(DTYPES)}"
        )
    # Keys that only double quantization has.
    nested = NESTED_ABSMAX in raw
    offset = found.get("nested_offset", 0.0)
    if nested and (isinstance(offset, bool) or not isinstance(offset, int | float)):
        raise CodecError(f"{name}: {suffix} says nested_offset {offset!r}, expected a number")
    if nested and found.get("nested_dtype") != "float32":
        raise CodecError(
            f"{name}: {suffix} says nested_dtype {found.get('nested_dtype')!r}, expected 'float32'"
        )
    try:
        nested_offset = float(offset) if nested else 0.0
    except OverflowError as error:
        raise CodecError(f"{name}: {suffix}: nested_offset is beyond float64") from error
    return QuantState(
        blocksize=_check_count(name, found, "blocksize"),
        dtype=found["dtype"],
        shape=_check_shape(name, found.get("shape")),
        nested_blocksize=_check_count(name, found, "nested_blocksize") if nested else 0,
        nested_offset=nested_offset,
    )


def _check_count(name: str, found: Mapping[str, Any], key: str) -> int:
    """Return the quant state's value of `key`; CodecError unless it is a positive integer."""
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise CodecError(f"{name}: quant state says {key} {value!r}, expected a positive integer")
    return value


def _check_shape(name: str, value: object) -> tuple[int, ...]:
    """Return the shape as a tuple; CodecError unless it is a list of sizes."""
    if not isinstance(value, list) or len(value) > _DIMENSIONS:
        raise CodecError(f"{name}: quant state says shape {value!r:.80}, expected a list of sizes")
    for length in value:
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length < 1 << 62:
            raise CodecError(f"{name}: quant state says shape {value!r:.80}, expected sizes")
    return tuple(value)


def read_absmax(name: str, raw: Mapping[str, Bytes], state: QuantState) -> F32:
    """Return the absmax of each block, float32 [blocks], with double quantization undone.

    `raw` is {suffix: bytes} of the weight's parts. Raises CodecError where a part has the wrong
    length.
    """
    data = part_bytes(name, raw, ABSMAX)
    if not state.nested_blocksize:
        check_length(name, data.size, 4 * state.blocks, f"absmax of {state.blocks} blocks")
        return data.view("<f4").astype(np.float32, copy=False)
    check_length(name, data.size, state.blocks, f"quantized absmax of {state.blocks} blocks")
    code = part_bytes(name, raw, NESTED_QUANT_MAP)
    check_length(name, code.size, 4 * 256, NESTED_QUANT_MAP)
    nested = part_bytes(name, raw, NESTED_ABSMAX)
    groups = -(-state.blocks // state.nested_blocksize)
    check_length(name, nested.size, 4 * groups, f"{NESTED_ABSMAX} of {state.blocks} blocks")
    scale = nested.view("<f4")[np.arange(state.blocks) // state.nested_blocksize]
    # Two roundings: the library dequantizes the absmax, then adds the offset.
    absmax: F32 = code.view("<f4")[data] * scale + np.float32(state.nested_offset)
    return absmax


def read_code(name: str, raw: Mapping[str, Bytes]) -> F32:
    """Return float32 [16]: the values of the nibbles, as the file stores them."""
    data = part_bytes(name, raw, QUANT_MAP)
    check_length(name, data.size, 4 * 16, QUANT_MAP)
    return data.view("<f4").astype(np.float32, copy=False)


def encode_companions(
    name: str,
    code: F32,
    absmax: F32,
    *,
    shape: tuple[int, ...],
    blocksize: int,
    dtype: str,
    nested: tuple[U8, F32, F32] | None,
) -> dict[str, bytes]:
    """Return {suffix: bytes} of all parts but the packed codes, JSON as the library writes it.

    `nested` is (codes, scales, offset) of the quantized absmax, or None to store the absmax as
    float32.
    """
    state: dict[str, Any] = {
        "quant_type": name.lower(),
        "blocksize": blocksize,
        "dtype": dtype,
        "shape": list(shape),
    }
    parts = {ABSMAX: absmax.astype("<f4").tobytes(), QUANT_MAP: code.astype("<f4").tobytes()}
    if nested is not None:
        codes, scales, offset = nested
        state |= {
            "nested_blocksize": double_quant.GROUP,
            "nested_dtype": "float32",
            "nested_offset": float(offset),
        }
        parts[ABSMAX] = codes.tobytes()
        parts[NESTED_ABSMAX] = scales.astype("<f4").tobytes()
        parts[NESTED_QUANT_MAP] = double_quant.dynamic_map().astype("<f4").tobytes()
    return parts | {ENCODINGS[name].claim: json.dumps(state).encode()}


def cut_companions(name: str, raw: Mapping[str, Bytes], start: int, stop: int) -> dict[str, Bytes]:
    """Return {suffix: bytes} of the quant state and absmax for elements [start, stop).

    They are those of a 1-D weight. Tables that all elements share (such as the quant map) are not
    in the result.
    """
    state = read_state(name, raw)
    found = json.loads(bytes(raw[ENCODINGS[name].claim]))
    found["shape"] = [stop - start]
    first, last = start // state.blocksize, -(-stop // state.blocksize)
    size = 1 if state.nested_blocksize else 4
    parts: dict[str, Bytes] = {
        ENCODINGS[name].claim: json.dumps(found).encode(),
        ABSMAX: memoryview(raw[ABSMAX])[size * first : size * last],
    }
    if state.nested_blocksize:
        low, high = first // state.nested_blocksize, -(-last // state.nested_blocksize)
        parts[NESTED_ABSMAX] = memoryview(raw[NESTED_ABSMAX])[4 * low : 4 * high]
    return parts
