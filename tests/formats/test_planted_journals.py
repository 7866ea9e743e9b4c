"""A journal is believed only where this user's own run wrote it, of these very files.

Seen red: a journal without a signature completed, one of another key, a file of another inode moved
or removed, a file of a foreign journal cleaned away, a key that others can read.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprfmt.base.protocols import Note
from aprfmt.errors import AprfmtError, FormatError, OutputError
from aprfmt.formats import journal, signature
from aprfmt.formats.atomic import FileSet, complete_renames, pending_journals
from aprfmt.formats.journal import Journal, publish_set
from aprfmt.formats.signature import is_signed, key_path, sign
from aprfmt.formats.temporary_files import SUFFIX, temporary_name
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder

NAME = ".aprfmt-journal-0123456789abcdef.json"


def identity(path: Path) -> str:
    facts = path.lstat()
    return f"{facts.st_ino}:{facts.st_size}:{facts.st_uid}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a user's two files and a temporary one, as a run that was killed leaves it."""
    made = tmp_path / "folder"
    made.mkdir()
    for name in ("thesis.txt", "photo.jpg"):
        (made / name).write_bytes(f"my {name}".encode())
    (made / stale()).write_bytes(b"new")
    return made


def stale() -> str:
    """Return the name of a temporary file of an ended run, which the next run removes."""
    found = temporary_name("thesis.txt").split(".")
    found[3] = "999999999-" + found[3].partition("-")[2].partition("-")[0] + "-00000000"
    return ".".join(found)


def whole(folder: Path) -> Journal:
    """Return the journal that an own run would have written."""
    files = {name: identity(folder / name) for name in (stale(), "photo.jpg")}
    return Journal(NAME, [(stale(), "thesis.txt")], ["photo.jpg"], files)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def write_here(folder: Path) -> None:
    with FileSet(force=True) as files:
        files.create(folder / "out.gguf").write(b"x")


def test_an_own_journal_is_completed_and_that_is_said(folder: Path, notices: list[Note]) -> None:
    (folder / NAME).write_bytes(whole(folder).dumps())
    write_here(folder)
    assert contents(folder) == {"thesis.txt": b"new", "out.gguf": b"x"}
    assert [note.key for note in notices] == ["completed_write"]
    assert "completed: thesis.txt" in notices[0].text


def unsigned(folder: Path, value: dict[str, Any]) -> None:
    value["signature"] = ""


def old_form(folder: Path, value: dict[str, Any]) -> None:
    del value["signature"], value["files"]


def another_key(folder: Path, value: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder.parent / "another"))
        value |= json.loads(whole(folder).dumps())


def another_move(folder: Path, value: dict[str, Any]) -> None:
    value["moves"][0][1] = "photo.jpg"


def another_removal(folder: Path, value: dict[str, Any]) -> None:
    value["removes"] = ["thesis.txt"]


def another_identity(folder: Path, value: dict[str, Any]) -> None:
    value["files"]["photo.jpg"] = "1:1:1"


def another_file(folder: Path, value: dict[str, Any]) -> None:
    """The temporary file was exchanged."""
    kept = folder.parent / "kept"
    (folder / stale()).rename(kept)
    (folder / stale()).write_bytes(b"new")
    assert kept.read_bytes() == b"new"


def a_link(folder: Path, value: dict[str, Any]) -> None:
    (folder / stale()).unlink()
    (folder / stale()).symlink_to("photo.jpg")


def longer(folder: Path, value: dict[str, Any]) -> None:
    with (folder / stale()).open("ab") as file:
        file.write(b"er")


def an_own_one_copied(folder: Path, value: dict[str, Any]) -> None:
    """A journal of an own run, which came back with a copy of its folder."""
    other = folder.parent / "other"
    other.mkdir()
    for name, data in contents(folder).items():
        (other / name).write_bytes(data)
    value |= json.loads(whole(other).dumps())


FALSE: list[Callable[[Path, dict[str, Any]], None]] = [
    unsigned, old_form, another_key, another_move, another_removal, another_identity, another_file,
    a_link, longer, an_own_one_copied,
]  # fmt: skip


