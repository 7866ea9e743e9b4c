"""Rows that A repeats are no offset of B: what differs has to be what the offset gives.

Seen red: "row i of B is row i-8 of A", confirmed, of a sound B whose other half alone differs.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.compare import diff


@pytest.mark.parametrize("count", [16, 12])
@pytest.mark.parametrize("first", [True, False])
def test_a_repeated_part_is_no_offset(count: int, first: bool, tmp_path: Path) -> None:
    sound = np.random.default_rng(3).normal(0, 1, (2 * count, 64)).astype(np.float32)
    bad = sound.copy()
    bad[:count] = bad[count:]
    sides = {"a": bad, "b": sound} if first else {"a": sound, "b": bad}
    for name, values in sides.items():
        save_file({"w": values}, tmp_path / f"{name}.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert not {one.cause for one in found.causes} & {"row_offset", "byte_offset"}


def test_a_shift_is_one(tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(0, 1, (32, 64)).astype(np.float32)
    save_file({"w": values}, tmp_path / "a.safetensors")
    save_file({"w": np.roll(values, 3, 0)}, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert {one.cause for one in found.causes} == {"row_offset"}
