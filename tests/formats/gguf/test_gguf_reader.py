"""What an open GGUF file tells: values and types, lazy arrays, tensors, in both byte orders."""

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aprfmt.base.encodings import BY_GGML
from aprfmt.errors import FormatError
from aprfmt.formats.gguf import FORMAT, arrays
from aprfmt.formats.gguf.arrays import STRIDE, StoredArray
from aprfmt.formats.gguf.layout import TYPE_BY_ID
from aprfmt.formats.gguf.reader import GGUFSource, open_source
from tests.formats.gguf_files import ARR, BOOL, DATA, F32, I8, I64, STR, U8, U32, U64, File

ROOT = Path(__file__).parents[3]
ORDERS = pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])
VALUES = {
    0: 255, 1: -128, 2: 65_535, 3: -32_768, 4: 2**32 - 1, 5: -(2**31), 6: 0.5, 7: True,
    10: 2**64 - 1, 11: -(2**63), 12: 1e300,
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.gguf"


@pytest.fixture
def rich(path: Path, order: str) -> Iterator[GGUFSource]:
    """A file with every kind of value, in a byte order."""
    file = File(order=order, data=DATA[:32])
    for kind, value in VALUES.items():
        file.key(f"one.{TYPE_BY_ID[kind].name}", kind, value)
        file.raw_key(f"many.{TYPE_BY_ID[kind].name}", ARR, file.array(kind, [value] * 3))
    file.key("text", STR, "größe \U0001f40b").key("bytes", STR, b"a\xff\x00z")
    file.raw_key("words", ARR, file.array(STR, [f"w{n}" * (n % 5) for n in range(200)]))
    inner = [file.array(U8, [1, 2]), file.array(U8, [])]
    file.raw_key("nested", ARR, file.array(ARR, inner))
    file.raw_key("mixed", ARR, file.array(ARR, [file.array(STR, ["a"]), file.array(I8, [-1])]))
    deep = file.array(ARR, [file.array(ARR, inner), file.array(ARR, [])])
    file.raw_key("deep", ARR, deep)
    path.write_bytes(file.tensor("t", [4, 2]).build())
    with open_source(path) as source:
        yield source


@ORDERS
@pytest.mark.parametrize("kind", VALUES)
def test_numbers(rich: GGUFSource, kind: int) -> None:
    name, value = TYPE_BY_ID[kind].name, VALUES[kind]
    found, many = rich.metadata[f"one.{name}"], rich.metadata[f"many.{name}"]
    assert (found, type(found)) == (value, type(value))
    assert rich.types[f"one.{name}"] == name
    assert rich.types[f"many.{name}"] == many.type == f"array:{name}"
    assert many.tolist() == list(many) == [value] * 3 == many
    assert {type(item) for item in (many[0], *many, *many.tolist())} == {type(value)}


@ORDERS
def test_strings(rich: GGUFSource) -> None:
    words = rich.metadata["words"]
    expected = [f"w{n}" * (n % 5) for n in range(200)]
    assert rich.types["words"] == "array:string"
    assert rich.metadata["text"] == "größe \U0001f40b"
    assert rich.metadata["bytes"].encode("utf-8", "surrogateescape") == b"a\xff\x00z"
    assert list(words) == expected
    assert [words[n] for n in range(200)] == expected
    assert words[-1] == expected[-1]
    assert words[62:67] == tuple(expected[62:67])
    assert words[::-50] == tuple(expected[::-50])
    assert (words == expected, words == expected[:-1], "w7w7" in words) == (True, False, True)
    with pytest.raises(IndexError, match="element 200 of 200"):
        words[200]


@ORDERS
def test_nested_arrays(rich: GGUFSource) -> None:
    nested, mixed, deep = (rich.metadata[key] for key in ("nested", "mixed", "deep"))
    assert [nested.type, mixed.type] == ["array:array:uint8", "array:array"]
    assert deep.type == rich.types["deep"] == "array:array:array:uint8"
    assert [list(item) for item in nested] == [[1, 2], []]
    assert (mixed[0].type, list(mixed[0]), list(mixed[1])) == ("array:string", ["a"], [-1])
    assert [[list(leaf) for leaf in item] for item in deep] == [[[1, 2], []], []]
    assert nested == nested.tolist() == [[1, 2], []]
    assert deep.tolist() == [[[1, 2], []], []]


def stored(source: GGUFSource, key: str) -> bytes:
    """Return a value's bytes, which begin behind the u32 of its type."""
    metadata = source.shards[0].parsed.metadata
    return bytes(metadata.buffer[metadata.fields[key].start : metadata.fields[key].end])


@ORDERS
def test_raw_values_are_the_files_bytes(rich: GGUFSource, order: str) -> None:
    assert stored(rich, "one.uint32") == b"\xff" * 4
    assert stored(rich, "one.float32") == struct.pack(f"{order}f", 0.5)
    assert stored(rich, "text") == File(order=order).text("größe \U0001f40b")
    array = rich.metadata["many.int16"]
    assert stored(rich, "many.int16") == bytes(array.stored)
    assert bytes(array.raw) == struct.pack(f"{order}3h", *[-32_768] * 3)
    assert rich.byteorder == {"<": "little", ">": "big"}[order]


@ORDERS
def test_order_and_shape(rich: GGUFSource, path: Path) -> None:
    assert list(rich.metadata)[:4] == ["one.uint8", "many.uint8", "one.int8", "many.int8"]
    assert list(rich.types) == list(rich.metadata)
    info = rich.tensors["t"].info
    assert (info.shape, info.encoding, info.nbytes, info.row_bytes) == ((2, 4), "F32", 32, 16)
    assert info.offset + info.nbytes == path.stat().st_size
    assert (rich.format, rich.version, rich.files) == ("gguf", "3", (path,))


@pytest.mark.parametrize("count", [0, 1, STRIDE - 1, STRIDE, STRIDE + 1, 3 * STRIDE + 5])
def test_every_length_around_the_stride(path: Path, count: int) -> None:
    texts = [str(n) * (n % 3) for n in range(count)]
    file = File()
    inner = [file.array(STR, [text]) for text in texts]
    file.raw_key("t", ARR, file.array(STR, texts)).raw_key("n", ARR, file.array(ARR, inner))
    path.write_bytes(file.key("after", U8, 9).build())
    with open_source(path) as source:
        flat, nested = source.metadata["t"], source.metadata["n"]
        assert [flat[n] for n in range(count)] == list(flat) == texts
        assert [nested[n][0] for n in range(count)] == [item[0] for item in nested] == texts
        assert source.metadata["after"] == 9


def test_arrays_compare_by_bytes_or_by_elements(path: Path) -> None:
    file = File()
    nan = struct.pack("<f", float("nan"))
    file.raw_key("a", ARR, struct.pack("<IQ", F32, 1) + nan)
    file.raw_key("b", ARR, struct.pack("<IQ", F32, 1) + nan)
    file.raw_key("c", ARR, file.array(I64, [1, 2])).raw_key("d", ARR, file.array(U64, [1, 2]))
    path.write_bytes(file.build())
    with open_source(path) as source:
        a, b, c, d = source.metadata.values()
        assert (a == b, a == [float("nan")], c == d, c == (1, 2), c == "12") == (
            True,
            False,
            True,
            True,
            False,
        )
        assert isinstance(a, StoredArray)
        with pytest.raises(TypeError, match="unhashable"):
            hash(a)


@pytest.mark.parametrize("row", BY_GGML.values(), ids=lambda row: row.name)
def test_every_encoding_by_name_and_size(path: Path, row: object) -> None:
    known = [r for r in BY_GGML.values() if r is row and r.known]
    width = known[0].block_size if known else 8
    row_bytes = known[0].row_header + known[0].type_size if known else None
    size = 50 if row_bytes is None else 3 * row_bytes
    ggml_id = next(code for code, found in BY_GGML.items() if found is row)
    data = bytes(range(256)) * 4
    path.write_bytes(File(data=data[:size]).tensor("t", [width, 3], ggml_id).build())
    with open_source(path) as source:
        info = source.tensors["t"].info
        assert (info.encoding, info.shape, info.nbytes) == (BY_GGML[ggml_id].name, (3, width), size)
        assert info.row_bytes == row_bytes
        assert bytes(source.tensors["t"].raw()) == data[:size]
        assert bytes(source.tensors["t"].raw(1, size - 1)) == data[1 : size - 1]


def test_there_are_43_types_upstream() -> None:
    assert sorted(number for number in BY_GGML if number < 97) == list(range(43))


def test_unknown_type_has_its_bytes(path: Path) -> None:
    file = File(data=DATA[:80]).tensor("a", [7], 142).tensor("b", [8], offset=64)
    path.write_bytes(file.build()[:-16] + DATA[64:96])
    with open_source(path) as source:
        assert source.tensors["a"].info.encoding == "type#142"
        assert bytes(source.tensors["a"].raw()) == DATA[:64]


def test_values_end_with_the_source(path: Path) -> None:
    path.write_bytes(File().raw_key("x", ARR, File().array(STR, ["a"])).build())
    with open_source(path) as source:
        words = source.metadata["x"]
    with pytest.raises(ValueError, match="released"):
        words[0]


def test_recognised_by_content() -> None:
    assert FORMAT.recognise(File().build(), 24)
    assert FORMAT.recognise(File(order=">").build(), 24)
    assert not FORMAT.recognise(b"GGU", 3)


def test_a_great_vocabulary_is_not_decoded_on_opening(path: Path) -> None:
    """262,144 tokens and 515,000 merges: only every 64th place of a string is held."""
    token, merge = File().text("token"), File().text("mer ge")
    file = File()
    for key, text, count in (("t", token, 262_144), ("m", merge, 515_000)):
        file.raw_key(key, ARR, struct.pack("<IQ", STR, count) + text * count)
    file.key("flag", BOOL, 1).key("last", U32, 3)
    path.write_bytes(file.build())
    with open_source(path) as source:
        tokens, merges = source.metadata["t"], source.metadata["m"]
        assert (len(tokens), len(merges), source.metadata["last"]) == (262_144, 515_000, 3)
        assert (tokens[262_143], merges[514_999]) == ("token", "mer ge")
        assert len(merges._marks) == 8047


def test_opening_imports_nothing_heavy(path: Path) -> None:
    path.write_bytes(File(data=DATA[:32]).tensor("t", [8]).build())
    code = (
        "import sys; from pathlib import Path; from aprfmt.formats.gguf import FORMAT\n"
        f"with FORMAT.open_source(Path({str(path)!r})) as s:\n"
        "    print(len(s.tensors), len(bytes(s.tensors['t'].raw())))\n"
        "print(*sorted({'numpy', 'gguf', 'torch', 'rich', 'click', 'aprfmt.formats.gguf.writer',"
        " 'aprfmt.formats.atomic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 32\n\n"


@pytest.mark.parametrize("at", [0, 1, 3, 4, 7, 8, 9])
def test_a_bool_of_another_number_is_found_wherever_it_stands(
    at: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first and the last place of a window too; four bools are looked at at a time."""
    monkeypatch.setattr(arrays, "_WINDOW", 4)
    raw = bytearray(i % 2 for i in range(10))
    raw[at] = 7
    head = struct.pack("<IQ", BOOL, 10)
    path.write_bytes(File(data=b"").raw_key("k", ARR, head + bytes(raw)).build())
    place = path.read_bytes().index(head + bytes(raw)) + len(head) + at
    said = f"has a bool of 7 at offset {place}; GGUF has 0 and 1"
    with pytest.raises(FormatError, match=said):
        open_source(path)
