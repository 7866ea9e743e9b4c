"""Files that are not whole: the rest is compared, and the answer says what was lost.

Seen red: the first fault of a file ended `diagnose`; a shard of zeros made its whole set
unreadable; tensors of a shard that is missing counted as those that differ.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aprfmt.compare import diff
from aprfmt.diagnosis import diagnose
from aprfmt.errors import FormatError
from aprfmt.model import open_model
from tests.conversion.folders import tensors_of, write_mixed
from tests.diagnosis import files
from tests.models import save_tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of several shards."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    save_tiny("qwen3", folder)
    shards = folder.with_name("shards")
    shutil.copytree(folder, shards)
    rows = tensors_of(folder)
    (shards / "model.safetensors").unlink()
    names, homes = list(rows), {}
    for i in range(3):
        part = {name: rows[name] for name in names[i::3]}
        home = f"model-0000{i + 1}-of-00003.safetensors"
        write_mixed(shards / home, part)
        homes.update(dict.fromkeys(part, home))
    index = {"metadata": {}, "weight_map": homes}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    return shards


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def zero_head(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(bytes(1024) + raw[1024:])


def short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "bytes are missing"),
    "zero header": (zero_head, "first 1024 bytes are zero"),
    "header cut": (short, "has 5 bytes"),
    "missing": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("label", DAMAGE)
def test_the_whole_files_of_a_set_are_compared(label: str, whole: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(whole, bad)
    harm, words = DAMAGE[label]
    harm(bad / "model-00002-of-00003.safetensors")
    for pair in ((whole, bad), (bad, whole)):
        answer = diagnose(*map(str, pair))
        assert answer.verdict == "not_comparable" and not answer.findings, answer.sentence
        assert words in answer.sentence and "equal in what was compared" in answer.sentence
        assert "not compared" in answer.sentence


def test_a_difference_in_the_whole_files_is_found_all_the_same(whole: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(whole, bad)
    cut(bad / "model-00002-of-00003.safetensors")
    home = "model-00001-of-00003.safetensors"
    held = json.loads((bad / "model.safetensors.index.json").read_text())["weight_map"]
    rows = {n: row for n, row in tensors_of(whole).items() if held[n] == home}
    name = next(name for name in rows if name.endswith("proj.weight"))
    files.edit(name, lambda x: x * 0.5)(rows)
    write_mixed(bad / home, rows)
    answer = diagnose(str(whole), str(bad))
    assert answer.verdict == "bug"
    assert [finding.cause for finding in answer.findings] == ["scale"], answer.sentence


def homes_of(folder: Path, file: str = "") -> list[str]:
    """Return the names of all tensors in the index of a folder, or of one file's."""
    homes = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return [name for name, home in homes.items() if home == file or not file]


@pytest.mark.parametrize("side", ["A", "B"])
def test_tensors_of_a_shard_that_is_missing_are_not_called_one_sided(
    side: str, whole: Path, tmp_path: Path
) -> None:
    """What was in it is not known: no difference, and not equal."""
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    lost = set(homes_of(part, "model-00002-of-00003.safetensors"))
    (part / "model-00002-of-00003.safetensors").unlink()
    report = diff(*((whole, part) if side == "B" else (part, whole)))
    counts = {verdict: count for verdict, count in report.counts.items() if count}
    every = len(homes_of(whole))
    assert counts == {"SAME_BYTES": every - len(lost), "UNREADABLE": len(lost)}
    assert report.exit_code() == 2
    assert report.pronounced().says.startswith(f"not decided, {every - len(lost)} of {every} ")


def test_zeros_at_the_beginning_are_said_as_such(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(4096) + bytes(range(1, 200)))
    with pytest.raises(FormatError, match="bytes and more are zero, as after an interrupted"):
        open_model(path)
