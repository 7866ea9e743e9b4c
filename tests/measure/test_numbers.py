"""Integers, booleans and complex numbers are compared like floats: which value, which bit."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aprfmt as api
from aprfmt.base.encodings import ENCODINGS
from aprfmt.causes.tensor import byte_shifts
from aprfmt.compare import diff
from aprfmt.measure.numbers import CHUNK, PairSums, difference
from tests.cli.run import aprfmt
from tests.conversion.folders import write_mixed


def kind(name: str) -> str:
    """Return numpy's letter for a kind of number; ml_dtypes' own types are floats."""
    return "f" if hasattr(ml_dtypes, name) else np.dtype(name).kind


PLAIN = {name: row for name, row in ENCODINGS.items() if row.numpy and row.safetensors}
EXACT = sorted(name for name, row in PLAIN.items() if kind(row.numpy) in "biuc")
COUNT = 60


def values(name: str, count: int = COUNT) -> Any:
    """Return different bytes of an encoding's numbers; of booleans both kinds."""
    size = PLAIN[name].type_size
    raw = np.random.default_rng(3).integers(1, 127, count * size).astype(np.uint8)
    return (raw % 2 if name == "BOOL" else raw).tobytes()


def pair(folder: Path, name: str, change: Any, shape: tuple[int, ...] = (COUNT,)) -> Any:
    """Return the report on two files whose one tensor differs by `change` of its bytes."""
    data = bytearray(values(name, int(np.prod(shape))))
    paths = folder / "a.safetensors", folder / "b.safetensors"
    write_mixed(paths[0], {"codes": (name, shape, bytes(data))})
    change(data)
    write_mixed(paths[1], {"codes": (name, shape, bytes(data))})
    return diff(*paths), paths


@pytest.mark.parametrize("shape", [(COUNT,), (6, 10)], ids=["vector", "matrix"])
@pytest.mark.parametrize("name", EXACT)
def test_one_bit_of_a_value_is_named(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    size = PLAIN[name].type_size

    def flip(data: bytearray) -> None:
        data[17 * size] ^= 1

    report, paths = pair(tmp_path, name, flip, shape)
    (row,) = report.tensors
    assert (row.verdict, report.exit_code()) == ("DIFFERENT", 1)
    assert row.stats.changed == 1
    at = [int(i) for i in np.unravel_index(17, shape)]
    assert row.stats.max_at == tuple(at)
    if name == "C64":
        return  # compared, but what is looked for speaks of real numbers
    assert row.cause == "bit_rot"
    assert any(f"of the {name} value at {at}: " in line for line in row.explanation.evidence)
    assert aprfmt("diff", *paths).code == 1


@pytest.mark.parametrize("name", EXACT)
def test_equal_values_are_equal(name: str, tmp_path: Path) -> None:
    report, _ = pair(tmp_path, name, lambda data: None)
    assert report.equal


def test_a_value_of_other_bits_is_shown_on_both_sides(tmp_path: Path) -> None:
    def change(data: bytearray) -> None:
        data[8 * 5 : 8 * 6] = (7).to_bytes(8, "little")

    report, _ = pair(tmp_path, "I64", change)
    before = int(np.frombuffer(values("I64"), "<i8")[5])
    assert f"[5] ({before} | 7)" in " ".join(report.tensors[0].explanation.evidence)


@pytest.mark.parametrize("name", ["I64", "U64"])
def test_integers_that_float64_cannot_tell_apart_differ(name: str, tmp_path: Path) -> None:
    size = PLAIN[name].type_size

    def change(data: bytearray) -> None:
        data[size * 9] ^= 1  # the lowest of 63 bits

    report, _ = pair(tmp_path, name, change)
    assert report.tensors[0].stats.changed == 1
    assert report.tensors[0].stats.max_abs_diff == 1.0


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), min_size=1, max_size=8))
def test_difference_is_zero_exactly_where_integers_are_equal(rows: list[tuple[int, int]]) -> None:
    x, y = (np.array(side, np.int64) for side in zip(*rows, strict=True))
    found = difference(x, y)
    assert [(value > 0) - (value < 0) for value in found.tolist()] == [
        (a > b) - (a < b) for a, b in rows
    ]


def test_an_imaginary_part_counts() -> None:
    sums = PairSums((3,))
    x = np.array([1 + 2j, 3, 4j], np.complex64)
    sums.add(x, np.array([1 - 2j, 3, 4j], np.complex64))
    found = sums.stats()
    assert (found.changed, found.max_abs_diff, found.max_at) == (1, 4.0, (0,))


def test_a_long_vector_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aprfmt.tensors.view import View

    count = 2 * CHUNK + 5
    data = np.zeros(count, np.uint8)
    for name, at in (("a", 1), ("b", 2)):
        data[-at] ^= 1
        tensors = {"codes": ("U8", (count,), data.tobytes())}
        write_mixed(tmp_path / f"{name}.safetensors", tensors)

    def whole(self: View) -> Any:
        raise AssertionError("decoded whole")

    monkeypatch.setattr(View, "numpy", whole)
    report = api.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (row,) = report.tensors
    assert row.stats is not None and row.stats.changed == 1 and row.cause == "bit_rot"


