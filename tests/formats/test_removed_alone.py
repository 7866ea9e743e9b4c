"""What is removed of temporary folders, and that a set of files which has ended takes no more."""

from pathlib import Path

import pytest

from aprfmt.formats import temporary_files
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.cleanup import OPEN
from aprfmt.formats.resumable_output import ResumableFileSet


@pytest.mark.parametrize("opened", [True, False])
def test_only_one_folder_deep_is_removed(
    opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not opened:
        monkeypatch.setattr(temporary_files, "_open_for_emptying", lambda path: None)
    for name in ("flat", "deep"):
        inner = tmp_path / name / "inner"
        inner.mkdir(parents=True)
        (inner / "file").write_text("x")
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "deep" / "inner" / "other").mkdir()
    (tmp_path / "deep" / "inner" / "other" / "file").write_text("x")
    for name in ("flat", "deep"):
        temporary_files.remove(tmp_path / name)
    assert not (tmp_path / "flat").exists()
    assert (tmp_path / "deep" / "inner" / "other" / "file").read_text() == "x"
    assert not (tmp_path / "deep" / "file").exists()


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("end", ["discard", "publish"])
def test_a_set_that_has_ended_takes_no_more_files(
    end: str, resumable: bool, tmp_path: Path
) -> None:
    """Nor is it discarded once more when the program ends."""
    output = tmp_path / "m.bin"
    files = ResumableFileSet(output) if resumable else FileSet()
    files.create(output).write(b"some")
    assert files in OPEN
    getattr(files, end)()
    assert files not in OPEN and output.exists() == (end == "publish")
    with pytest.raises(ValueError, match=r"the set of files is published or discarded already$"):
        files.create(tmp_path / "other.bin")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == (
        ["m.bin"] if end == "publish" else []
    )
