"""Notes of interrupted changes, and options that a format's writer has no use for."""

import os
from pathlib import Path
from typing import Any

import pytest

from aprfmt.errors import FormatError, UsageError
from aprfmt.formats import apr, gguf, in_place_patch, safetensors
from aprfmt.formats.in_place_patch import refuse_half_changed
from aprfmt.formats.journal import SCHEMA, parse_journal
from aprfmt.formats.temporary_files import temporary_name
from aprfmt.formats.unfinished_writes import patch_path

# --- journals -------------------------------------------------------------------------------------

PATH = Path("folder/journal.json")
DRAFT = temporary_name("model.gguf")
RIGHT: dict[str, Any] = {
    "schema": SCHEMA,
    "moves": [[DRAFT, "model.gguf"]],
    "removes": ["old.gguf"],
    "files": {"model.gguf": "1:2"},
    "signature": "abc",
}


def test_a_journal_names_plain_files_and_drafts() -> None:
    found = parse_journal(RIGHT, PATH)
    assert found.name == "journal.json" and found.moves == [(DRAFT, "model.gguf")]
    assert (found.removes, found.files, found.signature) == (
        ["old.gguf"],
        {"model.gguf": "1:2"},
        "abc",
    )
    bare = {key: RIGHT[key] for key in ("schema", "moves", "removes")}
    found = parse_journal(bare, PATH)
    assert (found.files, found.signature) == ({}, "")
    assert parse_journal(bare | {"moves": [], "removes": []}, PATH).moves == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"schema": "aprfmt.journal/0"},
        {"moves": {DRAFT: "model.gguf"}},
        {"moves": [[DRAFT]]},
        {"moves": [[DRAFT, "a", "b"]]},
        {"moves": [f"{DRAFT}"]},
        {"moves": [[DRAFT, "../model.gguf"]]},
        {"moves": [[DRAFT, 3]]},
        {"moves": [["model.bak", "model.gguf"]]},  # no draft of ours
        {"moves": [[DRAFT, "a"], ["b", "c"]]},
        {"removes": "old.gguf"},
        {"removes": ["sub/old.gguf"]},
        {"removes": [".."]},
        {"removes": [7]},
        {"files": ["model.gguf"]},
        {"files": {"model.gguf": 12}},
        {"files": {"a": "1:2", "b": None}},
        {"signature": 5},
    ],
)
def test_any_other_journal_is_none_of_ours(wrong: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"journal.json: is not a journal of aprfmt.journal/1"):
        parse_journal(RIGHT | wrong, PATH)


@pytest.mark.parametrize("value", [None, [], "text", 3, {}, {"schema": SCHEMA}])
def test_another_value_is_no_journal(value: Any) -> None:
    with pytest.raises(FormatError, match="no run can complete it"):
        parse_journal(value, PATH)


# --- changes in place -----------------------------------------------------------------------------


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("state", ["none", "another's", "ours", "unsigned"])
def test_a_file_that_is_half_changed_is_refused_under_each_of_its_names(
    state: str, link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "model.gguf"
    real.write_bytes(b"data")
    path = real
    if link:
        (tmp_path / "names").mkdir()
        path = tmp_path / "names" / "link.gguf"
        path.symlink_to(real)
    asked: list[tuple[Path, Path]] = []

    def read(file: Path, record: Path) -> Any:
        asked.append((file, record))
        found = type("Record", (), {"signed": state == "ours"})
        return None if state == "another's" else found

    monkeypatch.setattr(in_place_patch, "_read_record", read)
    if state != "none":
        patch_path(real).write_text("{}")
    if state in ("none", "another's"):
        refuse_half_changed(path)
    else:
        with pytest.raises(FormatError) as error:
            refuse_half_changed(path)
        text = str(error.value)
        assert text.startswith(f"{path}: a change in place was interrupted, so old and new bytes")
        signed = "give the same aprfmt set --in-place again" in text
        assert signed is (state == "ours")
        assert ("is not signed by this user's key" in text) is (state == "unsigned")
    expected = [] if state == "none" else [(Path(os.path.realpath(real)), patch_path(real))]
    assert asked == expected


# --- options of writers ---------------------------------------------------------------------------


@pytest.mark.parametrize("format_", [apr, gguf, safetensors])
def test_a_writer_refuses_options_that_it_does_not_have(format_: Any, tmp_path: Path) -> None:
    from importlib import import_module

    writer = import_module(f"{format_.__name__}.writer")
    path = tmp_path / "m.out"
    with pytest.raises(UsageError, match=r"files are not written with colour, shape$"):
        writer.open_sink(path, colour="red", shape="round")
    assert writer.open_sink(path, force=True) is not None
    assert not list(tmp_path.iterdir())


# --- records that are written -------------------------------------------------------------------


def test_a_new_record_is_this_users_alone_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a write takes a part of the bytes only, or fails."""
    done: list[tuple[str, int]] = []
    write, sync, close = os.write, os.fsync, os.close
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))

    def noted(what: str, call: Any) -> Any:
        def call_and_note(fd: int) -> None:
            done.append((what, fd))
            call(fd)

        return call_and_note

    monkeypatch.setattr(os, "fsync", noted("sync", sync))
    monkeypatch.setattr(os, "close", noted("close", close))
    path = tmp_path / "note"
    in_place_patch._write_new_file(path, b"eight by")
    assert path.read_bytes() == b"eight by" and path.stat().st_mode & 0o777 == 0o600
    (first, fd), (second, again) = done
    assert (first, second) == ("sync", "close") and fd == again
    with pytest.raises(FileExistsError):
        in_place_patch._write_new_file(path, b"other")
    assert path.read_bytes() == b"eight by"
    done.clear()

    def full(fd: int, data: Any) -> int:
        raise OSError("no space")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        in_place_patch._write_new_file(tmp_path / "more", b"x")
    assert [what for what, _ in done] == ["close"]
