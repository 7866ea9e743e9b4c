"""Blocks of arrays that are stored in parts, against numpy's slices of the whole.

Seen red: a part's first column taken for the block's, rows of the second part counted from the
first, a sum without its last part, the statistics without the last rows, pieces without what was
left of the rows before, halves of distances that are not the kernel's, a last part of fewer
elements that is not taken, parts taken again after the buffer has moved.
"""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aprfmt.codecs import native_kernels
from aprfmt.errors import FormatError, UsageError
from aprfmt.inference.engines import tiles as tiles_module
from aprfmt.inference.engines.dump_folders import Dump, Pass
from aprfmt.inference.engines.rank_joining import JoinedArray
from aprfmt.inference.engines.sequences import align
from aprfmt.inference.engines.tiles import (
    MeasuredTiles,
    StoredRows,
    Tiles,
    add_up,
    join_columns,
    join_rows,
)
from aprfmt.measure import distances
from aprfmt.tensors.stats import PART, compute_stats

F32 = NDArray[np.float32]


def tiles_of(values: F32, stored: bool = False) -> Tiles:
    """Return the blocks of an array in memory; `stored`: with its bytes as a file's."""

    def fill(row: int, column: int, out: F32) -> None:
        block = values[row : row + out.shape[0], column : column + out.shape[1]]
        assert block.shape == out.shape and row >= 0 and column >= 0
        out[...] = block

    rows, width = values.shape

    def held(row: int, count: int) -> list[StoredRows]:
        raw = memoryview(values[row : row + count].tobytes())
        return [StoredRows("F32", raw, width, 0, width, lambda: None, "here")]

    return Tiles(rows, width, fill, held if stored else None)


