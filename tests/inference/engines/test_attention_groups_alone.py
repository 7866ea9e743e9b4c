"""How ranks of attention data parallelism are told apart, by small dumps made by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.engines.attention_groups import AttentionGroups, find_attention_groups
from aprfmt.inference.engines.rank_joining import DumpedArray, JoinedArray
from aprfmt.inference.engines.tiles import Tiles

Found = list[tuple[int, DumpedArray]]


def dumped(name: str, values: Any, **ranks: int) -> DumpedArray:
    """Return one rank's array of these values."""
    held = np.asarray(values)
    return DumpedArray(name, ranks, held.shape, str(held.dtype), lambda: held, f"{name}.npy")


def rank_ids(rows: Sequence[Sequence[int]], step: int = 0, **more: int) -> Found:
    """Return the ids of a step that ranks 0, 1, ... hold."""
    return [(step, dumped("ids", row, tp=rank, **more)) for rank, row in enumerate(rows)]


def of_all(rows: Sequence[int], step: int = 0, name: str = "h") -> Found:
    """Return an array of `rows` rows of 4 for each rank."""
    return [(step, dumped(name, np.zeros((n, 4)), tp=at)) for at, n in enumerate(rows)]


TWO = [[1, 2], [1, 2], [3, 4, 5], [3, 4, 5]]


def test_groups_are_blocks_of_ranks_with_the_same_ids() -> None:
    found = find_attention_groups(
        rank_ids(TWO) + of_all([5, 5, 5, 5]) + of_all([2, 2, 3, 3], name="q"), {"ids"}
    )
    assert found is not None
    assert found.places == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    assert found.tokens == {0: [2, 3]} and set(found.gathered) == {"h"}
    assert found.sizes == {"dp": 2, "tp": 2}


def test_one_rank_in_each_of_three_groups() -> None:
    found = find_attention_groups(rank_ids([[1], [2], [3, 4]]) + of_all([4, 4, 4]), {"ids"})
    assert found is not None and found.sizes == {"dp": 3, "tp": 1}
    assert found.places == {0: (0, 0), 1: (1, 0), 2: (2, 0)}
    assert found.tokens == {0: [1, 1, 2]}


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2], [3], [1, 2], [3]],  # not one block after the other
        [[1], [1], [1], [2]],  # blocks of two sizes
        [[1], [2], [2]],  # two groups of three ranks
        [[1], [1]],  # one group
        [[1]],
    ],
)
def test_ranks_that_are_no_blocks_of_groups_are_none(rows: list[list[int]]) -> None:
    total = sum(len(row) for row in {tuple(row): row for row in rows}.values())
    assert find_attention_groups(rank_ids(rows) + of_all([total] * len(rows)), {"ids"}) is None


def test_ranks_are_counted_from_zero_without_a_gap() -> None:
    shifted: Found = [(0, dumped("ids", row, tp=at + 1)) for at, row in enumerate(TWO)]
    wide: Found = [(0, dumped("h", np.zeros((5, 4)), tp=at + 1)) for at in range(4)]
    assert find_attention_groups(shifted + wide, {"ids"}) is None


def test_without_ids_or_ranks_there_are_no_groups() -> None:
    gathered = of_all([5, 5, 5, 5])
    assert find_attention_groups(rank_ids(TWO) + gathered, {"tokens"}) is None
    assert find_attention_groups(rank_ids(TWO)[:3] + gathered, {"ids"}) is None
    lone: Found = [(0, dumped("ids", [9], pp=0))]
    assert find_attention_groups(rank_ids(TWO) + gathered + lone, {"ids"}) is None


def test_ranks_of_another_step_are_not_compared() -> None:
    short = rank_ids(TWO) + rank_ids([[7], [7], [8]], step=1)
    assert find_attention_groups(short + of_all([5] * 4), {"ids"}) is None
    whole = rank_ids(TWO) + rank_ids([[7], [7], [8], [8]], step=1)
    found = find_attention_groups(whole + of_all([5] * 4) + of_all([2] * 4, step=1), {"ids"})
    assert found is not None and found.tokens == {0: [2, 3], 1: [1, 1]}
    assert set(found.gathered) == {"h"}


def test_other_ids_of_one_rank_and_step_are_requests_of_another_axis() -> None:
    again = [(0, dumped("ids", row, tp=at)) for at, row in enumerate([[1, 2], [9, 9]])]
    assert find_attention_groups(rank_ids(TWO) + again + of_all([5] * 4), {"ids"}) is None
    same = [(0, dumped("ids", [row], tp=at)) for at, row in enumerate(TWO)]
    assert find_attention_groups(rank_ids(TWO) + same + of_all([5] * 4), {"ids"}) is not None


