"""No command writes B again from an A that is damaged or incomplete: `convert` refuses such an A.

Seen red: each row, with the command offered whatever A is.
"""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from tests.cli.run import aprfmt as command
from tests.compare.test_verdicts import edited
from tests.conversion.folders import llama_folder
from tests.diagnosis.test_shared_ranges import moved

QUERY = "model.layers.0.self_attn.q_proj.weight"
SIZES: dict[str, Any] = {"hidden": 96, "layers": 1, "ffn": 160, "heads": 3, "kv_heads": 1}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound llama of one layer in F32: a folder `hf` and the same model as `m.gguf`."""
    folder = tmp_path_factory.mktemp("unwhole")
    aprfmt.convert(llama_folder(folder / "hf", "F32", **SIZES), folder / "m.gguf")
    return folder


@pytest.fixture(scope="module")
def faulty(right: Path) -> Path:
    """The same with the rows of one matrix moved on by one: `b` and `b.gguf`."""

    def roll(data: dict[str, bytes]) -> None:
        rows = np.frombuffer(data[QUERY], np.float32).reshape(96, 96)
        data[QUERY] = np.roll(rows, 1, 0).tobytes()

    aprfmt.convert(edited(right / "hf", right / "b", roll), right / "b.gguf")
    return right


def overlapping(folder: Path, right: Path) -> Path:
    """Return a GGUF of which one tensor was written over the end of another."""
    return moved(folder / "a.gguf", right / "m.gguf", -32, overwritten=True)


def cut(folder: Path, right: Path) -> Path:
    """Return a GGUF without its last third."""
    raw = (right / "m.gguf").read_bytes()
    (folder / "a.gguf").write_bytes(raw[: 2 * len(raw) // 3])
    return folder / "a.gguf"


def followed(folder: Path, right: Path) -> Path:
    """Return a folder whose safetensors file has bytes behind its last tensor."""
    shutil.copytree(right / "hf", folder / "a")
    with (folder / "a" / "model.safetensors").open("ab") as file:
        file.write(bytes(64))
    return folder / "a"


def without_shard(folder: Path, right: Path) -> Path:
    """Return a folder of shards of which one is missing, and not that of QUERY."""
    aprfmt.convert(right / "hf", folder / "a", max_shard_size=100_000)
    sorted((folder / "a").glob("model-*.safetensors"))[0].unlink()
    return folder / "a"


UNWHOLE: dict[str, Callable[[Path, Path], Path]] = {
    one.__name__: one for one in (overlapping, cut, followed, without_shard)
}


def offered(out: str) -> list[list[str]]:
    """Return the words of each command that an answer's `next:` lines offer."""
    return [shlex.split(line) for line in re.findall(r"^(?:next: +| {6})(aprfmt .+)$", out, re.M)]


@pytest.mark.parametrize("verb", ["diagnose", "diff"])
@pytest.mark.parametrize("name", UNWHOLE)
def test_nothing_is_written_from_a_damaged_side(
    name: str, verb: str, faulty: Path, tmp_path: Path
) -> None:
    a = UNWHOLE[name](tmp_path, faulty)
    assert command("convert", a, tmp_path / "out.gguf").code == 2
    for b in (a, faulty / ("b" if a.is_dir() else "b.gguf")):
        said = command(verb, a, b).out
        assert {words[1] for words in offered(said)} <= {"diff", "validate", "repair"}, said
        assert "write it again from A" not in said


@pytest.mark.parametrize("verb", ["diagnose", "diff"])
@pytest.mark.parametrize("kind", ["", ".gguf"])
def test_b_is_written_again_from_a_whole_a(
    verb: str, kind: str, faulty: Path, tmp_path: Path
) -> None:
    a, b = faulty / ("m.gguf" if kind else "hf"), faulty / f"b{kind}"
    said = command(verb, a, b).out
    assert ["aprfmt", "convert", str(a)] in [words[:3] for words in offered(said)], said


@pytest.mark.parametrize("name", ["overlapping", "cut", "followed"])
def test_a_damaged_b_is_written_again_from_a_whole_a(
    name: str, right: Path, tmp_path: Path
) -> None:
    b = UNWHOLE[name](tmp_path, right)
    said = command("diagnose", right / "m.gguf", b).out
    named = "overlapping_ranges" in said
    assert ("aprfmt convert" in said) == named, said
