"""One output file: what is refused at once, what is written, and what the disk holds afterwards."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import OutputError
from aprfmt.formats import temporary_files
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.journal import Journal, _read_journal, _write_journal
from aprfmt.formats.mapped_file import MappedFile
from aprfmt.formats.resumable_output import ResumableFileSet
from aprfmt.formats.temporary_files import lock_folder
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in an empty folder, and find it without litter at the end."""
    monkeypatch.chdir(tmp_path)
    yield
    assert [name for name in os.listdir(tmp_path) if name.endswith(temporary_files.SUFFIX)] == []


def put(path: Path | str, data: bytes = b"new", *, force: bool = False) -> None:
    with FileSet(force=force) as files:
        files.create(Path(path)).write(data)


def test_writes_and_replaces() -> None:
    put("x.apr", b"one")
    assert Path("x.apr").read_bytes() == b"one"
    put("x.apr", b"two", force=True)
    assert Path("x.apr").read_bytes() == b"two"
    assert os.listdir() == ["x.apr"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("old", "old: exists; use --force"),
        ("folder", "folder: is a folder"),
        ("", "is a folder"),
        ("/", "is a folder"),
        ("/dev/null", "/dev/null: is a device"),
        ("pipe", "pipe: is a pipe"),
        ("absent/x", "no folder .*absent; make it first"),
        ("old/x", "old/x: cannot be written: .*; a part of the path is a file"),
        ("a\0b", "cannot be written: embedded null"),
        ("n" * 300, "cannot be written: .*; choose a shorter name"),
        ("loop", "loop: cannot be written: "),
        ("/proc/aprfmt", "/proc/aprfmt: cannot be written: "),
    ],
)
@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
def test_refuses_at_once(name: str, message: str, force: bool) -> None:
    Path("old").write_bytes(b"old")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    before = sorted(os.listdir())
    with FileSet(force=force) as files:
        if force and "--force" in message:
            files.create(Path(name))
            files.discard()
        else:
            with pytest.raises(OutputError, match=message):
                files.create(Path(name))
    assert Path("old").read_bytes() == b"old"
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_any_exception_discards(error: type[BaseException]) -> None:
    put("x", b"old")
    with pytest.raises(error), FileSet(force=True) as files:
        files.create(Path("x")).write(bytes(500_000))
        assert len(os.listdir()) == 2
        raise error
    assert os.listdir() == ["x"]
    assert Path("x").read_bytes() == b"old"


def test_a_file_made_meanwhile_is_not_replaced() -> None:
    with pytest.raises(OutputError, match="x: was made by somebody else"), FileSet() as files:
        files.create(Path("x")).write(b"ours")
        Path("x").write_bytes(b"theirs")
    assert Path("x").read_bytes() == b"theirs"


def test_mode_is_that_of_the_umask_or_of_the_old_file() -> None:
    before = os.umask(0o027)
    try:
        put("new")
        Path("old").write_bytes(b"")
        Path("old").chmod(0o600)
        put("old", force=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat("new").st_mode) == 0o640
    assert stat.S_IMODE(os.stat("old").st_mode) == 0o600


@pytest.mark.parametrize(
    ("old", "new"), [(0o755, 0o755), (0o466, 0o466), (0o4711, 0o711), (0o2640, 0o640)]
)
def test_the_old_mode_stays_whatever_the_umask_but_no_set_id(old: int, new: int) -> None:
    """A rewritten file must not keep the right to run as its owner (set-id bits)."""
    Path("old").write_bytes(b"")
    Path("old").chmod(old)
    before = os.umask(0o077)
    try:
        put("old", force=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat("old").st_mode) == new


def test_a_link_stays_and_its_target_is_replaced() -> None:
    Path("store").mkdir()
    Path("store/blob").write_bytes(b"old")
    Path("link").symlink_to("store/blob")
    Path("early").symlink_to("store/later")
    put("link", force=True)
    put("early")
    assert os.readlink("link") == "store/blob"
    assert Path("store/blob").read_bytes() == b"new"
    assert Path("store/later").read_bytes() == b"new"
    assert sorted(os.listdir("store")) == ["blob", "later"]


