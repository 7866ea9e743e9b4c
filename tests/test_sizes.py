"""A file holds one subject, a function one thought: longer ones say why."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from aprfmt.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("aprfmt/cli/", "aprfmt/inference/")
CODE = sorted(
    path.relative_to(ROOT)
    for folder in ("aprfmt", "cli", "fixtures", "inference", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if not str(path.relative_to(ROOT)).startswith(LINKS)
)


def room(path: Path) -> str:
    """Return the folder of the first two that a file lies in."""
    return "/".join(path.parts[:-1][:2])


ROOMS = sorted({room(path) for path in CODE})
FILE, FUNCTION = 400, 60
COMMAND = 80  # a command: its options, one call, one rendering
WHY = "# Long: "


def too_long(text: str) -> Iterator[str]:
    """Yield what is too long in a module and does not say why."""
    lines = text.splitlines()
    if len(lines) > FILE:
        yield f"{len(lines)} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            own = lines[node.lineno - 1 : node.end_lineno]
            if len(own) > FUNCTION and not any(line.strip().startswith(WHY) for line in own):
                yield f"{node.name} has {len(own)} lines"


@pytest.mark.parametrize("name", ROOMS)
def test_nothing_is_too_long(name: str) -> None:
    files = [path for path in CODE if room(path) == name]
    found = {str(path): list(too_long((ROOT / path).read_text())) for path in files}
    assert not {path: said for path, said in found.items() if said}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_thin(name: str) -> None:
    text = (ROOT / "cli" / f"{COMMANDS[name].module}.py").read_text()
    assert len(text.splitlines()) <= COMMAND


def test_what_is_too_long_is_seen() -> None:
    body = "\n".join("    x = 1" for _ in range(FUNCTION))
    assert list(too_long(f"def f():\n{body}\n")) == ["f has 61 lines"]
    assert not list(too_long(f"def f():\n    # Long: a table\n{body}\n"))
    assert list(too_long("x = 1\n" * 401)) == ["401 lines"]
