"""Finds scales that no quantizer writes: NaN, infinity, and sums that contradict their block.

ggml's own check of quantized rows (`ggml_validate_row_data`) refuses NaN and infinite scales; the
other rules follow from the layouts. A *block* is a quantization block. A block with such a scale
decodes to garbage, all of it.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.codecs import codec
from aprfmt.codecs.row_codec import RowCodec

if TYPE_CHECKING:
    Blocks = NDArray[np.void]

_EXPONENTS = {2: 0x7C00, 4: 0x7F800000}  # all ones: NaN or infinity, by bytes of a float


def first_bad_block(
    encoding: str, raw: memoryview, row_bytes: int | None = None
) -> tuple[int, str, int] | None:
    """Return (index of the first bad block, what is wrong with it, how many are bad), or None.

    `raw` are the bytes of whole blocks. None also for encodings without scales. If an encoding has
    a scale before every row of `row_bytes`, the index is that of the row. Raises UnsupportedError
    for an encoding without a codec.
    """
    found = codec(encoding)
    layout = found.layout
    if isinstance(found, RowCodec) and row_bytes:
        rows = np.frombuffer(raw, np.uint8).reshape(-1, row_bytes)
        heads = np.ascontiguousarray(rows[:, : found.head.itemsize]).view(found.head)
        bad = _nonfinite_blocks(heads["d"].reshape(-1))
        if not bad.any():
            return None
        return int(np.argmax(bad)), "a scale d that is NaN or infinite", int(bad.sum())
    if layout is None or layout.names is None or layout.fields is None or not len(raw):
        return None
    blocks = np.frombuffer(raw, layout)
    wrong = []
    every = np.zeros(len(blocks), bool)
    for field in (name for name in layout.names if layout.fields[name][0].base.kind == "f"):
        bad = _nonfinite_blocks(blocks[field])
        every |= bad
        if bad.any():
            wrong.append((int(np.argmax(bad)), f"{field} that is NaN or infinite"))
    rule = RULES.get(encoding)
    if rule is not None:
        test, sentence = rule
        bad = test(blocks)
        every |= bad
        if bad.any():
            wrong.append((int(np.argmax(bad)), sentence))
    return (*min(wrong), int(every.sum())) if wrong else None


def header_is_bad(header: memoryview) -> bool:
    """Return whether the float32 scale before a flat encoding (APR_Q8) is NaN or infinite."""
    return int.from_bytes(header[:4], "little") & _EXPONENTS[4] == _EXPONENTS[4]


def _nonfinite_blocks(values: Any) -> Any:
    """Return bool [blocks]: whether a float field of the block is NaN or infinite.

    `values` has the field of every block, [blocks] or [blocks, n].
    """
    size = values.dtype.itemsize
    bits = values.view(f"<u{size}")
    ones = _EXPONENTS[size]
    return _any_in_block(bits & ones == ones)


def _any_in_block(bad: Any) -> Any:
    """Return bool [blocks]: whether any element of the block is True."""
    return bad.reshape(len(bad), -1).any(axis=1) if bad.ndim > 1 else bad


def _mxfp4_nan_scale(blocks: "Blocks") -> Any:
    """Return bool [blocks]: whether the E8M0 scale is 0xff, which is NaN."""
    return blocks["e"] == 0xFF


def _nvfp4_bad_scale(blocks: "Blocks") -> Any:
    """Return bool [blocks]: whether a UE4M3 scale is NaN (0x7f) or has a sign bit."""
    return _any_in_block(blocks["d"] >= 0x7F)


def _iq1_m_nonfinite_scale(blocks: "Blocks") -> Any:
    """Return bool [blocks]: whether the float16 in the top nibbles of four words is not finite."""
    top = blocks["scales"] >> 12
    bits = top[:, 1] << 4 | top[:, 2] << 8 | top[:, 3] << 12
    return bits & _EXPONENTS[2] == _EXPONENTS[2]


def _q8_1_wrong_sum(blocks: "Blocks") -> Any:
    """Return bool [blocks]: whether `s` is not the scale times the sum of the block's codes."""
    total = blocks["qs"].sum(axis=1, dtype=np.int32)
    with np.errstate(all="ignore"):
        expected = blocks["d"].astype(np.float32) * total
        apart = np.abs(blocks["s"].astype(np.float32) - expected)
        # s is rounded to float16; d stands for its unrounded self: half a unit each.
        return apart > 2.0**-9 * np.abs(expected) + 2.0**-23 * np.abs(total) + 2.0**-24


def _q8_k_wrong_sums(blocks: "Blocks") -> Any:
    """Return bool [blocks]: whether `bsums` are not the sums of 16 codes each."""
    sums = blocks["qs"].reshape(-1, 16, 16).sum(axis=2, dtype=np.int32)
    return _any_in_block(sums != blocks["bsums"])


def _tq1_0_bad_digits(blocks: "Blocks") -> Any:
    """Return bool [blocks]: whether a byte does not encode five (in qh: four) base-3 digits."""
    five, four = np.ones(256, bool), np.ones(256, bool)
    five[[(number * 256 + 242) // 243 for number in range(243)]] = False
    four[[(number * 3 * 256 + 242) // 243 for number in range(81)]] = False
    return _any_in_block(five[blocks["qs"]]) | _any_in_block(four[blocks["qh"]])


# encoding -> (which blocks are bad, what is wrong with them), besides NaN and infinite floats
RULES: Mapping[str, tuple[Callable[["Blocks"], Any], str]] = {
    "MXFP4": (_mxfp4_nan_scale, "the scale 0xff, which is NaN"),
    "NVFP4": (_nvfp4_bad_scale, "a scale of 0x7f (NaN) or with a sign, which UE4M3 does not have"),
    "IQ1_M": (_iq1_m_nonfinite_scale, "d that is NaN or infinite"),
    "Q8_1": (_q8_1_wrong_sum, "s that is not d times the sum of its elements"),
    "Q8_K": (_q8_k_wrong_sums, "sums that are not those of its elements"),
    "TQ1_0": (_tq1_0_bad_digits, "a byte that is no group of base-3 digits"),
}
