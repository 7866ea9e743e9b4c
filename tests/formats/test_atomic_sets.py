"""Folders and sets of files: one rename, an exchange or a journal; no other file is lost."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.base.protocols import Note
from aprfmt.errors import OutputError
from aprfmt.formats import atomic, cleanup, journal, notices, temporary_files
from aprfmt.formats.atomic import FileSet, complete_renames, pending_journals
from tests.formats.publishing import SCENARIOS, Scenario

EVERY = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
FOLDERS = [scenario for scenario in SCENARIOS.values() if scenario.folder]
EVERY_FOLDER = pytest.mark.parametrize("scenario", FOLDERS, ids=[s.name for s in FOLDERS])


class Killed(BaseException):
    """Stands for the end of a process."""


def ours(name: str) -> bool:
    return name in ("config.json", "model.safetensors")


def put(folder: Path, text: bytes, *, force: bool = True) -> None:
    with FileSet(force=force, folder=folder, ours=ours) as files:
        for name in ("config.json", "model.safetensors"):
            files.create(folder / name).write(text)


@EVERY
def test_old_goes_new_comes(scenario: Scenario, tmp_path: Path) -> None:
    root = tmp_path / "x"
    scenario.prepare(root)
    assert scenario.version_of(root) == 1
    for version in (2, 3, 5):
        scenario.write(root, version)
        assert scenario.version_of(root) == version
        assert scenario.litter(root) == []
    assert pending_journals(scenario.target(root)) == []


@EVERY
def test_everything_is_synced_before_it_is_renamed(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's content is synced before its name is; folders are synced last."""
    root = tmp_path / "x"
    scenario.prepare(root)
    synced: set[int] = set()
    dirty: set[int] = set()
    made: set[Path] = set()  # names whose folder was not synced since
    real_fsync, real_open, real_link = os.fsync, os.open, os.link

    def fsync(fd: int) -> None:
        real_fsync(fd)
        inode = os.fstat(fd).st_ino
        synced.add(inode)
        dirty.discard(inode)
        made.difference_update([path for path in made if os.stat(path.parent).st_ino == inode])

    def opened(path: Path, flags: int, mode: int = 0o777, **named: Any) -> int:
        if flags & os.O_CREAT:
            made.add(Path(path))
        return real_open(path, flags, mode, **named)

    def link(old: Path, new: Path, **kwargs: Any) -> None:
        real_link(old, new, **kwargs)
        made.add(new)

    def checked(real: Callable[[Path, Path], Any]) -> Callable[[Path, Path], Any]:
        def move(source: Path, final: Path) -> Any:
            assert os.lstat(source).st_ino in synced, f"{source} is not durable yet"
            assert not final.name.startswith(".aprfmt-journal") or made == {source}
            result = real(source, final)
            made.discard(source)
            dirty.update(os.stat(path.parent).st_ino for path in (source, final))
            return result

        return move

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "link", link)
    for module, name in ((os, "rename"), (os, "replace"), (atomic, "swap_names")):
        monkeypatch.setattr(module, name, checked(getattr(module, name)))
    scenario.write(root, 2)
    monkeypatch.undo()
    assert scenario.version_of(root) == 2
    assert not dirty & {os.stat(folder).st_ino for folder in (root, scenario.target(root))}


@EVERY_FOLDER
def test_a_foreign_file_is_refused_by_name(scenario: Scenario, tmp_path: Path) -> None:
    root = tmp_path / "x"
    scenario.prepare(root)
    target = scenario.target(root)
    for foreign in ("thesis.txt", ".hidden"):
        (target / foreign).write_bytes(b"theirs")
        with pytest.raises(OutputError, match=f"holds {foreign}, which is not part of a model"):
            scenario.write(root, 2)
        (target / foreign).unlink()
    (target / "m-folder").mkdir()
    with pytest.raises(OutputError, match="holds m-folder"):
        scenario.write(root, 2)
    (target / "m-folder").rmdir()
    assert scenario.version_of(root) == 1
    assert scenario.litter(root) == []


@EVERY_FOLDER
def test_a_foreign_file_that_comes_meanwhile_is_kept(scenario: Scenario, tmp_path: Path) -> None:
    root = tmp_path / "x"
    scenario.prepare(root)
    target = scenario.target(root)
    with (
        scenario.seamed(),
        FileSet(force=True, folder=target, ours=lambda n: n.startswith("m")) as files,
    ):
        files.create(target / "m.json").write(b"new")
        (target / "thesis.txt").write_bytes(b"theirs")
        (target / "pictures").mkdir()
        (target / "pictures" / "cat.png").write_bytes(b"cat")
    assert sorted(os.listdir(target)) == ["m.json", "pictures", "thesis.txt"]
    assert (target / "pictures" / "cat.png").read_bytes() == b"cat"
    assert scenario.litter(root) == []


def test_a_file_that_cannot_be_carried_over_is_kept_with_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "hf"
    put(target, b"1")
    with (
        pytest.raises(OutputError, match=r"hf: is written; the old folder, kept as .*\.old-"),
        FileSet(force=True, folder=target, ours=ours) as files,
    ):
        files.create(target / "config.json").write(b"2")
        (target / "model.safetensors").unlink()
        (target / "model.safetensors").mkdir()  # a folder of a name that is ours
        files.create(target / "model.safetensors").write(b"2")
    kept = next(path for path in tmp_path.iterdir() if ".old-" in path.name)
    assert (kept / "model.safetensors").is_dir()
    assert (target / "model.safetensors").read_bytes() == b"2"


