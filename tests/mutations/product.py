"""Which files are the product, which are its tests, and what identifies their content."""

import hashlib
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATE = Path("build") / "mutations"  # inside a checkout; ignored by git
FOLDERS = ("aprfmt", "cli", "inference")
NATIVE = (".c", ".h")
SOURCES = (".py", *NATIVE, ".cu", ".cuh")
HERE = "tests/mutations/"


class StoppedError(Exception):
    """It could not be done: one line that says why and what to do (exit code 2)."""


def files(root: Path) -> list[str]:
    """Return every file of a checkout, as paths from its root: tracked, and new ones not ignored.

    Raises StoppedError where git cannot list them.
    """
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["git failed"])[-1]
        raise StoppedError(f"{root}: its files cannot be listed: {said}; run it in a git checkout")
    return sorted({name for name in done.stdout.split("\0") if name and _exists(root / name)})


def commit_seed(root: Path) -> int:
    """Return the seed that the last commit's hash gives: its first eight digits as a number.

    Raises StoppedError outside of a git checkout.
    """
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise StoppedError(f"{root}: has no commit; give a number: --seed")
    return int(done.stdout[:8], 16)


def _exists(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def product(root: Path) -> list[str]:
    """Return the product's sources, in Python, C and CUDA."""
    return [
        name
        for name in files(root)
        if name.startswith(tuple(f"{folder}/" for folder in FOLDERS))
        and name.endswith(SOURCES)
        and not (root / name).is_symlink()
    ]


def tests(root: Path) -> list[str]:
    """Return every file that pytest collects, but for the tests of this package itself."""
    return [
        name
        for name in files(root)
        if name.startswith("tests/")
        and Path(name).name.startswith("test_")
        and name.endswith(".py")
        and not name.startswith(HERE)
    ]


@cache
def digest(path: Path) -> str:
    """Return what identifies a file's content, read once in this process; "" where it is gone."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def digest_of(root: Path, names: Iterable[str]) -> str:
    """Return what identifies several files, by name and content."""
    whole = hashlib.sha256()
    for name in sorted(names):
        whole.update(f"{name}\0{digest(root / name)}\n".encode())
    return whole.hexdigest()[:16]


def test_key(root: Path, name: str) -> str:
    """Identify a test file together with the helpers that lie beside it."""
    folder = str(Path(name).parent)
    beside = [
        each
        for each in files_of_tests(root)
        if str(Path(each).parent) == folder and not Path(each).name.startswith("test_")
    ]
    return digest_of(root, [name, *beside])


@cache
def files_of_tests(root: Path) -> tuple[str, ...]:
    """Return all files that can change the tests' results."""
    return tuple(
        name
        for name in files(root)
        if name.startswith(("tests/", "fixtures/")) and not name.startswith(HERE)
    )
