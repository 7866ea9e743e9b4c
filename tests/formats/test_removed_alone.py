"""What is removed of temporary folders where they cannot be opened: one folder deep, no more."""

from pathlib import Path

import pytest

from aprfmt.formats import temporary_files


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
