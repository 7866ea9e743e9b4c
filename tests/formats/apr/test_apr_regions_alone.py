"""Where the parts of an APR file are said to be wrong, with structures made by hand."""

from typing import Any

import pytest

from aprfmt.base.protocols import Note, TensorInfo
from aprfmt.errors import FormatError, TruncatedError
from aprfmt.formats.apr.layout import Header
from aprfmt.formats.apr.regions import check_end, check_regions
from aprfmt.formats.apr.structure import IndexEntry, ParsedApr
from aprfmt.formats.damage import Faults

DATA = 256
Extent = tuple[str, int, int]


def parsed(*tensors: Extent, size: int = 0, collect: bool = True, **changed: int) -> ParsedApr:
    """Return a file with metadata at 64..100, index at 128..200 and (name, offset, bytes)."""
    at = {"metadata": 64, "index": 128, "metadata_end": 100, "index_end": 200} | changed
    header = Header(b"APR2", 2, 0, 0, len(tensors), at["metadata"], 36, at["index"], DATA, 0, b"")
    entries = [
        IndexEntry(TensorInfo(name, (n,), "U8", start, n, n), 0) for name, start, n in tensors
    ]
    found = ParsedApr("f.apr", memoryview(b""), size, header, Faults("f.apr", collect))
    found.entries = entries
    found.metadata_end, found.index_end = at["metadata_end"], at["index_end"]
    return found


def texts(found: ParsedApr) -> list[str]:
    """Return the texts of the notes."""
    return [note.text for note in found.notes]


def test_aligned_parts_one_after_the_other_are_in_order() -> None:
    found = parsed(("a", DATA, 64), ("b", DATA + 64, 60))
    check_regions(found)
    assert not found.notes and not found.faults.damage and found.end == DATA + 128


@pytest.mark.parametrize(("start", "holes"), [(DATA + 64, 0), (DATA + 65, 1), (DATA + 128, 1)])
def test_unused_bytes_behind_the_padding_are_a_hole(start: int, holes: int) -> None:
    found = parsed(("a", DATA, 40), ("b", start, 64))
    check_regions(found)
    said = [note for note in found.notes if note.key == "holes"]
    assert len(said) == holes
    if holes:
        where = f"{start - DATA - 40} unused bytes between tensor 'a' and tensor 'b'"
        assert said[0] == Note("warning", "f.apr", where, "holes")


def test_metadata_that_cannot_be_read_take_no_place() -> None:
    found = parsed(("a", DATA, 64), metadata=10, metadata_end=10)
    check_regions(found)
    assert texts(found) == ["64 unused bytes between the header and the tensor index"]


def test_of_several_holes_the_first_is_named_and_all_are_counted() -> None:
    found = parsed(("c", DATA + 512, 64), ("a", DATA, 64), ("b", DATA + 192, 64))
    check_regions(found)
    assert texts(found) == [
        "128 unused bytes between tensor 'a' and tensor 'b'",
        "2 holes between the parts of the file",
    ]


def test_a_hole_before_the_metadata_and_one_before_the_tensors() -> None:
    found = parsed(("a", 320, 64), metadata=128, metadata_end=129, index=192)
    check_regions(found)
    assert texts(found)[0] == "64 unused bytes between the header and the metadata"
    lone = parsed(("a", 320, 64))
    check_regions(lone)
    assert texts(lone) == ["120 unused bytes between the tensor index and tensor 'a'"]


def test_unaligned_tensors_are_counted_and_the_first_is_named() -> None:
    found = parsed(("a", DATA, 8), ("b", DATA + 8, 8), ("c", DATA + 16, 8), ("none", 7, 0))
    check_regions(found)
    assert texts(found) == ["2 tensors are not 64-byte aligned, first tensor 'b'"]
    assert found.end == DATA + 64


