"""Rows of latent attention that rope does not turn are no pairs of rope in any order.

Seen red: "rows reordered with the wrong head count", of a weight that rope does not turn.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aprfmt.causes.tensor import rearrangements
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.permutation import FoundLines, invert_permutation
from aprfmt.measure.row_reader import RowReader

Array = Any
HEADS, KEYS = 4, 16


def causes(move: Callable[[Array], Array], values: int, role: str) -> list[str]:
    """Return the causes guessed where B's rows are those that `move` makes of A's row numbers."""
    count = HEADS * (KEYS + values)
    sides = SimpleNamespace(
        n_heads=HEADS, n_kv_heads=HEADS, qk_nope_head_dim=KEYS, value_head_dim=values
    )
    side = SimpleNamespace(
        shape=(count, 8), encoding="F32", numpy=lambda: np.zeros((count, 8)), drop=lambda: None
    )
    reader = RowReader(cast(Any, side))
    context = SimpleNamespace(hyper=[vars(sides)], results={}, rotated_pairs=lambda layer: "")
    case = DifferingPair(f"L0.{role}.weight", reader, reader, cast(Any, context))
    at = invert_permutation(np.asarray(move(np.arange(count))))
    found = FoundLines(np.arange(count), at, count, 0)
    return [guess.cause for guess in rearrangements._name_rearrangement(case, found)]


@pytest.mark.parametrize("move", [lambda rows: rows[::-1], lambda rows: np.roll(rows, 3)])
def test_other_orders_are_not_joined(move: Callable[[Array], Array]) -> None:
    found = causes(move, 16, "attn_kv_b")
    assert not {"fused_order", "gqa_mapping"} & {*found}


def test_only_rotated_rows_have_pairs() -> None:
    def pairs(rows: Array) -> Array:
        return rows.reshape(HEADS, 2, -1).swapaxes(1, 2).reshape(-1)

    assert "rope_pairing" in causes(pairs, 16, "attn_k")
    assert "rope_pairing" not in causes(pairs, 16, "attn_kv_b")
