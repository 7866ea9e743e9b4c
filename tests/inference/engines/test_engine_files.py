"""Foreign trace files with false sizes: refused with the name of the fault, in bounded memory.

Seen red: a pickled member read, a header's size believed, a member expanded before its size.
"""

import io
import resource
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.inference.engines import npz
from aprfmt.inference.engines.npz import load_npz

KEY = "model.layers.0.input_layernorm.npy"


def npy(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=values.dtype == object)
    return buffer.getvalue()


def header(shape: str, descr: str = "'<f4'", version: int = 1) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + size + text


def archive(path: Path, members: list[tuple[str, bytes]], packed: bool = False) -> Path:
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as file:
        for name, data in members:
            file.writestr(name, data)
    return path


REFUSED: dict[str, tuple[bytes | list[tuple[str, bytes]], str]] = {
    "no zip": (b"PK\x03\x05 and nothing more", "is not an .npz file"),
    "cut zip": (b"PK\x03\x04 and nothing more", "the archive is cut"),
    "pickle": ([(KEY, npy(np.array([{"a": 1}], dtype=object)))], "pickled objects are not read"),
    "no array": ([(KEY, b"hello there, this is text")], "expected an .npy array"),
    "no suffix": ([("x.txt", b"")], "expected NAME.npy"),
    "short": ([(KEY, b"\x93NUMPY")], "begins with"),
    "huge shape": ([(KEY, header("(1099511627776,)") + bytes(64))], "64 follow the header"),
    "overflowing": ([(KEY, header("(4294967296, 4294967296)") + bytes(16))], "follow the header"),
    "negative": ([(KEY, header("(-1, 4)") + bytes(16))], "expected up to 8 sizes"),
    "not a tuple": ([(KEY, header("4") + bytes(16))], "expected up to 8 sizes"),
    "code": ([(KEY, header("__import__('os').getpid(),") + bytes(4))], "not readable"),
    "deep": ([(KEY, header("(" * 5000 + ")" * 5000) + bytes(4))], "header"),
    "structured": ([(KEY, header("(1,)", "[('a', '<f4')]") + bytes(4))], "expected numbers"),
    "too short": ([(KEY, header("(8,)") + bytes(12))], "12 follow the header"),
    "too long": ([(KEY, header("(2,)") + bytes(12))], "12 follow the header"),
    "long header": ([(KEY, b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 30))], "are read"),
    "cut header": ([(KEY, b"\x93NUMPY\x01\x00" + struct.pack("<H", 200) + b"{}")], "ends inside"),
    "ids": ([("input_ids.npy", npy(np.ones((2, 3), np.int64)))], "expected the ids of one"),
    "float ids": ([("input_ids.npy", npy(np.ones(3, np.float32)))], "expected the ids of one"),
    "order": ([("__order__.npy", npy(np.ones(3)))], "is not a list of names"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_lying_file_is_refused(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    path = tmp_path / "x.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        archive(path, content)
    with pytest.raises((FormatError, UnsupportedError), match=message), load_npz(path, ids=[1, 2]):
        pass


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_key_may_not_stand_twice(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", [(KEY, npy(np.ones(3)))] * 2)
    with pytest.raises(FormatError, match="appears twice"), load_npz(path):
        pass


def test_a_bomb_is_refused_unopened(tmp_path: Path) -> None:
    """300 MB of zeros in 300 kB: no activation compresses like that."""
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open(KEY, "w") as member:
        member.write(header(f"({300 << 18},)"))
        for _ in range(300):
            member.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match=r"compress at most 1:100"), load_npz(path, ids=[1]):
        pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_size_that_the_directory_lies_about(tmp_path: Path) -> None:
    """The central directory declares more than the member holds: found while reading."""
    body = header("(4096,)") + bytes(4 * 4096)
    path = archive(tmp_path / "x.npz", [(KEY, body)])
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\x01\x02")
    good = header("(4096,)")
    raw[raw.index(good) : raw.index(good) + len(good)] = header("(8192,)")
    raw[at + 24 : at + 28] = struct.pack("<I", len(good) + 4 * 8192)
    path.write_bytes(bytes(raw))
    with pytest.raises(FormatError), load_npz(path, ids=[1]):
        pass


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    path = archive(tmp_path / "x.npz", [(KEY, npy(values))])
    raw = bytearray(path.read_bytes())
    raw[raw.index(values.tobytes()) + 5] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(FormatError, match="CRC"), load_npz(path, ids=[1, 2, 3]):
        pass


def test_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz, "MAX_MEMBERS", 3)
    path = archive(tmp_path / "x.npz", [(f"k{i}.npy", npy(np.ones(1))) for i in range(4)])
    with pytest.raises(FormatError, match="4 members; at most 3"), load_npz(path):
        pass


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<f8"])
def test_numbers_come_through_in_any_layout(dtype: str, order: str, tmp_path: Path) -> None:
    values = np.asarray(np.arange(24).reshape(1, 3, 8) / 7, dtype, order=order)  # type: ignore[call-overload]
    path = archive(tmp_path / "x.npz", [(KEY, npy(values))], packed=True)
    with load_npz(path, ids=[1, 2, 3]) as trace:
        found = trace.recorded_values("L0.attn_norm")
        assert found is not None and found.dtype.isnative
        np.testing.assert_array_equal(found, values[0].astype(found.dtype))
        assert trace.records["L0.attn_norm"].positions == (0, 1, 2)
