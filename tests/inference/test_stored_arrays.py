"""Arrays that are read from mapped files by range; numpy and torch have the numbers."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from aprfmt.base.protocols import TensorInfo
from aprfmt.errors import AprfmtError, FormatError, UsageError
from aprfmt.formats import open_source
from aprfmt.formats.mapped_file import MappedFile, MemoryTensor
from aprfmt.inference.engines import stored_arrays
from aprfmt.inference.engines.stored_arrays import (
    INTEGERS,
    FilePool,
    Region,
    StoredArray,
    region_of,
)

RNG = np.random.default_rng(7)
SHAPE = (6, 10)
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
START = 24  # bytes of the file before the array


def stored(encoding: str, shape: tuple[int, ...] = SHAPE) -> tuple[bytes, np.ndarray]:
    """Return the bytes of an array, and its numbers as they are read."""
    if encoding in FLOATS:
        values = torch.tensor(RNG.standard_normal(shape)).to(FLOATS[encoding])
        wide = torch.float64 if encoding == "F64" else torch.float32
        return values.contiguous().view(torch.uint8).numpy().tobytes(), values.to(wide).numpy()
    kind = np.dtype(INTEGERS[encoding])
    whole = RNG.integers(0, 2 if encoding == "BOOL" else 256, (*shape, kind.itemsize), np.uint8)
    return whole.tobytes(), whole.view(kind).reshape(shape)


def region(path: Path, encoding: str, data: bytes, shape: tuple[int, ...] = SHAPE) -> Region:
    path.write_bytes(b"?" * START + data + b"!" * 9)
    file = MappedFile(path)
    identity = file.identity
    file.close()
    return Region(path, identity, START, len(data), encoding, shape)


@pytest.mark.parametrize("encoding", [*FLOATS, *INTEGERS])
def test_an_array_is_read_as_it_is_stored(encoding: str, tmp_path: Path) -> None:
    data, values = stored(encoding)
    where = region(tmp_path / "f", encoding, data)
    with ExitStack() as stack:
        array = FilePool(stack).array(where, "here")
        found = array.read()
        assert found.dtype == values.dtype and np.array_equal(found, values)
        kept = array.stored()
        assert kept.form == encoding
        assert b"".join(bytes(window) for window in kept.windows()) == data


@pytest.mark.parametrize("window", [1, 7, 64, 10_000])
def test_stored_bytes_come_in_windows(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_arrays, "WINDOW", window)
    data, _ = stored("F32")
    asked: list[tuple[str, int, int]] = []

    def raw(start: int, stop: int) -> memoryview:
        asked.append(("raw", start, stop))
        return memoryview(data)[start:stop]

    array = StoredArray(
        "here", "F32", SHAPE, len(data), raw, lambda a, b: asked.append(("drop", a, b))
    )
    assert b"".join(array.stored().windows()) == data
    ends = [(at, min(at + window, len(data))) for at in range(0, len(data), window)]
    assert asked == [(what, *end) for end in ends for what in ("raw", "drop")]


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", [(6, 10), (1, 6, 10)])
@pytest.mark.parametrize("native", [True, False])
def test_blocks_of_an_array_are_its_rows_and_columns(
    encoding: str, shape: tuple[int, ...], native: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not native:
        monkeypatch.setattr(stored_arrays, "native_kernels", lambda: None)
    data, values = stored(encoding, shape)
    values = values.reshape(6, 10)
    where = region(tmp_path / "f", encoding, data, shape)
    with ExitStack() as stack:
        tiles = FilePool(stack).array(where, "here").tiles()
        assert tiles is not None and (tiles.rows, tiles.width) == (6, 10)
        for row, column, rows, columns in (
            (0, 0, 6, 10),
            (2, 3, 3, 4),
            (5, 9, 1, 1),
            (1, 0, 2, 10),
        ):
            out = np.full((rows, columns), np.nan, np.float32)
            tiles.fill(row, column, out)
            assert np.array_equal(out, values[row : row + rows, column : column + columns])
        assert tiles.stored is not None
        size = len(data) // values.size
        (held,) = tiles.stored(2, 3)
        assert bytes(held.raw) == data[2 * 10 * size : 5 * 10 * size]
        assert (held.encoding, held.columns, held.first, held.wide) == (encoding, 10, 0, 10)
        del held


@pytest.mark.parametrize(
    ("encoding", "shape"),
    [("F64", (6, 10)), ("I32", (6, 10)), ("F32", (10,)), ("F32", (2, 3, 10)), ("F32", (0, 10)),
     ("F32", (1, 1, 6, 10))],
)  # fmt: skip
def test_other_arrays_have_no_blocks(encoding: str, shape: tuple[int, ...]) -> None:
    array = StoredArray("here", encoding, shape, 0, lambda a, b: memoryview(b""), lambda a, b: None)
    assert array.tiles() is None


def test_complex_and_damaged_arrays_are_refused_by_name() -> None:
    def array(encoding: str, data: bytes) -> StoredArray:
        return StoredArray(
            "here",
            encoding,
            SHAPE,
            len(data),
            lambda a, b: memoryview(data)[a:b],
            lambda a, b: None,
        )

    with pytest.raises(FormatError, match=r"^here: holds complex numbers"):
        array("C64", b"\0" * 480).read()
    with pytest.raises(FormatError, match=r"^here: "):
        array("F32", b"\0" * 239).read()


def test_files_are_mapped_again_when_others_took_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FilePool, "MOST", 2)
    made: list[str] = []

    class Counted(MappedFile):
        def __init__(self, path: Path, *args: Any) -> None:
            made.append(path.name)
            super().__init__(path, *args)

    regions = {}
    for name in "abc":
        data, _ = stored("U8")
        regions[name] = region(tmp_path / name, "U8", data), data
    monkeypatch.setattr(stored_arrays, "MappedFile", Counted)
    with ExitStack() as stack:
        pool = FilePool(stack)
        for name in "ababcab":  # `c` takes the place of `a`, which was used longest ago, and so on
            where, data = regions[name]
            view = pool.view(where, 3, 9)
            assert bytes(view) == data[3:9]
            del view
            pool.drop(where, 3, 9)
        assert "".join(made) == "abcab"
        pool.drop(regions["c"][0], 0, 1)  # closed long ago: nothing to release
        array = pool.array(*[regions["a"][0], "here"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a: is closed"):
        array.read()
    with pytest.raises(UsageError, match="a: is closed"):
        pool.view(regions["a"][0], 0, 1)


def test_files_are_closed_with_the_stack_and_pages_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = stored("F32")
    where = region(tmp_path / "f", "F32", data)
    told: list[Any] = []

    class Told(MappedFile):
        def drop(self, *ends: int) -> None:
            told.append(ends)
            super().drop(*ends)

        def close(self) -> None:
            told.append("closed")
            super().close()

    monkeypatch.setattr(stored_arrays, "MappedFile", Told)
    with ExitStack() as stack:
        array = FilePool(stack).array(where, "here")
        array.read()
        assert told == [(START, START + len(data))]
        tiles = array.tiles()
        assert tiles is not None
        tiles.fill(1, 2, np.empty((2, 3), np.float32))
        assert told[1:] == [(START + 40, START + 120)]
    assert told[2:] == ["closed"]


def test_only_a_mapped_file_s_own_bytes_have_a_place(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}, path)
    with open_source(path) as source:
        for name, tensor in source.tensors.items():
            found = region_of(tensor)
            assert found is not None and found.path == path and found.identity
            info = tensor.info
            assert (found.encoding, found.shape) == (info.encoding, tuple(info.shape))
            whole = path.read_bytes()[found.start : found.start + found.nbytes]
            assert whole == bytes(tensor.raw()) and found.nbytes == {"a": 24, "b": 8}[name]
    memory = MemoryTensor(TensorInfo("m", (2,), "F32", 0, 8, 8), b"\0" * 8)
    assert region_of(memory) is None


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    data, _ = stored("U8")
    where = region(tmp_path / "f", "U8", data)
    other = tmp_path / "g"
    other.write_bytes(where.path.read_bytes())
    os.replace(other, where.path)
    with ExitStack() as stack, pytest.raises(AprfmtError, match="f"):
        FilePool(stack).view(where, 0, 4)
