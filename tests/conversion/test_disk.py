"""With shards too, a run takes the disk of its output and nothing else, at every tensor.

Seen red: a second file beside every one that is written.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aprfmt.conversion import convert
from tests.conversion.folders import llama_folder

JOURNAL = 64 << 10  # bytes of a run's own notes: --resume's journal


def taken(folder: Path) -> int:
    """Return the bytes of all files below a folder, hidden and growing ones too."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            pass  # it was renamed or removed meanwhile
    return found


@pytest.mark.parametrize("name", ["x.gguf", "x.apr", "x"])
@pytest.mark.parametrize("options", [
    {}, {"jobs": 3}, {"resume": True}, {"encoding": "F16"}, {"encoding": "F16", "jobs": 3},
])  # fmt: skip
def test_shards_take_no_disk_but_the_output(
    name: str, options: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = llama_folder(tmp_path / "m", "BF16", hidden=128, layers=4)
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(out))
    seen: list[int] = []
    report = convert(
        source, out / name, max_shard_size=100_000, **options,
        progress=lambda done, total: seen.append(taken(out)),
    )  # fmt: skip
    assert len(report.files) > 4 and len(seen) == len(report.tensors)
    assert max(seen) <= taken(out) + JOURNAL
