"""Extensions of the documentation, built and installed as a reader would, without a network.

Seen red: the codec's page without `py-modules` (setuptools refuses two modules), its class without
`step` (no bound), and `explain` over the rows of this package alone.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.docs.examples import DOCS, ROOT, files
from tests.patience import PATIENCE

DEMO = ROOT / "fixtures" / "demo"
PAGES = [page for page in sorted((DOCS / "extending").glob("*.md"))
         if any(block.title == "pyproject.toml" for block in files(page))]  # fmt: skip


def install(page: Path, folder: Path) -> Path:
    """Build the package that a page shows, and return the folder it is installed in."""
    source, site = folder / "source", folder / "site"
    source.mkdir()
    for block in files(page):
        (source / block.title).write_text(block.text)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index",
         "--disable-pip-version-check", "-q", "--target", str(site), str(source)],
        check=True, timeout=PATIENCE,
    )  # fmt: skip
    return site


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_extension_installs_with_its_entry_points(page: Path, tmp_path: Path) -> None:
    site = install(page, tmp_path)
    (package,) = metadata.Distribution.discover(path=[str(site)])
    assert package.entry_points
    for point in package.entry_points:
        assert point.group.startswith("aprfmt.") and (site / f"{point.module}.py").is_file()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(DOCS / "extending" / "adding_a_codec.md", tmp_path_factory.mktemp("toy"))


def aprfmt(site: Path, *args: object, code: int = 0) -> Any:
    """Run a command where the package of `site` is installed; return its JSON."""
    path = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "aprfmt", *map(str, args), "--json"], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": path}, timeout=PATIENCE, check=False,
    )  # fmt: skip
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
    assert "TOY_8: not known" in str(error["error"])
