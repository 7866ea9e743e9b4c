"""docs/architectures.md, which docstrings cite as a source, agrees with the tables."""

from pathlib import Path

import pytest

from aprfmt.arch import ARCHS
from aprfmt.arch.page import page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    path = ROOT / "docs" / "architectures.md"
    assert path.read_text() == page(), "run python -m aprfmt.arch.page > docs/architectures.md"


@pytest.mark.parametrize("name", ARCHS.own)
def test_an_architecture_has_its_row_and_its_layouts(name: str) -> None:
    text = page()
    assert text.count(f"\n| {name} | hf `") == 1
    for style, bindings in ARCHS[name].bindings.items():
        laid_out = [binding for binding in bindings if binding.steps]
        assert text.count(f"\n| {name} | {style} | ") == len(laid_out)
