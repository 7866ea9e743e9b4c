"""Rows of a mapped tensor in another order: gathered at once or run by run, to the same bytes.

Seen red: rows beginning at a window's first one, a row of another size taken for one of these.
"""

import random
from pathlib import Path

import pytest

from aprfmt.arch.spec import Move
from aprfmt.base.columns import Columns
from aprfmt.base.protocols import TensorInfo
from aprfmt.formats.mapped import MappedFile, MemoryTensor, StoredTensor
from aprfmt.tensors.runs import RunBytes, element_runs, windows

ROWS, COLUMNS, AT = 60, 10, 3  # F16: rows of 20 bytes, behind three others


@pytest.fixture
def tensor(tmp_path: Path) -> StoredTensor:
    path = tmp_path / "x"
    path.write_bytes(random.Random(4).randbytes(AT + 2 * ROWS * COLUMNS))
    info = TensorInfo("x", (ROWS, COLUMNS), "F16", AT, 2 * ROWS * COLUMNS, 2 * COLUMNS)
    return StoredTensor(MappedFile(path), info)


def moves(kind: str) -> list[Move]:
    """Take every row, none beside its neighbour; one of them in halves, or two at once."""
    order = [*range(0, ROWS, 2), *range(1, ROWS, 2)]
    found = [Move(0, row * COLUMNS, COLUMNS) for row in order]
    if kind == "doubled":
        found[3] = Move(0, order[3] * COLUMNS, 2 * COLUMNS)
    if kind == "halves":
        half = COLUMNS // 2
        found[3:4] = [Move(0, order[3] * COLUMNS + half, half), Move(0, order[3] * COLUMNS, half)]
    return found


@pytest.mark.parametrize("kind", ["even", "halves", "doubled"])
@pytest.mark.parametrize("mapped", [False, True])
def test_windows_of_rows(kind: str, mapped: bool, tensor: StoredTensor) -> None:
    held = bytes(tensor.raw())
    stored = tensor if mapped else MemoryTensor(tensor.info, held)
    wanted = moves(kind)
    expected = b"".join(held[2 * m.start : 2 * (m.start + m.count)] for m in wanted)
    runs = element_runs([stored], wanted)
    assert isinstance(runs, Columns)
    data = RunBytes(runs)
    assert (data._rows is not None) == (mapped and kind == "even")
    assert len(data) == len(expected)
    for start in (0, 1, 19, 20, 21, 400):
        for stop in (start, start + 1, start + 20, start + 39, len(expected)):
            assert bytes(data.window(start, stop)) == expected[start:stop], (start, stop)
    for size in (7, 20, 64, 1 << 20):
        assert b"".join(windows(runs, size)) == expected
