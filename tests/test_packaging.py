"""The packages that are found, the links, what a wheel and an archive hold, and one installed."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from aprfmt.base import installation
from aprfmt.base.installation import install_command, recorded_source
from tests.conftest import not_run
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETTINGS = PYPROJECT["tool"]["setuptools"]
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


def copied(place: Path) -> Path:
    """Return a copy of the repository: what an earlier build left would come into the wheel."""
    left = shutil.ignore_patterns(".git", "build", "dist", "*.egg-info", "*.so", "tests", "docs")
    return Path(shutil.copytree(ROOT, place, symlinks=True, ignore=left))


def archive(tree: Path, place: Path) -> Path:
    """Return the source archive of a tree."""
    make = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run = [sys.executable, "-c", make, str(place)]
    subprocess.run(run, cwd=tree, check=True, capture_output=True)
    return next(place.glob("*.tar.gz"))


def pip(*arguments: str, **environment: str) -> None:
    """Run pip, which asks no index."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--no-deps", "--no-index", "-q"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def wheel_of(source: Path, place: Path, **environment: str) -> Path:
    """Return the wheel that pip builds of a tree or an archive, with what is installed here."""
    pip("wheel", "--no-build-isolation", "-w", str(place), str(source), **environment)
    return next(place.glob("*.whl"))


@pytest.mark.parametrize("source", ["links", "no links", "archive"])
def test_wheel_holds_every_module_and_the_demo_model(source: str, tmp_path: Path) -> None:
    tree = copied(tmp_path / "tree")
    if source == "no links":
        without_links(tree)
    built = archive(tree, tmp_path) if source == "archive" else tree
    # Without a compiler: the optional extension takes a minute; the test below compiles it.
    wheel_of(built, tmp_path, CC="false")
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    packages = on_disk()
    assert len(packages) > 30
    for package in packages:
        for module in folder_of(package).glob("*.py"):
            assert "/".join((*package.split("."), module.name)) in names
    for file in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json"):
        assert f"aprfmt/demo_model/{file}" in names
    for path in (ROOT / "aprfmt" / "schemas").glob("*.json"):
        assert f"aprfmt/schemas/{path.name}" in names
    pages = [path.name for path in (ROOT / "cli" / "pages").glob("*.*")]
    assert len(pages) > 10 and {f"aprfmt/cli/pages/{file}" for file in pages} <= names
    assert "aprfmt/py.typed" in names
    skill = [path for path in (ROOT / "aprfmt" / ".agents").rglob("*") if path.is_file()]
    assert len(skill) > 3 and {path.relative_to(ROOT).as_posix() for path in skill} <= names
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


def commands(place: Path) -> Path:
    """Return the folder of the commands of an environment."""
    return place / ("Scripts" if os.name == "nt" else "bin")


@pytest.mark.slow
def test_the_wheel_of_the_archive_is_installed_and_used(tmp_path: Path) -> None:
    """As a stranger gets it: archive, wheel, an environment without anything of the repository."""
    if shutil.which("cc") is None:
        not_run("no C compiler")
    wheel = wheel_of(archive(copied(tmp_path / "tree"), tmp_path), tmp_path)
    assert re.fullmatch(r"aprfmt-[\d.]+-cp311-abi3-\w+\.whl", wheel.name)
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = commands(place) / "python"
    pip("--python", str(python), "install", str(wheel))
    # What the wheel requires is what this run has. A .pth there (an editable aprfmt) is not read.
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.check_output([python, "-c", code], text=True, env={}).strip()
    have = [path for path in sys.path if path.endswith("-packages")]
    Path(site, "required.pth").write_text("\n".join([*have, sysconfig.get_path("platlib")]))

    def aprfmt(*arguments: str) -> str:
        done = subprocess.run(
            [str(commands(place) / "aprfmt"), *arguments],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = [str(python), "-c", "import aprfmt; print(aprfmt.__file__)"]
    found = subprocess.check_output(where, cwd=tmp_path, text=True, env={}).strip()
    assert Path(found).is_relative_to(place)
    aprfmt("demo", "--out", "out", "--quiet")
    assert json.loads(aprfmt("inspect", "out/demo.gguf", "--json"))["format"] == "gguf"
    facts = json.loads(aprfmt("doctor", "--json"))
    assert facts["native"]["built"] and "Q4_K" in facts["native"]["kernels"], facts["native"]
    hints = {row["name"]: row["get"] for row in facts["packages"]}
    assert hints["torch"] == f"pip install '{wheel}[torch]'"


def test_the_metadata_is_complete_and_of_this_licence(tmp_path: Path) -> None:
    place = archive(copied(tmp_path / "tree"), tmp_path)
    with tarfile.open(place) as held:
        inside = {name.partition("/")[2] for name in held.getnames()}
        (info,) = (name for name in held.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name))
        text = held.extractfile(info)
        assert text is not None
        said = message_from_string(text.read().decode())
    assert {"LICENSE", "README.md", "CHANGELOG.md", "setup.py", "pyproject.toml"} <= inside
    assert not [name for name in inside if name.startswith(("tests/", "aprfmt/cli/"))]
    assert said["License-Expression"] == "Apache-2.0" and said["License-File"] == "LICENSE"
    assert said["Author"] and said["Summary"] and "GGUF" in said["Keywords"]
    assert said["Description-Content-Type"] == "text/markdown"
    assert "Operating System :: POSIX :: Linux" in said.get_all("Classifier", [])
    assert set(said.get_all("Provides-Extra", [])) == set(
        PYPROJECT["project"]["optional-dependencies"]
    )


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"dir_info": {"editable": True}}, "pip install -e '{path}[torch]'"),
        ({"dir_info": {}}, "pip install '{path}[torch]'"),
        ({"archive_info": {}}, "pip install '{path}[torch]'"),
    ],
)
def test_a_hint_names_the_file_or_clone_that_was_installed(
    record: dict[str, object], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a b"
    text = json.dumps({"url": path.as_uri(), **record})
    assert recorded_source(text) is None  # nothing is there
    path.mkdir()
    source = recorded_source(text)
    assert source is not None
    monkeypatch.setattr(installation, "installed_from", lambda: source)
    assert install_command("torch") == expected.format(path=path)
    assert install_command() == expected.format(path=path).replace("[torch]", "")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "pip install 'aprfmt[torch] @ git+https://host/x.git@c0ffee'",
        ),
        ({"archive_info": {}}, "pip install 'aprfmt[torch] @ https://host/x.git'"),
    ],
)
def test_a_hint_names_the_address_that_was_installed(
    record: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = recorded_source(json.dumps({"url": "https://host/x.git", **record}))
    assert source is not None
    monkeypatch.setattr(installation, "installed_from", lambda: source)
    assert install_command("torch") == expected


def test_without_a_record_or_a_clone_the_hint_says_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "installed_from", lambda: ("", installation.UNKNOWN))
    assert install_command("torch") == "pip install 'PATH[torch]'"
    assert install_command() == "pip install PATH"


def test_no_message_takes_the_package_from_an_index() -> None:
    """No index has it: a module says how to install an extra through `install_command` alone."""
    seen = 0
    for top in ("aprfmt", "cli", "inference"):
        for path in (ROOT / top).rglob("*.py"):
            seen += 1
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"install (?:-\S+ )*['\"]?aprfmt\b", text), path
            assert "aprfmt[" not in text or path.name == "installation.py", path
    assert seen > 400
