"""Hostile files of torch.save: nothing runs, nothing is imported, each is refused by name."""

import io
import pickle
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aprfmt.errors import FormatError, TruncatedError, UnsupportedError
from aprfmt.formats import open_source
from aprfmt.formats.pytorch import pickle_calls, state_dict
from aprfmt.formats.pytorch.pickle_imports import Imports
from aprfmt.formats.pytorch.pickle_reader import MAX_NAME, WINDOW, Stream, Unpickler
from tests.formats import pytorch_files as files
from tests.formats.hostile_pickles import (
    PICKLES,
    PLANTED,
    RUN,
    SOUND,
    archived,
    call,
    name,
    tensor,
    text,
)


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a folder first on the path with a module that leaves a mark where it is imported."""
    mark = tmp_path / "mark"
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\ndef run(*a): pass\nclass Evil:\n"
    code += f"    def __setstate__(self, s): pathlib.Path({str(mark)!r}).touch()\n"
    (tmp_path / f"{PLANTED}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not mark.exists()
    assert PLANTED not in sys.modules
    assert not (tmp_path / "x").exists()


def zipped(path: Path, body: bytes) -> Path:
    """Write an archive around a pickle, with one storage of 16 bytes."""
    path.write_bytes(archived(body))
    return path


def _calls_to_refuse(path: Path) -> int:
    """Return how many functions are called until a file is refused, on any machine."""
    counted = 0

    def count(frame: Any, event: str, given: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with pytest.raises(FormatError):
            open_source(path)
    finally:
        sys.setprofile(before)
    return counted


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_small_file_takes_few_calls_and_little_memory(marked: Path) -> None:
    """Memory is at most 64 bytes a byte, and calls 16 for each value that a file may have."""
    bodies = [body if len(body) < 1 << 16 else body[: 1 << 13] for body, _ in PICKLES.values()]
    made = [*map(archived, bodies), *(make() for make, _ in ARCHIVES.values())]
    assert len(made) >= 80
    for data in made:
        path = marked / "x.pt"
        path.write_bytes(data)
        values = state_dict.FREE_VISITS + state_dict.BYTE_VISITS * len(data)
        assert _calls_to_refuse(path) < 16 * values
        tracemalloc.start()
        try:
            with pytest.raises(FormatError):
                open_source(path)
            assert tracemalloc.get_traced_memory()[1] < (4 << 20) + 64 * len(data)
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "x.pt"),
        ("validate", "x.pt"),
        ("diff", "x.pt", "x.pt"),
        ("scan", "."),
        ("hash", "x.pt"),
        ("convert", "x.pt", "y.safetensors"),
        ("tensors", "x.pt"),
        ("trace", "MODEL", "--map", "x.pt", "--ids", "1,2"),
        ("diff", "MODEL", "x.pt"),
        ("step", "MODEL", "--grads", "x.pt", "--after", "MODEL", "--optimizer", "sgd"),
    ],
)
def test_every_command_only_describes_a_pickle(marked: Path, words: tuple[str, ...]) -> None:
    """What the file would call is never imported, whichever command opens the file."""
    from tests.cli.run import aprfmt

    zipped(marked / "x.pt", call(PLANTED, RUN, "x"))
    model = Path(__file__).resolve().parents[3] / "fixtures" / "demo"
    done = aprfmt(*(str(model) if word == "MODEL" else word for word in words))
    assert done.code in ((0, 1, 2) if words[0] == "scan" else (1, 2)), done.out
    if words[0] not in ("scan", "validate"):
        assert f"calls {PLANTED}.run" in done.err + done.out


@pytest.mark.parametrize("kind", PICKLES)
def test_pickles(marked: Path, kind: str) -> None:
    """Every one is refused, with what it was and where it stood; the planted module rests."""
    body, said = PICKLES[kind]
    path = zipped(marked / "hostile.pt", body)
    with pytest.raises(FormatError, match=said) as caught:
        open_source(path)
    assert str(caught.value).count("hostile.pt") == 1, "the place stands once"
    assert len(str(caught.value)) < 1000


def test_the_frame_of_these_files_is_sound(marked: Path) -> None:
    """The same file with a whole tensor opens: the errors above are those of the bodies."""
    with open_source(zipped(marked / "x.pt", SOUND)) as source:
        assert source.tensors["t"].info.shape == (4,)


def test_objects_are_only_described(marked: Path) -> None:
    """A class of a package with a state is named; neither it nor its __setstate__ is touched."""
    body = b"}" + text("t") + name(PLANTED, "Evil") + b")\x81}" + text("w") + tensor() + b"sbs"
    with open_source(zipped(marked / "x.pt", body)) as source:
        assert list(source.tensors) == ["t.w"]
        assert f"{PLANTED}.Evil" in source.imports  # type: ignore[attr-defined]
        assert any(f"{PLANTED}.Evil (1)" in note.text for note in source.notes)


def test_sharing_is_bounded(marked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that hold each other twice, 40 deep, end at the limit of values."""
    monkeypatch.setattr(state_dict, "MAX_VISITS", 10_000)
    body = b"}q\x00"
    for i in range(1, 40):
        held = b"h" + bytes([i - 1])
        body += b"]q" + bytes([i]) + b"(" + held + held + b"e"
    body = b"(" + body + b"t"
    with pytest.raises(FormatError, match="more than 10000 values"):
        open_source(zipped(marked / "x.pt", body))


