"""What is a truncated decomposition, of one matrix or of a model, and what only looks like one.

Seen red: a rank that is not held against the other side, and stacks taken as one matrix.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.tensor.low_rank import _truncation
from aprfmt.compare import diff
from tests.causes import faults
from tests.causes.tensor.low_rank import cut
from tests.compare.test_verdicts import edited
from tests.conversion.folders import llama_folder

RNG = np.random.default_rng(3)
FULL = RNG.standard_normal((48, 32)).astype(np.float32)


def test_directions_that_are_not_the_largest_are_not_called_so() -> None:
    left, sizes, right = np.linalg.svd(FULL, full_matrices=False)
    middle = ((left[:, 4:12] * sizes[4:12]) @ right[4:12]).astype(np.float32)
    found = _truncation(FULL, middle, 0.0)
    assert found is not None and found.rank == 8 and "directions" in found.what
    largest = _truncation(FULL, cut(FULL, 8), 0.0)
    assert largest is not None and "8 largest singular values" in largest.what


INNOCENT: dict[str, Callable[[Any], Any]] = {
    "of another matrix": lambda x: cut(np.roll(x, 1, 0) + x, 8),
    "high rank": lambda x: cut(x, 24),
    "one large row": lambda x: np.where(np.arange(48)[:, None] < 1, 1e4 * x, RNG.permuted(x)),
    "columns lost": lambda x: np.where(np.arange(32) < 8, x, 0),
    "trained": lambda x: x + cut(RNG.standard_normal(x.shape), 4) * np.float32(0.1),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_what_is_no_truncation_is_not_called_one(name: str) -> None:
    made = np.asarray(INNOCENT[name](FULL), np.float32)
    assert _truncation(FULL, made, 0.0) is None


def test_a_model_cut_as_a_whole_is_derived(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16", hidden=faults.HIDDEN, layers=2)

    def change(data: dict[str, bytes]) -> None:
        for name in data:
            if "proj" in name:
                data[name] = faults.rounded(cut(faults.values(data, name), 12))

    rows = {row.key: row for row in diff(source, edited(source, tmp_path / "b", change)).tensors}
    cut_rows = [row for row in rows.values() if "attn_q" in row.key or "ffn_up" in row.key]
    assert len(cut_rows) == 4
    assert {row.explanation.cause for row in cut_rows if row.explanation} == {"derived"}
