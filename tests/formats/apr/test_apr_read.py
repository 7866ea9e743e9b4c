"""What an APR file may look like, what is remarked on, and what is refused."""

from pathlib import Path

import pytest

from aprfmt.errors import FormatError, TruncatedError
from aprfmt.formats import detect_format, open_source
from aprfmt.formats.apr import layout
from aprfmt.formats.apr.parse import parse
from aprfmt.formats.apr.reader import open_source as open_apr
from tests.formats.apr_cases import LEGAL, MALFORMED, WARNED, Case
from tests.formats.apr_files import AprFile, Tensor, header_field


@pytest.mark.parametrize("case", MALFORMED, ids=str)
def test_malformed_is_refused_with_one_clear_line(case: Case) -> None:
    assert case.error is not None
    with pytest.raises(FormatError) as caught:
        parse(memoryview(case.data), "t.apr")
    message = str(caught.value)
    assert type(caught.value) is case.error, message
    assert message.startswith("t.apr: ") and "\n" not in message
    assert case.says in message


@pytest.mark.parametrize("case", WARNED, ids=str)
def test_odd_files_open_with_a_note(case: Case) -> None:
    parsed = parse(memoryview(case.data), "t.apr")
    assert any(case.says in note.text for note in parsed.notes), parsed.notes


@pytest.mark.parametrize("case", LEGAL, ids=str)
def test_legal_files_open_without_a_remark(case: Case) -> None:
    parsed = parse(memoryview(case.data), "t.apr")
    assert not parsed.notes
    assert parsed.footer == "present"


@pytest.mark.parametrize("length", range(0, len(AprFile().build()), 7))
def test_every_cut_is_noticed(length: int) -> None:
    data = AprFile().build()[:length]
    end = len(AprFile().build()) - 4
    if length < end:
        with pytest.raises(TruncatedError):
            parse(memoryview(data), "t.apr")
    else:
        assert parse(memoryview(data), "t.apr").notes


def test_partial_lists_what_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "cut.apr"
    path.write_bytes(AprFile().build()[:-50])
    with pytest.raises(TruncatedError, match="--partial"):
        open_source(path)
    with open_source(path, partial=True) as source:
        assert list(source.tensors) == ["a", "b"]
        assert source.tensors["a"].raw().nbytes == 16
        where = [note.where for note in source.notes]
        assert where == [str(path)]  # the padding is cut, no tensor is
    path.write_bytes(AprFile().build()[: header_field(AprFile().build(), "data_offset") + 70])
    with open_source(path, partial=True) as source:
        (note,) = source.notes  # one for the file, not one for each tensor
        assert note.where == str(path) and "1 of 2 tensors are cut" in note.text
        with pytest.raises(TruncatedError, match="'b' needs bytes"):
            source.tensors["b"].raw()


def test_missing_footer_is_no_match_and_no_mismatch(tmp_path: Path) -> None:
    path = tmp_path / "x.apr"
    for file, state, matches in (
        (AprFile().build(), "present", True),
        (AprFile(footer=b"1234").build(), "present", False),
        (AprFile(footer=b"").build(), "missing", None),
        (AprFile().build() + b"tail", "trailing", True),
        (AprFile(footer=b"1234").build() + b"tail", "trailing", False),
        (AprFile().build()[:-1], "trailing", False),
    ):
        path.write_bytes(file)
        with open_apr(path) as source:
            assert (source.footer_state(), source.footer_matches()) == (state, matches)


@pytest.mark.parametrize("code", layout.CODES)
def test_every_code_reads_as_each_of_its_meanings(code: int) -> None:
    from aprfmt.base.encodings import ENCODINGS

    for name in layout.CODES[code]:
        row = ENCODINGS[name]
        for shape in ((512,), (2, 256), (33,) if name == layout.CODES[code][0] else (512,)):
            fit = layout.possible_sizes(row, shape)[0]
            tensor = Tensor(b"w", shape, code, bytes(fit.nbytes))
            parsed = parse(memoryview(AprFile(tensors=(tensor,)).build()), "t.apr")
            found = parsed.infos["w"].encoding
            # Where the bytes of two meanings are equal, the table's order decides.
            equal = [
                other
                for other in layout.CODES[code]
                if layout.possible_sizes(ENCODINGS[other], shape)[0].nbytes == fit.nbytes
            ]
            assert found == equal[0]


@pytest.mark.parametrize(
    ("shape", "nbytes", "row_bytes"),
    [
        ((3, 300), 3 * 2 * 144, 2 * 144),  # row-padded
        ((3, 300), 4 * 144, None),  # flat, blocks cross row ends
        ((2, 512), 4 * 144, 2 * 144),
        ((2, 200), 2 * 144, 144),  # both fit: rows first
        ((300,), 2 * 144, None),
        ((1, 300), 2 * 144, 2 * 144),
        ((2, 2, 300), 5 * 144, None),
        ((2, 2, 256), 4 * 144, 144),
    ],
)
def test_rows_of_k_quants(shape: tuple[int, ...], nbytes: int, row_bytes: int | None) -> None:
    tensor = Tensor(b"w", shape, 12, bytes(nbytes))
    info = parse(memoryview(AprFile(tensors=(tensor,)).build()), "t.apr").infos["w"]
    assert (info.shape, info.encoding, info.row_bytes) == (shape, "Q4_K", row_bytes)


def test_detection_is_by_content(tmp_path: Path) -> None:
    for magic in (b"APR\0", b"APR2", b"APRN", b"APR1"):
        path = tmp_path / "model.gguf"
        path.write_bytes(AprFile(magic=magic).build())
        assert detect_format(path).name == "apr"
