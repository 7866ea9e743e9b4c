"""Sums of products of large arrays, without a call of BLAS.

OpenBLAS wakes all its threads for a product of more than 10,000 elements (`interface/dot.c`), and
they spin for some milliseconds after each: among other work, that costs several times the product.
`numpy.dot`, `numpy.vdot` and `numpy.linalg.norm` without an axis call it; `einsum` does not.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def exact_dot(x: ArrayLike, y: ArrayLike) -> float:
    """Return the sum of the products of two real arrays of one size, in float64."""
    one, other = np.ravel(x), np.ravel(y)
    return float(np.einsum("i,i->", one, other, dtype=np.float64))


def exact_norm(x: ArrayLike) -> float:
    """Return the root of the sum of squared magnitudes of an array of any shape, in float64."""
    values: Any = np.ravel(x)
    if values.dtype.kind == "c":
        return math.hypot(exact_norm(values.real), exact_norm(values.imag))
    return math.sqrt(exact_dot(values, values))


def cosine(x: ArrayLike, y: ArrayLike) -> float:
    """Return the cosine of the angle between two real arrays of one size; 0.0 if one is zero."""
    size = exact_norm(x) * exact_norm(y)
    return exact_dot(x, y) / size if size else 0.0
