"""What comes in the place of a file, a folder or an output while it is written.

Seen red: the look at what is there before the lock and not in it, no look at what lies under the
temporary name, files removed by name behind a link, a temporary file that others may open.
"""

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aprfmt.errors import OutputError
from aprfmt.formats import atomic, journal
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.output_file import OutputFile
from aprfmt.formats.temporary_files import LockedFolder, lock_folder, remove
from tests.formats.publishing import BYSTANDER, SCENARIOS, Scenario
from tests.patience import PATIENCE

EVERY = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
FOLDERS = [scenario for scenario in SCENARIOS.values() if scenario.folder]
EVERY_FOLDER = pytest.mark.parametrize("scenario", FOLDERS, ids=[s.name for s in FOLDERS])


def empty(scenario: Scenario, root: Path) -> Path:
    """Return the target, in which nothing lies."""
    root.mkdir()
    (root / BYSTANDER).write_bytes(b"mine")
    target = scenario.target(root)
    if any(name == "_is_unswappable" for name, _ in scenario.seams):
        target.mkdir()  # the working folder
    return target


def test_a_folder_that_is_exchanged_before_it_is_locked_is_locked_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that held the lock put another folder in its place: the old one locks nobody out."""
    fcntl = pytest.importorskip("fcntl")
    folder = tmp_path / "x"
    folder.mkdir()
    real = fcntl.flock

    def later(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        folder.rename(tmp_path / "old")
        folder.mkdir()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", later)
    with lock_folder(folder):
        other = os.open(folder, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)


@EVERY
def test_of_two_runs_without_force_one_is_told(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked and found nothing when the first of them publishes."""
    root = tmp_path / "x"
    target = empty(scenario, root)
    both = threading.Barrier(2, timeout=PATIENCE)
    real_rename = os.rename
    errors: dict[int, OutputError] = {}
    done: list[int] = []

    @contextmanager
    def locked(folder: Path) -> Iterator[LockedFolder]:
        both.wait()
        with lock_folder(folder) as lock:
            yield lock

    def rename(source: Path, final: Path) -> None:
        if Path(final) == target:
            both.wait()
        real_rename(source, final)

    monkeypatch.setattr(journal, "lock_folder", locked)
    monkeypatch.setattr(os, "rename", rename)

    def write(run: int) -> None:
        try:
            folder = target if scenario.folder else None
            with FileSet(folder=folder, ours=lambda name: name.startswith("m")) as files:
                for name in scenario.names(1):
                    files.create(target / name).write(b"%d" % run)
        except OutputError as error:
            errors[run] = error
        else:
            done.append(run)

    with scenario.seamed():
        threads = [threading.Thread(target=write, args=(run,)) for run in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert len(done) == 1 and len(errors) == 1
    found = {path.name: path.read_bytes() for path in target.iterdir() if path.name[0] == "m"}
    assert found == {name: b"%d" % done[0] for name in scenario.names(1)}
    (error,) = errors.values()
    assert "left as it is" in str(error) or "not empty" in str(error), error
    assert scenario.litter(root) == []


def swapped_file(files: FileSet, elsewhere: Path) -> None:
    temporary = files._files[0].temporary
    temporary.unlink()
    temporary.symlink_to(elsewhere / files._files[0].final.name)


def another_file(files: FileSet, elsewhere: Path) -> None:
    temporary = files._files[0].temporary
    temporary.unlink()
    temporary.write_bytes(b"theirs")


def removed_file(files: FileSet, elsewhere: Path) -> None:
    files._files[0].temporary.unlink()


def swapped_folder(files: FileSet, elsewhere: Path) -> None:
    """The folder in which the temporary files grow becomes a link to another."""
    grows = files._files[0].temporary.parent
    grows.rename(grows.with_name("moved"))
    grows.symlink_to(elsewhere)


SWAPS: list[Callable[[FileSet, Path], None]] = [
    swapped_file, another_file, removed_file, swapped_folder,
]  # fmt: skip


@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: swap.__name__)
@EVERY
def test_what_was_exchanged_is_not_published_and_nothing_else_is_touched(
    scenario: Scenario, swap: Callable[[FileSet, Path], None], tmp_path: Path
) -> None:
    root, elsewhere = tmp_path / "x", tmp_path / "elsewhere"
    scenario.prepare(root)
    elsewhere.mkdir()
    names = {*scenario.names(1), *scenario.names(2), BYSTANDER}
    for name in names:
        (elsewhere / name).write_bytes(b"theirs")
    target = scenario.target(root)
    folder = target if scenario.folder else None
    with (
        pytest.raises(OutputError, match=r"removed or exchanged|cannot be put in place"),
        scenario.seamed(),
        FileSet(force=True, folder=folder, ours=lambda name: name.startswith("m")) as files,
    ):
        for name in scenario.names(2):
            files.create(target / name).write(b"new")
        swap(files, elsewhere)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == dict.fromkeys(
        names, b"theirs"
    )
    if (tmp_path / "moved").exists():
        root.unlink()
        (tmp_path / "moved").rename(root)
    if scenario.folder and (target.parent / "moved").exists():
        (target.parent / "moved").rename(tmp_path / "grown")
    if target.is_symlink():
        target.unlink()
        (tmp_path / "grown").rename(target)
    assert scenario.version_of(root) == 1