def test_existing_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "new", b"1", force=False)
    with pytest.raises(OutputError, match="new: exists and is not empty; use --force"):
        put(tmp_path / "new", b"2", force=False)
    (tmp_path / "empty").mkdir(mode=0o700)
    put(tmp_path / "empty", b"1", force=False)
    assert stat.S_IMODE(os.stat(tmp_path / "empty").st_mode) == 0o700
    (tmp_path / "link").symlink_to("new")
    put(tmp_path / "link", b"3")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new" / "config.json").read_bytes() == b"3"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="file: exists and is not a folder"):
        put(tmp_path / "file", b"1")
    with pytest.raises(OutputError, match=r"no folder .*absent; make it first"):
        put(tmp_path / "absent" / "hf", b"1")
    with FileSet(folder=tmp_path / "x") as files:
        for outside in (tmp_path / "y", tmp_path / "x" / "sub" / "y", tmp_path / "x" / ".."):
            with pytest.raises(OutputError, match="is not a file directly inside"):
                files.create(outside)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "link", "new"]


def test_the_working_folder_is_not_swapped_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "hf", b"1")
    monkeypatch.chdir(tmp_path / "hf")
    before = os.stat(".").st_ino
    put(Path(), b"2")
    assert os.stat(tmp_path / "hf").st_ino == before
    assert Path("config.json").read_bytes() == b"2"
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("here", [False, True], ids=["swapped", "in place"])
def test_what_a_killed_run_left_in_a_folder_is_completed_and_removed(
    here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its half published set comes first, or its files would replace the new ones later."""
    folder = tmp_path / "hf"
    put(folder, b"1")
    monkeypatch.chdir(folder)  # not swapped away: the set is renamed inside

    def killed(lock: Any, plan: Any, *, again: bool) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_run_journal", killed)
        patch.setattr(FileSet, "discard", lambda self: None)
        with pytest.raises(Killed):
            put(Path(), b"2")
    assert pending_journals(folder) and (folder / "config.json").read_bytes() == b"1"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = f".model.safetensors.{dead.pid}-{temporary_files.host_id()}-01234567"
    (folder / f"{left}{temporary_files.SUFFIX}").write_bytes(b"half")
    if not here:
        monkeypatch.chdir(tmp_path)
    said: list[Note] = []
    monkeypatch.setattr(notices, "_listeners", [said.append])
    put(Path() if here else folder, b"3")
    assert any("completed: config.json, model.safetensors" in note.text for note in said)
    monkeypatch.chdir(tmp_path)
    complete_renames(folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert {path.read_bytes() for path in folder.iterdir()} == {b"3"}


def test_a_folder_whose_parent_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "hf", b"1")
    before = os.stat(tmp_path / "hf").st_ino

    def mkdir(path: Path, *args: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(os, "mkdir", mkdir)
    put(tmp_path / "hf", b"2")
    assert (tmp_path / "hf" / "config.json").read_bytes() == b"2"
    assert os.stat(tmp_path / "hf").st_ino == before
    with pytest.raises(OutputError, match="allow writing in that folder"):
        put(tmp_path / "other", b"2")


def test_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"a")
    b.mkdir()
    if not atomic.swap_names(a, b):
        pytest.skip("NOT-RUN: renameat2 with RENAME_EXCHANGE is not available here")
    assert a.is_dir() and b.read_bytes() == b"a"
    with pytest.raises(FileNotFoundError):
        atomic.swap_names(a, tmp_path / "absent")
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    assert not atomic.swap_names(a, b)


def test_many_files_are_kept_open_no_longer_than_asked(tmp_path: Path) -> None:
    with FileSet() as files:
        before = len(os.listdir("/proc/self/fd"))
        for i in range(50):
            out = files.create(tmp_path / f"m-{i}")
            out.write(b"x")
            out.close()
        assert len(os.listdir("/proc/self/fd")) == before
    assert len(os.listdir(tmp_path)) == 50


def test_nothing_written_is_nothing_published(tmp_path: Path) -> None:
    with FileSet(folder=tmp_path / "hf"):
        pass
    complete_renames(tmp_path)
    assert os.listdir(tmp_path) == []
    assert pending_journals(tmp_path / "absent") == []


@pytest.mark.parametrize("end", ["published", "left by an error", "discarded"])
def test_what_has_ended_is_no_longer_cleaned_up(end: str, tmp_path: Path) -> None:
    """A set that is not ended is discarded by a signal; a later file of its name is not its own."""
    files = FileSet()
    with suppress(KeyError), files:
        files.create(tmp_path / "x").write(b"one")
        assert files in cleanup.OPEN
        if end == "discarded":
            files.discard()
        elif end == "left by an error":
            raise KeyError
    assert files not in cleanup.OPEN
    assert (tmp_path / "x").exists() is (end == "published")


@pytest.mark.parametrize("fails", ["", "write", "fsync", "replace"])
def test_a_journal_is_whole_or_leaves_nothing(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    lock: Any = SimpleNamespace(path=tmp_path, sync=lambda: None)
    plan = journal.Journal(".aprfmt-journal-0123456789abcdef.json", [("a", "b")], ["c"], {"a": "1"})
    if fails:
        monkeypatch.setattr(os, fails, full)
        with pytest.raises(OSError, match="No space left"):
            journal._write_journal(lock, plan)
        assert not list(tmp_path.iterdir())
    else:
        journal._write_journal(lock, plan)
        (path,) = tmp_path.iterdir()
        assert path.name == plan.name and path.read_bytes() == plan.dumps()
