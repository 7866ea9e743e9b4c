"""Every malformed file is refused with its sentence; every odd one opens and says why it is odd."""

import struct
from pathlib import Path

import pytest

from aprfmt.base.encodings import find_encoding
from aprfmt.errors import FormatError, TruncatedError
from aprfmt.formats.gguf.parse import parse
from aprfmt.formats.gguf.reader import open_source
from tests.formats.gguf_cases import LEGAL, MALFORMED, WARNED, Case
from tests.formats.gguf_files import ARR, DATA, STR, U8, File, one, two


@pytest.mark.parametrize("case", MALFORMED, ids=str)
def test_refuses(case: Case) -> None:
    with pytest.raises(FormatError) as caught:
        parse(memoryview(case.data), "x.gguf")
    assert type(caught.value) is case.error
    assert str(caught.value).startswith("x.gguf: ")
    assert case.says in str(caught.value)


COUNTS = {  # below the number of bytes that are left, of entries that take more
    "tensors": (one(n_tensors=100), "the tensor count at offset 8 is 100", 2400),
    "keys": (one(n_keys=100), "the key count at offset 16 is 100", 1400),
    "elements": (
        File().raw_key("x", ARR, struct.pack("<IQ", STR, 500) + bytes(900)),
        "the element count of key 'x' at offset 41 is 500",
        4000,
    ),
}


@pytest.mark.parametrize("what", COUNTS)
def test_a_count_is_held_against_the_bytes_its_entries_take(what: str) -> None:
    file, says, least = COUNTS[what]
    with pytest.raises(TruncatedError, match=f"{says}, which takes at least {least} bytes"):
        parse(memoryview(file.build()), "x.gguf")


@pytest.mark.parametrize("case", WARNED, ids=str)
def test_opens_with_a_note(case: Case) -> None:
    notes = parse(memoryview(case.data), "x.gguf").notes
    assert any(case.says in note.text for note in notes), notes


@pytest.mark.parametrize("case", LEGAL, ids=str)
def test_opens_in_silence(case: Case) -> None:
    assert parse(memoryview(case.data), "x.gguf").notes == []


def test_ids_are_unique() -> None:
    ids = [case.id for case in (*MALFORMED, *WARNED, *LEGAL)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("case", (*LEGAL, *WARNED), ids=str)
def test_a_cut_anywhere_is_found(case: Case) -> None:
    """Every byte of a whole file is needed, except bytes that belong to no part of it."""
    parsed = parse(memoryview(case.data), "x.gguf")
    needed = max((i.offset + i.nbytes for i in parsed.infos.values() if i.nbytes), default=0)
    unsized = any(not find_encoding(info.encoding).known for info in parsed.infos.values())
    for length in range(0, needed, 7 if needed < 4096 else needed // 50):
        if unsized and length > parsed.data_offset:
            continue  # what is left is taken for the tensor's bytes
        with pytest.raises(TruncatedError):
            parse(memoryview(case.data[:length]), "x.gguf")


LIMITS = {  # where a limit stands, and what passes the lowered one
    "arrays.MAX_STRING": (File().raw_key("x", ARR, File().array(STR, ["", "n" * 101])), "x'[1] at"),
    "metadata.MAX_METADATA": (File().key("x", STR, "n" * 101), "the metadata up to key 'x' takes"),
    "arrays.MAX_COUNT": (
        File().raw_key("x", ARR, File().array(ARR, [File().array(U8, [])] * 101)),
        "key 'x' holds more than 100 arrays",
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, says = LIMITS[limit]
    assert parse(memoryview(file.build()), "x.gguf").notes == []
    monkeypatch.setattr(f"aprfmt.formats.gguf.{limit}", 100)
    with pytest.raises(FormatError) as caught:
        parse(memoryview(file.build()), "x.gguf")
    assert says in str(caught.value)


def test_pages_of_large_values_are_given_back() -> None:
    file = File().raw_key("x", ARR, File().array(U8, [1]))
    file.raw_key("large", ARR, struct.pack("<IQ", U8, 2 << 20) + bytes(2 << 20))
    dropped: list[tuple[int, int]] = []
    parsed = parse(
        memoryview(file.build()), "x.gguf", drop=lambda start, stop: dropped.append((start, stop))
    )
    field = parsed.metadata.fields["large"]
    assert dropped == [(field.start, field.end)]


def test_a_pipe_and_a_folder_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a regular file"):
        open_source(tmp_path)


def test_partial_lists_what_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(two(32, data=40).build())
    with pytest.raises(TruncatedError, match=r"tensor 'b' needs bytes 128\.\.160.*24 too few"):
        open_source(path)
    with open_source(path, partial=True) as source:
        assert bytes(source.tensors["a"].raw()) == DATA[:32]
        assert source.tensors["b"].info.nbytes == 32
        source.tensors["b"].drop()
        with pytest.raises(TruncatedError, match="tensor 'b' needs bytes"):
            source.tensors["b"].raw()
        (note,) = (note for note in source.notes if note.level == "warning")
        assert note.where == str(path) and "1 of 2 tensors are cut" in note.text


def test_partial_lists_an_unknown_type_beyond_the_end() -> None:
    data = File(data=DATA[:32]).tensor("a", [8]).tensor("b", [8], 142, 64).build()
    parsed = parse(memoryview(data), "x.gguf", partial=True)
    assert parsed.infos["b"].nbytes == 0
    assert any("1 of 2 tensors are cut" in note.text for note in parsed.notes)


def test_partial_still_needs_the_header() -> None:
    with pytest.raises(TruncatedError):
        parse(memoryview(one().build()[:60]), "x.gguf", partial=True)


def test_messages_spell_controls_and_shorten_names() -> None:
    data = File(data=DATA).tensor("\x1b[2J" + "n" * 5000, [33], "Q4_0").build()
    with pytest.raises(FormatError) as caught:
        parse(memoryview(data), "x.gguf")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_ten_thousand_tensors_are_normal() -> None:
    file = File(data=DATA[:32])
    for number in range(10_000):
        file.tensor(f"blk.{number}.zero", [0])
    parsed = parse(memoryview(file.tensor("last", [8]).build()), "x.gguf")
    assert len(parsed.infos) == 10_001
    assert parsed.notes == []
