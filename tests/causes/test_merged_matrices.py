"""An adapter that was merged into one matrix or into few, told by the rank of the difference.

Seen red: one matrix left out; the first layer's one matrix called a run of layers; a limit of the
rank that full rank passes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.compare import diff
from aprfmt.diagnosis import diagnose
from tests.causes import faults
from tests.compare.test_verdicts import edited
from tests.conversion.folders import llama_folder

LAYERS = 4
PROJECTION = "model.layers.{}.self_attn.{}_proj.weight"
MIDDLE, FIRST = PROJECTION.format(2, "q"), PROJECTION.format(0, "q")
Values = Any  # a float32 matrix [rows, columns]


def product(rank: int, size: float = 0.2) -> Callable[[Values], Values]:
    """Return a function that adds a product of `rank` columns, `size` of the matrix's norm."""
    rng = np.random.default_rng(rank)

    def added(matrix: Values) -> Values:
        rows, columns = matrix.shape
        change = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))
        change *= size * np.linalg.norm(matrix) / np.linalg.norm(change)
        return (matrix + change).astype(np.float32)

    return added


def pair(folder: Path, names: Sequence[str], change: Callable[[Values], Values]) -> list[str]:
    """Write a model and the same one with some matrices changed; return both folders."""
    source = llama_folder(folder / "a", "BF16", hidden=faults.HIDDEN, layers=LAYERS)

    def edit(data: dict[str, bytes]) -> None:
        for name in names:
            data[name] = faults.rounded(change(faults.values(data, name)))

    return [str(source), str(edited(source, folder / "b", edit))]


MERGED: dict[str, tuple[Sequence[str], int, Sequence[str]]] = {
    "one in the middle": ([MIDDLE], 4, ["L2.attn_q.weight"]),
    "one in the first layer": ([FIRST], 4, ["L0.attn_q.weight"]),
    "of one column": ([MIDDLE], 1, ["L2.attn_q.weight"]),
    "of rank 16": ([MIDDLE], 16, ["L2.attn_q.weight"]),
    "two of two layers": (
        [MIDDLE, PROJECTION.format(3, "v")], 4, ["L2.attn_q.weight", "L3.attn_v.weight"],
    ),
    "the head": (["lm_head.weight"], 4, ["output.weight"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGED)
def test_a_product_in_few_matrices_is_a_merged_adapter(name: str, tmp_path: Path) -> None:
    names, rank, where = MERGED[name]
    found = diagnose(*pair(tmp_path, names, product(rank)))
    assert (found.verdict, found.cause) == ("not_comparable", "lora_merge")
    assert [list(finding.where) for finding in found.findings] == [where]
    assert f"B - A has rank {rank}" in found.findings[0].says


OTHERS: dict[str, Callable[[Values], Values]] = {
    "of full rank": product(faults.HIDDEN),
    "of half the rank": product(faults.HIDDEN // 2),
    "other numbers": lambda matrix: np.random.default_rng(3).permuted(-matrix),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_change_of_no_low_rank_in_one_matrix_is_a_stale_tensor(name: str, tmp_path: Path) -> None:
    found = diagnose(*pair(tmp_path, [MIDDLE], OTHERS[name]))
    assert (found.verdict, found.cause) == ("bug", "stale_tensor")


INNOCENT: dict[str, Callable[[Values], Values]] = {
    "one column": lambda matrix: matrix * np.where(np.arange(matrix.shape[1]) == 5, 3, 1),
    "one row": lambda matrix: matrix * np.where(np.arange(len(matrix)) == 5, 3, 1)[:, None],
    "a factor": lambda matrix: 2 * matrix,
    "zeros": lambda matrix: 0 * matrix,
    "nothing": lambda matrix: matrix,
}


@pytest.mark.parametrize("name", INNOCENT)
def test_what_has_a_low_rank_for_another_reason_is_no_merge(name: str, tmp_path: Path) -> None:
    sides = pair(tmp_path, [MIDDLE], lambda matrix: np.float32(INNOCENT[name](matrix)))
    causes = {row.explanation.cause for row in diff(*sides).tensors if row.explanation is not None}
    assert not causes & {"lora_merge", "partial_merge", "derived"}
