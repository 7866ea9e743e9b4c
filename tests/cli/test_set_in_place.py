"""`aprfmt set --in-place`: only the bytes that change are written, and a kill loses nothing."""

import hashlib
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors

from aprfmt.conversion import folder_edits, in_place
from aprfmt.conversion.edits import read_values
from aprfmt.errors import AprfmtError
from aprfmt.formats import in_place_patch, open_source
from aprfmt.formats.in_place_patch import (
    SCHEMA,
    complete_patches,
    inode_identity,
    parse_patch,
    patch_file,
)
from aprfmt.formats.mapped_file import file_identity
from aprfmt.formats.signature import sign
from aprfmt.formats.unfinished_writes import patch_path
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder
from tests.formats.writers import contents
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("open", "write", "pwrite", "replace", "unlink", "fsync", "link")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {"folder": llama_folder(tmp_path / "m", "BF16")}
    for name in ("gguf", "apr", "safetensors"):
        found[name] = tmp_path / f"m.{name}"
        done = aprfmt("convert", found["folder"], found[name])
        assert done.code == 0, done.err
        if name != "gguf":
            key = "__metadata__:note" if name == "safetensors" else "note"
            done = aprfmt("set", found[name], f"{key}=abcdefgh", "-o", found[name], "--force")
            assert done.code == 0, done.err
    return found


def values(path: Path) -> dict[str, Any]:
    with open_source(path) as source:
        return {key: source.metadata[key] for key in source.metadata}


def test_gguf_values_of_the_same_length(files: dict[str, Path]) -> None:
    path = files["gguf"]
    before = path.read_bytes()
    inode = path.stat().st_ino
    done = aprfmt("set", path, "llama.context_length=77", "--in-place", "--json")
    assert done.code == 0, done.err
    assert done.json["in_place"] and 0 < done.json["patched_bytes"] <= 8192
    after = path.read_bytes()
    assert path.stat().st_ino == inode
    assert len(after) == len(before)
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= 4
    reader = gguf.GGUFReader(path)
    assert reader.fields["llama.context_length"].contents() == 77


def test_what_the_gap_holds(files: dict[str, Path], tmp_path: Path) -> None:
    """A text grows as long as a copy, which pads anew, is no longer; gguf-py reads it."""
    path, copy = files["gguf"], tmp_path / "copy.gguf"
    tensors = {t.name: bytes(t.data) for t in gguf.GGUFReader(path).tensors}
    size, whole = path.stat().st_size, path.read_bytes()
    answers = set()
    for length in range(1, 34, 4):
        change = f"general.name={'x' * length}"
        assert aprfmt("set", path, change, "-o", copy, "--force").code == 0
        done = aprfmt("set", path, change, "--in-place")
        answers.add(done.code)
        assert (done.code == 0) == (copy.stat().st_size == size)
        if done.code:
            assert "which would have to move; write a copy with -o" in done.err
            assert path.read_bytes() == whole
        else:
            whole = path.read_bytes()
            assert whole == copy.read_bytes()
    assert answers == {0, 2}
    assert {t.name: bytes(t.data) for t in gguf.GGUFReader(path).tensors} == tensors


def test_safetensors_fills_up_with_spaces(files: dict[str, Path]) -> None:
    """More of them than a header is padded with by itself."""
    path = files["safetensors"]
    long = f"__metadata__:note={'x' * 80}"
    assert aprfmt("set", path, long, "-o", path, "--force").code == 0
    size = path.stat().st_size
    assert aprfmt("set", path, "note=abc", "--in-place").code == 0
    assert path.stat().st_size == size
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata()["note"] == "abc"
    assert aprfmt("set", path, f"note={'y' * 80}", "--in-place").code == 0, "the room is there"
    assert aprfmt("set", path, f"note={'x' * 99}", "--in-place").code == 2


def test_apr_keeps_its_checksum_right(files: dict[str, Path]) -> None:
    path = files["apr"]
    assert aprfmt("set", path, "note=ABCDEFGH", "--in-place").code == 0
    assert values(path)["note"] == "ABCDEFGH"
    assert aprfmt("validate", path).code == 0


