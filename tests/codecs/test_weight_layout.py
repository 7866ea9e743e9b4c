"""Packed weights by rows: the kernels against the numpy form, and rows against the whole.

Seen red: nibbles of AWQ in order, E4M3's NaN as 480, a row of tiles counted from the chunk,
the second half of a block in the low nibbles.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs import decode, encode, f4, f6, fp8, weight_layout
from aprfmt.codecs.bits import pairs_to_halves
from aprfmt.codecs.fp8 import OF_TWO_SIGNS
from aprfmt.codecs.weight_layout import (
    GroupNumbers,
    PackedCodes,
    WeightLayout,
    tile_grid,
    wrap_codes,
)
from aprfmt.errors import CodecError
from tests.codecs.levels import level as level
from tests.codecs.levels import native, same_bits

Array = Any
MATRICES, ROWS, COLUMNS = 2, 48, 96  # rows and columns are whole units of every order and width
TALL, WIDE = 144, 144  # more than the kernel takes at a time of both, and a part


def codes(order: str, bits: int, columns: int = COLUMNS, rows: int = ROWS) -> PackedCodes:
    rng = np.random.default_rng(bits)
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "rows": (np.uint8, (rows, -(-columns * bits // 8))),
        "columns": (np.uint32, (columns * bits // 32, rows)),
        "bytes": (np.uint8, (columns * bits // 8, rows)),
        "awq": (np.uint32, (columns, rows // 8)),
        "pairs": (np.uint8, (rows // 2, columns)),
    }
    kind, shape = shapes[order]
    held = rng.integers(0, 1 << 32, (MATRICES, *shape)).astype(kind)
    return PackedCodes(bits, "columns" if order == "bytes" else order, held)


def numbers(down: int, across: int, *, small: bool = False) -> GroupNumbers:
    rng = np.random.default_rng(down + across)
    shape = (MATRICES, down, across)
    if small:
        table = rng.standard_normal((MATRICES, 256)).astype(np.float32)
        return GroupNumbers(rng.integers(0, 256, shape).astype(np.uint8), table)
    return GroupNumbers(rng.standard_normal(shape).astype(np.float32))


def values_of(kind: str, bits: int) -> Array:
    every = np.arange(1 << bits, dtype=np.float32)
    return {
        "integers": every - np.float32(1 << bits - 1),
        "signed": np.where(every < 1 << bits - 1, every, every - np.float32(1 << bits)),
        "mirrored": np.concatenate([half := every[: len(every) // 2] * np.float32(0.3), -half]),
        "table": np.random.default_rng(bits).standard_normal(1 << bits).astype(np.float32),
    }[kind].astype(np.float32)


def by_numpy(weight: WeightLayout, monkeypatch: pytest.MonkeyPatch) -> Array:
    with monkeypatch.context() as patch:
        patch.setattr(weight_layout, "native_kernels", lambda: None)
        return weight.decode()


WEIGHTS: dict[str, Callable[[WeightLayout], WeightLayout]] = {
    "bare": lambda one: one,
    "scale": lambda one: replace(one, scale=numbers(ROWS, 3)),
    "bytes": lambda one: replace(one, tile=(1, 16), scale=numbers(ROWS, 6, small=True)),
    "tiles": lambda one: replace(one, tile=(5, 40), scale=numbers(10, 3)),
    "zero": lambda one: replace(one, scale=numbers(ROWS, 3), zero=numbers(ROWS, 3)),
    "offset": lambda one: replace(one, scale=numbers(ROWS, 3), offset=numbers(ROWS, 3)),
    "odd": lambda one: replace(one, tile=(1, 13), scale=numbers(ROWS, 8), zero=numbers(ROWS, 8)),
    "grouped": lambda one: replace(
        one, scale=numbers(ROWS, 3), zero=numbers(ROWS, 3, small=True),
        group=np.random.default_rng(0).integers(0, 3, COLUMNS).astype(np.int32)),
    "factor": lambda one: replace(
        one, scale=numbers(ROWS, 3), factor=np.linspace(-1, 1, COLUMNS, dtype=np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("kind", ["integers", "signed", "mirrored", "table"])
def test_numbers_of_every_width(
    level: str, bits: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = WeightLayout(
        (MATRICES, ROWS, COLUMNS), codes("rows", bits), values_of(kind, bits), (1, 32)
    )
    for change in WEIGHTS.values():
        weight = change(made)
        same_bits(weight.decode(), by_numpy(weight, monkeypatch))


@pytest.mark.parametrize("table", [f4.CODEC.values, f6.E2M3.values, f6.E3M2.values],
                         ids=["E2M1", "E2M3", "E3M2"])  # fmt: skip
def test_small_floats(level: str, table: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = {16: 4, 64: 6}[len(table)]
    held = np.resize(np.arange(256, dtype=np.uint8), (MATRICES, ROWS, COLUMNS * bits // 8))
    made = WeightLayout((MATRICES, ROWS, COLUMNS), PackedCodes(bits, "rows", held), table, (1, 32))
    assert (made.unpack_rows(0, ROWS) == np.arange(1 << bits)[:, None, None]).any(axis=(1, 2)).all()
    for change in WEIGHTS.values():
        weight = change(made)
        same_bits(weight.decode(), by_numpy(weight, monkeypatch))
    almost = table.copy()
    almost[-1] = 1.25  # one number differs: it is looked up
    weight = replace(made, values=almost)
    same_bits(weight.decode(), by_numpy(weight, monkeypatch))


@pytest.mark.parametrize("order", ["rows", "columns", "bytes", "awq", "pairs"])
def test_codes_in_every_order(level: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = (4,) if order in ("awq", "pairs") else (3, 4, 8)
    for bits in widths:
        weight = WeightLayout(
            (MATRICES, ROWS, COLUMNS), codes(order, bits), values_of("table", bits), (5, 32),
            numbers(10, 3),
        )  # fmt: skip
        expected = by_numpy(weight, monkeypatch)
        whole = weight.decode(threads=2)
        same_bits(whole, expected)
        for start, stop in ((0, 1), (3, 4), (7, 61), (40, 96)):
            same_bits(weight.decode(start, stop), expected[start:stop])


ACROSS: dict[str, Callable[[WeightLayout], WeightLayout]] = {
    "bare": lambda one: one,
    "scale": lambda one: replace(one, scale=numbers(TALL, 2)),
    "zero": lambda one: replace(one, scale=lying(numbers(TALL, 2)), zero=numbers(TALL, 2)),
    "all": lambda one: replace(one, scale=numbers(TALL, 2), zero=numbers(TALL, 2),
                               offset=lying(numbers(TALL, 2))),
    "bytes": lambda one: replace(one, tile=(1, 16), scale=lying(numbers(TALL, 9, small=True))),
    "odd": lambda one: replace(one, tile=(1, 13), scale=numbers(TALL, 12), zero=numbers(TALL, 12)),
    "grouped": lambda one: replace(
        one, scale=numbers(TALL, 5), zero=lying(numbers(TALL, 5, small=True)),
        group=np.random.default_rng(0).integers(0, 5, WIDE).astype(np.int32)),
    "factor": lambda one: replace(
        one, scale=numbers(TALL, 2), factor=np.linspace(-1, 1, WIDE, dtype=np.float32)),
}  # fmt: skip


def lying(found: GroupNumbers) -> GroupNumbers:
    """Return numbers that lie by groups: those of neighbouring rows are neighbours."""
    return found._replace(array=np.ascontiguousarray(found.array.swapaxes(1, 2)).swapaxes(1, 2))


@pytest.mark.parametrize("kind", ["integers", "signed", "mirrored", "table"])
@pytest.mark.parametrize(
    ("order", "bits"),
    [("columns", 2), ("columns", 4), ("columns", 8), ("bytes", 4), ("bytes", 8), ("awq", 4)],
)
def test_codes_that_do_not_lie_in_rows_are_decoded_where_they_lie(
    level: str, order: str, bits: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = WeightLayout(
        (MATRICES, TALL, WIDE), codes(order, bits, WIDE, TALL), values_of(kind, bits), (1, 72)
    )
    for change in ACROSS.values():
        weight = change(made)
        expected = by_numpy(weight, monkeypatch)
        taken = [weight._decodes_across(first, rows) for first, rows in ((0, TALL), (4, 8), (0, 9))]
        assert taken == [weight.group is not None, False, False]
        same_bits(weight.decode(threads=2), expected)  # turned first, but for groups of columns
        with monkeypatch.context() as patch:
            patch.setattr(
                WeightLayout,
                "_decodes_across",
                lambda self, first, rows: not (first % 8 or rows % 8),
            )
            same_bits(weight.decode(), expected)
            for start, stop in ((8, 24), (130, 200), (136, 280)):
                same_bits(weight.decode(start, stop), expected[start:stop])
    if bits == 8:
        weight = replace(made, values=fp8.E4M3.values, scale=numbers(TALL, 2))
        same_bits(weight.decode(), by_numpy(weight, monkeypatch))


@pytest.mark.parametrize("order", ["awq", "pairs"])
def test_columns_may_be_odd_where_rows_share_words(
    level: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = WeightLayout((MATRICES, ROWS, 27), codes(order, 4, 27), values_of("table", 4), (1, 27))
    same_bits(weight.decode(), by_numpy(weight, monkeypatch))


@pytest.mark.parametrize("kind", fp8.OF_TWO_SIGNS, ids=lambda kind: kind.name)
def test_every_code_of_eight_bits(level: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held = np.arange(512).astype(np.uint8).reshape(1, 2, 256)
    weight = WeightLayout((2, 256), PackedCodes(8, "rows", held), kind.values, (1, 256))
    found = weight.decode()
    same_bits(found, by_numpy(weight, monkeypatch))
    assert np.array_equal(found.view(np.uint32)[0], kind.values.view(np.uint32))


def test_rows_that_end_within_a_byte(level: str) -> None:
    rng = np.random.default_rng(0)
    stored: Array = rng.integers(0, 256, 6).astype(np.uint8)
    held, table = wrap_codes(stored[:5], 4, (3, 3), np.arange(16.0))
    each = np.stack([stored & 15, stored >> 4], axis=1).reshape(-1)[:9]
    assert np.array_equal(WeightLayout((3, 3), held, table, (1, 3)).decode(), each.reshape(3, 3))


def test_memory_in_use_is_stored_to_past_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large outputs at every alignment: the stores that need one are not used without it."""
    wide, rows = 4096, 512
    held = np.random.default_rng(0).integers(0, 256, (1, rows, wide // 2)).astype(np.uint8)
    weight = WeightLayout(
        (rows, wide),
        PackedCodes(4, "rows", held),
        values_of("integers", 4),
        (1, 32),
        GroupNumbers(np.random.default_rng(1).random((1, rows, wide // 32), np.float32)),
    )
    expected = by_numpy(weight, monkeypatch)
    room = np.empty(rows * wide + 16, np.float32)
    for skip in range(9):
        out = room[skip : skip + rows * wide].reshape(rows, wide)
        weight.decode_into(out)
        assert np.array_equal(out, expected)


def test_parts_that_do_not_fit_are_refused(level: str) -> None:
    out, streams = np.empty((4, 8), np.float32), np.zeros((4, 4), np.uint8)
    values, scale = np.zeros(16, np.float32), np.zeros((4, 2), np.float32)

    def call(**change: Any) -> None:
        said = {"streams": streams, "bits": 4, "values": values, "at": (0, 1, 4), "scale": scale,
                "table": None, "group": None, "out": out, **change}  # fmt: skip
        native.decode_packed(
            said["streams"], said["bits"], said["values"], said["at"],
            (said["scale"], None, None), (said["table"], None, None), said["group"], said["out"],
        )  # fmt: skip

    call()
    for change in (
        {"streams": streams[:, :3]},
        {"bits": 3},
        {"bits": 0},
        {"values": values[:8]},
        {"at": (1, 1, 4)},
        {"at": (0, 1, 3)},
        {"at": (0, 0, 4)},
        {"at": (0, 1, 0)},
        {"at": (-1, 1, 4)},
        {"scale": scale[:3]},
        {"scale": scale[:, :1]},
        {"scale": scale.astype(np.float64)},
        {"scale": scale[0]},
        {"table": values},
        {"group": np.full(8, 2, np.int32)},
        {"group": np.full(8, -1, np.int32)},
        {"group": np.zeros(7, np.int32)},
        {"streams": streams.T},
        {"out": np.empty(30, np.float32)},
    ):
        with pytest.raises(CodecError):
            call(**change)


@pytest.mark.parametrize("encoding", ["BF16", "F16"])
@pytest.mark.parametrize("tile", [(1, 32), (7, 16), (ROWS, COLUMNS)])
def test_rows_are_encoded_as_what_decodes_them_says(
    level: str, tile: tuple[int, int], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call or by way of numbers: the same bytes, and the same counts of what changed."""
    monkeypatch.setattr(weight_layout, "_CHUNK", 1 << 12)
    rng = np.random.default_rng(3)
    for columns in (COLUMNS, COLUMNS - 5, 20_000):  # the last fill more than is decoded at a time
        grid = (1, *tile_grid((ROWS, columns), tile))
        scale = np.exp2(rng.integers(-40, 40, grid)).astype(np.float32) * 1.37
        held = rng.integers(0, 256, (1, ROWS, columns), np.uint8)
        weight = WeightLayout(
            (ROWS, columns),
            PackedCodes(8, "rows", held),
            OF_TWO_SIGNS[0].values.astype(np.float32),
            tile,
            GroupNumbers(scale.astype(np.float32)),
        )
        for first, last in ((0, ROWS), (3, ROWS - 1), (5, 6)):
            out = memoryview(bytearray(2 * (last - first) * columns))
            counted = weight.recode_into(encoding, out, first, last)
            values = weight.decode(first, last)
            assert bytes(out) == encode(encoding, values)[""]
            after = decode(encoding, out, values.shape)
            assert np.array(counted).sum(axis=0).tolist() == [*native.changes(values, after)]
            assert np.array(counted).sum(), "nothing changed: the counts are not tried"


def test_what_is_encoded_at_once_fits(level: str) -> None:
    streams, values = np.zeros((4, 8), np.uint8), np.zeros(256, np.float32)
    good = (
        streams,
        8,
        values,
        (0, 4, 8),
        (np.ones((1, 1), np.float32), None, None),
        (None, None, None),
        None,
    )
    assert native.recode_packed("BF16", bytearray(64), *good) == (0, 0, 0)
    for encoding, weight, size in (
        ("BF16", good, 63),
        ("BF16", good, 80),
        ("BF16", (streams, 7, *good[2:]), 64),
        ("BF16", (*good[:3], (-1, 4, 8), *good[4:]), 64),
        ("Q8_0", good, 34),
    ):
        with pytest.raises(CodecError):
            native.recode_packed(encoding, bytearray(size), *weight)
    assert native.recodes("BF16") and native.recodes("F16") and not native.recodes("Q8_0")


def test_orders_that_do_not_fit_are_refused(level: str) -> None:
    words, small = np.zeros((8, 2), np.uint32), np.zeros((8, 16), np.uint8)
    native.turn("awq", words, 8, np.empty((8, 4), np.uint8))
    native.turn("columns", small, 8, np.empty((8, 8), np.uint8))
    for order, held, first, rows, size in (
        ("awq", words, 8, 16, 4),
        ("awq", words, 4, 8, 4),
        ("awq", words, 0, 8, 3),
        ("awq", words, 0, 7, 4),
        ("awq", small, 0, 8, 4),
        ("columns", small, 8, 9, 8),
        ("columns", words, 0, 2, 8),
        ("pairs", words, 0, 2, 1),
        ("pairs", small, 16, 1, 8),
        ("columns", small.T, 0, 8, 16),
        ("columns", small[0], 0, 1, 1),
    ):
        with pytest.raises(CodecError):
            native.turn(order, held, first, np.empty((rows, size), np.uint8))


def test_what_does_not_fit_across_is_refused(level: str) -> None:
    values, scale = np.zeros(16, np.float32), np.zeros((8, 2), np.float32)
    good: dict[str, Any] = {
        "order": "columns",
        "held": np.zeros((2, 16), np.uint32),
        "bits": 4,
        "values": values,
        "at": (8, 8, 8),
        "scale": np.zeros((16, 2), np.float32),
        "group": None,
        "out": np.empty((8, 16), np.float32),
    }

    def call(**change: Any) -> None:
        said = {**good, **change}
        native.decode_across(
            said["order"],
            said["held"],
            said["bits"],
            said["values"],
            said["at"],
            (said["scale"], None, None),
            (None, None, None),
            said["group"],
            said["out"],
        )

    call()
    call(order="awq", held=np.zeros((16, 2), np.uint32))
    for change in (
        {"order": "rows"},
        {"order": "pairs"},
        {"held": np.zeros((2, 16), np.uint16)},
        {"held": np.zeros((2, 15), np.uint32)},
        {"held": np.zeros((3, 16), np.uint32)},
        {"held": np.zeros((16, 2), np.uint32).T},
        {"held": np.zeros(32, np.uint32)},
        {"bits": 8},
        {"bits": 3, "values": values[:8]},
        {"bits": 0},
        {"values": values[:8]},
        {"at": (4, 8, 8)},
        {"at": (8, 4, 8)},
        {"at": (-8, 8, 8)},
        {"at": (16, 8, 8)},
        {"at": (8, 8, 0)},
        {"at": (8, 8, 7)},
        {"at": (8, 0, 8)},
        {"scale": scale},
        {"group": np.full(16, 2, np.int32)},
        {"group": np.full(16, -1, np.int32)},
        {"out": np.empty((8, 12), np.float32)},
        {"order": "awq"},
        {"order": "awq", "held": np.zeros((16, 16), np.uint8)},
    ):
        with pytest.raises(CodecError):
            call(**change)


@pytest.mark.parametrize(("half", "size"), [(8, 8), (8, 32), (16, 16), (16, 48)])
def test_nibbles_of_blocks_change_their_order(level: str, half: int, size: int) -> None:
    codes = np.random.default_rng(half).integers(0, 256, (21, size)).astype(np.uint8)
    blocks = np.zeros((21, size + 4), np.uint8)
    native.halves(codes, half, blocks[:, 2 : size + 2])
    found = blocks[:, 2 : size + 2]
    expected = pairs_to_halves(codes.reshape(-1, half)).reshape(codes.shape)
    assert np.array_equal(found, expected) and not blocks[:, :2].any()
    back = np.empty_like(codes)
    native.halves(found, half, back, True)
    assert np.array_equal(back, codes)
    for wrong in ((codes, half + 1, back), (codes[:20], half, back), (codes, 32, back)):
        with pytest.raises(CodecError):
            native.halves(*wrong)
