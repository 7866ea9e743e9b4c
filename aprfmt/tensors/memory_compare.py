"""Compare two blocks of memory, as fast as the machine reads them."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Octets = NDArray[np.uint8]


def bytes_equal(a: Octets, b: Octets) -> bool:
    """Return whether two contiguous arrays of bytes are equal.

    Other threads can run while memory is compared.
    """
    compare = _memcmp()
    if compare is None:
        return bool(np.array_equal(a, b))
    return a.size == b.size and not compare(a.ctypes.data, b.ctypes.data, a.size)


@cache
def _memcmp() -> Callable[[int, int, int], int] | None:
    """Return the C library's memcmp; None where it is not found (Windows names another file)."""
    try:
        found: Any = ctypes.CDLL(None).memcmp
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return found  # type: ignore[no-any-return]