def test_a_wrong_checksum_stays_wrong(files: dict[str, Path]) -> None:
    path = files["apr"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert aprfmt("set", path, "note=ABCDEFGH", "--in-place").code == 0
    assert aprfmt("validate", path).code == 1


def test_nothing_to_change_writes_nothing(files: dict[str, Path]) -> None:
    path = files["gguf"]
    before = path.stat().st_mtime_ns
    done = aprfmt(
        "set",
        path,
        f"llama.context_length={values(path)['llama.context_length']}",
        "--in-place",
        "--json",
    )
    assert done.json["patched_bytes"] == 0
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("kind", ["link", "names", "set", "both", "neither"])
def test_what_is_refused(kind: str, files: dict[str, Path], tmp_path: Path) -> None:
    path, arguments, said = files["gguf"], ["--in-place"], ""
    if kind == "link":
        path = tmp_path / "link.gguf"
        path.symlink_to(files["gguf"])
        said = "is a link"
    elif kind == "names":
        os.link(path, tmp_path / "other.gguf")
        said = "2 names"
    elif kind == "set":
        assert aprfmt("split", path, tmp_path / "s.gguf", "--max-shard-size", "60K").code == 0
        path = next(tmp_path.glob("s-00001*"))
        said = "is a set of"
    elif kind == "both":
        arguments += ["-o", str(tmp_path / "y.gguf")]
        said = "one of them"
    else:
        arguments = []
        said = "one of them"
    done = aprfmt("set", path, "llama.context_length=77", *arguments)
    assert done.code == 2
    assert said in done.err


def killed_at(n: int, path: Path, change: str) -> int:
    """Change a file in a fork that ends at the n-th call of the change; return how it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = itertools.count(1)

    def dying(name: str) -> Callable[..., Any]:
        real: Callable[..., Any] = getattr(os, name)

        def call(*args: Any, **named: Any) -> Any:
            if next(calls) == n:
                if name == "pwrite":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **named)

        return call

    where, what = (folder_edits, "write_in_place") if path.is_dir() else (in_place, "patch_file")
    function = vars(where)[what]

    def patch(*of: Any) -> Any:
        for name in CALLS:
            setattr(os, name, dying(name))
        return function(*of)

    code = 1
    try:
        vars(where)[what] = patch
        code = aprfmt("set", path, change, "--in-place").code
    finally:
        os._exit(code)


def kill_at_each_call(path: Path, change: str) -> None:
    """Kill a change in place at each of its calls: the file is old, new, or refused and completed.

    Needs a process with one thread.
    """
    old = path.read_bytes()
    assert aprfmt("set", path, change, "--in-place").code == 0
    new = path.read_bytes()
    refused = mixed = 0
    for n in itertools.count(1):
        path.write_bytes(old)
        code = killed_at(n, path, change)
        if code == 0:
            break
        assert code == -signal.SIGKILL, f"call {n}: {code}"
        if patch_path(path).exists():
            refused += 1
            mixed += path.read_bytes() not in (old, new)
            inspected = aprfmt("inspect", path)
            assert inspected.code == 2 and "a change in place was interrupted" in inspected.err
            link = path.parent / "links" / path.name
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(path)
            by_link = aprfmt("inspect", link)
            assert by_link.code == 2 and "a change in place was interrupted" in by_link.err
        else:
            assert path.read_bytes() in (old, new)
        assert aprfmt("set", path, change, "--in-place").code == 0
        assert path.read_bytes() == new
        assert not list(path.parent.glob(".*"))
    assert n > len(CALLS), "the calls were not reached"
    assert refused >= 2 and mixed >= (path.suffix == ".apr"), (
        "a header, and the checksum at the end"
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gguf", "llama.context_length=1000001"),
        ("apr", "note=ABCDEFGH"),
        ("folder", "eos_token_id=7"),
    ],
)
def test_a_kill_at_any_call_leaves_old_or_new_or_is_completed(
    name: str, change: str, files: dict[str, Path]
) -> None:
    """In the middle of every piece that is written over the old one, too."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.test_set_in_place", str(files[name]), change],
        cwd=ROOT,
        timeout=PATIENCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def kill_folder_at_each_call(folder: Path, change: str) -> None:
    """Kill a change of two text files of a folder at each call: it is old, new, or refused.

    The same command completes it, whatever the kill left. Needs a process with one thread.
    """
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 5}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    old = contents(folder)
    assert aprfmt("set", folder, change, "--in-place").code == 0
    new = contents(folder)
    changed = [name for name in new if new[name] != old[name]]
    assert len(changed) == 2, "the two are published by a journal"
    refused = linked = 0
    for n in itertools.count(1):
        for name in changed:
            (folder / name).write_bytes(old[name])
        code = killed_at(n, folder, change)
        if code == 0:
            break
        assert code == -signal.SIGKILL, f"call {n}: {code}"
        linked += any((folder / name).stat().st_nlink > 1 for name in changed)
        mixed = contents(folder) not in (old, new)
        inspected = aprfmt("inspect", folder)
        refused += inspected.code == 2
        assert inspected.code == 2 or not mixed
        assert inspected.code == 0 or "whose writing was interrupted" in inspected.err
        done = aprfmt("set", folder, change, "--in-place")
        assert done.code == 0, done.err
        assert contents(folder) == new
        assert not list(folder.glob(".*"))
    assert n > len(CALLS), "the calls were not reached"
    assert refused and linked


