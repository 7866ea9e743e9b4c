"""The writer: bytes as the reference writes them, order, padding, checksums, refusals."""

import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import TensorInfo, TypedValue
from aprfmt.errors import ConversionError, OutputError, UsageError
from aprfmt.formats import FORMATS
from aprfmt.formats.apr.reader import open_source
from aprfmt.formats.apr.writer import open_sink
from aprfmt.formats.atomic import FileSet
from tests.formats.apr_files import header_field
from tests.formats.apr_writing import info, pattern, round_trip, write

# The worked example of the format's description: a file of the reference writer.
GOLDEN = (
    bytes.fromhex(
        "41505200 0200 0004 02000000 40000000 00000000 bd000000 00010000 00000000"
        "80010000 00000000 028cc03b"
    )
    + bytes(20)
    + b'{"model_type":"linear_regression","name":"golden-v2","license":null,"data_source":null,'
    b'"data_license":null,"version":"0.0.0-golden","created_at":"1700000000","total_size":0,'
    b'"param_count":8}'
    + bytes(3)
    + bytes.fromhex(
        "0400 62696173 00 01 0100000000000000 0000000000000000 0400000000000000"
        "0700 77656967687473 00 01 0800000000000000 4000000000000000 2000000000000000"
    )
    + bytes(61)
    + bytes.fromhex("0000003e")
    + bytes(60)
    + bytes.fromhex("0000803f 00000040 0000003f 000000bf 00008040 000000c0 0000803e 00000041")
    + bytes(32)
    + bytes.fromhex("353f0f55")
)


def test_the_worked_example_byte_for_byte(tmp_path: Path) -> None:
    assert len(GOLDEN) == 516
    path = tmp_path / "golden.apr"
    metadata = {
        "param_count": 8,
        "created_at": "1700000000",
        "version": "0.0.0-golden",
        "name": "golden-v2",
        "model_type": "linear_regression",
        "author": None,
    }
    with open_sink(path) as sink:
        sink.plan(metadata, [info("bias", (1,)), info("weights", (8,))])
        sink.write("bias", [memoryview(GOLDEN[0x180:0x184])])
        sink.write("weights", [memoryview(GOLDEN[0x1C0:0x1D0]), memoryview(GOLDEN[0x1D0:0x1E0])])
    assert path.read_bytes() == GOLDEN


def test_no_tensors_gives_the_shortest_file(tmp_path: Path) -> None:
    write(tmp_path / "x.apr", [])
    data = (tmp_path / "x.apr").read_bytes()
    assert header_field(data, "data_offset") == header_field(data, "index_offset") == 192
    assert len(data) == 196


@pytest.mark.parametrize("name", [row.name for row in ENCODINGS.values() if row.apr is not None])
def test_every_encoding_with_a_code_round_trips(name: str, tmp_path: Path) -> None:
    shapes = [(2, 256), (256,), (3, 0)]
    infos = [info(f"t{at}", shape, name) for at, shape in enumerate(shapes)]
    round_trip(tmp_path / "x.apr", infos)
    data = (tmp_path / "x.apr").read_bytes()
    assert len(data) % 64 == 4
    assert int.from_bytes(data[-4:], "little") == zlib.crc32(data[:-4])


def test_row_padded_k_quants_keep_their_padding(tmp_path: Path) -> None:
    padded = TensorInfo("w", (3, 300), "Q6_K", 0, 3 * 2 * 210, 2 * 210)
    flat = TensorInfo("x", (3, 300), "Q6_K", 0, 4 * 210, None)
    round_trip(tmp_path / "x.apr", [padded, flat])


def test_index_is_sorted_and_data_lies_in_plan_order(tmp_path: Path) -> None:
    names = ["b", "é", "Z", "a", "a.b"]
    infos = [info(name, (at + 1,)) for at, name in enumerate(names)]
    write(tmp_path / "x.apr", infos)
    with open_source(tmp_path / "x.apr") as source:
        assert list(source.tensors) == ["Z", "a", "a.b", "b", "é"]
        by_offset = sorted(source.tensors.values(), key=lambda tensor: tensor.info.offset)
        assert [tensor.info.name for tensor in by_offset] == names
        assert not source.notes
    assert [i.name for i in FORMATS["apr"].order(infos)] == ["Z", "a", "a.b", "b", "é"]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8"), max_size=20),
            st.lists(st.integers(0, 5), max_size=4).map(tuple),
            st.sampled_from(["F32", "BF16", "U8", "I64", "BOOL", "F8_E4M3", "U16", "C64", "NF4"]),
        ),
        max_size=8,
        unique_by=lambda row: row[0],
    )
)
def test_any_tensors_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, tuple[int, ...], str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.apr"
    round_trip(path, [info(*row) for row in rows], force=True)


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    infos = [info("b", (3, 5)), info("a", (7,), "I8")]
    for name in ("x", "y"):
        write(tmp_path / name, infos, {"k": {"z": 1, "a": 2}, "tokenizer.vocabulary": ["a"]})
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


