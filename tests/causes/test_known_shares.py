"""A change that gives a known part of a tensor: the share is that part, and only all is confirmed.

Seen red: 48 of 96 rows that stand 48 further down were confirmed with a share of 1, and so were
76 of 96 beside another encoding.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.compare import diff

Array = Any
ROWS, COLUMNS = 96, 64
NAME = "w.weight"


def noise(rows: int) -> Array:
    return np.random.default_rng(9).standard_normal((rows, COLUMNS)).astype(np.float32)


def down(count: int, front: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Every row stands `count` further down; `front` gives the rows before."""
    return lambda x: np.concatenate([front(x), x[:-count]])


def along(count: int) -> Callable[[Array], Array]:
    """Every value stands `count` places further on; other values stand before."""
    return lambda x: np.concatenate(
        [noise(ROWS).reshape(-1)[:count], x.reshape(-1)[:-count]]
    ).reshape(x.shape)


CASES: dict[str, tuple[Callable[[Array], Array], str, float]] = {
    "rows": (down(5, lambda x: noise(5)), "row_offset", 91 / ROWS),
    "half": (down(48, lambda x: noise(48)), "row_offset", 0.5),
    "round": (lambda x: np.roll(x, 48, 0), "row_offset", 1.0),
    "up": (lambda x: np.roll(x, -5, 0), "row_offset", 1.0),
    "repeated": (down(5, lambda x: x[:5]), "row_offset", 1.0),  # those are where they were
    "some-repeated": (
        down(10, lambda x: np.concatenate([x[:6], noise(4)])), "row_offset", 86 / 90,
    ),
    "zeros": (down(5, lambda x: noise(5) * 0), "row_offset", 91 / ROWS),
    "values": (along(1300), "byte_offset", 1 - 1300 / (ROWS * COLUMNS)),
}  # fmt: skip
BESIDE = {"values": 75 / ROWS}  # a row counts as a whole where values are compared


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_share_is_that_of_the_rows_that_come_out(
    name: str, coarse: bool, tmp_path: Path
) -> None:
    change, cause, share = CASES[name]
    if coarse and name in ("repeated", "some-repeated", "zeros"):
        pytest.skip("NOT-RUN: no offset is looked for beside rows that stand twice or are zero")
    x = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    y = np.ascontiguousarray(change(x))
    save_file({NAME: x}, tmp_path / "a.safetensors")
    made = y.astype(ml_dtypes.bfloat16) if coarse else y
    save_file({NAME: made}, tmp_path / "b.safetensors")
    (found,) = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").causes
    assert found.cause == cause
    assert found.share == pytest.approx(BESIDE.get(name, share) if coarse else share, abs=2e-3)
    assert found.level == ("confirmed" if share == 1 else "explained")
