"""Programs of literal bytes, tensors and checksums, written front to back."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.base.protocols import TensorInfo, TypedValue, Value
from aprfmt.errors import ConversionError, UsageError
from aprfmt.formats import FORMATS
from aprfmt.formats.crc_combine import combine_crcs
from aprfmt.formats.output_file import OutputFile
from aprfmt.formats.sequential import (
    Checksum,
    FileProgram,
    SequentialSink,
    TensorSlot,
    distribute_tensors,
)
from tests.conftest import ROOT
from tests.formats.apr_writing import info

_MIB = 1 << 20


@settings(deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_combine(first: bytes, second: bytes) -> None:
    whole = combine_crcs(zlib.crc32(first), zlib.crc32(second), len(second))
    assert whole == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [0, 1, 255, 4096, 5 * _MIB + 3])
def test_checksums_combine_over_lengths(length: int) -> None:
    tail = bytes(range(256)) * (length // 256 + 1)
    tail = tail[:length]
    assert combine_crcs(zlib.crc32(b"head"), zlib.crc32(tail), length) == zlib.crc32(b"head" + tail)


class OneFile(SequentialSink):
    """A head, the tensors with a byte between them, a checksum, a tail."""

    def _lay_out(
        self, metadata: Mapping[str, Value | TypedValue], infos: Sequence[TensorInfo]
    ) -> Sequence[FileProgram]:
        body = [part for one in infos for part in (TensorSlot(one.name, one.nbytes), b"|")]
        return [FileProgram(self._path, b"head:", [*body, Checksum(), b"tail"])]


def test_small_and_large_chunks_count_alike(tmp_path: Path) -> None:
    """Chunks from a mebibyte on are summed beside the write; a reused buffer must not matter."""
    sizes = [3, _MIB, 5 * _MIB // 2, 0]
    infos = [TensorInfo(f"t{at}", (n,), "U8", 0, n, n) for at, n in enumerate(sizes)]
    buffer = bytearray(_MIB)

    def reused(count: int) -> Iterator[memoryview]:
        for start in range(0, count, _MIB):
            buffer[:] = bytes([count % 250 + (start >> 20)]) * _MIB
            yield memoryview(buffer)[: count - start]

    expected = b"head:"
    with OneFile(tmp_path / "x") as sink:
        sink.plan({}, infos)
        for one in infos:
            sink.write(one.name, reused(one.nbytes))
            expected += b"".join(bytes(chunk) for chunk in reused(one.nbytes)) + b"|"
    expected += zlib.crc32(expected).to_bytes(4, "little") + b"tail"
    assert (tmp_path / "x").read_bytes() == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 50)), st.integers(1, 120))
def test_dealing_keeps_order_and_limit(sizes: list[int], limit: int) -> None:
    infos = [info(f"t{at}", (size,), "U8") for at, size in enumerate(sizes)]
    parts = distribute_tensors(infos, limit, "t")
    assert [one for part in parts for one in part] == infos
    for part in parts:
        assert sum(one.nbytes for one in part) <= limit or len(part) == 1
    for part, after in pairwise(parts):
        assert sum(one.nbytes for one in part) + after[0].nbytes > limit
    assert distribute_tensors(infos, None, "t") == [infos]
    with pytest.raises(UsageError):
        distribute_tensors(infos, 0, "t")


@pytest.mark.parametrize("name", ["every.apr", "carried.apr", "every.safetensors"])
def test_header_fields_tell_true_bytes(name: str) -> None:
    """Every field lies inside the file, none overlaps another, and the first says the format."""
    path = ROOT / "fixtures" / "golden" / name
    data = path.read_bytes()
    fields = list(FORMATS[path.suffix[1:]].header_fields(memoryview(data), name))
    at = 0
    for found in sorted(fields, key=lambda one: (one.offset, one.nbytes)):
        assert found.offset >= at or found.nbytes == 0
        at = max(at, found.offset + found.nbytes)
    assert at == len(data)
    assert any(found.name.startswith("tensor ") for found in fields)


def test_rooms_that_others_fill_count_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Filled from the last to the first, beside tensors that are written in order."""
    data = [bytes([n % 251]) * n for n in (40, 7, 3 * _MIB, 1)]
    infos = [TensorInfo(f"t{at}", (len(d),), "U8", 0, len(d), len(d)) for at, d in enumerate(data)]
    with OneFile(tmp_path / "one") as sink:
        sink.plan({}, infos)
        for one, held in zip(infos, data, strict=True):
            sink.write(one.name, [memoryview(held)])
    with OneFile(tmp_path / "several") as sink:
        sink.plan({}, infos)
        rooms = [(sink.defer_tensor("t0"), data[0])]
        sink.write("t1", [memoryview(data[1])])
        rooms += [(sink.defer_tensor("t2"), data[2]), (sink.defer_tensor("t3"), data[3])]
        for room, held in reversed(rooms):
            half = len(held) // 2
            room.place.put(half, held[half:])
            room.place.put(0, held[:half])
            sink.record_filled(room, zlib.crc32(held))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "several").read_bytes()


