"""Seeded faults of `aprfmt/causes/tensor/low_rank.py`."""

from typing import Any

import numpy as np

from aprfmt.causes.tensor import low_rank
from tests.causes.faults import HIDDEN, UP, Fault, computed

_WEIGHTS = np.linspace(0.3, 2.0, HIDDEN, dtype=np.float32)


def cut(x: Any, rank: int) -> Any:
    """Return a matrix with its largest singular values alone."""
    left, sizes, right = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    return ((left[:, :rank] * sizes[:rank]) @ right[:rank]).astype(np.float32)


FAULTS = (
    Fault(
        "rank 16",
        "low_rank",
        UP,
        computed(UP, lambda x: cut(x, 16)),
        low_rank.explain_low_rank,
        "its 16 largest singular values alone",
        quantized=False,
    ),
    Fault(
        "rank 12 of weighted inputs",
        "low_rank",
        UP,
        computed(UP, lambda x: cut(x * _WEIGHTS, 12) / _WEIGHTS),
        low_rank.explain_low_rank,
        "12 directions of its outputs",
        quantized=False,
    ),
)