# --- offsets of 32 bits ---------------------------------------------------------------------------

BIG = (1 << 16) + 64


@pytest.mark.parametrize("power", [16, 15])
@pytest.mark.parametrize("name", ["F32", "I32", "BF16"])
def test_offsets_that_wrapped_are_named(
    name: str, power: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_shifts, "WRAPS", (1 << power,))
    tail = np.random.default_rng(0).integers(1, 255, 256).astype(np.uint8).tobytes()
    size = PLAIN[name].type_size
    shape = (256 // size,)
    big = bytes(BIG)
    right = {"big": ("U8", (BIG,), big), "tail": (name, shape, tail)}
    place = BIG % (1 << power)
    wrong = big[:place] + tail + big[place + len(tail) :]
    wrapped = {"big": ("U8", (BIG,), wrong), "tail": (name, shape, bytes(len(tail)))}
    for file, rows in (("a", right), ("b", wrapped)):
        write_mixed(tmp_path / f"{file}.safetensors", rows)
    report = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (row,) = (each for each in report.tensors if each.key == "tail")
    assert row.cause == "byte_offset" and row.explanation is not None
    assert f"offsets were kept in {power} bits" in row.explanation.evidence[0]
    assert f"B's big at +{place:#x}" in row.explanation.evidence[1]
    (landed,) = (each for each in report.tensors if each.key == "big")
    assert landed.cause == "byte_offset" and landed.explanation is not None
    said = row.explanation.evidence[0]
    assert landed.explanation.evidence == (said, "those of tail were written here")
    assert len(report.causes) == 1


def test_each_place_that_wrapped_data_reached_names_those_that_stand_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tensors from 64 KiB on: two were written into the first tensor, one behind it."""
    monkeypatch.setattr(byte_shifts, "WRAPS", (1 << 16,))
    rng = np.random.default_rng(0)
    tails = {f"tail{i}": rng.integers(1, 255, 256).astype(np.uint8).tobytes() for i in range(3)}
    sizes = {"a first": 512, "big": (1 << 16) - 512}
    whole = {name: ("U8", (size,), bytes(size)) for name, size in sizes.items()}
    right = whole | {name: ("F32", (64,), data) for name, data in tails.items()}
    there = {"a first": tails["tail0"] + tails["tail1"],
             "big": tails["tail2"] + bytes(sizes["big"] - 256)}  # fmt: skip
    wrong = {name: ("U8", (sizes[name],), data) for name, data in there.items()}
    wrong |= {name: ("F32", (64,), bytes(256)) for name in tails}
    for file, rows in (("a", right), ("b", wrong)):
        write_mixed(tmp_path / f"{file}.safetensors", rows)
    report = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    said = {row.key: row.explanation for row in report.tensors}
    assert {key for key, row in said.items() if row and row.cause == "byte_offset"} == {*right}
    for name, held in (("a first", "tail0, tail1"), ("big", "tail2")):
        row = said[name]
        assert row is not None and row.evidence[1] == f"those of {held} were written here"
    for name, at in (("tail0", "a first at +0x0"), ("tail1", "a first at +0x100"),
                     ("tail2", "big at +0x0")):  # fmt: skip
        row = said[name]
        assert row is not None and f"B's {at} (" in row.evidence[1]


def test_offsets_that_did_not_wrap_are_not_named(tmp_path: Path) -> None:
    tail = bytes(range(1, 129))
    for file, held in (("a", tail), ("b", bytes(128))):
        rows = {"big": ("U8", (128,), tail), "tail": ("F32", (32,), held)}
        write_mixed(tmp_path / f"{file}.safetensors", rows)
    report = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (row,) = (each for each in report.tensors if each.key == "tail")
    assert row.explanation is not None
    assert row.cause == "stale_tensor" and "holds 0 everywhere" in row.explanation.evidence[0]


NEAR_LIMITS = [
    (name, at + i, at + j)
    for name in ("int64", "uint64")
    for at in (0, 1 << 53, 1 << 60, np.iinfo(name).max - 2, *((-(1 << 62),) * (name == "int64")))
    for i in range(3)
    for j in range(3)
]


@pytest.mark.parametrize("chosen", ["int64", "uint64"])
def test_the_difference_of_close_integers_has_size_and_sign(chosen: str) -> None:
    """As Python's own integers say, where float64 rounds both to one number."""
    rows = [(x, y) for name, x, y in NEAR_LIMITS if name == chosen]
    x, y = (np.array(column, chosen) for column in zip(*rows, strict=True))
    found = difference(x, y)
    expected = [a - b for a, b in rows]
    assert found.dtype == np.float64
    lost = [float(a) == float(b) for a, b in rows]
    assert any(a != b and same for (a, b), same in zip(rows, lost, strict=True))
    for one, exact, same, (a, b) in zip(found, expected, lost, rows, strict=True):
        assert one == (exact if same else float(a) - float(b))
        assert np.sign(one) == np.sign(exact)
