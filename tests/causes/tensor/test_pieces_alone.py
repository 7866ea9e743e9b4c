"""Searches that read a tensor by pieces, which find what they find in all of it at once.

Seen red: a difference counted from the start of its window, a smallest value that is missing,
a piece of rows filled with the places of the first piece.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.tensor import byte_shifts, lattices, transposition

NAN = float("nan")


@pytest.mark.parametrize("first", (70, 1024, 1500, 2048))
@pytest.mark.parametrize("shift", (-7, 5))
def test_bytes_late_from_one_on_are_found_in_any_window(
    first: int, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_shifts, "READ", 512)
    a = np.random.default_rng(first).integers(0, 256, 5000, np.uint8)
    b = a.copy()
    b[first:] = np.roll(a, -shift)[first:]
    b[first] = a[first] ^ 1 if shift < 0 else b[first]
    sides: Any = a.tobytes(), b.tobytes()
    start = int(np.flatnonzero(a != b)[0])
    assert byte_shifts._shift_inside(*sides) == (start, shift)
    # One byte of the last window that no shift gives, and sides that are equal.
    b[-20] ^= 1
    broken: Any = a.tobytes(), b.tobytes()
    assert byte_shifts._shift_inside(*broken) is None
    assert byte_shifts._shift_inside(sides[0], sides[0]) is None


@pytest.mark.parametrize(
    ("cell", "ends"),
    [
        ([1.0, -3.0, 2.0], [-3.0, -3.0, 2.0]),
        ([1.0, -3.0, 4.0], [4.0, -3.0, 4.0]),
        ([1.0, -4.0, 4.0], [-4.0, -4.0, 4.0]),
        ([4.0, -4.0, 1.0], [4.0, -4.0, 4.0]),
        ([NAN, 2.0, 5.0], [5.0, 2.0, 5.0]),
        ([-2.0, NAN, -5.0], [-5.0, -5.0, -2.0]),
        ([0.0, 0.0, NAN], [0.0, 0.0, 0.0]),
    ],
)
def test_the_ends_of_a_cell_are_its_largest_magnitude_and_its_bounds(
    cell: list[float], ends: list[float]
) -> None:
    assert lattices._cell_ends(np.array([cell, cell])).tolist() == [ends, ends]


@pytest.mark.parametrize("way", [(12, 8, 1, False), (8, 12, 1, False), (12, 8, 2, True)])
def test_rows_of_a_transposed_matrix_are_the_same_by_pieces(
    way: tuple[int, int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(2 * 12 * 8, dtype=np.float32).reshape(2, 12, 8)
    side: Any = SimpleNamespace(shape=values.shape, whole=values.reshape(-1, 8))
    numbers = np.array([23, 0, 5, 13, 12, 7])
    take = transposition._take_transposed(side, *way)
    # What is expected is read from the definition: the flat place of each element of one matrix.
    places = transposition._transposed_places(np.arange(12 * 8), *way)
    wanted = values.reshape(2, -1)[:, places].reshape(-1, 8)[numbers]
    for size in (1, 8, 20, 1000):
        monkeypatch.setattr(transposition, "PLACES", size)
        assert np.array_equal(take(numbers), wanted)
    assert take(numbers[:0]).shape == (0, 8)