def test_a_set_spread_by_links_is_refused() -> None:
    Path("store").mkdir()
    Path("b").symlink_to("store/blob")
    with FileSet() as files:
        files.create(Path("a"))
        with pytest.raises(OutputError, match=r"b: lies in .*store, other files"):
            files.create(Path("b"))
        with pytest.raises(OutputError, match="a: is written twice"):
            files.create(Path("../") / Path.cwd().name / "a")
    assert sorted(os.listdir()) == ["a", "b", "store"]


def test_the_source_may_be_the_destination() -> None:
    data = os.urandom(300_000)
    Path("m").write_bytes(data)
    source = MappedFile(Path("m"))
    with FileSet(force=True) as files:
        out = files.create(Path("m"))
        out.write(source.view[150_000:])
        out.write(source.view[:150_000])
    assert bytes(source.view) == data
    source.close()
    assert Path("m").read_bytes() == data[150_000:] + data[:150_000]


def test_write_loops_over_short_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    data = os.urandom(200_000)
    monkeypatch.setattr(os, "write", lambda fd, view: real(fd, view[:7777]))
    with FileSet() as files:
        out = files.create(Path("x"))
        for start, stop in ((0, 5), (5, 100_005), (100_005, 100_006), (100_006, 200_000)):
            out.write(data[start:stop])
            assert out.tell() == stop
    assert Path("x").read_bytes() == data


def test_large_buffers_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    array = np.arange(100_000, dtype="<f4").reshape(100, 1000)
    sent: list[Any] = []

    def write(fd: int, view: memoryview) -> int:
        sent.append(view.obj)
        return real(fd, view)

    monkeypatch.setattr(os, "write", write)
    with FileSet() as files:
        out = files.create(Path("x"))
        out.write(array.data)
        out.write(array[:0].data)
    assert all(item is array for item in sent) and sent
    assert Path("x").read_bytes() == array.tobytes()


def test_patch() -> None:
    with FileSet() as files:
        out = files.create(Path("x"))
        out.write(b"abcdef")
        out.patch(2, b"CD")
        out.write(b"gh")
        assert out.tell() == 8
        for offset, data in ((7, b"xx"), (-1, b"x"), (9, b"")):
            with pytest.raises(ValueError, match="of 8"):
                out.patch(offset, data)
    assert Path("x").read_bytes() == b"abCDefgh"


def test_closed_means_closed() -> None:
    with FileSet() as files:
        out = files.create(Path("x"))
        out.write(b"1")
        out.close()
        with pytest.raises(ValueError, match="x: is closed"):
            out.write(b"2")
        with pytest.raises(ValueError, match="x: is closed"):
            out.patch(0, b"2")
    assert Path("x").read_bytes() == b"1"
    with pytest.raises(ValueError, match="published or discarded"):
        files.create(Path("y"))


def test_leftovers_of_dead_runs_are_removed_and_those_of_living_ones_kept() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    place, other = temporary_files.host_id(), "0" * 8
    day = time.time() - temporary_files.STALE_SECONDS - 60
    kept = [
        f".x.{os.getpid()}-{place}-01234567.not-ours",
        f".x.{os.getpid()}-{place}-01234567{temporary_files.SUFFIX}",
        f".x.{dead.pid}-{other}-01234567{temporary_files.SUFFIX}",
        f"x.{dead.pid}-{place}-01234567{temporary_files.SUFFIX}",
    ]
    removed = [
        f".x.{dead.pid}-{place}-01234567{temporary_files.SUFFIX}",
        f".y.gguf.{dead.pid}-{place}-89abcdef{temporary_files.SUFFIX}",
        f".x.{os.getpid()}-{other}-01234567{temporary_files.SUFFIX}",
    ]
    for name in kept + removed:
        Path(name).write_bytes(b"")
    os.utime(removed[2], (day, day))
    os.utime(kept[1], (day, day))
    put("x")
    assert sorted(os.listdir()) == sorted([*kept, "x"])
    for name in kept:
        os.unlink(name)


