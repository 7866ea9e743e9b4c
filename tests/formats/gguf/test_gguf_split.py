"""Splits: one model from any of its files, and sets that do not belong together."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aprfmt.base.protocols import TensorInfo, TypedValue
from aprfmt.errors import ConversionError, FormatError, TruncatedError, UsageError
from aprfmt.formats.gguf.layout import parse_split_name, split_name
from aprfmt.formats.gguf.reader import open_source
from aprfmt.formats.gguf.split import divide_tensors
from aprfmt.formats.gguf.writer import open_sink
from tests.formats.gguf_files import DATA, I16, I32, U16, U32, File
from tests.formats.gguf_writing import Stored, info_of, read, rewrite, write

META = {"general.architecture": "llama", "tokenizer.ggml.tokens": [f"token {n}" for n in range(40)]}
TENSORS: dict[str, Stored] = {
    f"blk.{n}.w": ("F32", (2, 4 * (1 + n % 5)), DATA[: 32 * (1 + n % 5)]) for n in range(20)
}
SIZE = 1300
NAMES = [f"m-{n:05d}-of-00004.gguf" for n in range(1, 5)]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    files = write(tmp_path / "m.gguf", META, TENSORS, max_shard_size=SIZE)
    assert [path.name for path in files] == NAMES
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    return files


@pytest.mark.parametrize("number", range(4))
def test_any_file_opens_the_model(shards: list[Path], number: int) -> None:
    metadata, types, tensors = read(shards[number])
    assert tensors == TENSORS
    assert list(tensors) == list(TENSORS)
    keys = {"split.no": 0, "split.count": 4, "split.tensors.count": 20}
    assert metadata == META | keys
    assert [types[key] for key in keys] == ["uint16", "uint16", "int32"]
    with open_source(shards[number]) as source:
        assert source.files == tuple(shards)
        assert source.path == shards[number]
        assert source.notes == []


def test_only_the_first_has_the_models_metadata(shards: list[Path]) -> None:
    for number, path in enumerate(shards):
        alone = path.with_name("alone.gguf")
        data = path.read_bytes().replace(b"split.count", b"split_count")
        alone.write_bytes(data)
        metadata = read(alone)[0]
        assert metadata["split.no"] == number
        assert ("tokenizer.ggml.tokens" in metadata) == (number == 0)


@pytest.mark.parametrize("limit", [1, 700, 1500, 1800, 2500, 5000])
def test_no_file_is_larger_than_the_limit(tmp_path: Path, limit: int) -> None:
    files = write(tmp_path / "m.gguf", META, TENSORS, max_shard_size=limit)
    for path in files:
        with open_source(path) as source:
            shard = source.shards[files.index(path)].parsed
        assert path.stat().st_size <= limit or len(shard.infos) == 1
    assert read(files[-1])[2] == TENSORS
    assert (files == [tmp_path / "m.gguf"]) == (limit == 5000)


def test_what_fits_is_one_file_without_split_keys(tmp_path: Path) -> None:
    (whole,) = write(tmp_path / "m.gguf", META, TENSORS)
    size = whole.stat().st_size
    (same,) = write(tmp_path / "n.gguf", META, TENSORS, max_shard_size=size)
    assert same.read_bytes() == whole.read_bytes()
    assert len(write(tmp_path / "o.gguf", META, TENSORS, max_shard_size=size - 1)) == 2


def test_every_file_of_a_split_states_its_alignment(tmp_path: Path) -> None:
    files = write(tmp_path / "m.gguf", META, TENSORS, max_shard_size=2500, alignment=128)
    with open_source(files[-1]) as source:
        assert [shard.parsed.alignment for shard in source.shards] == [128] * len(files)
        assert source.notes == []
    assert read(files[0])[2] == TENSORS


def test_a_split_becomes_a_file_and_a_file_a_split(shards: list[Path], tmp_path: Path) -> None:
    with open_source(shards[2]) as source:
        (whole,) = rewrite(source, tmp_path / "whole.gguf")
    with open_source(whole) as source:
        # a name that is a file's of a split gives the split its stem
        again = rewrite(source, tmp_path / "k-00001-of-00009.gguf", max_shard_size=SIZE)
    assert [path.name for path in again] == [name.replace("m-", "k-") for name in NAMES]
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in shards]


Damage = Callable[[list[Path]], object]


def _set(path: Path, key: str, value: int) -> None:
    """Write over a split key; a negative number becomes an int16."""
    data = bytearray(path.read_bytes())
    at = data.index(key.encode()) + len(key)
    size = {U16: 2, I32: 4}[data[at]]
    data[at] = I16 if value < 0 else data[at]
    data[at + 4 : at + 4 + size] = value.to_bytes(size, "little", signed=value < 0)
    path.write_bytes(data)


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Damage, str]] = {
    "missing": (lambda s: s[2].unlink(), "split of 4 files, m-00003-of-00004.gguf is missing"),
    "missing_first": (lambda s: s[0].unlink(), "m-00001-of-00004.gguf is missing"),
    "folder": (lambda s: _make_folder(s[2]), "m-00003-of-00004.gguf is missing"),
    "other_number": (lambda s: _set(s[2], "split.no", 1), "then its name must be m-00002"),
    "other_count": (lambda s: _set(s[2], "split.count", 5), "split.count is 5, in .* it is 4"),
    "other_total": (lambda s: _set(s[2], "split.tensors.count", 9), "count is 9, in .* it is 20"),
    "no_number": (lambda s: _set(s[2], "split.no", -1), "has type int16; it must be a whole"),
    "copied": (lambda s: shutil.copy(s[1], s[2]), "is file 2 of 4 by its keys"),
    "cut": (lambda s: s[3].write_bytes(s[3].read_bytes()[:-40]), "too few"),
    "no_gguf": (lambda s: s[3].write_bytes(b"<html>404</html>"), "starts with"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("opened", [1, 3])
def test_a_set_that_does_not_belong_together(shards: list[Path], damage: str, opened: int) -> None:
    action, says = DAMAGE[damage]
    action(shards)
    with pytest.raises(FormatError, match=says):
        open_source(shards[opened])


def test_tensors_are_unique_over_all_files(tmp_path: Path) -> None:
    for number in range(2):
        file = File(data=DATA[:32]).key("split.no", U16, number).key("split.count", U16, 2)
        path = tmp_path / split_name("m", number, 2)
        path.write_bytes(file.tensor("same", [8]).build())
    with pytest.raises(FormatError, match=r"'same' is in .*00001-of-00002.* as well"):
        open_source(path)


def test_fewer_tensors_than_stated(tmp_path: Path) -> None:
    for number in range(2):
        file = File(data=DATA[:32]).key("split.no", U16, number).key("split.count", U16, 2)
        path = tmp_path / split_name("m", number, 2)
        file.key("split.tensors.count", 5, 3)
        path.write_bytes(file.tensor(f"t{number}", [8]).build())
    with pytest.raises(FormatError, match=r"split.tensors.count is 3, the files have 2 tensors"):
        open_source(path)


def test_byte_orders_do_not_mix(tmp_path: Path) -> None:
    for number, order in enumerate("<>"):
        file = File(order=order).key("split.no", U16, number).key("split.count", U16, 2)
        path = tmp_path / split_name("m", number, 2)
        path.write_bytes(file.build())
    with pytest.raises(FormatError, match=r"the byte order is big, in .* it is little"):
        open_source(path)


@pytest.mark.parametrize(
    ("name", "number", "count", "says"),
    [
        ("m.gguf", 0, 2, "its name must be NAME-00001-of-00002.gguf"),
        ("m-00001-of-00003.gguf", 0, 2, "its name must be m-00001-of-00002.gguf"),
        ("m-1-of-2.gguf", 0, 2, "its name must be NAME-00001"),
        ("m-00003-of-00002.gguf", 2, 2, "split.no is 2; expected a number below the count"),
        ("m-00001-of-70000.gguf", 0, 70_000, "at most 65535 files"),
    ],
)
def test_names_and_keys_disagree(
    tmp_path: Path, name: str, number: int, count: int, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(File().key("split.no", U32, number).key("split.count", U32, count).build())
    with pytest.raises(FormatError, match=says):
        open_source(path)


def test_one_file_of_one_is_no_split(tmp_path: Path) -> None:
    path = tmp_path / "any name.gguf"
    path.write_bytes(File().key("split.no", U16, 0).key("split.count", U16, 1).build())
    assert read(path)[0] == {"split.no": 0, "split.count": 1}


def test_partial_lists_an_incomplete_split(shards: list[Path]) -> None:
    shards[2].unlink()
    shards[3].write_bytes(shards[3].read_bytes()[:-40])
    with open_source(shards[0], partial=True) as source:
        assert source.files == (shards[0], shards[1], shards[3])
        texts = [note.text for note in source.notes]
        assert texts[0] == "m-00003-of-00004.gguf is missing next to it"
        assert any("truncated" in text for text in texts)
        last = list(source.tensors.values())[-1]
        with pytest.raises(TruncatedError, match="m-00004-of-00004"):
            last.raw()


def test_an_interrupted_publication_is_no_model(shards: list[Path]) -> None:
    journal = shards[0].with_name(".aprfmt-journal-0123456789abcdef.json")
    temporary = f".{NAMES[3]}.1-00000000-00000000.aprfmt-tmp"
    journal.write_text(
        f'{{"schema":"aprfmt.journal/1","moves":[["{temporary}","{NAMES[3]}"]],"removes":[]}}'
    )
    with pytest.raises(FormatError, match=r"00004-of-00004.* writing was interrupted"):
        open_source(shards[1])


@pytest.mark.parametrize("limit", [0, -5])
def test_refuses_sizes(tmp_path: Path, limit: int) -> None:
    with pytest.raises(UsageError, match="give a size > 0"):
        write(tmp_path / "m.gguf", META, TENSORS, max_shard_size=limit)


def test_refuses_more_files_than_a_split_can_count(tmp_path: Path) -> None:
    infos = [TensorInfo(f"t{n}", (8,), "F32", 0, 32, 32) for n in range(65_536)]
    with (
        pytest.raises(ConversionError, match="65536 files of 1 bytes"),
        open_sink(tmp_path / "m.gguf", max_shard_size=1) as sink,
    ):
        sink.plan({}, infos)


def test_dealing_out_counts_header_table_and_padding() -> None:
    costs = [(10, 64)] * 4
    assert divide_tensors(costs, (100, 20), 32, 1000) == [4]
    # 100 + 20 aligned is 128, and two tensors make 256
    assert divide_tensors(costs, (100, 20), 32, 256) == [2, 2]
    assert divide_tensors(costs, (100, 20), 32, 255) == [1, 2, 1]
    assert divide_tensors([], (100, 20), 32, 1) == [0]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a-00001-of-00002.gguf", ("a", 0, 2)),
        ("a-00001-of-00002-00002-of-00003.gguf", ("a-00001-of-00002", 1, 3)),
        ("-00001-of-00002.gguf", ("", 0, 2)),
        ("a-123456-of-123457.gguf", ("a", 123_455, 123_457)),
        ("a-00001-of-00002.GGUF", None),
        ("a-0001-of-0002.gguf", None),
        ("a-000001-of-00002.gguf", None),
        ("a-\N{ARABIC-INDIC DIGIT ONE}0001-of-00002.gguf", None),
    ],
)
def test_names(name: str, found: tuple[str, int, int] | None) -> None:
    assert parse_split_name(name) == found


def test_the_first_file_can_be_amended_last(tmp_path: Path) -> None:
    with open_sink(tmp_path / "m.gguf", max_shard_size=SIZE) as sink:
        infos = [info_of(name, stored) for name, stored in TENSORS.items()]
        sink.plan(META | {"hash": TypedValue("0" * 64, "string")}, infos)
        for name, (_, _, data) in TENSORS.items():
            sink.write(name, [memoryview(data)])
        sink.amend("0" * 64, "1" * 64)
    assert len(sink.files) > 2
    assert read(sink.files[1])[0]["hash"] == "1" * 64