@pytest.mark.parametrize("change", FALSE, ids=lambda change: change.__name__)
def test_any_other_journal_is_left_alone_and_that_is_said(
    change: Callable[[Path, dict[str, Any]], None], folder: Path, notices: list[Note]
) -> None:
    value = json.loads(whole(folder).dumps())
    change(folder, value)
    (folder / NAME).write_text(json.dumps(value))
    before = contents(folder)
    write_here(folder)
    assert contents(folder) == before | {"out.gguf": b"x"}
    assert [note.key for note in notices] == ["foreign_journal"]
    assert NAME in notices[0].where and "is left alone, with the files it names" in notices[0].text
    assert pending_journals(folder), "the set that it names may be mixed"


def write_a_folder_here(folder: Path) -> None:
    with FileSet(folder=folder / "model") as files:
        files.create(folder / "model" / "config.json").write(b"{}")


def test_a_folder_as_output_says_what_lies_beside_it_too(folder: Path, notices: list[Note]) -> None:
    (folder / NAME).write_bytes(whole(folder).dumps().replace(b"photo", b"notes"))
    before = contents(folder)
    write_a_folder_here(folder)
    assert contents(folder) == before and (folder / "model" / "config.json").is_file()
    assert [note.key for note in notices] == ["foreign_journal"]


def test_a_folder_as_output_completes_an_own_journal_beside_it(
    folder: Path, notices: list[Note]
) -> None:
    (folder / NAME).write_bytes(whole(folder).dumps())
    write_a_folder_here(folder)
    assert contents(folder) == {"thesis.txt": b"new"}
    assert [note.key for note in notices] == ["completed_write"]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"[" * 70, b'{"a": 1, "a": 2}', b"[]", b'{"moves": NaN}']
)
def test_what_is_no_journal_says_what_to_do_and_nothing_is_written(
    data: bytes, folder: Path
) -> None:
    (folder / NAME).write_bytes(data)
    before = contents(folder)
    with pytest.raises(AprfmtError, match=rf"^\S*{NAME}: .*check the files .*remove it$"):
        write_here(folder)
    assert contents(folder) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT-RUN: only root gives files away")
def test_a_journal_of_another_owner_is_left_alone(folder: Path, notices: list[Note]) -> None:
    (folder / NAME).write_bytes(whole(folder).dumps())
    os.chown(folder / NAME, 12345, 12345)
    before = contents(folder)
    complete_renames(folder)
    assert contents(folder) == before
    assert "another user's" in notices[0].text


def test_a_file_that_came_since_is_not_removed(folder: Path, notices: list[Note]) -> None:
    (folder / NAME).write_bytes(whole(folder).dumps())
    (folder / "photo.jpg").rename(folder.parent / "photo.jpg")
    (folder / "photo.jpg").write_bytes(b"my photo.jpg")
    complete_renames(folder)
    assert contents(folder) == {"thesis.txt": b"new", "photo.jpg": b"my photo.jpg"}


def test_without_a_state_folder_a_set_is_published_and_its_journal_is_nobodys(
    folder: Path, notices: list[Note], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/state")
    assert json.loads(whole(folder).dumps())["signature"] == ""
    with FileSet(force=True) as files:
        for name in ("a", "b"):
            files.create(folder / name).write(b"x")
    assert {"a", "b"} <= contents(folder).keys() and not list(folder.glob(".*"))


def test_a_set_is_completed_where_inodes_change(
    tmp_path: Path, notices: list[Note], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hard links (FAT) a journal does without inodes, which a remount changes there."""
    old, new = [tmp_path / "a", tmp_path / "b"], [temporary_name("a"), temporary_name("b")]
    for path in (*old, *(tmp_path / name for name in new)):
        path.write_bytes(b"1")
    calls: list[str] = []
    real = os.replace

    def replaces(source: Path, final: Path) -> None:
        calls.append(str(final))
        if len(calls) == 3:
            raise OSError(5, "Input/output error")
        real(source, final)

    def no_link(*of: object, **named: object) -> None:
        raise OSError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replaces)
        patch.setattr(os, "link", no_link)
        with pytest.raises(OutputError, match="the next write into this folder"):
            publish_set(tmp_path, list(zip(new, ("a", "b"), strict=True)))
    left = tmp_path / new[1]
    data = left.read_bytes()
    (tmp_path / "moved").write_bytes(data)
    left.unlink()
    (tmp_path / "moved").rename(left)
    complete_renames(tmp_path)
    assert [note.key for note in notices] == ["completed_write"]
    assert sorted(contents(tmp_path)) == ["a", "b"]


# --- the key -------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "aprfmt" / "key"


def test_the_key_is_made_once_for_this_user_alone(home: Path) -> None:
    signed = sign("kind", b"data")
    assert len(signed) == 64 and is_signed("kind", b"data", signed)
    assert stat.S_IMODE(home.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700
    assert os.listdir(home.parent) == ["key"]
    before = home.read_bytes()
    signature._keys.clear()
    assert sign("kind", b"data") == signed and home.read_bytes() == before
    assert not is_signed("kind", b"date", signed)
    assert not is_signed("kin", b"data", signed) and not is_signed("kin", b"ddata", signed), (
        "a record of one kind is none of another"
    )
    assert not is_signed("kind", b"data", "é") and not is_signed("kind", b"data", None)


@pytest.mark.parametrize("most", [1, 31, 32])
def test_a_key_that_the_system_takes_in_parts_is_whole(
    most: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: a key of fewer bytes, which is no key, now or later."""
    signature._keys.clear()
    write, positioned = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:most]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: positioned(fd, data[:most], at))
    assert is_signed("kind", b"data", sign("kind", b"data"))
    assert home.stat().st_size == 32