def test_without_names_some_array_has_rows_of_all_groups() -> None:
    assert find_attention_groups(rank_ids(TWO), {"ids"}) is None
    assert find_attention_groups(rank_ids(TWO) + of_all([2, 2, 3, 3]), {"ids"}) is None
    named = [(0, dumped("ids", row, tp=at, dp=at // 2)) for at, row in enumerate(TWO)]
    found = find_attention_groups(named, {"ids"})
    assert found is not None and not found.gathered
    wrong = [(0, dumped("ids", row, tp=at, dp=1 - at // 2)) for at, row in enumerate(TWO)]
    assert find_attention_groups(wrong, {"ids"}) is None
    partly = [*named[:3], (0, dumped("ids", TWO[3], tp=3))]
    assert find_attention_groups(partly, {"ids"}) is None


def test_an_array_counts_as_gathered_only_where_it_fits_at_every_step() -> None:
    two = rank_ids(TWO) + rank_ids([[7], [7], [8], [8]], step=1)
    fits = of_all([5] * 4, name="a") + of_all([2] * 4, step=1, name="a")
    other = of_all([5] * 4, name="b") + of_all([99] * 4, step=1, name="b")
    again = of_all([99] * 4, name="c") + of_all([2] * 4, step=1, name="c")
    found = find_attention_groups(two + fits + other + again, {"ids"})
    assert found is not None and set(found.gathered) == {"a"}
    late = of_all([5] * 4, name="d", step=7)
    found = find_attention_groups(two + fits + late, {"ids"})
    assert found is not None and set(found.gathered) == {"a"}


def test_rows_are_counted_in_matrices_and_behind_a_batch_of_one() -> None:
    for shape, gathered in (((1, 5, 4), True), ((5, 2, 4), True), ((5,), False)):
        held: Found = [(0, dumped("x", np.zeros(shape), tp=at)) for at in range(4)]
        found = find_attention_groups(rank_ids(TWO) + of_all([5] * 4) + held, {"ids"})
        assert found is not None and ("x" in found.gathered) == gathered, shape


GROUPS = AttentionGroups({0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}, {0: [2, 3]}, {"h"})


def test_a_groups_array_has_its_group_as_the_data_parallel_rank() -> None:
    one = dumped("q", [1], tp=2, dp=9, rank=6, pp=4)
    assert GROUPS.own(one).ranks == {"pp": 4, "tp": 0, "dp": 1}
    assert GROUPS.shared(one).ranks == {"pp": 4, "tp": 2}
    assert GROUPS.own(dumped("q", [1], tp=1)).ranks == {"tp": 1, "dp": 0}


def joined(values: Any, tiles: Tiles | None = None) -> JoinedArray:
    """Return a whole array of these values."""
    return JoinedArray("h", values.shape, "float64", lambda: values, "rows", tiles=tiles)


@pytest.mark.parametrize(
    ("rows", "starts"),
    [
        (5, (0, 2)),  # one after the other
        (6, (0, 3)),  # each in as many as the longest
        (8, (0, 4)),
        (12, (0, 6)),  # three more, of four ranks
        (14, None),  # four more
        (7, None),
        (4, None),  # fewer than the longest
    ],
)
def test_a_group_has_its_rows_of_an_array_of_all(rows: int, starts: Any) -> None:
    values = np.arange(rows * 2.0).reshape(rows, 2)
    for group, count in enumerate((2, 3)):
        found = GROUPS.rows_of_group(joined(values), 0, group)
        if starts is None:
            assert found is None
            continue
        assert found is not None and found.shape == (count, 2)
        assert (found.read() == values[starts[group] :][:count]).all()
        batch = GROUPS.rows_of_group(joined(values[None]), 0, group)
        assert batch is not None and batch.shape == (1, count, 2)
        assert (batch.read() == values[None, starts[group] :][:, :count]).all()
        assert (found.name, found.dtype, found.how) == ("h", "float64", "rows")


def test_blocks_of_a_groups_rows_are_read_where_blocks_can_be() -> None:
    values = np.arange(10.0).reshape(5, 2)

    def fill(row: int, column: int, out: Any) -> None:
        out[...] = values[row : row + out.shape[0], column : column + out.shape[1]]

    tiles = Tiles(5, 2, fill)
    found = GROUPS.rows_of_group(joined(values, tiles), 0, 1)
    assert found is not None and found.tiles is not None and found.tiles.rows == 3
    out = np.zeros((2, 1), np.float32)
    found.tiles.fill(1, 1, out)
    assert out.tolist() == [[7], [9]]
    batch = GROUPS.rows_of_group(joined(values[None], tiles), 0, 1)
    assert batch is not None and batch.tiles is None
