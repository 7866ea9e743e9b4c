"""Warnings: one line, once, with a key that `explain` explains; none for healthy files.

Seen red: the three assumptions about Gemma's keys printed as warnings, a remark without a key, a
key of the table that nothing gives, one line printed for each command's opening of a file.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from aprfmt.base.warnings import WARNINGS
from tests.cli.run import ROOT, aprfmt

FOLDERS = ("aprfmt", "cli", "inference")


def calls() -> Iterator[tuple[str, ast.expr | None]]:
    """Yield (place, key) of everything in the product that makes or prints a warning."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder == "aprfmt" and path.relative_to(ROOT / folder).parts[0] in FOLDERS:
                continue  # the links
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield from ((place, key) for key in _keys(node))


def _keys(node: ast.Call) -> Iterator[ast.expr | None]:
    called, args = ast.unparse(node.func), node.args
    constant = args[0] if args and isinstance(args[0], ast.Constant) else None
    if called == "Note" and constant is not None and constant.value == "warning":
        yield args[3] if len(args) > 3 else None
    elif called in ("parsed.warn", "self.warn"):
        yield args[0]
    elif called == "render.warn":
        yield args[1] if len(args) > 1 else None


def test_every_warning_has_a_key_of_the_table_and_every_key_a_warning() -> None:
    found = dict(calls())
    assert len(found) > 40
    keys = {where: key.value for where, key in found.items() if isinstance(key, ast.Constant)}
    passed_on = {where for where in found if where not in keys}
    assert {where.partition(":")[0] for where in passed_on} <= {
        "cli/inspect/output.py",
        "aprfmt/formats/damage.py",
    }
    assert set(keys.values()) <= WARNINGS.keys(), set(keys.values()) - WARNINGS.keys()
    elsewhere = {
        "assumed",
        "remark",
        "missing_tensors",
        "accepted_missing",
    }  # chosen among, or a note
    assert WARNINGS.keys() - elsewhere <= set(keys.values())


@pytest.mark.parametrize("key", WARNINGS)
def test_every_key_is_explained(key: str) -> None:
    found = aprfmt("explain", key, "--json").json["found"]
    assert ("warning", WARNINGS[key]) in [(row["section"], row["text"]) for row in found]


@pytest.mark.parametrize(
    "args", [("inspect",), ("tensors", "--limit", "1"), ("logits", "--ids", "2,818")]
)
@pytest.mark.parametrize("name", ["gemma", "smollm2"])
def test_healthy_files_of_known_writers_give_none(
    name: str, args: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    done = aprfmt(args[0], request.getfixturevalue(name), *args[1:])
    assert done.code == 0 and not done.err
    if args == ("inspect",):
        assert done.out.splitlines()[0].endswith("unusual: nothing")


def test_what_a_reader_assumes_is_a_note(gemma: Path) -> None:
    notes = aprfmt("inspect", gemma, "--json").json["notes"]
    assert [(row["level"], row["key"]) for row in notes] == [("note", "assumed")] * 3
    out = aprfmt("inspect", gemma, "-v").out
    assert out.count("\nnote: ") == 3 and "rope_theta_local" in out


@pytest.fixture(scope="module")
def trailing(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF with bytes behind its last tensor."""
    path = tmp_path_factory.mktemp("warnings") / "a.gguf"
    assert aprfmt("convert", demo_model, path).code == 0
    with path.open("ab") as file:
        file.write(b"x" * 96)
    return path


@pytest.mark.parametrize(
    "args",
    [("inspect",), ("tensors", "--limit", "1"), ("logits", "--ids", "1,2"),
     ("run", "--ids", "1,2", "--max-tokens", "1", "--quiet"), ("trace", "--payload", "--ids", "1"),
     ("parity", "--between", "numpy", "numpy:float64", "--ids", "1,2")],
)  # fmt: skip
def test_a_warning_is_one_line_once_with_its_key(args: tuple[str, ...], trailing: Path) -> None:
    done = aprfmt(args[0], trailing, *args[1:])
    lines = [line for line in done.err.splitlines() if "96 bytes follow" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"warning: {trailing}: ")
    assert lines[0].endswith("(aprfmt explain trailing_bytes)")