def test_a_link_that_comes_in_place_of_the_output_is_replaced_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    with FileSet(force=True) as files:
        files.create(tmp_path / "m.apr").write(b"new")
        (tmp_path / "m.apr").symlink_to(mine)
    assert mine.read_bytes() == b"mine"
    assert not (tmp_path / "m.apr").is_symlink() and (tmp_path / "m.apr").read_bytes() == b"new"


def test_a_link_that_comes_without_force_is_left(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="left as it is"), FileSet() as files:
        files.create(tmp_path / "m.apr").write(b"new")
        (tmp_path / "m.apr").symlink_to("nowhere")
    assert os.listdir(tmp_path) == ["m.apr"] and (tmp_path / "m.apr").is_symlink()


def test_no_file_is_made_where_a_link_in_place_of_the_growing_folder_leads(tmp_path: Path) -> None:
    elsewhere, model = tmp_path / "elsewhere", tmp_path / "model"
    elsewhere.mkdir()
    with pytest.raises(OutputError), FileSet(folder=model) as files:
        files.create(model / "config.json").write(b"{}")
        (growing,) = tmp_path.glob(".model.*")
        growing.rename(tmp_path / "moved")
        growing.symlink_to(elsewhere)
        files.create(model / "tokenizer.json").write(b"{}")
    assert not list(elsewhere.iterdir()) and not model.exists()


def test_removing_follows_no_link_that_comes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is exchanged between the look at it and its emptying."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for made in (folder, elsewhere):
        made.mkdir()
        (made / "m").write_bytes(b"theirs")
    real = os.lstat

    def looks(path: Path, **named: int) -> os.stat_result:
        found = real(path, **named)
        if path == folder and not folder.is_symlink():
            folder.rename(tmp_path / "moved")
            folder.symlink_to(elsewhere)
        return found

    monkeypatch.setattr(os, "lstat", looks)
    remove(folder)
    assert (elsewhere / "m").read_bytes() == b"theirs"


# --- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007, 0o000])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o400, None], ids=str)
@EVERY
def test_nobody_may_open_a_growing_file_who_may_not_open_the_final_one(
    scenario: Scenario, mode: int | None, umask: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    root = tmp_path / "x"
    scenario.prepare(root)
    for path in scenario.target(root).glob("m*"):
        path.chmod(mode or 0o644)
        if mode is None:
            path.unlink()
    if mode is None and scenario.folder:
        (scenario.target(root) / "m.json").write_bytes(b"")
    seen: dict[str, set[int]] = {}
    real_open, real_write = os.open, OutputFile.write
    files: dict[int, str] = {}

    def opened(path: Path, flags: int, *mode: int, **named: int) -> int:
        fd = real_open(path, flags, *mode, **named)
        if flags & os.O_EXCL:
            files[os.fstat(fd).st_ino] = str(path)
            seen.setdefault(str(os.fstat(fd).st_ino), set()).add(os.fstat(fd).st_mode & 0o7777)
        return fd

    def written(file: OutputFile, data: bytes) -> None:
        real_write(file, data)
        facts = os.lstat(file.temporary)
        seen[str(facts.st_ino)].add(stat.S_IMODE(facts.st_mode))

    before = os.umask(umask)
    try:
        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(OutputFile, "write", written)
        scenario.write(root, 2)
    finally:
        os.umask(before)
    monkeypatch.undo()
    for name in scenario.names(2):
        facts = os.stat(scenario.target(root) / name)
        final = stat.S_IMODE(facts.st_mode)
        assert all(not each & ~final for each in seen[str(facts.st_ino)]), (name, seen)
        if mode is None and name != "m.json":
            assert final == 0o666 & ~umask


@EVERY_FOLDER
def test_a_growing_folder_is_no_wider_than_the_old_one(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "x"
    scenario.prepare(root)
    scenario.target(root).chmod(0o700)
    modes: list[int] = []
    real = os.mkdir

    def mkdir(path: Path, mode: int = 0o777, **named: int) -> None:
        real(path, mode, **named)
        modes.append(stat.S_IMODE(os.lstat(path).st_mode))

    monkeypatch.setattr(os, "mkdir", mkdir)
    scenario.write(root, 2)
    assert all(mode == 0o700 for mode in modes)
    assert stat.S_IMODE(scenario.target(root).stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT-RUN: only root gives files away")
@pytest.mark.parametrize("refused", [False, True])
def test_another_group_does_not_gain_what_the_old_one_had(
    refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.apr"
    path.write_bytes(b"old")
    os.chown(path, -1, 12345)
    path.chmod(0o664)

    def refuses(*of: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    if refused:
        monkeypatch.setattr(os, "fchown", refuses)
    with FileSet(force=True) as files:
        files.create(path).write(b"new")
    facts = path.stat()
    assert (facts.st_gid, stat.S_IMODE(facts.st_mode)) == (
        (0, 0o644) if refused else (12345, 0o664)
    )


def test_the_seams_of_the_scenarios_are_there() -> None:
    assert all(hasattr(atomic, name) for s in SCENARIOS.values() for name, _ in s.seams)