def test_any_write_into_the_folder_completes_it(files: dict[str, Path], tmp_path: Path) -> None:
    path = files["gguf"]
    old = path.read_bytes()
    patch_file(path, [(4, b"\7")], file_identity(path.stat()))
    path.write_bytes(old)
    record = patch_path(path)
    record.write_bytes(written_patch(path))
    assert aprfmt("inspect", path).code == 2
    done = aprfmt("convert", files["folder"], tmp_path / "z.gguf")
    assert done.code == 0
    assert "an earlier change in place was ended before its end; completed" in done.err
    assert not record.exists()
    assert path.read_bytes() == old[:8] + b"zz" + old[10:]


def written_patch(path: Path, *, file: str = "", signed: bool = True) -> bytes:
    """Return a patch of two bytes, as a killed run leaves it."""
    head = {
        "schema": SCHEMA,
        "file": file or inode_identity(path.stat()),
        "pieces": [[8, 2]],
        "sha256": hashlib.sha256(b"zz").hexdigest(),
    }
    payload = json.dumps(head, separators=(",", ":")).encode()
    return json.dumps(head | {"signature": sign(SCHEMA, payload) if signed else ""}).encode() + (
        b"\nzz"
    )


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "text", "empty"])
def test_what_lies_where_a_change_is_noted_is_named_and_left(
    kind: str, files: dict[str, Path], tmp_path: Path
) -> None:
    """Reading is not refused, as nothing was half changed; nor is another write in the folder."""
    path, record = files["gguf"], patch_path(files["gguf"])
    old = path.read_bytes()
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(record),
        "folder": record.mkdir,
        "link": lambda: record.symlink_to(path),
        "text": lambda: record.write_text("mine"),
        "empty": record.touch,
    }
    make[kind]()
    assert aprfmt("inspect", path).code == 0
    done = aprfmt("set", path, "llama.context_length=77", "--in-place")
    assert done.code == 2 and done.err.count("\n") == 1
    assert record.name in done.err and "remove it, or write a copy with -o" in done.err
    assert path.read_bytes() == old and os.path.lexists(record)
    assert aprfmt("convert", files["folder"], tmp_path / "z.gguf").code == 0
    assert os.path.lexists(record)


@pytest.mark.parametrize("kind", ["another file", "not whole", "a link"])
def test_a_patch_of_another_file_is_nothing(
    kind: str, files: dict[str, Path], tmp_path: Path
) -> None:
    path = files["gguf"]
    old = path.read_bytes()
    data = written_patch(path, file="1:2:3" if kind == "another file" else "")
    record = patch_path(path)
    if kind == "a link":
        record.symlink_to(tmp_path / "elsewhere")
        record = tmp_path / "elsewhere"
    record.write_bytes(data[:-1] if kind == "not whole" else data)
    assert aprfmt("inspect", path).code == 0
    assert aprfmt("convert", files["folder"], tmp_path / "z.gguf").code == 0
    assert path.read_bytes() == old


