"""The files of the pages: all are used, and none can close the HTML element it is put into.

Seen red: a script in a Python string, a file that no page uses, a script containing `</script>`.
"""

import re
from pathlib import Path
from string import Template

import pytest

CLI = Path(__file__).resolve().parents[2] / "cli"
PAGES = sorted(file for kind in ("css", "html", "js") for file in CLI.glob(f"pages/*.{kind}"))
PROGRAMS = sorted(CLI.rglob("*.py"))
# Markup, rules of a style, and functions or elements of a script.
OF_A_PAGE = re.compile(
    r"</?(?:style|script|table|tr|td|div|span|svg|html|body)\b|\bfunction\b[^.\n]*\)\s*\{"
    r"|\)\s*=>|\bdocument\.(?:body|get|query|create)|\{ [a-z-]+: [^{}\n\"]*;"
)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_no_program_holds_a_part_of_a_page(path: Path) -> None:
    found = OF_A_PAGE.search(path.read_text())
    assert found is None, f"{path.name}: {found[0]!r} belongs in a file of cli/pages"


def test_the_pattern_knows_a_part_of_a_page() -> None:
    for text in (
        "<style>",
        "</script>",
        "<script type=x>",
        "function f(a, b) {",
        "(x) => x",
        "document.body",
        ".a { color: red; }",
        "<table class=y>",
    ):
        assert OF_A_PAGE.search(text), text
    assert all(OF_A_PAGE.search(path.read_text()) for path in PAGES)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_file_is_used_and_cannot_end_its_element(path: Path) -> None:
    assert any(f'"{path.name}"' in program.read_text() for program in PROGRAMS)
    text = path.read_text(encoding="utf-8")
    assert text.isascii() and text.endswith("\n")
    if path.suffix != ".html":
        assert not re.search(r"</|<!--|<script", text, re.IGNORECASE)
    if path.suffix == ".css":
        assert "url(" not in text and "@import" not in text


def test_the_frame_has_each_hole_and_forbids_to_load() -> None:
    frame = Template((CLI / "pages" / "frame.html").read_text())
    assert frame.is_valid()
    assert sorted(frame.get_identifiers()) == ["body", "data", "script", "style", "title"]
    assert "default-src 'none'" in frame.template
