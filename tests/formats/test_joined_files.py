"""Model files that were joined with `cat`: the place where the next one begins, and how to cut.

Seen red: the file was only said to have another name than its keys ask for, or bytes left over.
"""

import hashlib
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import aprfmt
from aprfmt.model.ledger import make_ledger
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a GGUF, its parts and a safetensors file."""
    folder = tmp_path_factory.mktemp("joined")
    llama_folder(folder / "model", "F32", hidden=64, layers=2, ffn=96, heads=4, kv_heads=2)
    aprfmt.convert(folder / "model", folder / "whole.gguf")
    (folder / "plain.safetensors").write_bytes((folder / "model/model.safetensors").read_bytes())
    size = (folder / "whole.gguf").stat().st_size // 2
    done = command("split", folder / "whole.gguf", folder / "part.gguf", "--max-shard-size", size)
    assert done.code == 0, done.err
    return folder


Names = Callable[[Path], Sequence[Path]]
JOINED: dict[str, tuple[Names, str, str]] = {
    "parts": (lambda f: sorted(f.glob("part-*.gguf")), "GGUF", "one.gguf"),
    "parts-under-a-part-s-name": (
        lambda f: sorted(f.glob("part-*.gguf")),
        "GGUF",
        "part-00001-of-00003.gguf",
    ),
    "twice": (lambda f: [f / "whole.gguf"] * 2, "GGUF", "one.gguf"),
    "shards": (lambda f: [f / "plain.safetensors"] * 2, "safetensors", "one.safetensors"),
    "of-two-formats": (
        lambda f: [f / "whole.gguf", f / "plain.safetensors"],
        "safetensors",
        "one.gguf",
    ),
}


@pytest.mark.parametrize("case", JOINED)
def test_the_next_file_is_found_and_can_be_cut_off(case: str, files: Path, tmp_path: Path) -> None:
    names, kind, called = JOINED[case]
    pieces = [path.read_bytes() for path in names(files)]
    assert len(pieces) > 1
    one = tmp_path / called.replace("00003", f"{len(pieces):05}")
    one.write_bytes(b"".join(pieces))
    said = command("validate", one).out
    assert f"another {kind} file begins at byte {len(pieces[0])}" in said
    cut = re.search(r"head -c \d+ FILE is the first, (tail -c \+\d+) FILE", said)
    assert cut is not None
    rest = subprocess.run([*cut[1].split(), one], capture_output=True, check=True).stdout
    assert rest == b"".join(pieces[1:])


@pytest.mark.parametrize("name", ["whole.gguf", "plain.safetensors"])
@pytest.mark.parametrize("tail", [bytes(64), b"GGU" * 30, bytes(range(1, 200))])
def test_other_bytes_are_no_file(name: str, tail: bytes, files: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes((files / name).read_bytes() + tail)
    said = command("validate", tmp_path / name).out
    assert "bytes follow" in said and "joined from" not in said


@pytest.mark.parametrize("at", [0, -1])
def test_bytes_behind_a_file_of_a_set_are_said_with_its_number(
    at: int, files: Path, tmp_path: Path
) -> None:
    parts = sorted(files.glob("part-*.gguf"))
    for path in parts:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / parts[at].name).open("ab") as file:
        file.write(b"?" * 100)
    (tmp_path / "one.gguf").write_bytes((files / "whole.gguf").read_bytes() + b"?" * 100)
    place = f" (file {parts.index(parts[at]) + 1} of {len(parts)})"
    for name, behind in ((parts[0].name, place), ("one.gguf", "")):
        with aprfmt.open(tmp_path / name) as model:
            (found,) = (item for item in make_ledger(model).items if " follow " in item.name)
            assert found.holds() == hashlib.sha256(b"?" * 100).hexdigest()
        assert found.name.endswith(behind) and ("(file" in found.name) == bool(behind)
