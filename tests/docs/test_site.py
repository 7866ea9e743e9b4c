"""The documentation site builds without a warning, with a page for every command."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from aprfmt.cli.commands import COMMANDS
from aprfmt.codecs import CODECS
from tests.docs.examples import DOCS, ROOT, SKILL


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="NOT-RUN: mkdocs-material is not installed")
    folder: Path = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert not warnings, "\n".join(warnings)
    return folder


def test_every_command_has_its_page(site: Path) -> None:
    for name in COMMANDS:
        page = (site / "reference" / "commands" / name / "index.html").read_text()
        assert f"Usage: aprfmt {name}" in page
        for option in ("--json", "--help"):
            assert option in page, name
        text = re.sub(r"<[^>]*>", "", page)
        assert f"$ aprfmt {name}" in text.partition("Usage: ")[0], name


def test_the_site_is_light_or_dark_as_the_system_is(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert re.findall(r'data-md-color-scheme="(\w+)"', page)[-2:] == ["default", "slate"]
    assert page.count("prefers-color-scheme") >= 2


def test_the_tables_are_the_packages(site: Path) -> None:
    page = (site / "reference" / "encodings" / "index.html").read_text()
    for name in CODECS.own:
        assert f"<td>{name}</td>" in page


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """A page of this site asks no other host for fonts or scripts."""
    page = (site / "index.html").read_text()
    asked = re.findall(r'(?:src|<link[^>]*href)="(https?://[^"]+)"', page)
    assert not [url for url in asked if "canonical" not in url]


def test_every_page_has_its_markdown_and_llms_txt_lists_it(site: Path) -> None:
    """As https://llmstxt.org asks: a title, a quotation, lists of links that lead to pages."""
    text = (site / "llms.txt").read_text()
    assert re.match(r"# aprfmt\n\n> .+\n\n## ", text)
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+\.md)\)", text, re.M)
    assert len(listed) == len(set(listed)) == len(re.findall(r"^- ", text, re.M))
    sources = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sources <= set(listed)
    assert listed[0] == "skill/SKILL.md"
    for page in SKILL.rglob("*.md"):  # with its links, that lead on
        assert (site / "skill" / page.relative_to(SKILL)).read_text() == page.read_text()
    for path in listed[1:]:
        html = site / path.removesuffix("index.md").removesuffix(".md") / "index.html"
        assert html.is_file() and (site / path).read_text().strip(), path
    commands = {f"reference/commands/{name}.md" for name in COMMANDS}
    assert commands <= sources
    for path in (
        sources - commands
    ):  # relative links of a page lead to twins, as they do in the repository
        assert (site / path).read_text().strip() == (DOCS / path).read_text().strip(), path
