"""All rules of the format, against the reference library: never laxer, stricter only on purpose."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from aprfmt.base.encodings import BY_SAFETENSORS
from aprfmt.errors import FormatError, TruncatedError
from aprfmt.formats import detect_format, open_source
from aprfmt.formats.safetensors.layout import DTYPE_ORDER
from aprfmt.formats.safetensors.parse import parse
from tests.formats.safetensors_cases import LEGAL, MALFORMED, Case, entry, file, reference


@pytest.mark.parametrize("case", MALFORMED, ids=str)
def test_malformed_is_refused_with_one_clear_line(case: Case) -> None:
    assert case.error is not None
    with pytest.raises(FormatError) as caught:
        parse(memoryview(case.data), "t.safetensors")
    message = str(caught.value)
    assert type(caught.value) is case.error, message
    assert message.startswith("t.safetensors: ") and "\n" not in message
    assert case.says in message
    assert len(message) < 1000


@pytest.mark.parametrize("case", MALFORMED, ids=str)
def test_only_what_is_marked_passes_the_reference(case: Case) -> None:
    if case.lenient:
        reference(case.data)
    else:
        with pytest.raises(SafetensorError):
            reference(case.data)


@pytest.mark.parametrize("case", LEGAL, ids=str)
def test_legal_files_open_as_in_the_reference(case: Case) -> None:
    assert_as_reference(case.data)
    assert not parse(memoryview(case.data), "t").notes


def assert_as_reference(data: bytes) -> None:
    """Assert that a file we read is one the reference reads, with the same content."""
    parsed = parse(memoryview(data), "t")
    theirs = reference(data)
    assert theirs.keys() == parsed.infos.keys()
    for name, info in parsed.infos.items():
        assert theirs[name]["dtype"] == info_dtype(info.encoding)
        assert tuple(theirs[name]["shape"]) == info.shape
        assert bytes(theirs[name]["data"]) == data[info.offset : info.offset + info.nbytes]


def info_dtype(encoding: str) -> str:
    (dtype,) = (row.safetensors for row in BY_SAFETENSORS.values() if row.name == encoding)
    return dtype


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_mutations_end_in_the_references_content_or_one_error(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([case.data for case in (*LEGAL, *MALFORMED)])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "text"]))
        if kind == "set" and at < len(raw):
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(max_size=5))
        elif kind == "delete":
            del raw[at : at + data.draw(st.integers(1, 20))]
        else:
            text = data.draw(st.sampled_from(['"', "{", "}", "[", "-", "e9", "0", " ", ",", "\\u"]))
            raw[at : at + 1] = text.encode()
    if data.draw(st.booleans()) and len(raw) > 8:  # keep the length true, so JSON is reached
        end = raw.rfind(b"}") + 1
        raw[:8] = max(end - 8, 0).to_bytes(8, "little")
    try:
        parse(memoryview(raw), "t")
    except FormatError as error:
        assert str(error).startswith("t: ")
    else:
        assert_as_reference(bytes(raw))
    try:
        parse(memoryview(raw), "t", partial=True)
    except FormatError:
        pass


def test_the_dtype_order_is_complete() -> None:
    assert sorted(DTYPE_ORDER) == sorted(BY_SAFETENSORS)


@pytest.mark.parametrize("dtype", DTYPE_ORDER)
def test_every_dtype_is_read_with_its_rows(dtype: str) -> None:
    row = BY_SAFETENSORS[dtype]
    nbytes = row.nbytes((3, 8))
    data = file({"w": entry(dtype, [3, 8], [0, nbytes])}, bytes(range(nbytes)))
    assert_as_reference(data)
    info = parse(memoryview(data), "t").infos["w"]
    assert (info.encoding, info.row_bytes) == (row.name, row.row_bytes((3, 8)))


def test_partial_lists_what_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    whole = file({"a": entry(), "b": entry(offsets=[16, 32])}, bytes(32))
    path.write_bytes(whole[:-1])
    with pytest.raises(TruncatedError, match="--partial"):
        open_source(path)
    with open_source(path, partial=True) as source:
        (note,) = source.notes  # one for the file, not one for each tensor
        assert note.where == str(path) and "1 of 2 tensors are cut" in note.text
        assert source.tensors["a"].raw().nbytes == 16
        with pytest.raises(TruncatedError, match="'b' needs bytes"):
            source.tensors["b"].raw()
    path.write_bytes(whole[:30])
    with pytest.raises(TruncatedError, match="bytes follow"):
        open_source(path, partial=True)


@pytest.mark.parametrize("case", (*LEGAL, *MALFORMED), ids=str)
def test_detection_is_by_content(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(case.data)
    begins = case.data[8:64].lstrip()[:1] == b"{"
    if begins:
        assert detect_format(path).name == "safetensors"
    else:
        with pytest.raises(FormatError):
            detect_format(path)


@pytest.mark.parametrize("length", [123, 0x7B20, 0x7B0A, 0x7B0920])
def test_a_length_that_begins_like_json_is_a_length(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = file({"a": entry()}, b"")[8:].ljust(length)
    data = length.to_bytes(8, "little") + header + bytes(range(16))
    assert data.lstrip()[:1] == b"{" and len(header) == length
    assert_as_reference(data)
    path.write_bytes(data)
    assert detect_format(path).name == "safetensors"
    with open_source(path) as source:
        assert bytes(source.tensors["a"].raw()) == bytes(range(16))


@pytest.mark.parametrize(
    "text", ['{"a": 1,\n {"b": 2}}', '{"architectures": ["x"]}', "[1, 2]  {}", "# text\n\n{}"]
)
def test_text_files_are_not_safetensors(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"is (JSON|text) that begins"):
        open_source(path)
