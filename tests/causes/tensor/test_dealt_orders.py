"""Rows, columns and heads whose parts were dealt out in turn, some of them nearly equal."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import aprfmt
from aprfmt.causes.tensor.permutation import FoundLines, dealt_orders, one_to_one
from tests.model.relations.edits import same
from tests.models import save_tiny

POSITIONS = "t.embed_positions.weight"


def sinusoids(rows: int = 50, columns: int = 64) -> Any:
    """Return a table of sines and cosines, in halves: its last columns are nearly equal."""
    rates = np.exp(-np.arange(columns // 2) * np.log(10000) / (columns // 2 - 1))
    angles = np.arange(rows)[:, None] * rates[None]
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


def dealt(x: Any, parts: int, axis: int) -> Any:
    """Return an array whose `parts` of an axis are dealt out in turn."""
    turned = np.moveaxis(x, axis, 0)
    pieces = np.split(turned, parts)
    return np.ascontiguousarray(np.moveaxis(np.stack(pieces, 1).reshape(turned.shape), 0, axis))


def diffed(folder: Path, right: Any, wrong: Any, name: str = POSITIONS) -> Any:
    """Return the findings on a tensor among others that are equal."""
    rng = np.random.default_rng(2)
    others = {f"t.{n}.weight": rng.normal(size=(8, 8)).astype(np.float32) for n in range(4)}
    for side, values in (("a", right), ("b", wrong)):
        save_file({**others, name: values}, folder / f"{side}.safetensors")
    return aprfmt.diff(folder / "a.safetensors", folder / "b.safetensors").findings


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("kind", ["sinusoid", "repeated", "plain"])
def test_parts_that_are_dealt_out_are_named(
    parts: int, axis: int, back: bool, kind: str, tmp_path: Path
) -> None:
    """Seen red: two columns found in one place were no order, and it had no name."""
    right = sinusoids(64)
    if kind != "sinusoid":
        right = np.random.default_rng(5).normal(size=(64, 64)).astype(np.float32)
    if kind == "repeated":  # lines that are equal
        right[:, 33], right[33] = right[:, 7], right[7]
    sides = (right, dealt(right, parts, axis))
    [finding] = diffed(tmp_path, *(sides[::-1] if back else sides))
    what, (one, other) = ("rows", "columns")[axis], ("BA" if back else "AB")
    assert (finding.cause, finding.certainty) == ("value_order", "confirmed")
    assert (
        f"B has A's {what} in another order: the {parts} parts of {64 // parts} in {one} are"
        in (finding.says)
    )
    assert f"{parts}i of {other} is i of {one}" in finding.says


def test_rows_inside_of_heads_are_named(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "b" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("1.self_attn.v_proj.weight"))
    with aprfmt.open(tmp_path / "a") as model:
        size = int(model.hyper["value_head_dim"])
    heads = np.split(tensors[name], len(tensors[name]) // size)
    save_file({**tensors, name: np.concatenate([dealt(x, 2, 0) for x in heads])}, path)
    [finding] = aprfmt.diff(tmp_path / "a", tmp_path / "b").findings
    assert finding.cause == "value_order" and f"of each block of {size} in A" in finding.says


def shuffled(x: Any) -> Any:
    return x[:, np.random.default_rng(1).permutation(x.shape[1])]


def one_value_off(x: Any) -> Any:
    made = dealt(x, 2, 1)
    made[3, 5] += 1
    return made


@pytest.mark.parametrize("change", [shuffled, one_value_off])
def test_another_order_is_not_called_dealt(change: Callable[[Any], Any], tmp_path: Path) -> None:
    right = np.random.default_rng(5).normal(size=(64, 64)).astype(np.float32)
    for finding in diffed(tmp_path, right, change(right)):
        assert "dealt out" not in finding.says or finding.certainty != "confirmed"


def test_two_sound_tables_are_equal(tmp_path: Path) -> None:
    assert not diffed(tmp_path, sinusoids(), sinusoids())
    save_tiny("llama", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    same(tmp_path / "a", tmp_path / "c")


def test_lines_of_one_place_are_told_apart_by_their_values() -> None:
    a = np.array([[1.0, 2], [1, 2 + 1e-9], [1, 2], [5, 6]])
    b = a[[3, 1, 0, 2]]
    assert one_to_one(a, b, np.array([1, 1, 1, 0]), 1e-6).tolist() == [2, 1, 3, 0]
    assert one_to_one(a, b + 1, np.array([1, 1, 1, 0]), 1e-6).tolist() == [-1, -1, -1, 0]


def test_orders_need_most_of_the_lines() -> None:
    every = np.arange(16)
    at = every.reshape(8, 2).T.reshape(-1)
    assert next(dealt_orders(FoundLines(every, at, 16, 1), []))[1].tolist() == at.tolist()
    assert not list(dealt_orders(FoundLines(every, every[::-1], 16, 1), []))
