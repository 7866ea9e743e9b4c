"""The examples in the documentation, taken from its pages and run.

A fenced block with a title is a file. A `console` block is commands behind `$ ` and what they
print, where `...` stands for anything. A `python` block without a title runs in the page's own
namespace. `python -m tests.docs.examples PAGE...` runs pages and prints what differs.
"""

import doctest
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.M | re.S)
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page that name a language."""
    text = page.read_text()
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(match[1], match[2] or "", match[3], line)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield (command, expected output) of a console block."""
    command, expected = "", ""
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            if command:
                yield command, expected
            command, expected = line[2:].strip(), ""
        elif line.startswith("> "):
            command += "\n" + line[2:].rstrip("\n")
        else:
            expected += line
    if command:
        yield command, expected


def install(folder: Path) -> None:
    """Make the entry points of a folder's pyproject.toml known to Pythons that start in it."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    facts = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(facts)
    lines = []
    for group, points in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a reader who installed aprfmt and stands in `folder`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {
        "PATH": path, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "COLUMNS": "200", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


def run_page(page: Path, folder: Path) -> list[str]:
    """Run a page's examples in `folder`; return what differs, with page and line."""
    (folder / "demo").symlink_to(ROOT / "fixtures" / "demo")
    wrong: list[str] = []
    script, first = "", 0
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.title:
            (folder / block.title).write_text(block.text)
            if block.title == "pyproject.toml":
                install(folder)
        elif block.language == "python":
            script, first = script + block.text, first or block.line
        elif block.language == "console":
            for command, expected in commands(block.text):
                done = _call(["bash", "-c", command], folder)
                wrong += _differs(where, command, done, expected)
    if script:  # the page's Python, from top to bottom in one namespace
        where = f"{page.relative_to(ROOT)}:{first}"
        wrong += _differs(where, "python", _call([sys.executable, "-c", script], folder), "...")
    return wrong


def _call(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(folder), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=PATIENCE,
    )  # fmt: skip


def _differs(
    where: str, command: str, done: subprocess.CompletedProcess[str], expected: str
) -> list[str]:
    """Return one message where the output is another, or where Python failed."""
    if "Traceback (most recent call last)" in done.stdout:
        return [f"{where}: {command}\n{done.stdout}"]
    if command == "python" and done.returncode:
        return [f"{where}: {command}\n{done.stdout}"]
    if doctest.OutputChecker().check_output(expected, done.stdout, _FLAGS):
        return []
    return [f"{where}: {command}\nexpected:\n{expected}found:\n{done.stdout}"]


def main(names: list[str]) -> None:
    """Run pages; exit 1 where something differs."""
    failed = False
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for message in run_page(Path(name).resolve(), Path(folder)):
                failed = True
                print(message)
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
