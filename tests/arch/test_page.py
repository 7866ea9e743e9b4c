"""docs/reference/architectures.md, which docstrings cite as a source, agrees with the tables."""

from pathlib import Path

import pytest

from aprfmt.arch import ARCHS
from aprfmt.arch.docs_page import architectures_page, model_count, model_types, uniquely_named_archs
from tests.arch.listed import LISTED
from tests.arch.tiny import TINY

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    path = ROOT / "docs" / "reference" / "architectures.md"
    command = "python -m aprfmt.arch.docs_page > docs/reference/architectures.md"
    assert path.read_text() == architectures_page(), f"run {command}"


@pytest.mark.parametrize("name", ARCHS.own)
def test_an_architecture_has_its_row_and_its_layouts(name: str) -> None:
    text = architectures_page()
    level = ARCHS[name].level
    assert text.count(f"\n| {name} | {level} | `") == 1
    assert text.count(f"\n| {name} | hf `") == (level == "full")
    for style, bindings in ARCHS[name].bindings.items():
        laid_out = [binding for binding in bindings if binding.steps]
        assert text.count(f"\n| {name} | {style} | ") == len(laid_out)


def test_every_model_type_of_a_tiny_model_is_on_the_page() -> None:
    types = {tiny.model_type for tiny in TINY} | {kind for _, kind, *_ in LISTED.values()}
    assert len(types) > 60
    for kind in types:
        assert f"`{kind}`" in architectures_page(), kind


def test_as_many_types_as_people_convert_are_known() -> None:
    assert len(model_types()) >= 70
    assert len(uniquely_named_archs()) >= 25
    assert model_count() in architectures_page()


def test_a_copy_of_a_row_has_no_names_of_its_own() -> None:
    """mistral's tables are llama's; a step that nobody else takes makes a row count."""
    assert "mistral" not in uniquely_named_archs()
    assert "falcon_mamba" not in uniquely_named_archs()
    assert {"gpt2", "qwen3_next", "jamba", "t5"} <= uniquely_named_archs()
