"""What is written and read up to a limit, and what is put back, each by itself."""

import errno
import os
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aprfmt.base.protocols import TensorInfo, TypedValue
from aprfmt.errors import ConversionError, FormatError
from aprfmt.formats import atomic
from aprfmt.formats.cursor import MAX_NESTING
from aprfmt.formats.gguf import layout, value_encoding, writer
from aprfmt.formats.mapped_file import MappedFile
from aprfmt.formats.pytorch import storages

# --- values of GGUF keys ------------------------------------------------------------------------


def encoded(value: Any, kind: str | None = None) -> bytes:
    held = value if kind is None else TypedValue(value, kind)
    return b"".join(bytes(piece) for piece in value_encoding.encode_value("own.key", held))


def refused(value: Any, kind: str | None = None) -> str:
    with pytest.raises(ConversionError) as error:
        encoded(value, kind)
    assert str(error.value).startswith("key 'own.key': ")
    return str(error.value).removeprefix("key 'own.key': ")


def test_arrays_and_texts_may_be_as_long_as_readers_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside of others; characters beyond ASCII count by their bytes."""
    monkeypatch.setattr(value_encoding, "MAX_ARRAY", 3)
    monkeypatch.setattr(value_encoding, "MAX_STRING", 4)
    for most in ([1, 2, 3], ["a"] * 3, b"abc", [[1, 2, 3]] * 3, "abcd", "éé", ["abcd"]):
        assert encoded(most)
    limit = "4 elements, the limit is 3"
    for over in ([1, 2, 3, 4], ["a"] * 4, b"abcd", [[1], [1, 2, 3, 4]], [[1]] * 4):
        assert refused(over) == limit
    assert refused([], "array:nothing").startswith("there is no element type 'nothing'")
    for long in ("abcde", "ééé", ["a", "abcde"]):
        count = len(long[-1].encode()) if isinstance(long, list) else len(long.encode())
        assert refused(long) == f"{count} bytes, readers accept up to 4"


def test_lists_are_nested_up_to_a_depth() -> None:
    value: Any = 1
    for _ in range(MAX_NESTING):
        value = [value]
    assert encoded(value)
    deep = f"lists are nested deeper than {MAX_NESTING} levels"
    assert refused([value]) == deep
    assert refused([value], "array:array") == deep


# value -> the type that it is written as; a text that begins with "!" is why it is refused
TYPES: tuple[tuple[Any, str], ...] = (
    (True, "bool"),
    (0, "uint32"),
    ((1 << 32) - 1, "uint32"),
    (1 << 32, "uint64"),
    ((1 << 64) - 1, "uint64"),
    (1 << 64, "!fits none of uint32, uint64, int32, int64"),
    (-1, "int32"),
    (-(1 << 31), "int32"),
    (-(1 << 31) - 1, "int64"),
    (-(1 << 63), "int64"),
    (-(1 << 63) - 1, "!fits none of"),
    (0.5, "float32"),
    ("a", "string"),
    (b"a", "array:uint8"),
    ([1, 2], "array:int32"),
    ([0, (1 << 31) - 1], "array:int32"),
    ([0, 1 << 31], "array:uint32"),
    ([-1, 1 << 31], "array:int64"),
    ([-1, (1 << 63) - 1], "array:int64"),
    ([1 << 63, 0], "array:uint64"),
    ([-1, 1 << 63], "!fits none of int32, uint32, int64, uint64"),
    ([1, 0.5], "array:float32"),
    ([0.5], "array:float32"),
    ([True, False], "array:bool"),
    (["a", b"b"], "array:string"),
    ([[1], [2, 3]], "array:array:int32"),
    ([[1], ["a"]], "array:array"),
    ([], "!an empty list does not say"),
    ([True, 1], "!elements of one type, found bool, int32"),
    (["a", 1], "!elements of one type, found int32, string"),
    ({"a": 1}, "!GGUF has no type for dict"),
    (None, "!GGUF has no type for NoneType"),
)


def test_a_value_has_the_first_type_that_holds_it() -> None:
    for value, kind in TYPES:
        if kind.startswith("!"):
            assert kind[1:] in refused(value), value
        else:
            assert value_encoding.type_of("own.key", value) == kind, value
            head = layout.TYPE_BY_NAME[kind.partition(":")[0]]
            assert encoded(value)[:4] == struct.pack("<I", head.id)


def test_a_typed_value_is_what_its_type_can_store() -> None:
    assert encoded(300, "uint16") == struct.pack("<IH", 2, 300)
    assert encoded([1, 2], "array:int8") == struct.pack("<IIQbb", 9, 1, 2, 1, 2)
    assert encoded(["a"], "array:string") == struct.pack("<IIQQ1s", 9, 8, 1, 1, b"a")
    long = list(range(value_encoding._CHUNK + 1))
    assert encoded(long, "array:uint16")[16:] == struct.pack(f"<{len(long)}H", *long)
    for value, kind, says in (
        (256, "uint8", "256 is not a uint8"),
        ([1, 256], "array:uint8", "a value of the list is not a uint8"),
        (True, "uint8", "is True (bool), its type is uint8"),
        (1, "bool", "is 1 (int), its type is bool"),
        (1, "string", "is int, its type is string"),
        ("\ud800", "string", "character 0 is a lone surrogate"),
        ("ab", "array:uint8", "is str, its type array:uint8"),
        (1, "array:uint8", "is int, its type array:uint8"),
        (1, "uint8:int8", "there is no type 'uint8:int8'"),
        (1, "byte", "there is no type 'byte'"),
        ([[1]], "array:uint8:int8", "there is no element type 'uint8:int8'"),
    ):
        assert says in refused(value, kind), (value, kind)


def test_a_key_has_a_byte_at_least_and_no_more_than_readers_accept() -> None:
    most = layout.MAX_KEY_BYTES
    for key in ("a", "a" * most, "é" * (most // 2)):
        raw = key.encode()
        assert value_encoding.encode_key(key) == struct.pack("<Q", len(raw)) + raw
    for key in ("", "a" * (most + 1), "é" * (most // 2 + 1), "\ud800"):
        with pytest.raises(ConversionError):
            value_encoding.encode_key(key)


def test_a_tensor_is_what_every_reader_of_gguf_accepts() -> None:
    def said(
        name: str = "w", shape: Any = (2, 32), encoding: str = "Q8_0", nbytes: int = 68
    ) -> str:
        try:
            writer._refuse_unstorable(TensorInfo(name, shape, encoding, 0, nbytes, 0))
        except ConversionError as error:
            return str(error)
        return ""

    most = layout.MAX_NAME_BYTES
    assert said() == said("a" * most) == said("é" * (most // 2)) == ""
    for name in ("a" * (most + 1), "é" * (most // 2 + 1)):
        assert f"its name has {len(name.encode())} bytes, GGUF names have at most {most}" in said(
            name
        )
    assert "lone surrogates" in said("\ud800")
    dims = layout.MAX_DIMS
    assert said(shape=(1,) * (dims - 1) + (32,), nbytes=34) == ""
    assert f"{dims + 1} dimensions, GGUF has at most {dims}" in said(shape=(1,) * dims + (32,))
    assert said(shape=(0, 32), nbytes=0) == ""
    for size in (-1, layout.MAX_INT64 + 1):
        assert "sizes are 0 to 2^63-1" in said(shape=(size, 32), encoding="F32")
    assert "rows must be a multiple of 32" in said(shape=(2, 33))
    assert "GGUF has no type for F8_E4M3" in said(encoding="F8_E4M3", nbytes=64)
    for nbytes in (67, 69):
        assert said(nbytes=nbytes) == (
            f"tensor 'w': {nbytes} bytes are planned, shape [2, 32] of Q8_0 takes 68"
        )


# --- pickles ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        (None, ""),
        (b"little", ""),
        (b"big", "big"),
        (b"", "!"),
        (b"middle", "!"),
        (b"little".ljust(16), "!"),
        (b"little".ljust(17), "!"),
    ],
)
def test_a_byte_order_is_little_or_big(stated: bytes | None, says: str, tmp_path: Path) -> None:
    """Where a file states none it is little; of a long text only the begin is shown."""
    torch.save({"w": torch.arange(4.0)}, tmp_path / "right.pt")
    path = tmp_path / "own.pt"
    with zipfile.ZipFile(tmp_path / "right.pt") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            if not name.endswith("byteorder"):
                new.writestr(name, old.read(name))
            elif stated is not None:
                new.writestr(name, stated)
    file = MappedFile(path)
    if says == "!":
        shown = (stated or b"")[:16]
        with pytest.raises(FormatError) as error:
            storages._read_zip(file, "f")
        assert str(error.value) == f"f: its byte order is {shown!r}; expected little or big"
    else:
        assert storages._read_zip(file, "f").swapped is (says == "big")
    file.close()


# --- folders that are put in place --------------------------------------------------------------


@pytest.mark.parametrize("old", [None, {}, {"w": "old"}])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("synced", [False, True])
def test_a_folder_that_cannot_be_made_safe_is_put_back(
    synced: bool,
    force: bool,
    old: dict[str, str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    staging, target = tmp_path / "staging", tmp_path / "target"
    staging.mkdir()
    (staging / "w").write_text("new")
    if old is not None:
        target.mkdir()
        for name, text in old.items():
            (target / name).write_text(text)

    def sync(folder: Path) -> None:
        if folder == tmp_path and not synced:
            raise OSError(errno.EIO, "no disk")

    removed: list[tuple[Path, Path]] = []
    checked: list[bool] = []
    monkeypatch.setattr(atomic, "sync_folder", sync)
    files: Any = SimpleNamespace(
        check=lambda: checked.append(True),
        _files=[],
        _force=force,
        _staging=staging,
        _remove_old_folder=lambda *given: removed.append(given),
    )
    if synced and (force or not old):
        assert atomic.FileSet._swap_folder(files, staging, target)
        assert (target / "w").read_text() == "new" and files._staging is None
        assert removed == [(staging, target)] * bool(old) and staging.exists() is bool(old)
    else:
        with pytest.raises(OSError):
            atomic.FileSet._swap_folder(files, staging, target)
        assert (staging / "w").read_text() == "new" and files._staging == staging
        assert not removed
        assert target.exists() is bool(old)
        assert not old or (target / "w").read_text() == "old"
    assert checked == [True] and sorted(os.listdir(tmp_path)) == sorted(
        ["staging"] * (files._staging is not None or bool(old)) + ["target"] * (target.exists())
    )
