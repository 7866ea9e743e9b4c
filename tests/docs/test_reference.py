"""The reference pages that are written from tables are what the tables say now."""

import ast
from pathlib import Path

import aprfmt
from aprfmt.cli.commands import COMMANDS
from tests.docs.reference import PAGES, REFERENCE, outdated

ROOT = Path(aprfmt.__file__).parent  # cli and inference are links in it


def test_every_page_is_current() -> None:
    assert not outdated(), "run python -m tests.docs.reference --write"


def test_a_changed_page_and_one_of_no_command_are_seen(tmp_path: Path) -> None:
    for name in PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((REFERENCE / name).read_text())
    assert not outdated(tmp_path)
    page = tmp_path / "commands" / "diff.md"
    page.write_text(page.read_text().replace("--tensor", "--tensors"))
    (tmp_path / "commands" / "gone.md").write_text("# aprfmt gone\n")
    assert outdated(tmp_path) == ["commands/gone.md", "commands/diff.md"]


def test_every_command_has_its_page() -> None:
    for name in COMMANDS:
        page = (REFERENCE / "commands" / f"{name}.md").read_text()
        assert f"Usage: aprfmt {name}" in page
        assert "| `--json` |" in page and "| `--format" in page, name


def test_the_values_of_a_literal_have_one_order() -> None:
    """typing keeps one object for unions of equal Literals: the first import decides their order.

    Seen red: functions.md said "last, all" or "all, last", by which test ran before.
    """
    found: dict[frozenset[str], dict[str, str]] = {}
    for folder in (ROOT, ROOT / "cli", ROOT / "inference"):
        for path in folder.rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "Literal[" in text else ():
                if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
                    each = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                    words = [ast.unparse(one) for one in each]
                    found.setdefault(frozenset(words), {})[", ".join(words)] = str(path)
    assert len(found) > 50
    assert not [rows for rows in found.values() if len(rows) > 1]
