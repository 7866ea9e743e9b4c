"""Packing codes as GPTQ and its relatives do, by Python integers: slow, and plain to see."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def pack(codes: Array, bits: int) -> Array:
    """Pack rows of codes into one little-endian stream of int32 each, by Python integers."""
    words = []
    for row in codes.reshape(-1, codes.shape[-1]):
        number = sum(int(code) << bits * i for i, code in enumerate(row))
        size = 4 * -(-codes.shape[-1] * bits // 32)
        words.append(np.frombuffer(number.to_bytes(size, "little"), "<i4"))
    return np.stack(words).reshape(*codes.shape[:-1], -1)
