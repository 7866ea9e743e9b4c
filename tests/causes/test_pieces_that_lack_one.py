"""Pieces of A of which one stands twice and one is missing are no other order of A's values."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

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
