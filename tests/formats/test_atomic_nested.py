"""Folders whose files lie one folder deeper: built beside, swapped at once, all or nothing."""

import os
from pathlib import Path

import pytest

from aprfmt.errors import OutputError
from aprfmt.formats import atomic
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.temporary_files import SUFFIX, temporary_name
from tests.formats.writers import contents


def ours(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder in ("", "layer-0", "layer-1") and (
        file.endswith(".bin") or name in ("layer-0", "layer-1")
    )


def put(folder: Path, data: bytes, *, force: bool = True) -> None:
    with FileSet(force=force, folder=folder, ours=ours, nested=True) as files:
        for name in ("layer-0/a.bin", "layer-0/b.bin", "layer-1/a.bin", "out.bin"):
            files.create(folder / name).write(data)


def test_new_and_replaced(tmp_path: Path) -> None:
    put(tmp_path / "x", b"1", force=False)
    assert set(contents(tmp_path)) == {
        "x/layer-0/a.bin",
        "x/layer-0/b.bin",
        "x/layer-1/a.bin",
        "x/out.bin",
    }
    with pytest.raises(OutputError, match="use --force"):
        put(tmp_path / "x", b"2", force=False)
    put(tmp_path / "x", b"2")
    assert set(contents(tmp_path).values()) == {b"2"}
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("foreign", ["thesis.txt", "layer-0/thesis.txt", "layer-1/deep/a.bin"])
def test_what_is_somebody_elses_is_refused(foreign: str, tmp_path: Path) -> None:
    put(tmp_path / "x", b"1")
    (tmp_path / "x" / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / "x" / foreign).write_bytes(b"mine")
    before = contents(tmp_path)
    with pytest.raises(OutputError, match=f"holds {foreign.partition('/')[0]}, which is not part"):
        put(tmp_path / "x", b"2")
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("name", ["../y", "a/b/c.bin", "a/../../y", "layer-0/..", ".."])
def test_nothing_is_written_elsewhere(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    with FileSet(folder=folder, ours=ours, nested=True) as files:
        with pytest.raises(OutputError, match="is not a file directly inside"):
            files.create(folder / name)
        files.create(folder / "out.bin").write(b"1")
    assert contents(tmp_path) == {"x/out.bin": b"1"}


def test_an_error_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    put(folder, b"1")
    files = FileSet(force=True, folder=folder, ours=ours, nested=True)
    with pytest.raises(KeyboardInterrupt), files:
        files.create(folder / "layer-0" / "a.bin").write(b"2")
        raise KeyboardInterrupt
    assert set(contents(tmp_path).values()) == {b"1"}
    assert os.listdir(tmp_path) == ["x"]


def test_where_a_folder_cannot_be_swapped_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "x", b"1")
    monkeypatch.setattr(atomic, "swap_names", lambda a, b: False)
    with pytest.raises(OutputError, match="in one step here; give the name of a new folder"):
        put(tmp_path / "x", b"2")
    monkeypatch.chdir(tmp_path / "x")  # a shell's folder is not swapped away
    with pytest.raises(OutputError, match="in one step here"):
        put(Path(), b"2")
    assert set(contents(tmp_path).values()) == {b"1"}
    assert os.listdir(tmp_path) == ["x"]


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / temporary_name("x").replace(f".{os.getpid()}-", ".999999999-")
    (left / "layer-0").mkdir(parents=True)
    (left / "layer-0" / "a.bin").write_bytes(b"1")
    assert left.name.endswith(SUFFIX)
    put(tmp_path / "x", b"1")
    assert os.listdir(tmp_path) == ["x"]
