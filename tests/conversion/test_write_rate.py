"""The rate at which a disk is measured to write."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from aprfmt.conversion import estimate


def test_the_rate_is_of_bytes_that_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def timed(write: Any) -> float:
        write()
        sizes.append(files[-1].tell())
        return 2.0

    files: list[Any] = []
    made = tempfile.TemporaryFile

    def opened(**options: Any) -> Any:
        files.append(made(**options))
        return files[-1]

    monkeypatch.setattr("tempfile.TemporaryFile", opened)
    monkeypatch.setattr(estimate, "_time_call", timed)
    assert estimate.write_rate(tmp_path) == estimate.WRITTEN / 2
    assert sizes == [estimate.WRITTEN]
    assert estimate.write_rate(tmp_path / "none") is None
