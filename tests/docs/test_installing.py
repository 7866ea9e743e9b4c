"""The codec of the documentation, installed, through every command that a codec of ours serves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.examples import DOCS, ROOT, SITE, files, install
from tests.patience import PATIENCE

DEMO = ROOT / "fixtures" / "demo"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    for block in files(DOCS / "how-to" / "extending" / "adding_a_codec.md"):
        (folder / block.title).write_text(block.text)
    install(folder)
    return folder / SITE


def aprfmt(site: Path, *args: object, code: int = 0) -> Any:
    """Run a command where the package of `site` is installed; return its JSON."""
    path = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "aprfmt", *map(str, args), "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_a_codec_of_another_package_is_quantized_bounded_and_explained(
    toy: Path, tmp_path: Path
) -> None:
    made = tmp_path / "toy.gguf"
    aprfmt(toy, "quantize", DEMO, made, "--type", "TOY_8")
    diff = aprfmt(toy, "diff", DEMO, made, "--accept", "within")
    rows = [row for row in diff["tensors"] if row["encoding_b"] == "TOY_8"]
    assert len(rows) > 20 and {row["verdict"] for row in rows} == {"WITHIN"}
    assert all(0.4 < row["steps_off"] <= 0.51 for row in rows)  # half a step, rounded to nearest
    found = aprfmt(toy, "explain", "TOY_8")["found"]
    assert [one["section"] for one in found] == ["encoding", "type"]
    assert "d:f4 qs:16i1" in found[0]["text"]
    (block,) = aprfmt(toy, "hex", made, "L0.ffn_up", "--blocks", "1")["blocks"]
    assert [field["name"] for field in block["fields"]] == ["d", "qs"]
    assert [len(field["bytes"]) for field in block["fields"]] == [8, 32]


def test_without_the_package_the_type_is_refused(tmp_path: Path) -> None:
    error = aprfmt(tmp_path, "quantize", DEMO, tmp_path / "x.gguf", "--type", "TOY_8", code=2)
    assert "TOY_8: is not known" in str(error["error"])
