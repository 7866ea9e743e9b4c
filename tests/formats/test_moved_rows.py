"""Rows in another order, gathered at once or run by run, to the same bytes.

They are a mapped tensor's, or are made when they are asked for. Seen red: rows beginning at a
window's first one, a row of another size taken for one of these, rows of which two stay neighbours
(the last of a head, the first of the next) read one by one, made rows counted from the first.
"""

import random
from pathlib import Path

import pytest

from aprfmt.arch.spec import Move
from aprfmt.base.columns import Columns
from aprfmt.base.protocols import LazyTensor, TensorInfo
from aprfmt.formats.mapped_file import MappedFile, MemoryTensor, StoredTensor
from aprfmt.tensors.runs import RunBytes, byte_windows, element_runs

ROWS, COLUMNS, AT = 60, 10, 3  # F16: rows of 20 bytes, behind three others


@pytest.fixture
def tensor(tmp_path: Path) -> StoredTensor:
    path = tmp_path / "x"
    path.write_bytes(random.Random(4).randbytes(AT + 2 * ROWS * COLUMNS))
    info = TensorInfo("x", (ROWS, COLUMNS), "F16", AT, 2 * ROWS * COLUMNS, 2 * COLUMNS)
    return StoredTensor(MappedFile(path), info)


class Made(LazyTensor):
    """A tensor that makes its rows; `asked` are the bytes asked for at a time."""

    __slots__ = ("asked", "data", "info")

    info: TensorInfo

    def __init__(self, tensor: StoredTensor) -> None:
        self.info, self.data = tensor.info, bytes(tensor.raw())
        self.asked: list[int] = []

    @property
    def makes(self) -> bool:
        return True

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        return

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        stop = self.info.nbytes if stop is None else stop
        self.asked.append(stop - start)
        return memoryview(self.data)[start:stop]


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
@pytest.mark.parametrize("where", ["memory", "file", "made"])
def test_windows_of_rows(kind: str, where: str, tensor: StoredTensor) -> None:
    held = bytes(tensor.raw())
    every = {"memory": MemoryTensor(tensor.info, held), "file": tensor, "made": Made(tensor)}
    stored = every[where]
    wanted = moves(kind)
    expected = b"".join(held[2 * m.start : 2 * (m.start + m.count)] for m in wanted)
    runs = element_runs([stored], wanted)
    assert isinstance(runs, Columns)
    data = RunBytes(runs)
    gathered = where == "file" or (where == "made" and kind != "halves")
    assert (data._rows is not None) == gathered
    assert len(data) == len(expected)
    for start in (0, 1, 19, 20, 21, 400):
        for stop in (start, start + 1, start + 20, start + 39, len(expected)):
            assert bytes(data.window(start, stop)) == expected[start:stop], (start, stop)
    for size in (7, 20, 64, 1 << 20):
        assert b"".join(byte_windows(runs, size)) == expected


def test_made_rows_are_made_together_where_they_lie_together(tensor: StoredTensor) -> None:
    for step, at_once in ((2, True), (7, False)):  # 7 rows apart, more are made than are used
        made = Made(tensor)
        order = [row for first in range(step) for row in range(first, ROWS, step)]
        runs = element_runs([made], [Move(0, row * COLUMNS, COLUMNS) for row in order])
        assert runs is not None
        window = RunBytes(runs).window(0, 2 * COLUMNS * 8)
        rows = [made.data[2 * COLUMNS * row :][: 2 * COLUMNS] for row in order[:8]]
        assert bytes(window) == b"".join(rows)
        assert (len(made.asked) == 1) == at_once
