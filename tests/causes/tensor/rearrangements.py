"""Seeded faults of `aprfmt/causes/tensor/rearrangements.py`."""

from typing import Any

import numpy as np

from aprfmt.causes.tensor import rearrangements
from tests.compare.faults import (
    EMBEDDING,
    HEADS,
    HIDDEN,
    OUT,
    SIZE,
    UP,
    Fault,
    K,
    Q,
    moved,
    rows_of,
)


def _pairs(x: Any, heads: int) -> Any:
    """Rows of each head from split halves to adjacent pairs."""
    split = x.reshape(heads, 2, -1, HIDDEN)
    return split.swapaxes(1, 2).reshape(x.shape)


def _columns(x: Any) -> Any:
    return x.reshape(-1, HEADS, SIZE)[:, [2, 1, 0, 3]].reshape(-1, HIDDEN)


def _two_rows(x: Any) -> Any:
    x = x.copy()
    x[[5, 9]] = x[[9, 5]]
    return x


_SHUFFLED = np.random.default_rng(3).permutation(HIDDEN)

FAULTS = (
    Fault("transposed", "transpose", UP, moved(UP, lambda x: x.T), rearrangements.transpose,
          "rows and columns exchanged"),
    Fault("adjacent pairs", "rope_pairing", Q, moved(Q, lambda x: _pairs(x, HEADS)),
          rearrangements.rearranged, "adjacent pairs in B"),
    Fault("pairs of too many heads", "gqa_mapping", K, moved(K, lambda x: _pairs(x, HEADS)),
          rearrangements.rearranged, "as if there were 4 heads of 8 rows; there are 2 of 16"),
    Fault("heads in another order", "head_order", Q,
          moved(Q, rows_of(lambda x: x[[1, 0, 2, 3]])), rearrangements.rearranged, "1, 0, 2, 3"),
    Fault("two key heads exchanged", "head_order", K, moved(K, lambda x: np.roll(x, 16, 0)),
          rearrangements.rearranged, "A's order, as numbers of B: 1, 0"),
    Fault("heads of the output product", "head_order", OUT, moved(OUT, _columns),
          rearrangements.rearranged, "2, 1, 0, 3"),
    Fault("query heads regrouped", "gqa_mapping", Q,
          moved(Q, rows_of(lambda x: x[[0, 2, 1, 3]])),
          rearrangements.rearranged, "grouped the other way"),
    Fault("rows shuffled", "row_offset", UP, moved(UP, lambda x: x[_SHUFFLED]),
          rearrangements.rearranged, "another order"),
    Fault("two rows exchanged", "row_offset", EMBEDDING, moved(EMBEDDING, _two_rows),
          rearrangements.rearranged, "5 of A is 9 of B"),
)  # fmt: skip
