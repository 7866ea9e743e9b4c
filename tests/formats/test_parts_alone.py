"""Rules of the readers of files, each by itself, at both sides of its bounds."""

import pickle
import struct
from itertools import pairwise

import pytest

from aprfmt.errors import FormatError
from aprfmt.formats import foreign_formats, shard_set
from aprfmt.formats.apr import layout
from aprfmt.formats.apr.fields import header_fields
from aprfmt.formats.pytorch.pickle_imports import Imports
from aprfmt.formats.pytorch.pickle_reader import MAX_LONG, Stream, Unpickler
from tests.formats.apr_files import AprFile

# --- names of shards ----------------------------------------------------------------------------

PLAIN = [
    "a.safetensors",
    "sub/a.safetensors",
    "a" * 255,
    "é" * 127,
    f"{'a' * 255}/{'b' * 255}",
    ".a",
    "a..b",
    "conx",
    "com0x.bin",
    "a b",
    "~",
]
FAULTS: dict[object, str] = {
    None: "that is NoneType, not a string",
    3: "that is int, not a string",
    "\ud800": "it holds half of a surrogate pair",
    "a\\b": "it holds a backslash",
    "c:a": "a colon",
    "a\x1fb": "a control character",
    "a\x7fb": "a control character",
    "a/b/c": "it leads beyond one subfolder",
    "": "it is not a plain path",
    "/a": "it is not a plain path",
    "a/": "it is not a plain path",
    "a/..": "it is not a plain path",
    "./a": "it is not a plain path",
    "a" * 256: "a part of it is longer than 255 bytes",
    "é" * 128: "a part of it is longer than 255 bytes",
    f"a/{'b' * 256}": "a part of it is longer than 255 bytes",
    "con": "it is a device name, or ends in a dot or a space",
    "Com1.bin": "it is a device name",
    "LPT³": "it is a device name",
    "sub/nul.x.y": "it is a device name",
    "a.": "ends in a dot or a space",
    "a ": "ends in a dot or a space",
    "a./b": "ends in a dot or a space",
}


def test_a_shard_has_a_plain_name_or_one_in_a_subfolder() -> None:
    for name in PLAIN:
        assert shard_set._name_fault(name) is None, name
    for fault, says in FAULTS.items():
        assert says in (shard_set._name_fault(fault) or ""), fault


# --- pickles ------------------------------------------------------------------------------------


def unpickled(data: bytes) -> object:
    stream = Stream(memoryview(data), 0, len(data), "f")
    return Unpickler(stream, lambda function, arguments: None, lambda key: key, Imports()).load()


def test_integers_of_a_pickle_are_read_up_to_a_number_of_bytes() -> None:
    bits = 8 * MAX_LONG
    for number in (0, -1, 1 << 70, -(1 << 2039), (1 << bits - 1) - 1, -(1 << bits - 1)):
        assert unpickled(pickle.dumps(number, 2)) == number
    for number in (1 << bits - 1, -(1 << bits - 1) - 1):
        with pytest.raises(FormatError, match=f"has an integer of {MAX_LONG + 1} bytes"):
            unpickled(pickle.dumps(number, 2))


# --- what a foreign file is ---------------------------------------------------------------------


def test_an_old_importance_matrix_has_room_for_its_entries() -> None:
    """Each takes at least twelve bytes, and the first one's name is a weight's."""

    def old(entries: int, name: bytes, length: int | None = None) -> bytes:
        return struct.pack("<ii", entries, len(name) if length is None else length) + name

    weight = b"blk.0.attn_q.weight"
    judge = foreign_formats._is_old_imatrix
    assert judge(old(3, weight), 36) and judge(old(1, b"output.bias"), 12)
    long = b"a" * 249 + b".weight"
    assert judge(old(1, long), 1000) and not judge(old(1, b"a" + long), 1000)
    assert not judge(old(3, weight), 35) and not judge(old(0, weight), 36)
    assert not judge(old(-1, weight), 36) and not judge(old(1, weight, 0), 36)
    assert not judge(old(1, weight, -1), 36) and not judge(old(1, b"output.scale"), 36)
    assert not judge(old(1, weight + b" "), 36) and not judge(old(1, b"")[:11], 36)


# --- fields of an APR header --------------------------------------------------------------------


def test_fields_of_an_apr_file_lie_one_behind_the_other() -> None:
    data = AprFile().build()
    rows = list(header_fields(memoryview(data), "f"))
    first = {row.name: row.value for row in rows[:11]}
    assert first["magic"] == "APR\\x00" and first["version_major"] == str(layout.VERSION[0])
    assert [row.offset for row in rows[:11]] == [0, 4, 5, 6, 8, 12, 20, 24, 32, 40, 44]
    assert sum(row.nbytes for row in rows[:11]) == layout.HEADER_SIZE
    assert first["reserved"] == "00" * 20 and "computed" not in first["checksum"]
    numbers = struct.unpack("<4sBBHIQIQQI20s", data[:64])
    names = ("tensor_count", "metadata_offset", "metadata_size", "tensor_index_offset")
    assert [first[name] for name in (*names, "data_offset")] == [*map(str, numbers[4:9])]
    assert (rows[11].offset, rows[11].nbytes) == (numbers[5], numbers[6])
    tensors = [row for row in rows if row.name.startswith("tensor ")]
    assert len(tensors) == numbers[4] and tensors[0].offset == numbers[7]
    for one, following in pairwise(tensors):
        assert one.offset + one.nbytes == following.offset
    odd = bytearray(data)
    odd[layout.CRC_AT] ^= 1
    damaged = {row.name: row.value for row in header_fields(memoryview(odd), "f")}
    own = int.from_bytes(data[layout.CRC_AT : layout.CRC_AT + 4], "little")
    assert damaged["checksum"] == f"0x{own ^ 1:08x}, computed 0x{own:08x}"
