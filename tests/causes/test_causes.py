"""A cause is in the table by its module being there, and its order is stated with a reason."""

import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from aprfmt import causes
from aprfmt.causes import CAUSES, FOLDERS, hypotheses_of, modules_of
from aprfmt.causes.row import LAST
from tests.causes.seeded import files_of
from tests.test_imports import modules_after

TABLES = {"tensor": 30, "forward": 30, "training": 15}  # and at least so many hypotheses


@pytest.mark.parametrize("folder", TABLES)
def test_every_rank_is_stated_once_and_has_its_reason(folder: str) -> None:
    """Seen red: two rows of rank 120, and a row of ours without a rank."""
    rows = hypotheses_of(folder)
    assert len(rows) > TABLES[folder]
    assert [rank for rank, count in Counter(row.rank for row in rows).items() if count > 1] == []
    assert all(row.rank < LAST and len(row.because.split()) > 3 for row in rows)
    assert [row.rank for row in rows] == sorted(row.rank for row in rows)


def test_a_cause_stands_in_one_module() -> None:
    """Seen red: `scale` in two modules."""
    names = Counter(
        row.name
        for folder in FOLDERS
        for module in modules_of(folder)
        for row in getattr(import_module(module), "CAUSE_ROWS", ())
    )
    assert [name for name, count in names.items() if count > 1] == []
    assert tuple(names) == CAUSES.own and len(names) > 80


def test_a_hypothesis_names_causes_that_are_known() -> None:
    for folder in TABLES:
        for row in hypotheses_of(folder):
            assert set(getattr(row, "causes", None) or (row.cause,)) <= set(CAUSES.own)


@pytest.mark.parametrize("folder", ["tensor"])
def test_seeded_faults_stand_in_files_of_their_causes_names(folder: str) -> None:
    modules = {name.rpartition(".")[2] for name in modules_of(folder)}
    assert files_of(folder) and set(files_of(folder)) <= modules


def test_a_new_file_is_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is put into a folder is found; nothing else has to be touched."""
    (tmp_path / "tensor").mkdir()
    (tmp_path / "tensor" / "toy_scale.py").write_text("CAUSE_ROWS = ()\n")
    monkeypatch.setattr(causes, "__file__", str(tmp_path / "__init__.py"))
    modules_of.cache_clear()
    try:
        assert modules_of("tensor") == ("aprfmt.causes.tensor.toy_scale",)
    finally:
        monkeypatch.undo()
        modules_of.cache_clear()
    assert "aprfmt.causes.tensor.byte_shifts" in modules_of("tensor")


def test_the_table_alone_loads_no_module_of_a_cause() -> None:
    """Seen red: a cause imported at the top of the package."""
    loaded = modules_after("import aprfmt.causes", whole=True)
    assert not [name for name in loaded if name.startswith("aprfmt.causes.tensor")]
    assert "aprfmt.causes" in sys.modules and not loaded & {"numpy", "aprfmt.inference"}


def test_a_cause_of_tensors_is_named_without_the_forward_pass() -> None:
    """Seen red: the folders in another order, and a question for a name that loads them all."""
    code = "from aprfmt.causes import CAUSES\nassert 'byte_offset' in CAUSES\n"
    code += "assert CAUSES['byte_offset'].verdict == 'bug'"
    loaded = modules_after(code, whole=True)
    assert "aprfmt.causes.tensor.byte_shifts" in loaded and "aprfmt.inference" not in loaded


def test_two_models_are_diagnosed_without_the_causes_of_a_pass() -> None:
    """They are imported once a trace is held to the model. Seen red: `examine` above the walk."""
    loaded = modules_after("import aprfmt.diagnosis.walk", whole=True)
    assert "aprfmt.diagnosis.model_pair" in loaded
    assert not loaded & {"aprfmt.causes.forward.table", "aprfmt.causes.forward.rope"}
