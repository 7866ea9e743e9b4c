"""Every example of the documentation does what its page says."""

from pathlib import Path

import pytest

from tests.docs.examples import DOCS, blocks, run_page

PAGES = [
    page for page in sorted(DOCS.rglob("*.md"))
    if any(block.language in ("console", "python") for block in blocks(page))
]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_examples(page: Path, tmp_path: Path) -> None:
    differences = run_page(page, tmp_path)
    assert not differences, "\n".join(differences)


def test_every_kind_of_extension_has_its_page() -> None:
    named = {page.name for page in PAGES if page.parent.name == "extending"}
    assert named == {
        "adding_a_backend.md", "adding_a_codec.md", "adding_a_format.md",
        "adding_an_architecture.md", "adding_an_engine.md",
    }  # fmt: skip


def test_a_wrong_output_is_seen(tmp_path: Path) -> None:
    """The runner itself: a page that promises something else, and a Python block that fails."""
    page = DOCS / "extending" / "adding_a_backend.md"
    text = page.read_text().replace("... checked\n", "... unchecked\n")
    wrong = tmp_path / "docs" / "wrong.md"
    wrong.parent.mkdir()
    wrong.write_text(text + "\n```python\nassert 1 == 2\n```\n")
    (tmp_path / "room").mkdir()
    from tests.docs import examples

    root, examples.ROOT = examples.ROOT, tmp_path
    try:
        (tmp_path / "fixtures").symlink_to(root / "fixtures")
        found = run_page(wrong, tmp_path / "room")
    finally:
        examples.ROOT = root
    assert len(found) >= 2 and "unchecked" in found[0] and "AssertionError" in found[-1]