def test_the_end_counts_the_padding_and_empty_tensors() -> None:
    for tensors, end in (
        ((), DATA),
        ((("a", DATA, 64),), DATA + 64),
        ((("a", DATA, 65),), DATA + 128),
        ((("a", DATA, 1), ("none", DATA + 128, 0)), DATA + 128),
    ):
        found = parsed(*tensors)
        check_regions(found)
        assert found.end == end


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"metadata": 63}, "the metadata (63..100) overlaps the header, which ends at 64"),
        ({"metadata_end": 129}, "the tensor index (128..200) overlaps the metadata, which ends"),
        ({"metadata_end": 128}, ""),
        ({"metadata": 10, "metadata_end": 10}, ""),  # nothing there
    ],
)
def test_fixed_parts_share_no_bytes(changed: dict[str, int], says: str) -> None:
    found = parsed(("a", DATA, 64), collect=True, **changed)
    check_regions(found)
    said = [one.text for one in found.faults.damage]
    assert len(said) == bool(says) and all(one.startswith(says) for one in said)
    if says:
        with pytest.raises(FormatError, match=r"^f\.apr: the"):
            check_regions(parsed(("a", DATA, 64), collect=False, **changed))


@pytest.mark.parametrize(
    ("start", "count", "broken"),
    [(199, 1, True), (200, 1, False), (120, 8, False), (120, 9, True), (150, 0, False)],
)
def test_a_tensor_shares_no_bytes_with_the_index(start: int, count: int, broken: bool) -> None:
    found = parsed(("t", start, count))
    check_regions(found)
    assert list(found.faults.broken) == ["t"] * broken
    if broken:
        stop = start + count
        says = f"tensor 't' ({start}..{stop}) overlaps the tensor index, which ends at 200"
        assert [one.text for one in found.faults.damage] == [says]


def test_of_damaged_parts_no_holes_are_said() -> None:
    found = parsed(("a", DATA + 512, 64), ("b", DATA + 512, 32))
    check_regions(found)
    assert found.faults.damage and not [one for one in found.notes if one.key == "holes"]
    assert set(found.faults.broken) == {"a", "b"}


def cut(size: int, *, collect: bool, partial: bool = False) -> ParsedApr:
    """Return a file of `size` bytes whose data end at 384, its end checked."""
    found = parsed(
        ("a", DATA, 64), ("none", DATA + 64, 0), ("b", DATA + 64, 60), size=size, collect=collect
    )
    check_regions(found)
    assert found.end == DATA + 128
    check_end(found, partial)
    return found


@pytest.mark.parametrize(
    ("size", "key", "says"),
    [
        (384, "no_checksum", "no footer checksum, so damage to the data cannot be noticed"),
        (387, "trailing_bytes", "3 bytes follow the data, where a 4-byte footer is expected"),
        (388, "", ""),
        (389, "trailing_bytes", "5 bytes follow the data, where a 4-byte footer is expected"),
    ],
)
def test_four_bytes_follow_the_data(size: int, key: str, says: str) -> None:
    wanted = [Note("warning", "f.apr", says, key)] if key else []
    assert cut(size, collect=True).notes == wanted


def test_a_cut_file_says_what_is_missing() -> None:
    words = "has 383 bytes, its tensors end at 384: 1 bytes are missing, 0 of 3 tensors are cut"
    with pytest.raises(TruncatedError) as error:
        cut(383, collect=False)
    todo = "; get the file again, or list it with --partial"
    assert str(error.value) == f"f.apr: {words}{todo}"
    assert [one.text for one in cut(383, collect=True).faults.damage] == [words]
    noted = cut(383, collect=False, partial=True)
    assert noted.notes == [Note("warning", "f.apr", words, "truncated")]
    assert not cut(383, collect=True, partial=True).notes


@pytest.mark.parametrize(
    ("size", "beyond", "names"),
    [
        (380, [], ()),
        (379, ["b"], ("b",)),
        (320, ["b"], ("b",)),
        (319, ["a", "none", "b"], ("a", "b")),
    ],
)
def test_tensors_beyond_the_end_are_cut(size: int, beyond: list[str], names: Any) -> None:
    (damage,) = cut(size, collect=True).faults.damage
    assert damage.tensors == names
    first = f"; tensor {beyond[0]!r} is the first beyond the end" if beyond else ""
    assert damage.text.endswith(f"{384 - size} bytes are missing, {len(beyond)} of 3 tensors are "
                                f"cut{first}")  # fmt: skip


def test_the_end_of_damaged_data_is_not_known() -> None:
    found = parsed(("a", DATA, 64), ("b", DATA, 32), size=DATA + 64)
    check_regions(found)
    found.notes.clear()
    check_end(found, False)
    assert not found.notes and len(found.faults.damage) == 1
