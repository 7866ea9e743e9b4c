"""Rules of the readers of files, each by itself, at both sides of its bounds."""

import errno
import pickle
import struct
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.base.protocols import TensorInfo
from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.formats import foreign_formats, gguf, shard_set, temporary_files
from aprfmt.formats.apr import layout, parse, shards, writer
from aprfmt.formats.apr.fields import header_fields
from aprfmt.formats.pytorch import zip_archive
from aprfmt.formats.pytorch.pickle_imports import Imports
from aprfmt.formats.pytorch.pickle_reader import MAX_LONG, Stream, Unpickler
from aprfmt.formats.pytorch.pickle_values import GlobalName, PickledDict, PickledObject
from aprfmt.formats.pytorch.state_dict import Flattened
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


# --- bounds of a header, of a key, of a file system ---------------------------------------------


def test_a_header_of_safetensors_is_as_long_as_the_format_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parse = import_module("aprfmt.formats.safetensors.parse")
    monkeypatch.setattr(parse, "MAX_HEADER", 64)

    def read(length: int, begins: bytes = b"{") -> Any:
        text = begins + b"}".rjust(length - 1)
        return parse.parse(memoryview(struct.pack("<Q", length) + text), "f")

    assert read(63).header_size == 63 and read(64).header_size == 64
    with pytest.raises(FormatError, match=r"its header has 65 bytes, the format allows 64\. This"):
        read(65)
    with pytest.raises(FormatError, match="length at offset 0 is 65, the format allows 64; the"):
        read(65, b"x")


def test_a_value_of_a_gguf_key_is_of_one_kind() -> None:
    for value in ("", "a", 0, 1.5, True, [1], ["a", "b"], [[1, 2], [3]], [0.5, 0.5]):
        assert gguf.can_store_value(value), value
    odds: Any = (None, {}, {"a": 1}, [], [1, "a"], [1, 1.0], [None], [{}], [[]], (1,), b"a")
    for odd in odds:
        assert not gguf.can_store_value(odd), odd


def test_a_folder_that_cannot_be_synced_is_an_error_but_for_what_knows_no_such_thing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(fd: int) -> None:
        raise OSError(fd, "no")

    monkeypatch.setattr("os.fsync", fail)
    for code in (errno.EINVAL, errno.ENOTSUP):
        temporary_files._sync_entries(code)
    for code in (errno.EIO, errno.ENOSPC, errno.EBADF):
        with pytest.raises(OSError, match="no"):
            temporary_files._sync_entries(code)


def test_a_plan_is_that_of_a_file_with_the_same_tensors_in_its_order() -> None:
    def info(name: str, size: int = 8, shape: tuple[int, ...] = (2,), offset: int = 0) -> Any:
        return TensorInfo(name, shape, "F32", offset, size, 0)

    held = {"a": info("a"), "b": info("b", offset=8), "e": info("e", 0, (0,), 0)}

    def same(*infos: Any, limit: int | None = None, **file: Any) -> bool:
        facts = {"expanded": False, "size": 99, "end": 99, "infos": held} | file
        like: Any = SimpleNamespace(shards=[SimpleNamespace(parsed=SimpleNamespace(**facts))])
        return writer._is_same_plan(like, infos, limit)

    a, b, e = held.values()
    assert same(a, b, e) and same(a, e, b) and same(a, b, e, limit=16)
    assert not same(a, b, e, limit=15) and not same(b, a, e)
    assert not same(a, b) and not same(a, b, e, info("x"))
    assert not same(a, info("b", shape=(1, 2)), e) and not same(a, info("b", 4), e)
    assert not same(a, replace(b, encoding="I32"), e)
    assert same(a, b, e, size=100) and not same(a, b, e, size=98)
    assert not same(a, b, e, expanded=True)


def test_the_fields_of_a_models_output_are_its_attributes_or_its_items() -> None:
    """A field that is None is no value; an item counts over an attribute of its name."""

    def flat(state: Any, *items: tuple[str, Any], kind: str = "CausalLMOutputWithPast") -> Any:
        name = GlobalName("transformers.modeling_outputs", kind)
        made = PickledObject(name, state=state, items=PickledDict(list(items)))
        return Flattened(made, "x.pt", 1000)

    state = PickledDict([("logits", 1), ("loss", None), ("hidden", 2)])
    found = flat(state, ("logits", 3))
    assert found.values == {"logits": 3, "hidden": 2} and not found.classes
    assert flat(None, ("logits", 3)).values == {"logits": 3}
    assert flat((state,), ("logits", 3)).values == {"logits": 3}
    for other in (flat(state), flat(state, ("logits", 3), kind="Config")):
        assert other.values == {"logits": 1, "loss": None, "hidden": 2}
        assert list(other.classes.values()) == [1]


