"""The examples in the documentation, taken from its pages and run from an empty folder.

A fenced block with a title is a file. A `console` block has commands after `$ ` and their whole
output: `...` means (the last digits of) a number that differs by machine, never words or lines. A
block without a language, or of `text`, with a command of aprfmt has one command per line, which is
checked by its exit code: 0, or that in a comment (`# exit 1`). A `python` block without a title
runs after the commands of its page, in one namespace.

`python -m tests.docs.examples PAGE...` runs pages and prints what differs; with `--write` first, it
writes what `console` commands print into the page.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aprfmt.cli.output_format import AGENT_VARIABLES
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SKILL = ROOT / "aprfmt" / ".agents" / "skills" / "aprfmt"
# Every page that somebody follows.
WRITTEN = (
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted(SKILL.rglob("*.md")),
)
_FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.M | re.S)
_COMMAND = re.compile(r"^(?:aprfmt|python -m|eval|uvx|pipx) ", re.M)
_DIGITS = r"(?:\.\.\.|\d[\d.e+-]*|)"
ON_THE_HUB = ("read_on_the_hub.md",)  # pages whose readers have a network
SITE = "installed"  # where the project of a page's folder is installed
_EXIT = re.compile(r"\s# exit (\d+)\b")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str
    text: str
    line: int


@dataclass(frozen=True)
class Example:
    """A command, or a page's Python, and what is expected of it.

    `expected` is what it prints, None where only the exit code is judged; `at` is the place in the
    page of what is expected, to write it anew.
    """

    where: str
    text: str
    exit: int = 0
    expected: str | None = None
    python: bool = False
    at: tuple[int, int] = (0, 0)


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = page.read_text()
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(match[1], match[2] or "", match[3], line)


def files(page: Path) -> Iterator[Block]:
    """Yield the blocks that are files."""
    return (block for block in blocks(page) if block.title)


def examples(page: Path) -> list[Example]:
    """Return a page's commands in order, then its Python."""
    found: list[Example] = []
    script, first = "", 0
    text = page.read_text()
    name = page.relative_to(ROOT)
    for match in _FENCE.finditer(text):
        language, title, body = match[1], match[2], match[3]
        line = text.count("\n", 0, match.start()) + 1
        if title:
            continue
        if language == "python":
            script, first = script + body, first or line
        elif language == "console":
            found += _console(f"{name}:{{}}", body, line, match.start(3))
        elif language in ("", "text") and _COMMAND.search(body):
            for number, command in enumerate(body.splitlines(), line + 1):
                said = _EXIT.search(command)
                found.append(Example(f"{name}:{number}", command, int(said[1]) if said else 0))
    if script:  # from top to bottom in one namespace
        found.append(Example(f"{name}:{first}", script, python=True))
    return found


def _console(where: str, body: str, line: int, start: int) -> Iterator[Example]:
    """Yield the commands behind `$ ` of a block, with what stands below each."""
    lines = body.splitlines(keepends=True)
    begins = [i for i, each in enumerate(lines) if each.startswith("$ ")]
    for i, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        command, at = lines[i][2:].rstrip("\n"), i + 1
        while at < end and lines[at].startswith("> "):
            command += "\n" + lines[at][2:].rstrip("\n")
            at += 1
        place = start + len("".join(lines[:at]))
        expected = "".join(lines[at:end])
        yield Example(
            where.format(line + i + 1), command, 0, expected, at=(place, place + len(expected))
        )


def install(folder: Path) -> None:
    """Install a folder's project into it as `pip install .` does, from what is here."""
    site = folder / SITE
    command = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--target",
        str(site),
        ".",
    ]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        text=True,
        check=False,
        timeout=PATIENCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    for module in project["tool"]["setuptools"]["py-modules"]:
        (folder / f"{module}.py").unlink()  # what runs is what was installed


def hub() -> str:
    """Return the address of a hub on this machine that has the demo model as `owner/name`.

    It serves until this process ends.
    """
    from tests.remote.server import RangeServer

    server = RangeServer()
    folder = ROOT / "fixtures" / "demo"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    server.add_repository("owner/name", "0" * 40, files, lfs=("model.safetensors",))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server.url


