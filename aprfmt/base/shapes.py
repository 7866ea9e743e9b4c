"""What is counted from a shape."""

import math
from collections.abc import Sequence


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor seen as [rows, last axis]; a scalar is one row of one."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1