@pytest.mark.parametrize(
    ("infos", "metadata", "flags"),
    [
        ([info("a", (4,))], {}, 0x0400),
        ([info("a", (256,), "Q4_K")], {}, 0x0420),
        ([info("a", (4,))], {"tokenizer.vocabulary": ["x"]}, 0x0600),
    ],
    ids=["plain", "quantized", "vocabulary"],
)
def test_flags_are_true(
    infos: list[TensorInfo], metadata: dict[str, object], flags: int, tmp_path: Path
) -> None:
    write(tmp_path / "x.apr", infos, metadata)
    with open_source(tmp_path / "x.apr") as source:
        assert source.header.flags == flags


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([info("n" * 257, (1,))], "257 bytes"),
        ([info("n" * 253, (1,), "BOOL")], "258 bytes as stored"),
        ([info("a", (1,) * 9)], "9 dimensions"),
        ([info("a", (1,)), info("a", (1,))], "planned twice"),
        ([info("a", (8,), "BOOL"), info("a@BOOL", (8,), "U8")], "planned twice"),
        ([TensorInfo("a", (3,), "F32", 0, 13, None)], "13 bytes are planned"),
        ([TensorInfo("a", (3, 300), "Q4_K", 0, 700, None)], "takes 864 or 576"),
        ([info("\ud800", (1,))], "surrogate"),
        ([TensorInfo("a", (-1,), "F32", 0, -4, None)], "sizes are"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_apr_cannot_hold_is_refused(bad: list[TensorInfo], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=says), open_sink(tmp_path / "x.apr") as sink:
        sink.plan({}, bad)
    assert not list(tmp_path.iterdir())


def test_the_order_and_sizes_of_writes_are_checked(tmp_path: Path) -> None:
    infos = [info("a", (4,)), info("b", (4,))]
    data = memoryview(pattern(infos[0]))
    for names, chunks, says in (
        (["b"], [data], "'a' is next"),
        (["a", "a"], [data], "'b' is next"),
        (["a", "b", "c"], [data], "no tensor is next"),
        (["a"], [data[:15]], "15 bytes were given, 16"),
        (["a"], [data, data[:1]], "17 bytes or more"),
        (["a"], [data], "'b' is the first that is missing"),
    ):
        with pytest.raises(ConversionError, match=says), open_sink(tmp_path / "x.apr") as sink:
            sink.plan({}, infos)
            for name in names:
                sink.write(name, chunks)
        assert not list(tmp_path.iterdir())
    with pytest.raises(ConversionError, match="planned already"), open_sink(tmp_path / "x") as sink:
        sink.plan({}, [])
        sink.plan({}, [])
    with pytest.raises(ConversionError, match="the plan"), open_sink(tmp_path / "x") as sink:
        pass


def test_an_existing_file_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "x.apr"
    path.write_bytes(b"mine")
    with pytest.raises(OutputError, match="exists"):
        write(path, [])
    assert path.read_bytes() == b"mine"
    write(path, [], force=True)
    with pytest.raises(UsageError, match="alignment"):
        open_sink(path, alignment=32)


def test_a_shared_set_is_published_by_its_owner(tmp_path: Path) -> None:
    with FileSet() as files:
        write(tmp_path / "x.apr", [info("a", (4,))], files=files)
        assert not (tmp_path / "x.apr").exists()
        files.create(tmp_path / "config.json").write(b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "x.apr"]


@pytest.mark.parametrize("limit", [None, 64], ids=["one_file", "shards"])
def test_amend_mends_the_footer(limit: int | None, tmp_path: Path) -> None:
    old, new = "0" * 64, "f" * 64
    infos = [info("a", (16,)), info("b", (16,))]
    with open_sink(tmp_path / "x.apr", max_shard_size=limit) as sink:
        sink.plan({"digest": TypedValue(old, "string")}, infos)
        sink.write("a", [memoryview(pattern(infos[0]))])
        sink.amend(old, new)  # before the footer is written, and again after it
        sink.write("b", [memoryview(pattern(infos[1]))])
        sink.amend(new, old)
        sink.amend(old, new)
        with pytest.raises(ConversionError, match="0 times"):
            sink.amend(old, new)
        with pytest.raises(ConversionError, match="64 bytes"):
            sink.amend(new, "short")
        files = sink.files
    with open_source(files[0]) as source:
        assert source.metadata["digest"] == new
        assert source.footer_matches() is True
