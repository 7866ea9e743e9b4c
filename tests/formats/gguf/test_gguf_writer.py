"""The sink: layout, order, refusals, publishing, and files that are copied byte for byte."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aprfmt.base.protocols import TensorInfo, TypedValue
from aprfmt.errors import ConversionError, OutputError, UsageError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.gguf import FORMAT
from aprfmt.formats.gguf.reader import open_source
from aprfmt.formats.gguf.writer import GGUFSink, open_sink
from tests.formats.gguf_files import ARR, DATA, STR, U8, File, one
from tests.formats.gguf_writing import Stored, info_of, read, rewrite, write

META = {"general.architecture": "llama", "llama.block_count": 2}
TENSORS: dict[str, Stored] = {
    "blk.0.w": ("Q4_0", (3, 64), DATA[:108]),
    "blk.0.größe": ("F32", (4,), DATA[:16]),
    "none": ("F16", (0, 8), b""),
    "scalar": ("F64", (), DATA[:8]),
    "cube": ("I8", (2, 3, 1, 5), DATA[:30]),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.gguf"


@pytest.mark.parametrize("alignment", [None, 1, 2, 8, 32, 64, 4096])
def test_layout_is_what_a_plain_build_gives(path: Path, alignment: int | None) -> None:
    write(path, META, TENSORS, alignment=alignment)
    step = alignment or 32
    file = File(alignment=step).key("general.architecture", STR, "llama")
    file.key("llama.block_count", 4, 2)
    if step != 32:
        file.key("general.alignment", 4, step)
    codes = {"Q4_0": 2, "F32": 0, "F16": 1, "F64": 28, "I8": 24}
    for name, (kind, shape, data) in TENSORS.items():
        file.tensor(name, shape[::-1], codes[kind], len(file.data))
        file.data += data + bytes(-len(data) % step)
    assert path.read_bytes() == file.build()
    with open_source(path) as source:
        assert source.notes == []


def test_what_is_written_comes_back(path: Path) -> None:
    write(path, META, TENSORS)
    metadata, types, tensors = read(path)
    assert (metadata, tensors) == (META, TENSORS)
    assert types == {"general.architecture": "string", "llama.block_count": "uint32"}


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write(a, META, TENSORS)
    write(b, META, TENSORS)
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("version", [2, 3])
def test_a_copy_of_a_little_endian_file_is_equal(tmp_path: Path, version: int) -> None:
    path, copy = tmp_path / "x.gguf", tmp_path / "copy.gguf"
    file = one(version=version).key("bytes", STR, b"\xff\x00")
    file.raw_key("nan", 6, b"\x01\x00\x80\xff")  # signalling, which a float64 cannot say
    inner = [file.array(STR, ["a", b"\xfe"]), file.array(U8, [])]
    file.raw_key("nested", ARR, file.array(ARR, inner)).raw_key("n", ARR, file.array(ARR, []))
    path.write_bytes(file.build())
    with open_source(path) as source:
        rewrite(source, copy)
    file.version = 3
    assert copy.read_bytes() == file.build()


def test_a_copy_of_a_big_endian_file_is_its_little_endian_twin(tmp_path: Path) -> None:
    path, copy = tmp_path / "x.gguf", tmp_path / "copy.gguf"

    def build(order: str) -> bytes:
        file = File(order=order).key("f", 6, 1.5).key("t", STR, "é\0")
        file.raw_key("scalar", 6, file.pack("I", 0x7F800001))
        for kind in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12):
            file.raw_key(f"a{kind}", ARR, file.array(kind, [1, 0, 1]))
        quiet = file.pack("IQI", 6, 1, 0x7F800001)  # a signalling NaN keeps its bits
        file.raw_key("nan", ARR, quiet).raw_key("s", ARR, file.array(STR, ["a", b"\xff"]))
        file.raw_key("n", ARR, file.array(ARR, [file.array(3, [-1]), file.array(STR, ["b"])]))
        file.data = file.pack("8f", *range(8))
        return file.tensor("w", [4, 2]).build()

    path.write_bytes(build(">"))
    with open_source(path) as source:
        rewrite(source, copy)
    assert copy.read_bytes() == build("<")


@pytest.mark.parametrize("given", [64, None])
def test_alignment_of_the_metadata_counts_unless_asked_otherwise(path: Path, given: int) -> None:
    write(path, META | {"general.alignment": 128}, TENSORS, alignment=given)
    with open_source(path) as source:
        assert source.alignment == source.metadata["general.alignment"] == (given or 128)
        assert source.types["general.alignment"] == "uint32"


@pytest.mark.parametrize("bad", [0, 3, -32, 1 << 21, "32", True])
def test_refuses_alignments(path: Path, bad: Any) -> None:
    with pytest.raises(UsageError, match="power of two up to 1048576"):
        write(path, META | {"general.alignment": bad}, TENSORS)
    assert not path.exists()


def test_split_keys_of_the_source_are_not_kept(path: Path) -> None:
    write(path, META | {"split.no": 1, "split.count": 3, "split.tensors.count": 9}, TENSORS)
    assert read(path)[0] == META


BAD_INFOS: dict[str, tuple[TensorInfo, str]] = {
    "name": (TensorInfo("é" * 32, (8,), "F32", 0, 32, 32), "its name has 64 bytes, .* at most 63"),
    "surrogate": (TensorInfo("\udc80", (8,), "F32", 0, 32, 32), "lone surrogates"),
    "dims": (TensorInfo("a", (1,) * 5, "F32", 0, 4, 4), "5 dimensions, GGUF has at most 4"),
    "negative": (TensorInfo("a", (-8,), "F32", 0, 32, 32), "sizes are 0 to"),
    "encoding": (TensorInfo("a", (8,), "NF4", 0, 4, None), "GGUF has no type for NF4"),
    "no_encoding": (TensorInfo("a", (8,), "F33", 0, 32, 32), "'F33' is not one we know"),
    "row": (TensorInfo("a", (2, 33), "Q4_0", 0, 36, 18), "multiple of 32 elements, found 33"),
    "nbytes": (TensorInfo("a", (8,), "F32", 0, 31, 32), "31 bytes are planned, .* takes 32"),
}


@pytest.mark.parametrize("case", BAD_INFOS)
def test_refuses_tensors(path: Path, case: str) -> None:
    info, says = BAD_INFOS[case]
    with pytest.raises(ConversionError, match=says), open_sink(path) as sink:
        sink.plan(META, [info])
    assert list(path.parent.iterdir()) == []


def test_refuses_a_name_twice(path: Path) -> None:
    info = info_of("a", TENSORS["scalar"])
    with pytest.raises(ConversionError, match="'a' is planned twice"), open_sink(path) as sink:
        sink.plan(META, [info, info])


def test_unknown_types_are_copied(tmp_path: Path) -> None:
    path, copy = tmp_path / "x.gguf", tmp_path / "y.gguf"
    file = File(data=DATA[:96]).tensor("a", [7], 142).tensor("b", [3, 1], 31, 64)
    path.write_bytes(file.build())
    with open_source(path) as source:
        rewrite(source, copy)
    assert copy.read_bytes() == path.read_bytes()
    assert all(FORMAT.holds(row) for row in _rows("type#142", "Q4_0_4_4", "Q2_0", "BF16"))
    assert not any(FORMAT.holds(row) for row in _rows("NF4", "U8", "APR_Q4", "F8_E4M3"))


def _rows(*names: str) -> Iterator[Any]:
    from aprfmt.base.encodings import find_encoding

    return map(find_encoding, names)


def _short(sink: GGUFSink) -> None:
    sink.write("blk.0.w", [memoryview(DATA[:107])])


def _long(sink: GGUFSink) -> None:
    sink.write("blk.0.w", [memoryview(DATA[:100]), memoryview(DATA[:9])])


def _swapped(sink: GGUFSink) -> None:
    sink.write("blk.0.größe", [memoryview(DATA[:16])])


def _missing(sink: GGUFSink) -> None:
    sink.write("blk.0.w", [memoryview(DATA[:50]), memoryview(DATA[50:108])])


def _too_many(sink: GGUFSink) -> None:
    for name, (_, _, data) in TENSORS.items():
        sink.write(name, [memoryview(data)])
    sink.write("more", [])


def _interrupted(sink: GGUFSink) -> None:
    _missing(sink)
    raise KeyboardInterrupt


FAULTS: dict[str, tuple[Callable[[GGUFSink], None], type[BaseException], str]] = {
    "short": (_short, ConversionError, "107 bytes were given, 108 were planned"),
    "long": (_long, ConversionError, "109 bytes or more were given, 108 were planned"),
    "order": (_swapped, ConversionError, "'blk.0.größe' was given, 'blk.0.w' is next"),
    "missing": (
        _missing,
        ConversionError,
        "not everything was written, 'blk.0.größe' is the first",
    ),
    "too_many": (_too_many, ConversionError, "'more' was given, no tensor is next"),
    "interrupted": (_interrupted, KeyboardInterrupt, "^$"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shards", [None, 400], ids=["one", "split"])
def test_a_fault_publishes_nothing(path: Path, fault: str, shards: int | None) -> None:
    action, error, says = FAULTS[fault]
    path.write_bytes(b"old")
    with pytest.raises(error, match=says), open_sink(path, force=True, max_shard_size=shards) as s:
        s.plan(META, [info_of(name, stored) for name, stored in TENSORS.items()])
        action(s)
    assert [p.name for p in path.parent.iterdir()] == ["x.gguf"]
    assert path.read_bytes() == b"old"


def test_without_a_plan_there_is_no_file(path: Path) -> None:
    with pytest.raises(ConversionError, match="the plan is the first"), open_sink(path):
        pass
    assert not path.exists()


def test_is_planned_once(path: Path) -> None:
    with pytest.raises(ConversionError, match="planned already"), open_sink(path) as sink:
        sink.plan(META, [])
        sink.plan(META, [])


def test_an_existing_file_stays_unless_forced(path: Path) -> None:
    path.write_bytes(b"old")
    with pytest.raises(OutputError, match="exists"):
        write(path, META, TENSORS)
    assert path.read_bytes() == b"old"
    write(path, META, TENSORS, force=True)
    assert read(path)[2] == TENSORS


def test_the_owner_of_the_set_publishes(path: Path) -> None:
    with FileSet() as files:
        write(path, META, TENSORS, files=files)
        assert not path.exists()
    assert read(path)[2] == TENSORS


def test_amend_writes_over_one_text(path: Path) -> None:
    old, new = "0" * 64, "f" * 64
    with open_sink(path) as sink:
        sink.plan(META | {"hash": old, "after": ["x", "y"]}, [])
        sink.amend(old, new)
    assert read(path)[0] == META | {"hash": new, "after": ["x", "y"]}


@pytest.mark.parametrize(
    ("texts", "old", "new"),
    [(["ab", "ab"], "ab", "cd"), (["abab"], "ab", "cd"), (["ab"], "ab", "c"), ([], "ab", "cd")],
    ids=["twice", "twice_in_one", "other_length", "absent"],
)
def test_amend_refuses(path: Path, texts: list[str], old: str, new: str) -> None:
    with pytest.raises(ConversionError, match="expected once"), open_sink(path) as sink:
        sink.plan({f"key.{n}": text for n, text in enumerate(texts)}, [])
        sink.amend(old, new)


def test_options_of_other_formats_are_refused(path: Path) -> None:
    with pytest.raises(UsageError, match="not written with compress"):
        open_sink(path, compress=True)


def test_typed_values_win_over_the_table(path: Path) -> None:
    write(
        path, {"llama.block_count": TypedValue(2, "int64"), "x": TypedValue([1], "array:uint8")}, {}
    )
    assert read(path)[1] == {"llama.block_count": "int64", "x": "array:uint8"}