def test_temporary_names_fit_and_are_recognised() -> None:
    for name in ("x", "é" * 127, "m" * 255, os.fsdecode(b"\xff" * 200)):
        made = temporary_files.temporary_name(name)
        assert len(os.fsencode(made)) <= 200
        assert temporary_files.is_temporary(made)
    assert not temporary_files.is_temporary("x")
    put("é" * 127)
    assert os.listdir() == ["é" * 127]


def test_a_lock_of_another_run_is_waited_for_then_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary_files, "LOCK_SECONDS", 0)
    with (
        temporary_files.lock_folder(Path.cwd()),
        pytest.raises(OutputError, match="another run has been publishing"),
    ):
        put("x")
    assert os.listdir() == []
    put("x")


def test_an_interrupt_right_before_discarding_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = FileSet.discard
    calls = iter([KeyboardInterrupt()])

    def discard(files: FileSet) -> None:
        for interrupt in calls:
            raise interrupt
        real(files)

    monkeypatch.setattr(FileSet, "discard", discard)
    with pytest.raises(KeyboardInterrupt), FileSet() as files:
        files.create(Path("x")).write(b"x")
        raise ValueError
    assert os.listdir() == []


def test_the_end_of_the_program_discards_what_is_open(tmp_path: Path) -> None:
    code = (
        "from aprfmt.formats.atomic import FileSet; from pathlib import Path\n"
        "FileSet().create(Path('x')).write(b'half')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=PATIENCE)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["s3://bucket/x.gguf", "hf://a/b/x.gguf", "https://h/x.gguf"])
def test_an_address_is_no_place_for_an_output(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path has one slash left of two; a folder of such a name is one all the same."""
    monkeypatch.chdir(tmp_path)
    path = Path(text)
    with pytest.raises(OutputError, match="is an address; outputs are files on this machine"):
        FileSet().create(path)
    with pytest.raises(OutputError, match="is an address"):
        ResumableFileSet(path).begin({}, "")
    assert not list(tmp_path.iterdir())
    path.parent.mkdir(parents=True)
    with FileSet() as files:
        files.create(path).write(b"x")
    assert path.read_bytes() == b"x"


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_a_journal_that_the_system_takes_in_parts_is_whole(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    name = ".aprfmt-journal-0123456789abcdef.json"
    drafts = [temporary_files.temporary_name(final) for final in ("b", "ä")]
    files = {each: "1:2:3" for each in (*drafts, "d")}
    journal = Journal(name, [(drafts[0], "b"), (drafts[1], "ä")], ["d"], files)
    assert journal.dumps(), "the key is made before"
    monkeypatch.setattr(os, "write", lambda fd, view: real(fd, view[:most]))
    with lock_folder(tmp_path) as lock:
        _write_journal(lock, journal)
        found = _read_journal(tmp_path, name)
    assert found.is_signed() and found.dumps() == journal.dumps()
    (tmp_path / name).unlink()


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_lines_of_a_resumable_run_are_whole_however_they_are_taken(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = [{"tensor": "ä.weight", "crc": 7}, {"tensor": "b", "crc": None}]
    real = os.write

    def written(name: str) -> bytes:
        path = tmp_path / name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        run: Any = SimpleNamespace(_log=fd, _journal=path, _run="0123")
        for line in said:
            ResumableFileSet._add_line(run, line)
        os.close(fd)
        return path.read_bytes()

    whole = written("whole")
    monkeypatch.setattr(os, "write", lambda fd, view: real(fd, view[:most]))
    assert written("parts") == whole and whole.count(b"\n") == 2
