"""A cause is in the table by its module being there, and its order is stated with a reason."""

import sys
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from aprfmt import causes
from aprfmt.base.registry import LazyFunction
from aprfmt.causes import CAUSES, FOLDERS, causes_of, modules_of
from aprfmt.causes.forward import table as forward_table
from aprfmt.causes.forward.point_signatures import point_signatures
from aprfmt.causes.row import LAST, Cause
from aprfmt.causes.tensor import table as tensor_table
from aprfmt.causes.training import table as training_table
from tests.causes.seeded import files_of
from tests.test_imports import modules_after

TABLES: dict[str, tuple[Any, ...]] = {
    "tensor": (*tensor_table.TABLE, *tensor_table.JOINT),
    "forward": (*forward_table.TABLE, *forward_table.NUMBERS, *point_signatures()),
    "training": (*training_table.UPDATES, *training_table.GRADIENTS, *training_table.BACKWARDS),
}
GUESS = ("tensor.guess",)  # what the rows of a table are made of
LEAST = {"tensor": 30, "forward": 30, "training": 15}  # and at least so many hypotheses


@pytest.mark.parametrize("folder", TABLES)
def test_every_rank_is_stated_once_and_has_its_reason(folder: str) -> None:
    """Seen red: two rows of rank 120, and a row of ours without a rank."""
    rows = sorted(TABLES[folder], key=lambda row: row.rank)
    assert len(rows) > LEAST[folder]
    assert [rank for rank, count in Counter(row.rank for row in rows).items() if count > 1] == []
    assert all(row.rank < LAST and len(row.because.split()) > 2 for row in rows)


def functions_of(row: Cause) -> dict[str, Any]:
    """Return {field: function} of a cause's row that names functions, imported."""
    held = {field: getattr(row, field) for field in Cause.__dataclass_fields__}
    return {field: one.load() for field, one in held.items() if isinstance(one, LazyFunction)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_tables_read_from_the_text_are_those_of_the_modules(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none has to be imported for it. Seen red: a table with a comprehension, a constant of
    another module, a row whose name was read from its neighbour."""
    kinds = {type(row) for row in TABLES.get(folder, ())}
    modules = [import_module(name) for name in modules_of(folder)]
    monkeypatch.setattr(causes, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    assert [row for module in modules for row in getattr(module, "CAUSE_ROWS", ())] == [
        replace(row, **functions_of(row))
        for module in modules
        for row in causes_of(module.__name__)
    ]
    written = [row for module in modules for row in getattr(module, "HYPOTHESES", ())]
    read = {row.rank: row for kind in kinds for row in causes.hypotheses_of(folder, kind)}
    assert len(read) == len(written)
    for row in written:
        found = read[row.rank]
        name = next(name for name in ("propose", "find", "make") if hasattr(row, name))
        assert getattr(found, name).load() is getattr(row, name)
        assert replace(found, **{name: getattr(row, name)}) == row


def test_a_cause_stands_in_one_module() -> None:
    """Seen red: `scale` in two modules."""
    names = Counter(
        row.name for folder in FOLDERS for module in modules_of(folder) for row in causes_of(module)
    )
    assert [name for name, count in names.items() if count > 1] == []
    assert tuple(names) == CAUSES.own and len(names) > 80


def test_a_hypothesis_names_causes_that_are_known() -> None:
    for rows in TABLES.values():
        for row in rows:
            assert set(getattr(row, "causes", None) or (row.cause,)) <= set(CAUSES.own)


# Modules of causes whose faults no pair of files and no trace has: of the dumps of several ranks
# (tests/inference/engines/test_rank_dumps), of angles in few bits (test_rope_precision), of
# recorded ids (tests/diagnosis/test_recorded_ids), of adapters beside a trace
# (tests/diagnosis/test_served_adapters).
WITHOUT_FILE = {"dumped_ranks", "rope_precision", "recorded_ids", "served_adapter"}


@pytest.mark.parametrize("folder", ["", "tensor", "tokenizer", "forward"])
def test_seeded_faults_stand_in_files_of_their_causes_names(folder: str) -> None:
    """Seen red: a fault in the file of another cause, a file of no module's name."""
    modules = {name.rpartition(".")[2]: name for name in modules_of(folder)}
    assert files_of(folder) and set(files_of(folder)) <= set(modules)
    for name in files_of(folder):
        module = import_module(".".join(filter(None, ("tests.causes", folder, name))))
        own = {row.name for row in causes_of(modules[name])}
        for kind in ("FILE_FAULTS", "ENGINE_FAULTS"):
            first = {fault.causes[0] for fault in getattr(module, kind, ())}
            assert first <= own, f"{module.__name__}: {first - own}"


@pytest.mark.parametrize("folder", ["tokenizer", "forward"])
def test_a_module_of_causes_without_a_file_of_faults_is_seen(folder: str) -> None:
    """Seen red: a file of faults taken away, and one that a module no longer lacks."""
    stated = {name.rpartition(".")[2] for name in modules_of(folder) if causes_of(name)}
    assert stated - {*files_of(folder)} == WITHOUT_FILE & stated


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


def test_a_cause_is_known_without_its_module() -> None:
    """Seen red: a table that imports each module for its rows."""
    code = "from aprfmt.causes import CAUSES\nfrom aprfmt.causes.tensor.table import TABLE\n"
    code += "assert 'byte_offset' in CAUSES and CAUSES['byte_offset'].verdict == 'bug'\n"
    code += "assert CAUSES['rope_theta'].keys and len(TABLE) > 30"
    loaded = modules_after(code, whole=True)
    own = {name for name in loaded if name.startswith("aprfmt.causes.")}
    assert own == {f"aprfmt.causes.{name}" for name in ("row", "tensor", "tensor.table", *GUESS)}


def test_two_models_are_diagnosed_without_the_causes_of_a_pass() -> None:
    """They are imported once a trace is held to the model. Seen red: `examine` above the walk."""
    loaded = modules_after("import aprfmt.diagnosis.diagnosis_order", whole=True)
    assert "aprfmt.diagnosis.model_pair" in loaded
    assert not loaded & {"aprfmt.causes.forward.table", "aprfmt.causes.forward.rope"}