def test_the_shard_of_an_apr_is_one_of_its_count() -> None:
    def number(**sharding: Any) -> Any:
        parsed: Any = SimpleNamespace(metadata={"sharding": sharding}, where="m.apr")
        found = shards.shard_number_of(parsed)
        return found and (found.number, found.count)

    assert number(shard_index=0, shard_count=2) == (0, 2)
    assert number(shard_index=1, shard_count=2) == (1, 2)
    most = shards.MAX_SHARDS
    assert number(shard_index=most - 1, shard_count=most) == (most - 1, most)
    for single in (
        {},
        {"shard_index": 0},
        {"shard_count": 2},
        {"shard_index": 0, "shard_count": 1},
        {"shard_index": True, "shard_count": 2},
        {"shard_index": "0", "shard_count": 2},
    ):
        assert number(**single) is None
    for index, count in ((2, 2), (-1, 2), (0, most + 1)):
        with pytest.raises(FormatError, match=f"shard_index {index} of shard_count {count}"):
            number(shard_index=index, shard_count=count)
    alone: Any = SimpleNamespace(metadata={}, where="m.apr")
    assert shards.shard_number_of(alone) is None


def test_sizes_that_a_code_means_are_listed_each_once() -> None:
    for code, names in layout.CODES.items():
        told = layout.expected_sizes(code, (4, 256)).split(", ")
        assert [each.partition(" ")[0] for each in told] == list(names)
        for each in told:
            sizes = [int(size) for size in each.partition(" ")[2].split(" or ")]
            assert sizes == sorted(set(sizes)) and sizes


def test_a_name_that_a_writer_cut_is_no_damage() -> None:
    """Within its last character, at the most that the writer keeps; anywhere else it is damage."""
    most = layout.MAX_NAME_BYTES

    def decoded(raw: bytes) -> tuple[str, str]:
        told: list[str] = []
        parsed: Any = SimpleNamespace(
            where="m.apr",
            warn=lambda code, text: told.append(code),
            faults=SimpleNamespace(add=lambda error, name: told.append("fault")),
        )
        name = parse._decode_name(raw, 64, "tensor 3", parsed)
        return name, "".join(told)

    for text in ("a" * most, "ä" * (most // 2), "layer.0"):
        assert decoded(text.encode()) == (text, "")
    for character in ("ä", "€", "𝄞"):
        whole = character.encode()
        for left in range(1, len(whole)):
            raw = b"a" * (most - left) + whole[:left]
            name, told = decoded(raw)
            assert told == "cut_name" and name.startswith("a" * (most - left))
            assert decoded(raw[1:])[1] == "fault" and decoded(b"a" + raw)[1] == "fault"
    assert decoded(b"a" * (most - 4) + b"\xff" + b"aaa")[1] == "fault"


def test_the_end_of_a_zip_is_of_one_file_and_stands_behind_its_directory() -> None:
    """Written without zip64 by `zip_archive`'s own layouts; a field of each is changed."""
    length = zip_archive._ENTRY.size + 4

    def ended(
        disk: int = 0,
        first: int = 0,
        here: int = 1,
        count: int = 1,
        size: int = length,
        start: int = 10,
        behind: bytes = b"",
        before: bytes = b"",
    ) -> Any:
        end = zip_archive._END.pack(zip_archive.END, disk, first, here, count, size, start, 0)
        data = before + bytes(10 + length) + end + behind
        return zip_archive._find_directory(memoryview(data), len(data), "m.pt")

    assert ended() == (1, 10, length, 10 + length)
    for more in ({"disk": 1}, {"first": 1}, {"here": 0}, {"count": 2}):
        with pytest.raises(UnsupportedError, match="is one of several zip files"):
            ended(**more)  # type: ignore[arg-type]
    for wrong, said in (
        ({"start": 9}, "is said to take bytes"),
        ({"size": length - 1}, "is said to take bytes"),
        ({"before": b"x"}, "is said to take bytes"),
        ({"behind": b"x"}, "1 bytes stand after"),
        ({"here": 2, "count": 2}, "claims 2 records"),
        ({"here": 0xFFFF, "count": 0xFFFF}, "has no zip64 locator"),
    ):
        with pytest.raises(FormatError, match=said):
            ended(**wrong)