# --- archives ------------------------------------------------------------------------------------


def whole() -> bytes:
    """Return a file that torch wrote."""
    buffer = io.BytesIO()
    torch.save({"x": torch.arange(100.0), "y": torch.ones(3, 4).t()}, buffer)
    return buffer.getvalue()


def patched(data: bytes, at: int, new: bytes) -> bytes:
    """Return data with some bytes replaced."""
    return data[:at] + new + data[at + len(new) :]


def entry(data: bytes, record: str) -> int:
    """Return where the directory's entry of a record begins."""
    name = record.encode()
    at = data.rfind(name) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    return at


def _field(record: str, offset: int, new: bytes) -> bytes:
    data = whole()
    return patched(data, entry(data, record) + offset, new)


def _longer_name() -> bytes:
    """Return an archive in which a local header takes one byte of its extra field for its name."""
    data = whole()
    header = int.from_bytes(data[entry(data, "archive/data/0") + 42 :][:4], "little")
    name, extra = struct.unpack_from("<2H", data, header + 26)
    assert extra
    return patched(data, header + 26, struct.pack("<2H", name + 1, extra - 1))


def _compressed() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + b"N" * 10 + b".")
        archive.writestr("x/data/0", bytes(50_000_000))
    return buffer.getvalue()


def _rezipped(*records: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for record, data in records:
            archive.writestr(record, data)
    return buffer.getvalue()


def _overlapping() -> bytes:
    """Return the file with a record that reaches into the next, as its directory has it."""
    return _field("archive/data/0", 20, struct.pack("<2I", 500, 500))


def _script() -> bytes:
    """Return an archive of torch.jit.save's kind, whose code stands compressed before the rest."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/data.pkl", EMPTY)
        archive.writestr("x/code/__torch__/m.py", "class M(Module): pass", zipfile.ZIP_DEFLATED)
        archive.writestr("x/constants.pkl", EMPTY)
    return buffer.getvalue()


EMPTY = b"\x80\x02}."
ARCHIVES = {
    "bomb": (_compressed, "is compressed"),
    "method": (lambda: _field("archive/data/0", 10, b"\x08"), "is compressed"),
    "encrypted": (lambda: _field("archive/data/0", 8, b"\x01"), "is encrypted"),
    "sizes-differ": (lambda: _field("archive/data/0", 24, b"\x01\0\0\0"), "said to have 1;"),
    "size-outside": (
        lambda: _field("archive/data/0", 20, b"\xff\xff\xff\x7f" * 2),
        "is said to take 2147483647",
    ),
    "zip64-missing": (lambda: _field("archive/data/0", 20, b"\xff" * 8), "lacks its zip64 field"),
    "smaller": (
        lambda: _field("archive/data/0", 20, b"\x10\0\0\0" * 2),
        "needs 400 bytes, its record has 16",
    ),
    "header-outside": (
        lambda: _field("archive/data/0", 42, b"\xff\xff\xff\x7f"),
        "the records end at",
    ),
    "header-elsewhere": (
        lambda: _field("archive/data/0", 42, b"\x05\0\0\0"),
        "no local zip header at byte 5",
    ),
    "renamed": (lambda: _field("archive/data/0", 46, b"Archive/data/0"), "its directory says"),
    "longer-name": (_longer_name, "does not say what the directory says"),
    "overlapping": (_overlapping, "overlaps 'archive/data/1'"),
    "disk": (lambda: _field("archive/data/0", 34, b"\x01\0"), "is damaged"),
    "entry-magic": (lambda: _field("archive/data/0", 0, b"XX"), "no record of the zip directory"),
    "appended": (lambda: whole() + b"x" * 10, "stand after its directory"),
    "prepended": (lambda: whole()[:4] + b"x" * 10 + whole()[4:], "expected|directory|zip"),
    "twice": (
        lambda: _rezipped(("x/data.pkl", EMPTY), ("x/data/0", b"1"), ("x/data/0", b"2")),
        "twice",
    ),
    "two-pickles": (
        lambda: _rezipped(("x/data.pkl", EMPTY), ("y/data.pkl", EMPTY)),
        "has 2 records",
    ),
    "no-pickle": (lambda: _rezipped(("x/version", b"3")), "has 0 records"),
    "script": (lambda: _rezipped(("x/data.pkl", EMPTY), ("x/constants.pkl", EMPTY)), "TorchScript"),
    "saved-script": (_script, r"TorchScript archive.*torch\.jit\.load\('.*x\.pt'\)"),
    "order": (lambda: _rezipped(("x/data.pkl", EMPTY), ("x/byteorder", b"middle")), "byte order"),
    "empty-pickle": (lambda: _rezipped(("x/data.pkl", b"")), "an opcode at byte"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", ARCHIVES)
def test_archives(tmp_path: Path, kind: str) -> None:
    """Directories that lie are refused by name, and nothing is expanded."""
    make, said = ARCHIVES[kind]
    (tmp_path / "x.pt").write_bytes(make())
    with pytest.raises(FormatError, match=said):
        open_source(tmp_path / "x.pt")


@pytest.mark.parametrize("form", files.FORMS)
def test_every_cut(tmp_path: Path, form: str) -> None:
    """A file cut anywhere is an error of the format, never another one and never success."""
    path = files.save({"x": torch.arange(5.0), "y": [1, "z"]}, tmp_path / "w.pt", form, 2)
    data = path.read_bytes()
    for stop in range(0, len(data), 3):
        path.write_bytes(data[:stop])
        with pytest.raises(FormatError):
            open_source(path)


@pytest.mark.parametrize("form", files.FORMS)
def test_every_flip(tmp_path: Path, form: str) -> None:
    """A flipped byte is read, or refused as an error of the format: nothing else escapes."""
    path = files.save(
        {"x": torch.arange(5.0).reshape(1, 5).t(), "y": [1, "z"]}, tmp_path / "w.pt", form, 2
    )
    data = path.read_bytes()
    refused = 0
    for at in range(0, len(data), 2):
        path.write_bytes(patched(data, at, bytes([data[at] ^ 0xFF])))
        try:
            with open_source(path) as source:
                for one in source.tensors.values():
                    one.raw()
        except FormatError:
            refused += 1
    assert refused > 50


def test_a_legacy_count(tmp_path: Path) -> None:
    """The count of elements before a storage has to be that of the pickle."""
    path = files.save({"x": torch.arange(5.0)}, tmp_path / "x.pt", "legacy", 2)
    data = path.read_bytes()
    path.write_bytes(patched(data, len(data) - 28, b"\x09"))
    with pytest.raises(FormatError, match="has 9 elements, its pickle says"):
        open_source(path)


def test_a_hostile_pickle_in_the_legacy_form(marked: Path) -> None:
    """The older form goes through the same interpreter."""
    start = pickle.dumps(torch.serialization.MAGIC_NUMBER, 2) + pickle.dumps(1001, 2)
    path = marked / "x.pt"
    path.write_bytes(start + b"\x80\x02" + call(PLANTED, RUN, "x") + b".")
    with pytest.raises(FormatError, match=rf"calls {PLANTED}\.run"):
        open_source(path)


SPARSE_DATA: list[tuple[Any, Any, str]] = [
    ("torch.sparse_coo", ("i", "v", (2, 3)), ""),
    ("torch.sparse_coo", ("i", "v"), "its layout is .*, its data "),
    ("torch.sparse_coo", "ivs", "its layout is .*, its data "),
    ("torch.sparse_coo", ["i", "v", (2, 3)], "its layout is .*, its data "),
    ("torch.sparse_coo", None, "its layout is .*, its data "),
    (7, ("i", "v", (2, 3)), "its layout is "),
    ("torch.sparse_csr", ("r", "c", "v", (2, 3)), ""),
    ("torch.sparse_csr", ("r", "c", "v"), "torch.sparse_csr has 3 values"),
    ("torch.sparse_csc", ("r", "c", "v"), "torch.sparse_csc has 3 values"),
]


@pytest.mark.parametrize(("layout", "data", "says"), SPARSE_DATA)
def test_a_sparse_tensor_has_all_its_parts_or_is_refused(layout: Any, data: Any, says: str) -> None:
    if says:
        with pytest.raises(ValueError, match=says):
            pickle_calls._describe_sparse(layout, data)
        return
    found = pickle_calls._describe_sparse(layout, data)
    assert found.facts == {"layout": layout, "shape": [2, 3]} and list(found.parts) == (
        ["indices", "values"] if "coo" in layout else ["crow_indices", "col_indices", "values"]
    )


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        ("_describe_dict", (["ab", "c"],), "it is given no pairs"),
        ("_describe_dict", (5,), "it is given no pairs"),
        ("_describe_list", (5,), "it is given "),
        ("_encode_text", (5,), "it is given .* and 'utf-8'"),
        ("_encode_text", ("a", "rot13"), "it is given .* and 'rot13'"),
        ("_encode_text", ("\u20ac", "latin1"), "its text has no latin1 bytes"),
        ("_describe_bytes", ("a", "utf-7"), "it is given "),
        ("_describe_bytes", (b"a", 5), "it is given "),
        ("_describe_complex", ("1",), "it is given "),
        ("_describe_complex", (1, "2"), "it is given "),
        ("_describe_complex", (1 << 20000,), "its number is too large"),
        ("_describe_text", (5,), "it is given "),
    ],
)
def test_a_call_of_a_known_function_with_other_arguments_is_refused(
    function: str, arguments: tuple[Any, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        getattr(pickle_calls, function)(*arguments)


@pytest.mark.parametrize("kind", [FormatError, TruncatedError, UnsupportedError])
def test_what_a_storage_says_is_said_once(kind: type[FormatError]) -> None:
    """With its own place, not inside a sentence about the pickle."""

    def resolve(given: object) -> object:
        raise kind("x.pt: storage 7 is cut")

    body = b"\x80\x02" + text("7") + b"Q."
    stream = Stream(memoryview(body), 0, len(body), "x.pt: data.pkl")
    with pytest.raises(kind, match=r"^x\.pt: storage 7 is cut$"):
        Unpickler(stream, lambda function, arguments: None, resolve, Imports()).load()


@pytest.mark.parametrize("before", [0, 1, WINDOW - MAX_NAME, WINDOW - 3, WINDOW - 1, WINDOW])
def test_a_name_is_read_up_to_its_longest_wherever_it_stands(before: int) -> None:
    """Names that are fetched at once, and those at the edge of what is fetched."""
    for count, says in ((3, ""), (MAX_NAME, ""), (MAX_NAME + 1, "is longer than"), (9, "is cut")):
        end = b"" if says == "is cut" else b"\n."
        body = b"-" * before + b"n" * count + end
        stream = Stream(memoryview(body), 0, len(body), "x.pt")
        for at in range(before):
            assert stream.byte("an opcode") == 45 and stream.at == at + 1
        if says:
            with pytest.raises(FormatError, match=f"a name at byte .*{says}|{says}"):
                stream.line("a name")
        else:
            assert stream.line("a name") == "n" * count
            assert stream.byte("an opcode") == 46


@pytest.mark.parametrize("comment", [b"", b"x", b"PK\x05\x06", b"c" * 0xFFFF])
def test_an_archive_with_a_comment_is_read(comment: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    held = torch.arange(6.0)
    torch.save({"x": held}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = comment
    if b"PK" in comment:  # the last end of an archive is looked for, whatever it stands in
        with pytest.raises(FormatError, match="directory"), open_source(path):
            pass
        return
    with open_source(path) as source:
        assert bytes(source.tensors["x"].raw()) == held.numpy().tobytes()


def test_values_that_a_small_file_shares_are_bounded_by_its_size() -> None:
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    most = state_dict.FREE_VISITS + state_dict.BYTE_VISITS * 1000
    assert most < state_dict.MAX_VISITS
    with pytest.raises(UnsupportedError, match=f"more than {most} values, counted each time"):
        state_dict.Flattened(value, "x.pt", 1000)


def test_archives_after_each_other_are_no_file(marked: Path) -> None:
    """Seen red: of two archives of equal size the first was read as the whole file."""
    path = marked / "x.pt"
    torch.save(torch.arange(6.0), path)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(FormatError, match="something was put before it"):
        open_source(path)
    shard = path.rename(marked / "__0_0.distcp")
    with pytest.raises(UnsupportedError, match="dcp_to_torch FOLDER"):
        open_source(shard)