def test_nothing_is_signed_before_there_is_a_key(home: Path) -> None:
    assert not is_signed("kind", b"data", "") and not home.exists()


@pytest.mark.parametrize("fault", ["readable", "short", "link", "folder", "owner", "home"])
def test_a_key_that_others_may_know_is_none(fault: str, home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_bytes(b"k" * (31 if fault == "short" else 32))
    home.chmod(0o644 if fault == "readable" else 0o600)
    if fault == "link":
        home.rename(home.with_name("elsewhere"))
        home.symlink_to("elsewhere")
    elif fault == "folder":
        home.unlink()
        home.mkdir()
    elif fault in ("owner", "home"):
        if os.geteuid() != 0:
            pytest.skip("NOT-RUN: only root gives files away")
        if fault == "home":
            home.unlink()
        os.chown(home if fault == "owner" else home.parent, 12345, 12345)
    assert sign("kind", b"data") == ""
    assert fault != "home" or not home.exists(), "a key of root's would be of no use to its owner"


@pytest.mark.parametrize("there", [2, 1, 0], ids=["nothing", "its parent", "the folder"])
def test_a_key_is_made_in_the_folders_that_are_there(home: Path, there: int) -> None:
    signature._keys.clear()
    home.parents[there].mkdir(parents=True, exist_ok=True)
    assert len(sign("kind", b"data")) == 64 and home.is_file()


def test_a_relative_state_folder_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert key_path() == tmp_path / ".local" / "state" / "aprfmt" / "key"
    monkeypatch.setenv("HOME", "nowhere")
    assert key_path() is None and sign("kind", b"data") == ""


def test_runs_at_once_have_one_key(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run makes the key after this one found none."""
    real = os.link

    def slower(*of: Any, **named: Any) -> None:
        home.write_bytes(b"k" * 32)
        home.chmod(0o600)
        real(*of, **named)

    monkeypatch.setattr(os, "link", slower)
    assert sign("kind", b"data")
    assert home.read_bytes() == b"k" * 32 and os.listdir(home.parent) == ["key"]


def test_hidden_files_of_ended_runs_go(folder: Path) -> None:
    """What the tests above see kept would be removed without a journal."""
    write_here(folder)
    assert not [name for name in contents(folder) if name.endswith(SUFFIX)]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_link_in_a_journals_place_is_named(resumed: bool, tmp_path: Path) -> None:
    """Not "too many levels of symbolic links", which is what the system calls it."""
    source, target = llama_folder(tmp_path / "m", "F32", layers=1), tmp_path / "x.gguf"
    name = ".x.gguf.aprfmt-resume.jsonl" if resumed else ".aprfmt-journal-1.json"
    (tmp_path / name).symlink_to("/dev/zero")
    done = aprfmt("convert", source, target, *["--resume"] * resumed)
    assert done.code == 2 and done.err.count("\n") == 1
    assert name in done.err and "is a link, which is not followed; remove it" in done.err
    assert not target.exists()


@pytest.mark.parametrize("over", [-1, 0, 1, 100])
def test_a_journal_may_have_so_many_bytes_and_no_more(
    over: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = whole(folder).dumps()
    (folder / NAME).write_bytes(data)
    monkeypatch.setattr(journal, "_MAX_BYTES", len(data) - over)
    if over > 0:
        with pytest.raises(FormatError, match="is no journal"):
            journal._read_journal(folder, NAME)
    else:
        assert journal._read_journal(folder, NAME).moves == whole(folder).moves
