"""`validate` gives back what it has looked at, window by window."""

from pathlib import Path

import pytest

from aprfmt import validate
from aprfmt.formats.mapped_file import StoredTensor
from tests.conversion.folders import write_safetensors

LONG = (16 << 20) + 10  # elements: more than are looked at together


def test_windows_of_bools_are_dropped_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last value is none; what comes before it was let go of in its order."""
    dropped: list[tuple[int, int | None]] = []

    def drop(self: StoredTensor, start: int = 0, stop: int | None = None) -> None:
        dropped.append((start, stop))

    monkeypatch.setattr(StoredTensor, "drop", drop)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"mask": (LONG,)}, {"mask": bytes(LONG - 1) + b"\7"}, "BOOL")
    report = validate(path)
    found = next(check for check in report.checks if check.name == "values")
    assert found.outcome == "FAIL" and f"element {LONG - 1} is 7" in found.found
    first, *others = dropped
    assert len(others) == 1
    assert first[0] == 0 and others[0] == (first[1], LONG)
