"""Pieces of A of which one stands twice and one is missing are no other order of A's values."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.causes.tensor.piece_order import MOST, VARIED, _runs_in_other_order
from aprfmt.causes.tensor.stored_bytes import ANCHOR
from aprfmt.compare import diff


@pytest.mark.parametrize(("order", "whole"), [
    ((0, 2, 1, 3, 4), True), ((4, 0, 1, 2, 3), True),
    ((0, 2, 2, 3, 4), False), ((1, 1, 2, 3, 4), False), ((0, 1, 3, 2, 2), False),
])  # fmt: skip
def test_every_value_has_to_be_there_once(
    order: tuple[int, ...], whole: bool, tmp_path: Path
) -> None:
    values = np.random.default_rng(3).normal(0, 1, 1485).astype(np.float32)
    pieces = np.split(values, 5)
    made = {"a": values, "b": np.concatenate([pieces[i] for i in order])}
    for name, flat in made.items():
        save_file({"w": flat.reshape(27, 55).copy()}, tmp_path / f"{name}.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert ("piece_order" in {one.cause for one in found.causes}) is whole


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shortest", [ANCHOR // 2, ANCHOR - 4, ANCHOR, ANCHOR + 4, 2 * ANCHOR])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_run_is_longer_than_what_is_looked_up(shortest: int, place: int, size: int) -> None:
    """Wherever in A the shortest one stands; the runs are those that B was made of."""
    lengths = [400, 300]
    lengths.insert(place, shortest)
    ends = np.cumsum([0, *lengths])
    whole = np.random.default_rng(shortest).integers(0, 256, ends[-1]).astype(np.uint8).tobytes()
    parts = [whole[first:last] for first, last in itertools.pairwise(ends)]
    order = [2, 1, 0]
    found = _runs_in_other_order(whole, b"".join(parts[i] for i in order), size)
    begins = np.cumsum([0, *(lengths[i] for i in order)])
    expected = [
        (int(at), int(ends[i]), lengths[i]) for at, i in zip(begins[:-1], order, strict=True)
    ]
    assert found == (expected if shortest > ANCHOR else [])


@pytest.mark.parametrize("count", [2, 3, MOST, MOST + 1])
def test_so_many_runs_are_taken_apart(count: int) -> None:
    """All of them in reverse."""
    size = 2 * ANCHOR
    whole = np.random.default_rng(count).integers(0, 256, count * size).astype(np.uint8).tobytes()
    order = [*reversed(range(count))]
    found = _runs_in_other_order(
        whole, b"".join(whole[i * size : (i + 1) * size] for i in order), 4
    )
    expected = [(at * size, i * size, size) for at, i in enumerate(order)]
    assert found == (expected if count <= MOST else [])


@pytest.mark.parametrize("different", [VARIED - 1, VARIED, VARIED + 1])
def test_a_run_begins_with_so_many_different_bytes(different: int) -> None:
    """Fewer are found anywhere."""
    first, second = (
        bytes(base + i % different for i in range(ANCHOR)) + bytes(range(base + 20, base + 100))
        for base in (0, 128)
    )
    found = _runs_in_other_order(first + second, second + first, 1)
    expected = [(0, len(first), len(second)), (len(second), 0, len(first))]
    assert found == (expected if different >= VARIED else [])


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 0, 3, 2), (2, 3, 0, 1)])
def test_one_order_of_the_columns_of_all_rows_is_no_order_of_pieces(
    order: tuple[int, ...], tmp_path: Path
) -> None:
    """Seen red: "as ranks' pieces of flat parameters", confirmed, of heads in reverse."""
    values = np.random.default_rng(4).normal(0, 1, (24, 4, 32)).astype(np.float32)
    for name, made in {"a": values, "b": values[:, order]}.items():
        save_file({"w": made.reshape(24, 128).copy()}, tmp_path / f"{name}.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    causes = {one.cause for one in found.causes}
    assert causes and "piece_order" not in causes
