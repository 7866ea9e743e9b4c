"""Moves of a chain of steps: asked again they are known, and never those of other sizes.

Seen red: a key without the hyperparameters, one without the direction, one without the shapes.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from aprfmt.arch import element_moves
from aprfmt.arch.joining_steps import Split, Stacked
from aprfmt.arch.layout_steps import HalvesExchanged, RowsPermuted

STEPS = (RowsPermuted("n_heads"), RowsPermuted("n_kv_heads"))
CASES = list(product(((24, 3), (48, 2)), (2, 3), (1, 2), (False, True)))


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    element_moves._chains.clear()
    yield
    element_moves._chains.clear()


def applied(runs: element_moves.Chain, values: Any) -> list[int]:
    return [int(x) for move in runs[0] for x in values[move.start : move.start + move.count]]


@pytest.mark.parametrize("twice", [False, True])
def test_it_is_the_steps_one_after_the_other(twice: bool) -> None:
    for shape, heads, kv, back in CASES * (2 if twice else 1):
        sizes = {"n_heads": heads, "n_kv_heads": kv}
        found = element_moves.chain_steps(STEPS, [[shape], [shape]], sizes, back=back)
        assert found is not None
        values = np.arange(shape[0] * shape[1])
        logical = values.reshape(shape)
        for step in STEPS:
            (logical,) = step.undo([logical], sizes)
        if back:
            assert applied(found, logical.reshape(-1)) == values.tolist()
        else:
            assert applied(found, values) == logical.reshape(-1).tolist()


def test_what_is_known_is_bounded_and_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(element_moves, "_KEPT", 3)
    asked = [[(heads * 2, 1)] for heads in range(1, 9)]
    for shapes in asked:
        sizes = {"n_heads": 1}
        first = element_moves.chain_steps(STEPS[:1], [shapes], sizes, back=False)
        assert element_moves.chain_steps(STEPS[:1], [shapes], dict(sizes), back=False) is first
        assert len(element_moves._chains) <= 3
    monkeypatch.setattr(element_moves, "_MANY", 3)
    element_moves._chains.clear()
    element_moves.chain_steps(STEPS[:1], [[(64, 1)]], {"n_heads": 2}, back=False)
    assert not element_moves._chains


def test_a_step_that_cannot_be_a_key_is_asked_each_time() -> None:
    class Listed(RowsPermuted):
        __hash__ = None  # type: ignore[assignment]

    found = element_moves.chain_steps((Listed("n_heads"),), [[(8, 1)]], {"n_heads": 2}, back=False)
    assert found == element_moves.chain_steps(
        (RowsPermuted("n_heads"),), [[(8, 1)]], {"n_heads": 2}, False
    )
    assert len(element_moves._chains) == 1


# Steps of which one joins or divides tensors, and the shapes of the tensors that they end with.
JOINED: dict[str, tuple[tuple[Any, ...], list[tuple[int, ...]]]] = {
    "stacked, then divided": ((Stacked("n"), Split(("n", "m"), axis=1)), [(2, 2, 4), (2, 3, 4)]),
    "stacked, then permuted": ((Stacked("n", axis=1), RowsPermuted("n")), [(8, 2, 3)]),
    "stacked, then exchanged": ((Stacked("n"), HalvesExchanged()), [(2, 3, 4)]),
}


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("label", JOINED)
def test_steps_that_join_and_divide_tensors_are_chained_both_ways(label: str, back: bool) -> None:
    """Each step has other tensors, of other sizes, than the one before it."""
    (steps, shapes), sizes = JOINED[label], {"n": 2, "m": 3}
    arrays: Any = [np.zeros(shape, np.int64) for shape in shapes]
    before: list[list[tuple[int, ...]]] = []
    for step in reversed(steps):
        arrays = step.apply(arrays, sizes)
        before.insert(0, [each.shape for each in arrays])
    first = [np.arange(each.size).reshape(each.shape) + 1000 * i for i, each in enumerate(arrays)]
    last: Any = first
    for step in steps:
        last = step.undo(last, sizes)
    moves = element_moves.chain_steps(steps, before, sizes, back=back)
    assert moves is not None and [each.shape for each in last] == shapes
    source, target = (last, first) if back else (first, last)
    flat = [each.reshape(-1) for each in source]
    found = [
        [int(x) for move in runs for x in flat[move.source][move.start : move.start + move.count]]
        for runs in moves
    ]
    assert found == [each.reshape(-1).tolist() for each in target]