def environment(folder: Path, page: str = "") -> dict[str, str]:
    """Return the environment of a reader of a page who installed aprfmt and is in `folder`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {name: value for name, value in os.environ.items() if name not in AGENT_VARIABLES}
    own |= {"HF_ENDPOINT": hub(), "HF_HOME": str(folder / ".hf")} if page in ON_THE_HUB else {}
    return own | {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(folder / SITE), str(ROOT)]),
        "COLUMNS": "200",
        "NO_COLOR": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


class Room:
    """The folder in which a page's examples run, one after the other and each once."""

    def __init__(self, page: Path, folder: Path) -> None:
        """Start in an empty folder with the files that the page shows."""
        self.examples = examples(page)
        self.folder = folder
        self.environment = environment(folder, page.name)
        self._done: list[subprocess.CompletedProcess[str] | None] = []
        for block in files(page):
            (folder / block.title).write_text(block.text)
        if (folder / "pyproject.toml").is_file():
            install(folder)

    def run(self, index: int, left_out: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run an example, and those before it that have not run and are not left out."""
        while len(self._done) <= index:
            example = self.examples[len(self._done)]
            skipped = example.text in left_out and len(self._done) < index
            self._done.append(None if skipped else _call(example, self.folder, self.environment))
        done = self._done[index]
        assert done is not None, f"{self.examples[index].where} was left out"
        return done

    def judge(self, index: int, left_out: Sequence[str] = ()) -> str:
        """Return what is wrong with an example, "" if nothing is."""
        return wrong(self.examples[index], self.run(index, left_out))


def _call(
    example: Example, folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c"] if example.python else ["bash", "-c"]
    return subprocess.run(
        [*command, example.text],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=PATIENCE,
    )


def wrong(example: Example, done: subprocess.CompletedProcess[str]) -> str:
    """Return a message if output or exit code differ from the expected ones, else ""."""
    said = "python" if example.python else example.text
    if "Traceback (most recent call last)" in done.stdout or done.returncode != example.exit:
        return f"{example.where}: {said}\nexit {done.returncode}, not {example.exit}\n{done.stdout}"
    if example.expected is None or matches(example.expected, done.stdout):
        return ""
    return f"{example.where}: {said}\nexpected:\n{example.expected}found:\n{done.stdout}"


def matches(expected: str, found: str) -> bool:
    """Say whether an output is as expected, line by line; `...` is itself, or some digits."""
    wanted, lines = expected.rstrip().split("\n"), found.rstrip().split("\n")
    return len(wanted) == len(lines) and all(map(_line_matches, wanted, lines))


def _line_matches(wanted: str, line: str) -> bool:
    words = (_DIGITS.join(map(re.escape, word.split("..."))) for word in wanted.split())
    return re.fullmatch(r"\s*" + r"\s+".join(words) + r"\s*", line) is not None


def write(page: Path, room: Room) -> None:
    """Write what console commands print into their page; lines that match stay."""
    text = page.read_text()
    for index, example in reversed(list(enumerate(room.examples))):
        if example.expected is None:
            continue
        old = example.expected.rstrip().split("\n")
        lines = [line.rstrip() for line in room.run(index).stdout.rstrip().split("\n")]
        kept = [next((w for w in old if w and _line_matches(w, line)), line) for line in lines]
        shown = "".join(f"{line}\n" for line in kept) if lines != [""] else ""
        text = text[: example.at[0]] + shown + text[example.at[1] :]
    page.write_text(text)


def main(names: list[str]) -> None:
    """Run pages; exit 1 where something differs."""
    failed = False
    rewrite = names[:1] == ["--write"]
    for name in names[rewrite:]:
        page = Path(name).resolve()
        with tempfile.TemporaryDirectory() as folder:
            room = Room(page, Path(folder))
            for index in range(len(room.examples)):
                message = room.judge(index)
                failed = failed or bool(message)
                print(message, end="")
            if rewrite:
                write(page, room)
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