def drawn(rows: int, width: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


A, B, C = drawn(7, 5), drawn(7, 5, 1), drawn(7, 5, 2)
WIDE, LONG = drawn(7, 11, 3), drawn(4, 5, 4)
MADE: dict[str, tuple[Tiles, F32]] = {
    "beside": (join_columns([tiles_of(A), tiles_of(WIDE)]), np.hstack([A, WIDE])),
    "below": (join_rows([tiles_of(A), tiles_of(LONG), tiles_of(B)]), np.vstack([A, LONG, B])),
    "sum": (add_up([tiles_of(A), tiles_of(B), tiles_of(C)]), A + B + C),
    "columns": (tiles_of(WIDE).columns(3, 6), WIDE[:, 3:9]),
    "rows": (tiles_of(WIDE).row_range(2, 4), WIDE[2:6]),
    "columns of both": (
        join_columns([tiles_of(A), tiles_of(WIDE)]).columns(4, 3), np.hstack([A, WIDE])[:, 4:7]
    ),
    "parts beside each other, interleaved": (
        join_columns([tiles_of(A).columns(0, 2), tiles_of(B).columns(0, 2),
                      tiles_of(A).columns(2, 3), tiles_of(B).columns(2, 3)]),
        np.hstack([A[:, :2], B[:, :2], A[:, 2:], B[:, 2:]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_every_block_is_that_of_the_whole(kind: str) -> None:
    tiles, whole = MADE[kind]
    assert (tiles.rows, tiles.width) == whole.shape
    for top in range(tiles.rows):
        for left in range(tiles.width):
            for bottom in range(top + 1, tiles.rows + 1):
                for right in range(left + 1, tiles.width + 1):
                    out = np.full((bottom - top, right - left), np.nan, np.float32)
                    tiles.fill(top, left, out)
                    assert np.array_equal(out, whole[top:bottom, left:right])
    assert np.array_equal(tiles.read(), whole)
    assert np.array_equal(tiles.reader((1, *whole.shape))(), whole[None])
    assert np.array_equal(tiles.some_rows(3), whole[::3])


@pytest.mark.parametrize(
    "rows, width",
    [(1, 1), (3, PART), (2, PART + 1), (300, 2048), (1300, 1000), (5, 1 << 20), (3, 1_500_001)],
)
def test_statistics_are_those_of_the_whole(rows: int, width: int) -> None:
    x = drawn(rows, width)
    assert repr(tiles_of(x).stats()) == repr(compute_stats(x))
    assert repr(tiles_of(x, stored=True).stats()) == repr(compute_stats(x))


@pytest.mark.parametrize("rows", [1, 3, 700])
def test_statistics_of_stored_rows_are_those_of_the_whole(rows: int) -> None:
    """Parts side by side, columns and rows of them; a sum and rows below are computed."""
    x, y = (drawn(rows, width, width) for width in (1000, 37))
    x[rows // 2, 7] = np.nan
    beside = join_columns([tiles_of(x, True), tiles_of(y, True)])
    whole = np.hstack([x, y])
    for tiles, expected in (
        (beside, whole),
        (beside.columns(990, 30), whole[:, 990:1020]),
        (beside.columns(1000, 37).row_range(rows // 3, rows - rows // 3), y[rows // 3 :]),
        (join_columns([beside.columns(5, 3), beside.columns(1, 1)]), whole[:, [5, 6, 7, 1]]),
    ):
        assert tiles.stored is not None
        assert repr(tiles.stats()) == repr(compute_stats(np.ascontiguousarray(expected)))
    for tiles, expected in (
        (add_up([tiles_of(x, True), tiles_of(x, True)]), x + x),
        (join_rows([tiles_of(x, True), tiles_of(x, True)]), np.vstack([x, x])),
        (join_columns([tiles_of(x, True), tiles_of(y)]), whole),
    ):
        assert tiles.stored is None
        assert repr(tiles.stats()) == repr(compute_stats(expected))


@pytest.mark.parametrize("parts", [256, 257])
def test_of_many_files_few_are_held_at_a_time(parts: int) -> None:
    x = drawn(9, parts)
    open_rows: list[int] = []

    def part(column: int) -> Tiles:
        own = tiles_of(np.ascontiguousarray(x[:, column : column + 1]), True)

        def held(row: int, count: int) -> list[StoredRows]:
            assert own.stored is not None
            open_rows.append(column)
            assert len(open_rows) <= 256
            return [one._replace(drop=open_rows.clear) for one in own.stored(row, count)]

        return replace(own, stored=held)

    tiles = join_columns([part(column) for column in range(parts)])
    assert repr(tiles.stats()) == repr(compute_stats(x))


@pytest.mark.parametrize(
    "rows, width", [(1, 1), (3, PART), (300, 2048), (1300, 1000), (5, 1 << 20)]
)
@pytest.mark.parametrize("pieces", ["whole", "one", "thirds", "hundreds", "halves"])
def test_who_reads_all_values_has_their_statistics(rows: int, width: int, pieces: str) -> None:
    """By whole arrays and by pieces of any sizes; nothing is filled again for them."""
    if native_kernels() is None:
        pytest.skip("NOT-RUN: the C extension is not built")
    x = drawn(rows, width)
    x[rows // 2, width // 2] = np.inf
    filled: list[int] = []
    own = tiles_of(x)

    def fill(row: int, column: int, out: F32) -> None:
        filled.append(out.size)
        own.fill(row, column, out)

    tiles, size = MeasuredTiles(replace(own, fill=fill)), x.size
    counts = {
        "one": [size],
        "thirds": [size // 3, size - size // 3],
        "hundreds": [*[997] * (size // 997), size % 997],
        "halves": list(distances._kernel_runs(size)),
    }
    if pieces == "whole":
        assert np.array_equal(tiles.read((1, rows, width)), x[None])
    else:
        starts = accumulate(counts[pieces], initial=0)
        for piece, start in zip(tiles.pieces(counts[pieces]), starts, strict=False):
            assert np.array_equal(piece, x.reshape(-1)[start : start + piece.size])
    tiles.close()
    assert repr(tiles.stats()) == repr(compute_stats(x))
    assert sum(filled) == size
    with pytest.raises(UsageError, match="closed"):
        tiles.read((rows, width))


def test_statistics_that_nobody_took_are_an_error_after_closing() -> None:
    tiles = MeasuredTiles(tiles_of(A))
    next(tiles.pieces([3, 32]))
    tiles.close()
    with pytest.raises(UsageError, match="inside of the `with`"):
        tiles.stats()


def test_bytes_that_do_not_fit_their_rows_are_an_error_of_the_file() -> None:
    def short(row: int, count: int) -> list[StoredRows]:
        raw = memoryview(A[row : row + count].tobytes())[:-4]
        return [StoredRows("F32", raw, 5, 0, 5, lambda: None, "a.pt: x")]

    if native_kernels() is None:
        pytest.skip("NOT-RUN: the C extension is not built")
    with pytest.raises(FormatError, match=r"a\.pt: x: F32: found 136 bytes"):
        Tiles(7, 5, tiles_of(A).fill, short).stats()


def of_pass(values: F32, step: int, positions: list[int], mask: list[int]) -> Pass:
    """Return a pass of one array "x", with the positions of its tokens."""

    def array(name: str, held: NDArray[Any], tiles: Tiles | None = None) -> JoinedArray:
        return JoinedArray(name, held.shape, str(held.dtype), lambda: held, tiles=tiles)

    batch = {
        "ids": array("input_ids", np.array(positions)[None] + 1),
        "positions": array("positions", np.array(positions)[None]),
        "mask": array("attention_mask", np.array(mask)[None]),
        "lengths": array("seq_lens", np.array([len(positions)])),
    }
    return Pass(step, 0, {"x": array("x", values, tiles_of(values))}, batch)


@pytest.mark.parametrize(
    "passes, in_blocks",
    [
        ([([0, 1, 2, 3], [1, 1, 1, 1])], True),
        ([([0, 0, 1, 2], [0, 1, 1, 1])], True),  # padded on the left
        ([([0, 1, 2, 2], [1, 1, 1, 0])], True),
        ([([0, 0, 1, 2], [1, 0, 1, 1])], False),  # padded inside
        ([([0, 2, 1, 3], [1, 1, 1, 1])], False),  # chunks of context parallelism
        ([([0, 1, 2], [1, 1, 1]), ([3], [1]), ([4], [1])], True),
        ([([0, 1, 5, 6], [1, 1, 1, 1]), ([7, 8], [1, 1])], None),  # tokens are in no pass
    ],
)
def test_rows_of_passes_come_in_the_order_of_positions(
    passes: list[tuple[list[int], list[int]]], in_blocks: bool | None
) -> None:
    made, wanted = [], dict[int, F32]()
    for step, (positions, mask) in enumerate(passes):
        values = drawn(len(positions), 6, step)
        wanted |= {at: values[row] for row, at in enumerate(positions) if mask[row]}
        made.append(of_pass(values, step, positions, mask))
    dump = Dump(tuple(made), {}, {})
    if in_blocks is None:
        with pytest.raises(FormatError, match="in no pass"):
            align(dump, None)
        return
    found = align(dump, None).arrays["x"]
    expected = np.array([wanted[at] for at in sorted(wanted)])
    assert np.array_equal(found.read(), expected)
    assert (found.tiles is not None) == in_blocks
    if found.tiles is not None:
        assert np.array_equal(found.tiles.read(), expected)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("counts", [(1,), (3, 1, 2), (2,) * 9, (0, 5, 0, 7)])
@pytest.mark.parametrize("ahead", [1, 12, 1 << 18])
def test_pieces_are_the_elements_in_order(
    kind: str, counts: tuple[int, ...], ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles_module, "_AHEAD", ahead)
    tiles, whole = MADE[kind]
    counts = (*counts, whole.size - sum(counts))
    found = [piece.copy() for piece in tiles.pieces(counts)]
    assert [piece.size for piece in found] == list(counts)
    assert np.array_equal(np.concatenate(found), whole.reshape(-1))


@pytest.mark.skipif(native_kernels() is None, reason="pieces are compared by a kernel")
@pytest.mark.parametrize("piece", [256, 1000, 1 << 17])
@pytest.mark.parametrize("change", [0.0, 1e-3, 1.0])
def test_distances_of_pieces_are_those_of_the_whole(
    piece: int, change: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distances, "_PIECE", piece)
    for rows, width in [(1, 1), (3, 5), *((40 + 7 * n, 31 + n) for n in range(40)), (411, 1031)]:
        x = drawn(rows, width)
        y = x + np.float32(change) * drawn(rows, width, 1)
        found = distances.measure_blocks(tiles_of(x), tiles_of(y), (rows, width))
        assert found is not None
        assert found == distances.measure_values(x.ravel(), y.ravel(), None, (rows, width))
        apart = np.linalg.norm(np.float64(x) - y) / np.linalg.norm(np.float64(y))
        assert found.rel == pytest.approx(apart)


@pytest.mark.skipif(native_kernels() is None, reason="stored rows are compared by a kernel")
@pytest.mark.parametrize("piece, together", [(256, 1), (1000, 4096), (1 << 17, 1 << 18)])
@pytest.mark.parametrize("change", [0.0, 1e-3])
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 5), (77, 331), (3, PART + 9), (411, 1031)])
def test_stored_rows_are_measured_as_the_whole_and_leave_their_statistics(
    piece: int, together: int, change: float, rows: int, width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One side is of files beside one another, the other of one; nothing is decoded before."""
    monkeypatch.setattr(distances, "_PIECE", piece)
    monkeypatch.setattr(distances, "_TOGETHER", together)
    x = drawn(rows, width)
    y = x + np.float32(change) * drawn(rows, width, 1)
    cuts = sorted({0, width // 3, width // 2, width})
    beside = join_columns(
        [tiles_of(np.ascontiguousarray(x[:, a:b]), True) for a, b in pairwise(cuts)]
    )
    sides = [MeasuredTiles(replace(one, fill=refuse)) for one in (beside, tiles_of(y, True))]
    found = distances.measure_blocks(sides[0], sides[1], (rows, width))
    assert found == distances.measure_values(x.ravel(), y.ravel(), None, (rows, width))
    for side, values in zip(sides, (x, y), strict=True):
        side.close()
        assert repr(side.stats()) == repr(compute_stats(values))


def refuse(row: int, column: int, out: F32) -> None:
    """Raise AssertionError: a block was decoded."""
    raise AssertionError("a block was decoded")


@pytest.mark.skipif(native_kernels() is None, reason="stored rows are compared by a kernel")
def test_stored_rows_of_another_size_are_an_error_of_the_file() -> None:
    def short(row: int, count: int) -> list[StoredRows]:
        raw = memoryview(A[row : row + count].tobytes())[:-20]
        return [StoredRows("F32", raw, 5, 0, 5, lambda: None, "a.pt: x")]

    damaged = Tiles(7, 5, tiles_of(A).fill, short)
    for sides in ((damaged, tiles_of(A, True)), (tiles_of(A, True), damaged)):
        with pytest.raises(FormatError, match=r"a\.pt: x: F32: found .* bytes for . rows"):
            distances.measure_blocks(*sides, A.shape)


@pytest.mark.skipif(native_kernels() is None, reason="stored rows are compared by a kernel")
def test_one_array_can_be_compared_with_itself_where_it_is_stored() -> None:
    tiles, x = MeasuredTiles(tiles_of(A, True)), A.ravel()
    found = distances.measure_blocks(tiles, tiles, A.shape)
    assert (
        found == distances.measure_values(x, x, None, A.shape) and found is not None and found.bits
    )
    assert repr(tiles.stats()) == repr(compute_stats(A))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_pieces_that_are_not_finite_are_left_to_whole_arrays(odd: float, stored: bool) -> None:
    for side in (0, 1):
        sides = [drawn(300, 900), drawn(300, 900)]
        sides[side][250, 7] = odd
        tiles = [tiles_of(side, stored) for side in sides]
        assert distances.measure_blocks(tiles[0], tiles[1], (300, 900)) is None


def test_arrays_of_other_sizes_are_not_compared_in_pieces() -> None:
    assert distances.measure_blocks(tiles_of(A), tiles_of(WIDE), A.shape) is None
