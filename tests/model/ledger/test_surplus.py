"""Bytes behind the last tensor: the tensors are equal, and the file is longer than it should be.

Seen red: such a file taken for one that cannot be compared, and for an equal one (GGUF, APR).
"""

import shlex
import shutil
from pathlib import Path

import pytest

from aprfmt.conversion import convert
from tests.cli.run import aprfmt as command


def _longer(path: Path, data: bytes) -> None:
    weights = path / "model.safetensors" if path.is_dir() else path
    weights.write_bytes(weights.read_bytes() + data)


def _model(demo_model: Path, kind: str, path: Path) -> Path:
    if kind == "folder":
        return Path(shutil.copytree(demo_model, path))
    target = path.with_suffix(f".{kind}")
    convert(demo_model, target)
    return target


@pytest.mark.parametrize("kind", ["folder", "gguf", "apr"])
def test_bytes_behind_the_last_tensor(
    kind: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, same, other = (_model(demo_model, kind, tmp_path / name) for name in "abcd")
    for path, data in ((b, bytes(4096)), (same, bytes(4096)), (other, bytes(4095) + b"\1")):
        _longer(path, data)
    done = command("diff", a, b, "--json")
    assert (done.code, done.json["counts"]["SAME_BYTES"]) == (1, 50), done.json["says"]
    (row,) = done.json["not_compared"]
    assert row["state"] == "only in B" and "bytes follow" in row["name"]
    assert "equal in what was compared: 50 tensors" in done.json["says"]
    assert command("diff", b, a).code == 1
    assert command("diff", b, same).code == 0
    assert command("diff", b, other).code == 1
    account = command("inspect", b, "--account", "--json").json["account"]
    assert [one["name"] for one in account["unread"]] == [row["name"]]
    # The command that it names mends B.
    (remedy,) = done.json["next"]
    program, *args = shlex.split(remedy)
    assert program == "aprfmt"
    monkeypatch.chdir(tmp_path)
    assert command(*args).code == 0
    mended = b if kind == "folder" else tmp_path / f"b-fixed.{kind}"
    done = command("diff", a, mended, "--json")
    assert (done.code, done.json["not_compared"]) == (0, []), done.json["says"]
