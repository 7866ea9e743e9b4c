"""The reference pages that are written from tables are what the tables say now."""

from pathlib import Path

from aprfmt.cli.commands import COMMANDS
from tests.docs.reference import PAGES, REFERENCE, outdated


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
