"""Seeded faults of `aprfmt/causes/tensor/rearrangements.py`."""

from typing import Any

import numpy as np

from aprfmt.causes.tensor import rearrangements
from tests.causes.faults import EMBEDDING, HEADS, HIDDEN, OUT, SIZE, UP, Fault, K, Q, moved, rows_of


def _pairs(x: Any, heads: int) -> Any:
    """Rows of each head from split halves to adjacent pairs."""
    split = x.reshape(heads, 2, -1, HIDDEN)
    return split.swapaxes(1, 2).reshape(x.shape)


def _undone(x: Any, heads: int) -> Any:
    """Rows of each head from adjacent pairs to split halves."""
    pairs = x.reshape(heads, -1, 2, HIDDEN)
    return pairs.swapaxes(1, 2).reshape(x.shape)


def _for(heads: int, right: int) -> Any:
    """Rows permuted for one number of heads, and put right for the true one, as loaders do."""
    return lambda x: _undone(_pairs(x, heads), right)


def _columns(x: Any) -> Any:
    return x.reshape(-1, HEADS, SIZE)[:, [2, 1, 0, 3]].reshape(-1, HIDDEN)


def _two_rows(x: Any) -> Any:
    x = x.copy()
    x[[5, 9]] = x[[9, 5]]
    return x


_SHUFFLED = np.random.default_rng(3).permutation(HIDDEN)

FAULTS = (
    Fault(
        "transposed",
        "transpose",
        UP,
        moved(UP, lambda x: x.T),
        rearrangements.guess_transposed,
        "rows and columns exchanged",
    ),
    Fault(
        "adjacent pairs",
        "rope_pairing",
        Q,
        moved(Q, lambda x: _pairs(x, HEADS)),
        rearrangements.guess_rearranged,
        "adjacent pairs in B",
    ),
    Fault(
        "pairs of too many heads",
        "gqa_mapping",
        K,
        moved(K, lambda x: _pairs(x, HEADS)),
        rearrangements.guess_rearranged,
        "as if there were 4 heads of 8 rows; there are 2 of 16",
    ),
    *(
        Fault(
            f"k made for {heads} heads",
            "gqa_mapping",
            K,
            moved(K, _for(heads, HEADS // 2)),
            rearrangements.guess_rearranged,
            f"made for {heads} heads and undone for 2",
        )
        for heads in (1, 4, 8)
    ),
    *(
        Fault(
            f"q made for {heads} heads",
            "gqa_mapping",
            Q,
            moved(Q, _for(heads, HEADS)),
            rearrangements.guess_rearranged,
            f"made for {heads} heads and undone for 4",
        )
        for heads in (1, 2, 8, 16)
    ),
    Fault(
        "k undone for the heads of q",
        "gqa_mapping",
        K,
        moved(K, lambda x: _undone(_pairs(x, HEADS // 2), HEADS)),
        rearrangements.guess_rearranged,
        "made for 2 heads and undone for 4",
    ),
    Fault(
        "heads in another order",
        "head_order",
        Q,
        moved(Q, rows_of(lambda x: x[[1, 0, 2, 3]])),
        rearrangements.guess_rearranged,
        "1, 0, 2, 3",
    ),
    Fault(
        "heads after the first come round",
        "head_order",
        Q,
        moved(Q, rows_of(lambda x: x[[0, 2, 3, 1]])),
        rearrangements.guess_rearranged,
        "heads 0, 1, 2, ... of A are these of B: 0, 3, 1, 2",
    ),
    Fault(
        "two key heads exchanged",
        "head_order",
        K,
        moved(K, lambda x: np.roll(x, 16, 0)),
        rearrangements.guess_rearranged,
        "heads 0, 1, 2, ... of A are these of B: 1, 0",
    ),
    Fault(
        "heads of the output product",
        "head_order",
        OUT,
        moved(OUT, _columns),
        rearrangements.guess_rearranged,
        "2, 1, 0, 3",
    ),
    Fault(
        "query heads regrouped",
        "gqa_mapping",
        Q,
        moved(Q, rows_of(lambda x: x[[0, 2, 1, 3]])),
        rearrangements.guess_rearranged,
        "grouped the other way",
    ),
    Fault(
        "rows shuffled",
        "row_offset",
        UP,
        moved(UP, lambda x: x[_SHUFFLED]),
        rearrangements.guess_rearranged,
        "another order",
    ),
    Fault(
        "two rows exchanged",
        "row_offset",
        EMBEDDING,
        moved(EMBEDDING, _two_rows),
        rearrangements.guess_rearranged,
        "5 of A is 9 of B",
    ),
)
