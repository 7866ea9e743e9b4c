"""Compares embeddings of texts of which one side was divided by its length.

Engines return the embedding with length 1, and the model's own pooled rows have any length. The
length is then not known, and the direction is compared.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.tensors.norms import exact_norm

POINT = "pooled"
NOTE = "of length 1: compared by direction"
_OFF = 5e-3  # from length 1, as 16 bits round it


def has_length_one(values: NDArray[Any]) -> bool:
    """Return whether an embedding [..., hidden] of one text has length 1, up to rounding."""
    return abs(exact_norm(np.asarray(values, np.float64)) - 1) <= _OFF


def divide_by_length(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return an embedding of one text, [..., hidden], with length 1; zeros are unchanged."""
    wide = np.asarray(values, np.float64)
    found: NDArray[np.float64] = wide / (exact_norm(wide) or 1.0)
    return found
