"""The hand-written package list, the links, and what a wheel holds."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
MAPPED = {name: ROOT / folder for name, folder in SETTINGS["package-dir"].items()}


def folder_of(package: str) -> Path:
    for name, folder in MAPPED.items():
        if package == name or package.startswith(name + "."):
            return Path(folder, *package[len(name) :].strip(".").split("."))
    return ROOT.joinpath(*package.split("."))


def on_disk() -> set[str]:
    """Return every package that stands in the repository, by its import name."""
    found = set()
    for top, base in (("aprfmt", ROOT / "aprfmt"), *MAPPED.items()):
        for folder, names, files in os.walk(base):
            names[:] = [n for n in names if n != "__pycache__" and not Path(folder, n).is_symlink()]
            if "__init__.py" in files:
                parts = Path(folder).relative_to(base).parts
                found.add(".".join((top, *parts)))
    return found


def test_package_list_is_what_stands_on_disk() -> None:
    assert set(SETTINGS["packages"]) == on_disk()


def test_links_lead_to_the_mapped_folders() -> None:
    for name, folder in MAPPED.items():
        link = ROOT.joinpath(*name.split("."))
        assert link.is_symlink()
        assert link.resolve() == folder.resolve()


def without_links(tree: Path) -> None:
    """Turn the links into what git writes where it makes none (Windows): files that name a path."""
    for name in MAPPED:
        link = tree.joinpath(*name.split("."))
        target = link.readlink()
        link.unlink()
        link.write_text(str(target))


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_wheel_holds_every_module_and_the_demo_model(links: bool, tmp_path: Path) -> None:
    # Of a copy: what an earlier build left here (build/, *.egg-info) would come into the wheel.
    left = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "tests", "docs")
    tree = Path(shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=left))
    if not links:
        without_links(tree)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--disable-pip-version-check",
            "-q",
            "-w",
            str(tmp_path),
            str(tree),
        ],
        check=True,
        capture_output=True,
        # Without a compiler: the optional extension takes a minute and is not tested here.
        env={**os.environ, "CC": "false"},
    )
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    for package in SETTINGS["packages"]:
        for module in folder_of(package).glob("*.py"):
            assert "/".join((*package.split("."), module.name)) in names
    for file in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json"):
        assert f"aprfmt/demo_model/{file}" in names
    for path in (ROOT / "aprfmt" / "schemas").glob("*.json"):
        assert f"aprfmt/schemas/{path.name}" in names
    pages = [path.name for path in (ROOT / "cli" / "pages").glob("*.*")]
    assert len(pages) > 10 and {f"aprfmt/cli/pages/{file}" for file in pages} <= names
    assert "aprfmt/py.typed" in names
    assert not [name for name in names if name.startswith(("cli/", "inference/", "tests/"))]
    _smoke(next(tmp_path.glob("*.whl")), tmp_path / "elsewhere")


def _smoke(wheel: Path, place: Path) -> None:
    """Run the main job from the unpacked wheel, outside the repository and without its kernels."""
    place.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "site")
    env = {**os.environ, "PYTHONPATH": str(place / "site")}
    apr, gguf, page = [str(place / "out" / f"demo.{kind}") for kind in ("apr", "gguf", "html")]
    for command in (
        ["-c", "import aprfmt; print(aprfmt.__file__)"],
        ["-m", "aprfmt", "demo", "--out", str(place / "out"), "--quiet"],
        ["-m", "aprfmt", "diff", apr, gguf, "--html", page],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=place,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if command[0] == "-c":
            assert done.stdout.startswith(str(place / "site"))
    assert {"demo.apr", "demo.gguf", "demo.html"} <= {
        path.name for path in (place / "out").iterdir()
    }
