"""Scales no quantizer writes: NaN and infinity, and sub-scales or sums that contradict a block.

ggml's own check of quantized rows (`ggml_validate_row_data`) refuses NaN and infinite scales; the
rest follows from the layouts. A block with such a scale decodes to garbage, all of it.
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
) -> tuple[int, str] | None:
    """Return (block, what is wrong) of the first bad block in whole blocks, or None.

    Encodings without scales have none; of those with a scale in front of every row, of
    `row_bytes`, it is the row. Raises UnsupportedError for one without a codec.
    """
    found = codec(encoding)
    layout = found.layout
    if isinstance(found, RowCodec) and row_bytes:
        rows = np.frombuffer(raw, np.uint8).reshape(-1, row_bytes)
        heads = np.ascontiguousarray(rows[:, : found.head.itemsize]).view(found.head)
        bad = _not_finite(heads["d"].reshape(-1))
        return (int(np.argmax(bad)), "a scale d that is NaN or infinite") if bad.any() else None
    if layout is None or layout.names is None or layout.fields is None or not len(raw):
        return None
    blocks = np.frombuffer(raw, layout)
    wrong = []
    for field in (name for name in layout.names if layout.fields[name][0].base.kind == "f"):
        bad = _not_finite(blocks[field])
        if bad.any():
            wrong.append((int(np.argmax(bad)), f"{field} that is NaN or infinite"))
    rule = RULES.get(encoding)
    if rule is not None:
        test, sentence = rule
        bad = test(blocks)
        if bad.any():
            wrong.append((int(np.argmax(bad)), sentence))
    return min(wrong, default=None)


def header_is_bad(encoding: str, header: memoryview) -> bool:
    """Say whether the float32 scale in front of a flat encoding (APR_Q8) is NaN or infinite."""
    return int.from_bytes(header[:4], "little") & _EXPONENTS[4] == _EXPONENTS[4]


def _not_finite(values: Any) -> Any:
    size = values.dtype.itemsize
    bits = values.view(f"<u{size}")
    ones = _EXPONENTS[size]
    return _any_in_block(bits & ones == ones)


def _any_in_block(bad: Any) -> Any:
    return bad.reshape(len(bad), -1).any(axis=1) if bad.ndim > 1 else bad


def _mxfp4(blocks: "Blocks") -> Any:
    return blocks["e"] == 0xFF


def _nvfp4(blocks: "Blocks") -> Any:
    return _any_in_block(blocks["d"] >= 0x7F)


def _iq1_m(blocks: "Blocks") -> Any:
    """Look at the float16 that the top nibbles of four words make."""
    top = blocks["scales"] >> 12
    bits = top[:, 1] << 4 | top[:, 2] << 8 | top[:, 3] << 12
    return bits & _EXPONENTS[2] == _EXPONENTS[2]


def _q8_1(blocks: "Blocks") -> Any:
    total = blocks["qs"].sum(axis=1, dtype=np.int32)
    with np.errstate(all="ignore"):
        expected = blocks["d"].astype(np.float32) * total
        apart = np.abs(blocks["s"].astype(np.float32) - expected)
        # s is rounded to float16; d stands for its unrounded self: half a unit each.
        return apart > 2.0**-9 * np.abs(expected) + 2.0**-23 * np.abs(total) + 2.0**-24


def _q8_k(blocks: "Blocks") -> Any:
    sums = blocks["qs"].reshape(-1, 16, 16).sum(axis=2, dtype=np.int32)
    return _any_in_block(sums != blocks["bsums"])


def _tq1_0(blocks: "Blocks") -> Any:
    """Look for bytes that do not encode five (in qh: four) base-3 digits."""
    five, four = np.ones(256, bool), np.ones(256, bool)
    five[[(number * 256 + 242) // 243 for number in range(243)]] = False
    four[[(number * 3 * 256 + 242) // 243 for number in range(81)]] = False
    return _any_in_block(five[blocks["qs"]]) | _any_in_block(four[blocks["qh"]])


# encoding -> (which blocks are bad, what is wrong with them), besides NaN and infinite floats
RULES: Mapping[str, tuple[Callable[["Blocks"], Any], str]] = {
    "MXFP4": (_mxfp4, "the scale 0xff, which is NaN"),
    "NVFP4": (_nvfp4, "a scale of 0x7f (NaN) or with a sign, which UE4M3 does not have"),
    "IQ1_M": (_iq1_m, "d that is NaN or infinite"),
    "Q8_1": (_q8_1, "s that is not d times the sum of its elements"),
    "Q8_K": (_q8_k, "sums that are not those of its elements"),
    "TQ1_0": (_tq1_0, "a byte that is no group of base-3 digits"),
}