@pytest.mark.parametrize("kind", ["not signed", "another key", "changed"])
def test_a_planted_patch_is_never_applied(
    kind: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is refused, as another user's run may have left it; the patch stays."""
    path, record = files["gguf"], patch_path(files["gguf"])
    old = path.read_bytes()
    with monkeypatch.context() as other:
        if kind == "another key":
            other.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
        data = written_patch(path, signed=kind != "not signed")
    record.write_bytes(data.replace(b"[8, 2]", b"[9, 2]") if kind == "changed" else data)
    done = aprfmt("inspect", path)
    assert done.code == 2 and "is not signed by this user's key" in done.err
    done = aprfmt("convert", files["folder"], tmp_path / "z.gguf")
    assert done.code == 0 and "is left alone" in done.err and record.name in done.err
    assert aprfmt("set", path, "llama.context_length=77", "--in-place").code == 2
    assert path.read_bytes() == old and record.exists()


def test_a_change_of_another_run_is_not_mixed_with_ours(files: dict[str, Path]) -> None:
    """Two runs that read the same bytes: the second is told, and writes nothing."""
    path = files["gguf"]
    read = file_identity(path.stat())
    patch_file(path, [(8, b"ab")], read)
    after = path.read_bytes()
    with pytest.raises(AprfmtError, match="was changed by somebody else meanwhile"):
        patch_file(path, [(9, b"cd")], read)
    assert path.read_bytes() == after


def test_what_cannot_be_opened_for_writing_is_left_without_a_note(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link in its place, and a file that nobody may write: unchanged, and nothing to complete."""
    path = files["gguf"]
    old, folder = path.read_bytes(), path.parent
    link = folder / "link.gguf"
    link.symlink_to(path)
    before = sorted(folder.iterdir())
    with pytest.raises(AprfmtError, match=r"link\.gguf: cannot be changed: "):
        patch_file(link, [(8, b"ab")], file_identity(link.stat()))
    real = os.open

    def guarded(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if Path(os.fsdecode(name)) == path and flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(13, "Permission denied", str(path))
        return real(name, flags, *rest, **more)

    with monkeypatch.context() as patch:  # the superuser may write every file
        patch.setattr(os, "open", guarded)
        with pytest.raises(AprfmtError, match="cannot be changed: Permission denied"):
            patch_file(path, [(8, b"ab")], file_identity(path.stat()))
    assert sorted(folder.iterdir()) == before and path.read_bytes() == old


def test_without_a_state_folder_a_copy_is_asked_for(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files["gguf"]
    old = path.read_bytes()
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/state")
    done = aprfmt("set", path, "llama.context_length=77", "--in-place")
    assert done.code == 2 and "XDG_STATE_HOME" in done.err and "write a copy with -o" in done.err
    assert path.read_bytes() == old and not list(path.parent.glob(".*"))


@pytest.mark.parametrize(
    "data",
    [b"", b"{}\n", b'{"schema":"aprfmt.patch/1","file":"x","pieces":[[0,9]],"sha256":""}\nab',
     b'{"schema":"aprfmt.patch/1","file":"x","pieces":[[-1,2]],"sha256":""}\nab'],
)  # fmt: skip
def test_a_patch_is_not_believed(data: bytes) -> None:
    with pytest.raises(AprfmtError, match="patch"):
        parse_patch(data, "patch")


if __name__ == "__main__":
    of = kill_folder_at_each_call if os.path.isdir(sys.argv[1]) else kill_at_each_call
    of(Path(sys.argv[1]), sys.argv[2])


def two_tensors(path: Path, second: int) -> bytes:
    """Write a GGUF of tensors of 32 and 4 bytes, the second of them at this offset of the data."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.context_length", 5)
    for name, count in (("a", 8), ("b", 1)):
        writer.add_tensor(name, np.arange(count, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray(path.read_bytes())
    entry = struct.pack("<Q", 1) + b"b" + struct.pack("<IQIQ", 1, 1, 0, 32)
    at = data.index(entry) + len(entry) - 8
    data[at : at + 8] = struct.pack("<Q", second)
    data += bytes(max(0, second - 32))
    path.write_bytes(data)
    return bytes(data)


@pytest.mark.parametrize("second", [0, 32, 36, 60, 64])
def test_a_file_whose_tensors_lie_elsewhere_is_left(second: int, tmp_path: Path) -> None:
    """Its new header would say another place of them than they have; the first such is named."""
    path = tmp_path / "m.gguf"
    before = two_tensors(path, second)
    done = aprfmt("set", path, "llama.context_length=77", "--in-place")
    if second == 32:
        assert done.code == 0 and path.read_bytes() != before, done.err
        return
    assert done.code == 2 and done.err.count("\n") == 1
    assert path.read_bytes() == before
    if second == 64:
        start = len(before) - 96
        assert f"b at byte {start + 64}, expected {start + 32}" in done.err


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_a_change_that_the_system_takes_in_parts_is_completed(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write may take fewer bytes than it was given; the note of a change must be whole."""
    path = tmp_path / "x"
    path.write_bytes(bytes(64))
    pieces = [(4, b"abcdef"), (30, bytes(range(1, 20)))]
    real, positioned = os.write, os.pwrite
    assert sign(SCHEMA, b""), "the key is made before"
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:most]))
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(5, "no disk")))
        with pytest.raises(AprfmtError, match="is partly changed"):
            patch_file(path, pieces, file_identity(path.stat()))
    assert path.read_bytes() == bytes(64) and patch_path(path).exists()
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: positioned(fd, data[:most], at))
    said: list[Any] = []
    monkeypatch.setattr(in_place_patch, "announce", said.append)
    complete_patches(tmp_path)
    assert [note.key for note in said] == ["completed_write"]
    expected = bytearray(64)
    for at, data in pieces:
        expected[at : at + len(data)] = data
    assert path.read_bytes() == expected and not patch_path(path).exists()


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 40])
def test_an_array_is_said_in_full_up_to_sixteen(count: int, tmp_path: Path) -> None:
    path, held = tmp_path / "x.gguf", list(range(3, 3 + count))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("x.numbers", held or [0])
    writer.add_string("x.text", "t" * 40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_model(path) as model:
        found = read_values(model, ["x.numbers", "x.text", "x.none"])
    said = held or [0]
    assert found["x.numbers"][0] == (said if count <= 16 else f"array of {count}")
    assert found["x.text"][0] == "t" * 40 and "x.none" not in found