def test_a_room_that_nobody_filled_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="not whole"):
        with OneFile(tmp_path / "x") as sink:
            sink.plan({}, [info("t", (8,), "U8")])
            sink.defer_tensor("t").place.put(0, b"12345678")
    with pytest.raises(ConversionError, match="of a tensor of 8"):
        with OneFile(tmp_path / "x") as sink:
            sink.plan({}, [info("t", (8,), "U8")])
            sink.defer_tensor("t").place.put(4, b"12345")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("blanks", [0, 1, 9])
def test_blanks_behind_a_safetensors_header_are_a_field_where_there_are_some(blanks: int) -> None:
    spelled = b'{"t":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'
    size = len(spelled) + blanks
    data = size.to_bytes(8, "little") + spelled + b" " * blanks + b"abc"
    fields = list(FORMATS["safetensors"].header_fields(memoryview(data), "x"))
    assert [(field.offset, field.nbytes, field.name) for field in fields] == [
        (0, 8, "header_size"),
        (8, len(spelled), "header"),
        *[(8 + len(spelled), blanks, "padding")] * (blanks > 0),
        (8 + size, 3, "tensor t"),
    ]


class ThreeFiles(SequentialSink):
    """A file for each tensor: a head, the tensor, a checksum."""

    def _lay_out(
        self, metadata: Mapping[str, Value | TypedValue], infos: Sequence[TensorInfo]
    ) -> Sequence[FileProgram]:
        return [
            FileProgram(self._path.with_suffix(f".{one.name}"), b"head", [
                TensorSlot(one.name, one.nbytes), Checksum()])
            for one in infos
        ]  # fmt: skip


def test_files_are_closed_as_they_are_complete_all_but_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of many files holds one of them open, and one that others fill."""
    closed: list[str] = []
    close = OutputFile.close

    def noted(self: OutputFile) -> None:
        closed.append(self.path.suffix)
        close(self)

    monkeypatch.setattr(OutputFile, "close", noted)
    infos = [TensorInfo(f"t{at}", (2,), "U8", 0, 2, 2) for at in range(4)]
    with ThreeFiles(tmp_path / "x") as sink:
        sink.plan({}, infos)
        sink.write("t0", [memoryview(b"ab")])
        sink.write("t1", [memoryview(b"ab")])
        assert closed == [".t1"]
        room = sink.defer_tensor("t2")
        sink.write("t3", [memoryview(b"ab")])
        assert closed == [".t1", ".t3"]
        room.place.put(0, b"ab")
        sink.record_filled(room, zlib.crc32(b"ab"))
        assert closed == [".t1", ".t3", ".t2"]
    for at in range(4):
        held = (tmp_path / f"x.t{at}").read_bytes()
        assert held == b"headab" + zlib.crc32(b"headab").to_bytes(4, "little")
