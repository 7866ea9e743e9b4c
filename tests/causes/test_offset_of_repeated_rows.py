"""Rows that A or B repeats are no offset of B: what differs has to be what the offset gives.

Seen red: "row i of B is row i-8 of A", confirmed, of a sound B whose other half alone differs, and
"row i of B is row i-16 of A" of a B whose last 16 rows are a copy of the first, which stand there.
"""

from pathlib import Path
from typing import Any

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


def causes(a: Any, b: Any, folder: Path) -> dict[str, str]:
    """Return {cause: its sentence} of two files that hold one tensor each."""
    for name, values in (("a", a), ("b", b)):
        save_file({"w": values}, folder / f"{name}.safetensors")
    found = diff(folder / "a.safetensors", folder / "b.safetensors")
    return {one.cause: one.says for one in found.causes if one.level == "confirmed"}


SHAPES = {"matrix": (32, 64), "experts": (32, 4, 64), "vector": (64,)}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("to, source", [(1, 0), (0, 1), (3, 1)])
def test_a_part_that_stands_twice_is_no_offset(
    kind: str, to: int, source: int, tmp_path: Path
) -> None:
    parts = 2 if to < 2 else 4
    sound = np.random.default_rng(3).normal(0, 1, SHAPES[kind]).astype(np.float32)
    bad = sound.copy()
    cut = bad.reshape(parts, -1)
    cut[to] = cut[source]
    found = causes(sound, bad, tmp_path)
    assert {*found} == {"wrong_rows"}
    if kind == "vector":
        size = len(bad) // parts
        here, there = (f"{at * size}-{at * size + size - 1}" for at in (to, source))
        said = f"values {here}: A's values {there}"
        assert said in found["wrong_rows"]


@pytest.mark.parametrize("lost", [0.0, None])
def test_half_the_rows_moved_are_an_offset(lost: float | None, tmp_path: Path) -> None:
    sound = np.random.default_rng(3).normal(0, 1, (32, 64)).astype(np.float32)
    bad = np.roll(sound, 16, 0)
    if lost is not None:
        bad[:16] = lost
    save_file({"w": sound}, tmp_path / "a.safetensors")
    save_file({"w": bad}, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert {one.cause for one in found.causes} == {"row_offset"}


def test_one_value_that_stands_everywhere_is_no_copy(tmp_path: Path) -> None:
    sound = np.ones(64, np.float32)
    bad = sound.copy()
    sound[16:32] = 2.0
    assert "wrong_rows" not in causes(sound, bad, tmp_path)


def test_a_shift_is_one(tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(0, 1, (32, 64)).astype(np.float32)
    save_file({"w": values}, tmp_path / "a.safetensors")
    save_file({"w": np.roll(values, 3, 0)}, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert {one.cause for one in found.causes} == {"row_offset"}
