"""Packed weights read by rows: only what is asked for is decoded, wherever steps moved it.

Seen red: rows of the first tensor for every one, a weight decoded whole, rows taken from the start
of a run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.arch.spec import Move
from aprfmt.codecs.weight_layout import WeightLayout
from aprfmt.conversion import packed_weights
from aprfmt.inference.rows import StoredRows
from aprfmt.tensors.packed_rows import packed_rows
from tests.conversion.dialect_folders import FOLDERS, write_folder


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of rows that are decoded from now on."""
    seen: list[int] = []
    fill = WeightLayout._fill

    def noted(self: WeightLayout, matrix: int, first: int, out: "np.ndarray", fresh: bool) -> None:
        seen.append(len(out))
        fill(self, matrix, first, out, fresh)

    monkeypatch.setattr(WeightLayout, "_fill", noted)
    return seen


@pytest.mark.parametrize("dialect", FOLDERS)
def test_rows_of_a_packed_weight(dialect: str, tmp_path: Path, decoded: list[int]) -> None:
    expected = write_folder(tmp_path / "m", dialect)
    with aprfmt.open(tmp_path / "m") as model:
        for name, known in expected.items():
            view, values, count = model[name], model[name].numpy(), len(known)
            assert np.array_equal(values, known)
            assert view.by_rows is not None and StoredRows(view).by_rows
            assert view.rows(0, 1).tobytes() == values[:1].tobytes()  # its zeros are decoded once
            decoded.clear()
            assert view.rows(3, 6).tobytes() == values[3:6].tobytes()
            assert np.array_equal(view[count - 2], values[-2])
            assert np.array_equal(view[1:5:2, 3], values[1:5:2, 3])
            assert max(decoded) <= 4
            pieces = list(view.chunks(2 * values.shape[1]))
            assert max(decoded) <= 4 and len(pieces) == count // 2
            assert np.concatenate([piece for *_, piece in pieces]).tobytes() == values.tobytes()


def test_rows_that_steps_moved(tmp_path: Path, decoded: list[int]) -> None:
    expected = write_folder(tmp_path / "m", "fp8_block")
    names = [name for name in expected if "up_proj" in name]
    with aprfmt.open(tmp_path / "m") as model:
        stored = [model[name].stored[0] for name in names]
        wide = expected[names[0]].shape[1]

        def moved(*rows: tuple[int, int, int]) -> Sequence[Move]:
            return [Move(which, first * wide, count * wide) for which, first, count in rows]

        order = moved((1, 8, 2), (0, 3, 1), (0, 5, 1), (0, 4, 1), (1, 0, 4), (0, 0, 1), (0, 15, 1))
        rows = packed_rows(stored, order, (11, wide))
        assert rows is not None
        a, b = (expected[name] for name in names[:2])
        wanted = np.concatenate([b[8:10], a[3:4], a[5:6], a[4:5], b[:4], a[:1], a[15:16]])
        for start, stop in ((0, 11), (1, 4), (4, 8), (9, 11), (3, 3)):
            decoded.clear()
            assert rows.rows(start, stop).tobytes() == wanted[start:stop].tobytes()
            assert sum(decoded) <= 2 * (stop - start)
        half = [Move(0, 0, wide // 2), Move(0, wide // 2, wide - wide // 2)]
        assert packed_rows(stored, half, (1, wide)) is None  # a row that is cut
        assert packed_rows(stored, None, (1, wide)) is None


def test_small_parts_of_a_weight_are_kept_and_large_ones_made_again() -> None:
    """Each weight is encoded once for all of its scales, however the file orders its tensors."""
    made = {"": bytes(8), "absmax": b"scale", "large": bytes(packed_weights._SMALL + 1)}
    runs: list[int] = []

    def encode(values: Any) -> dict[str, bytes]:
        runs.append(1)
        return made

    latest = packed_weights.LatestParts()
    weight = packed_weights.BnbWeight(
        "w", "NF4", (4, 4), lambda: np.ones((4, 4), np.float32), encode, latest, counted=True
    )
    for suffix, count in (("", 1), ("absmax", 1), ("large", 1)):
        assert weight.part(suffix) == made[suffix] and len(runs) == count
    for suffix, count in (("absmax", 1), ("large", 2), ("", 3)):
        latest.name = "another"
        assert weight.part(suffix) == made[suffix] and len(runs) == count
