"""What is a truncated decomposition, of one matrix or of a model, and what only looks like one.

Seen red: a rank that is not held against the other side, and stacks taken as one matrix.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from aprfmt.causes.tensor import low_rank
from aprfmt.causes.tensor.low_rank import MatrixPair, _truncation
from aprfmt.compare import diff
from tests.causes import faults
from tests.causes.tensor.low_rank import cut
from tests.compare.test_verdicts import edited
from tests.conversion.folders import llama_folder

RNG = np.random.default_rng(3)
FULL = RNG.standard_normal((48, 32)).astype(np.float32)


class Held:
    """Rows of an array [rows, columns], as a reader of a tensor gives them."""

    def __init__(self, values: Any) -> None:
        self.values, self.columns = values, values.shape[1]
        self.side = self

    def take(self, index: Any) -> Any:
        return self.values[index]

    def drop(self) -> None:
        pass


def matrices(full: Any, part: Any) -> MatrixPair:
    return MatrixPair(cast(Any, Held(full)), cast(Any, Held(part)), 0, len(full))


def test_directions_that_are_not_the_largest_are_not_called_so() -> None:
    left, sizes, right = np.linalg.svd(FULL, full_matrices=False)
    middle = ((left[:, 4:12] * sizes[4:12]) @ right[4:12]).astype(np.float32)
    found = _truncation(matrices(FULL, middle), 0.0)
    assert found is not None and found.rank == 8 and "directions" in found.what
    largest = _truncation(matrices(FULL, cut(FULL, 8)), 0.0)
    assert largest is not None and "8 largest singular values" in largest.what


@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
def test_a_cut_is_told_alike_whatever_the_size_of_a_piece(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: sums of a piece that took the place of those before it."""
    full = FULL.reshape(shape)
    made = [cut(full, 6), cut(full, 6) + np.float32(1e-2) * full]
    told = []
    for window in (1 << 20, 5 * shape[1], 1):
        monkeypatch.setattr(low_rank, "WINDOW", window)
        assert len(list(matrices(full, full).pieces())) == -(
            -shape[0] // max(1, window // shape[1])
        )
        found = _truncation(matrices(full, made[0]), 0.0)
        assert found is not None and _truncation(matrices(full, made[1]), 0.0) is None
        told.append((found.rank, found.what, found.free))
        lost = np.linalg.norm(full - made[0]) / np.linalg.norm(full)
        assert found.after < 1e-5 < lost
    assert told == told[:1] * 3 and told[0][0] == 6 and "largest" in told[0][1]


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
    assert _truncation(matrices(FULL, made), 0.0) is None


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
