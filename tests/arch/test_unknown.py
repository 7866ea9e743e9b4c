"""What the list of transformers' types says that do not run here yet."""

import pytest

from tests.arch.unknown import levels, missing

pytest.importorskip("transformers")


def test_no_type_that_runs_here_is_listed_and_each_has_its_level() -> None:
    """Seen red: a type listed that runs here, a level that is not the table's."""
    rows = {row.model_type: row for row in missing()}
    known = levels()
    assert len(rows) > 5 and not {name for name in rows if known.get(name) == "full"}
    assert all(row.level == known.get(name, "unknown") for name, row in rows.items())


def test_the_nearest_type_is_the_one_whose_code_differs_least() -> None:
    """mistral is made of llama. Seen red: the first type that is imported."""
    rows = {
        row.model_type: row for row in missing({"llama": "full", "phi": "full", "gpt2": "names"})
    }
    assert "llama" not in rows and rows["gpt2"].level == "names"
    assert rows["mistral"].relative == "llama" and rows["mistral"].differs
    assert rows["starcoder2"].relative == "llama" and rows["phi3"].differs


def test_a_type_that_runs_anothers_class_has_no_lines_of_its_own() -> None:
    rows = {row.model_type: row for row in missing({"llama": "full"})}
    owned = [row for row in rows.values() if row.relative == "llama" and not row.differs]
    assert owned and all(row.model_type != "llama" for row in owned)
