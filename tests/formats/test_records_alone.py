"""What a directory or an index says of records and tensors, against what stands in the files."""

import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from aprfmt.errors import FormatError, TruncatedError
from aprfmt.formats import bounded_json
from aprfmt.formats.pytorch import fields, zip_archive
from aprfmt.formats.pytorch.zip_archive import ZipRecord
from aprfmt.formats.safetensors import index_check
from aprfmt.formats.safetensors.index_check import IndexFault

WIDE = 0xFFFFFFFF

# --- records of zip archives --------------------------------------------------------------------


def extra(*fields: tuple[int, bytes]) -> bytes:
    return b"".join(struct.pack("<2H", kind, len(data)) + data for kind, data in fields)


def long(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def test_sizes_beyond_32_bits_stand_in_the_zip64_field_in_order() -> None:
    """Only those that are marked; other fields are passed over, and one that is cut is none."""
    read = zip_archive._apply_zip64
    assert read(b"", (1, 2, 3), "f") == [1, 2, 3]
    assert read(extra((1, long(9, 8, 7))), (1, 2, 3), "f") == [1, 2, 3]
    big = 1 << 40
    for values, stored, found in (
        ((WIDE, 2, 3), (big,), [big, 2, 3]),
        ((1, WIDE, 3), (big,), [1, big, 3]),
        ((WIDE, WIDE, WIDE), (big, 5, 6), [big, 5, 6]),
        ((1, WIDE, WIDE), (big, 6), [1, big, 6]),
        ((WIDE, 2, 3), (big, 7), [big, 2, 3]),
    ):
        own = (1, long(*stored))
        for others in ((own,), ((7, b"abc"), own), ((7, b""), own, (9, b"x"))):
            assert read(extra(*others), values, "f") == found, (values, others)
    for data in (
        b"",
        extra((7, long(big))),
        extra((1, long())),
        extra((1, long(big)[:7])),
        extra((1, long(big)))[:-1],
        extra((1, long(big)))[:3],
        extra((1, b"x" * 7), (1, long(big))),
    ):
        with pytest.raises(FormatError, match="f: a record of its zip directory lacks its zip64"):
            read(data, (WIDE, 2, 3), "f")
    with pytest.raises(FormatError, match="lacks its zip64 field"):
        read(extra((1, long(big))), (WIDE, WIDE, 3), "f")


def local(
    name: str = "a/b",
    *,
    flags: int = 0,
    method: int = 0,
    size: int = 8,
    more: int = 5,
    named: int | None = None,
) -> bytes:
    """Return a local zip header and the name after it."""
    count = len(name.encode()) if named is None else named
    head = struct.pack("<4s5H3I2H", b"PK\x03\x04", 45, flags, method, 0, 0, 0, 8, size, count, more)
    assert len(head) == 30
    return head + name.encode()


def test_the_bytes_of_a_record_stand_behind_its_local_header() -> None:
    """Of a name and other fields; the header says what the directory does."""
    entry = ZipRecord("a/b", 100, 0, 8, 77)
    start = 100 + 30 + 3 + 5

    def located(head: bytes, size: int = 1000, entry: ZipRecord = entry) -> ZipRecord:
        return zip_archive._locate_bytes(entry, head, size, "f.pt")

    right = ZipRecord("a/b", 100, start, 8, 77)
    for head in (
        local(),
        local(size=WIDE),
        local(size=0, flags=8),
        local(flags=8),
        local(flags=2048),
    ):
        assert located(head) == right
    assert located(local(more=9)).start == start + 4 and located(local(), start + 8) == right
    wide = ZipRecord("é", 0, 0, 0, 0)
    assert located(local("é", size=0), entry=wide).start == 30 + 2 + 5
    with pytest.raises(TruncatedError) as error:
        located(local(), start + 7)
    assert str(error.value) == (
        f"f.pt: 'a/b' needs bytes {start}..{start + 8}, the file has {start + 7}; get it again"
    )
    for head in (b"", local()[:29], b"PK\x01\x02" + local()[4:]):
        with pytest.raises(FormatError) as none:
            located(head)
        assert str(none.value).startswith("f.pt: 'a/b': no local zip header at byte 100")
    for head in (
        local(method=8),
        local(flags=1),
        local(named=4),
        local(size=9),
        local(size=0),
        local(size=7, flags=8),
    ):
        with pytest.raises(FormatError) as other:
            located(head)
        assert str(other.value).startswith("f.pt: 'a/b': its local zip header at byte 100 does not")


def test_every_record_of_an_archive_is_a_field_of_its_file(tmp_path: Path) -> None:
    """The bytes of tensors are those of the tensors themselves."""
    path = tmp_path / "m.pt"
    torch.save({"w": torch.arange(4.0), "v": torch.ones(2)}, path)
    data = path.read_bytes()
    found: list[Any] = [
        (row.offset, row.nbytes, row.name, row.value)
        for row in fields.header_fields(memoryview(data), "f")
    ]
    expected = []
    with zipfile.ZipFile(path) as archive:
        for info in sorted(archive.infolist(), key=lambda one: one.header_offset):
            name, more = struct.unpack_from("<2H", data, info.header_offset + 26)
            head = 30 + name + more
            expected.append((info.header_offset, head, "local header", info.filename))
            if info.file_size and "/data/" not in info.filename:
                start = info.header_offset + head
                expected.append((start, info.file_size, "record", info.filename))
    assert found == expected
    torch.save(
        {"w": torch.arange(4.0), "v": torch.ones(2)}, path, _use_new_zipfile_serialization=False
    )
    data = path.read_bytes()
    head, *rest = fields.header_fields(memoryview(data), "f")
    assert (head.offset, head.name) == (0, "pickles (legacy)")
    assert rest and head.nbytes == min(row.offset for row in rest)
    assert [row.nbytes for row in rest] == [16, 8] or [row.nbytes for row in rest] == [8, 16]
    assert all(row.name == "storage" for row in rest)
    assert [row.offset for row in rest] == sorted(row.offset for row in rest)


# --- indexes of shards --------------------------------------------------------------------------


def checked(weight_map: dict[str, str], stored: dict[str, set[str]]) -> list[IndexFault]:
    faults: list[IndexFault] = []
    index_check.check_weight_map(Path("m/i.json"), weight_map, stored, faults)
    with_first: list[str] = []
    try:
        index_check.check_weight_map(Path("m/i.json"), weight_map, stored, None)
    except FormatError as error:
        with_first.append(str(error))
    assert bool(with_first) is bool(faults)
    return faults


def refused(weight_map: dict[str, str], stored: dict[str, set[str]]) -> str:
    with pytest.raises(FormatError) as error:
        index_check.check_weight_map(Path("m/i.json"), weight_map, stored, None)
    return str(error.value)


def test_an_index_names_the_shard_that_holds_each_tensor() -> None:
    stored = {"1": {"a.x.weight", "a.y.weight"}, "2": {"b.weight"}}
    right = {"a.x.weight": "1", "a.y.weight": "1", "b.weight": "2"}
    assert checked(right, stored) == []
    (moved,) = checked(right | {"b.weight": "1"}, stored)
    assert moved.says == "the index names another shard than the one that holds it for 1 tensor"
    assert (moved.where, moved.examples) == (("b.weight",), (("b.weight in 2", "1"),))
    assert moved.mended and not moved.by_index
    said = refused(right | {"b.weight": "1"}, stored)
    assert "tensor 'b.weight' is said to be in 1, which does not hold it; it is in 2; get" in said
    (loose,) = checked({"b.weight": "2"}, stored)
    assert loose.says.startswith("the index does not name 2 tensors that its shards hold ('a.")
    assert set(loose.where) == stored["1"]
    said = refused({"a.x.weight": "1", "a.y.weight": "1"}, stored)
    assert "m/i.json: 2 holds tensor 'b.weight', which the index does not list" in said
    (gone,) = checked(right | {"c.x.weight": "2"}, stored)
    assert gone.says == (
        "the index names 1 tensor that no shard holds ('c.x.weight', said to be in 2)"
    )
    assert gone.mended and gone.where == ("c.x.weight",)
    said = refused(right | {"c.x.weight": "2"}, stored)
    assert "is said to be in 2, which does not hold it; no other shard does; get" in said
    (lost,) = checked(right | {"a.z.weight": "1"}, stored)
    assert not lost.mended
    assert lost.says.endswith(
        "; the rest of its module is there: 'a.z.weight' is lost, get the shard again"
    )
    # Of a shard that is not there nothing is said, and of a tensor in two the named one counts.
    assert checked(right | {"d.weight": "3"}, stored) == []
    twice = {"1": {"b.weight"}, "2": {"b.weight"}}
    assert checked({"b.weight": "1"}, twice) == checked({"b.weight": "2"}, twice) == []
    many = checked({"b.weight": "1", "q.weight": "2"}, stored)
    assert [one.says.split(" ")[2] for one in many] == ["names", "names", "does"]


def test_a_lost_tensor_is_of_a_module_of_which_others_are_there() -> None:
    lost = index_check._lost_tensors
    held = {"mtp.fc.weight": "1", "model.layers.0.a.weight": "1"}
    assert lost(["mtp.norm.weight"], held) == ["mtp.norm.weight"]
    assert lost(["model.layers.0.b.weight", "model.norm.weight"], held) == [
        "model.layers.0.b.weight",
        "model.norm.weight",
    ]
    assert lost(["lm_head.weight", "other.fc.weight", "model.layers.1.a.weight"], held) == []


# --- numbers of JSON ----------------------------------------------------------------------------


def test_the_first_number_that_json_cannot_say_is_named_by_its_place() -> None:
    find = bounded_json._find_nonfinite
    value: Any
    for value, said in (
        ({"a": [1.0, math.nan], "b": math.inf}, "$.a[1] is NaN"),
        ({"a": [1.0], "b": math.inf}, "$.b is Infinity"),
        ([{"a": 1}, {"c": (0.5, -math.inf)}], "$[1].c[1] is -Infinity"),
        (math.nan, "$ is NaN"),
        ([math.inf, math.nan], "$[0] is Infinity"),
    ):
        assert find(value) == said
    for value in ({}, [], 1.0, "nan", {"a": [1, None, True, "inf"]}, 10**400):
        assert find(value) is None
