"""Scales of tiles of compressed-tensors: a side below one is one, as its library has it."""

import numpy as np
import pytest

from aprfmt.codecs.compressed_tensors import numbers_by_tile
from aprfmt.errors import CodecError


@pytest.mark.parametrize(
    ("size", "tile", "grid"),
    [
        ([2, 3], (2, 3), (2, 2)),
        ([2, 1], (2, 1), (2, 6)),
        ([2, 0], (2, 1), (2, 6)),
        ([0, 3], (1, 3), (4, 2)),
        ([-1, -1], (1, 1), (4, 6)),
    ],
)
def test_a_tile_has_at_least_one_row_and_column(
    size: list[int], tile: tuple[int, int], grid: tuple[int, int]
) -> None:
    values = np.arange(np.prod(grid), dtype=np.float32).reshape(grid)
    weights = {"strategy": "block", "block_structure": size}
    found, sides = numbers_by_tile(values, (4, 6), weights, "_scale")
    assert sides == tile and found.reshape(grid).tolist() == values.tolist()
    with pytest.raises(CodecError):
        numbers_by_tile(values[:, :-1], (4, 6), weights, "_scale")
