"""Every link of a page leads to a file and a heading, and every page that code names exists."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.examples import DOCS, ROOT, WRITTEN

PAGES = (*WRITTEN, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")))
KINDS = {"tutorial", "how-to", "reference", "explanation", "notes", "images"}
_FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
_NAMED = re.compile(r"(?<![\w/.])docs/[\w/.-]+\.(?:md|ipynb|json|py)\b")
# The specification of GGUF in another repository, and an invented page of a test.
ELSEWHERE = {"docs/gguf.md", "docs/how-to/a-b.md"}


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.M)
    plain = [re.sub(r"[^\w\s-]", "", head.replace("`", "")).strip().lower() for head in heads]
    return frozenset(re.sub(r"[-\s]+", "-", text) for text in plain)


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    found = []
    for target, anchor in _LINK.findall(_FENCED.sub("", page.read_text())):
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            found.append(f"{target}#{anchor}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One head\n[a](#one-head) [b](#no-head) [c](gone.md) [d](page.md#one-head)\n")
    assert broken(page) == ["#no-head", "gone.md#"]


def test_pages_that_code_names_exist() -> None:
    """Help texts, errors, docstrings and tests name pages by their path."""
    sources = [
        path
        for folder in ("aprfmt", "cli", "inference", "tests", ".github")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".c", ".h", ".cu", ".md", ".yml", ".json") and path.is_file()
    ]
    assert len(sources) > 500
    gone = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources
        for name in _NAMED.findall(path.read_text(encoding="utf-8"))
        if name not in ELSEWHERE and not (ROOT / name).is_file()
    }
    assert not gone


def test_every_page_is_of_one_kind() -> None:
    """Only the start page and the benchmarks are of no kind."""
    top = {path.name for path in DOCS.iterdir()}
    assert top - {"__pycache__"} <= KINDS | {"index.md", "benchmarks.md", "hooks.py"}
