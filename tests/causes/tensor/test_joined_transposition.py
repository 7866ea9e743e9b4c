"""Parts that were transposed as one joined tensor are named so, and parts in another order are not.

Seen red: each exchange without its order of rows, and other values taken for exchanged ones.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.joined_transposition import JoinedExchange, find_joined_exchange
from aprfmt.causes.tensor.row_sources import JoinedRows

Array = Any
Move = Callable[[Array], Array]


def part(values: Array) -> Any:
    """Return a reader of a stack of matrices [experts, rows, columns], or of one."""
    rows = values.reshape(-1, values.shape[-1])
    return SimpleNamespace(
        rows=len(rows),
        columns=rows.shape[1],
        shape=values.shape,
        encoding="F32",
        side=SimpleNamespace(shape=values.shape, encoding="F32", drop=lambda: None),
        take=lambda index: rows[index],
        drop=lambda: None,
    )


def found(
    move: Move, shape: tuple[int, int, int], *, by_row: bool = False
) -> JoinedExchange | None:
    """Return the exchange found where `move` made B's stored tensor of A's, of `shape`.

    That is [experts, rows, columns]. `by_row`: gate and up alternate in the stored rows.
    """
    experts, rows, _ = shape
    right = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    places = np.argsort([*range(0, rows, 2), *range(1, rows, 2)]) if by_row else np.arange(rows)
    stored = right[:, places]
    wrong = np.empty_like(right)
    wrong[:, places] = move(stored).reshape(shape)
    a, b = (
        JoinedRows(["gate", "up"], [part(half) for half in np.split(values, 2, axis=1)])
        for values in (right, wrong)
    )
    case = DifferingPair("L0.ffn_gate.weight", a, b, cast(Any, None))
    half = experts * rows // 2
    return find_joined_exchange(case, [("gate", half), ("up", half)], 0, experts)


def turned(stored: Array) -> Array:
    """Return the stored stack with the rows and columns of each matrix exchanged."""
    return stored.swapaxes(1, 2)


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 16, 16), (1, 16, 12), (3, 8, 12)])
@pytest.mark.parametrize("by_row", [False, True])
def test_rows_and_columns_exchanged(shape: tuple[int, int, int], by_row: bool) -> None:
    exchange = found(turned, shape, by_row=by_row)
    assert exchange is not None and exchange.residual == 0
    assert "rows and columns exchanged" in exchange.says
    assert ("row by row" in exchange.says) == by_row


@pytest.mark.parametrize("axes", [(1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_the_axis_of_the_stack_exchanged(axes: tuple[int, int, int]) -> None:
    exchange = found(lambda stored: stored.transpose(axes), (4, 16, 12))
    assert exchange is not None and str(axes) in exchange.says


@pytest.mark.parametrize(
    "move",
    [
        lambda stored: np.roll(stored, 8, axis=1),
        lambda stored: stored[::-1],
        lambda stored: -stored.swapaxes(1, 2),
        lambda stored: np.sort(stored.reshape(-1)),
    ],
)
def test_other_orders_and_other_values_are_no_exchange(move: Move) -> None:
    assert found(move, (3, 16, 16)) is None


def test_one_other_value_is_no_exchange() -> None:
    def damaged(stored: Array) -> Array:
        values = turned(stored).copy()
        values[-1, 7, 3] += 1
        return values

    assert found(damaged, (3, 64, 64)) is None
