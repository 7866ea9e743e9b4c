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


def test_parents_are_the_types_whose_code_is_imported() -> None:
    """mistral's own code is over llama's; parents that run here stand first."""
    rows = {row.model_type: row for row in missing({"llama": "names", "phi": "full"})}
    assert "llama" not in rows["llama"].parents and "phi" not in rows
    assert rows["mistral"].parents == ("llama",) and rows["mistral"].lines > 0
    assert rows["starcoder2"].parents == ("mistral",)
    several = {row.model_type: row.parents for row in missing() if len(row.parents) > 1}
    ranks = [[levels().get(each) != "full" for each in parents] for parents in several.values()]
    assert several and all(each == sorted(each) for each in ranks)
