"""The sample of `python -m tests`: the same tests everywhere, one of each kind, nothing named lost.

Seen red: a family whose file is gone, a cause of which no row is taken, a hash that is seeded, a
requirement's test left out; a function's family taken for its file's, an architecture without its
row, a file as the unit of an architecture, long units last, a name in FIRST that is none.
"""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.balance import FIRST, scheduler, unit
from tests.conftest import not_run
from tests.requirements import PAGE, ROOT, rows
from tests.scope import (
    ALONE,
    ALWAYS,
    CHEAP,
    FAMILIES,
    FOLDERS,
    LONG,
    THINNED,
    architecture,
    chosen,
    family_of,
    left_out,
    without_group,
)

FORWARD = "tests/inference/test_forward.py"
NAMED = frozenset(test for row in rows(PAGE.read_text()) for test in row.tests)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_part_inside_and_outside(name: str) -> None:
    family, (file, _, function) = FAMILIES[name], name.partition("::")
    text = (ROOT / file).read_text()
    assert "parametrize" in text and f"def {function}" in text
    test = f"{file}::{function or 'test_x'}"
    if family.every == 1 << 64:
        assert left_out([f"{test}[{n}]" for n in range(9)])
    elif family.unit is not None:
        units = [f"{test}[page{n}:{m}]" for n in range(40) for m in range(2)]
        out = left_out(units)
        assert 40 < len(out) < 80
        assert all((f"{node[:-2]}0]" in out) == (f"{node[:-2]}1]" in out) for node in units)
    elif family.kind is None:
        ids = [f"{test}[{n}]" for n in range(240)]
        assert 240 // (family.every * THINNED) // 2 <= 240 - len(left_out(ids)) < 200


def test_a_row_of_every_cause_and_verdict_is_taken() -> None:
    faults = pytest.importorskip("tests.diagnosis.faults").FAULTS
    test = "tests/diagnosis/test_faults.py::test_the_verdict_the_cause_and_the_place"
    ids = [f"{test}[{name}]" for name in faults]
    taken = [name for name, node in zip(faults, ids, strict=True) if node not in left_out(ids)]
    kinds = {(fault.causes[:1], fault.verdict) for fault in faults.values()}
    assert {(faults[name].causes[:1], faults[name].verdict) for name in taken} == kinds
    assert len(taken) < len(faults)


def test_what_is_always_taken_exists() -> None:
    faults = pytest.importorskip("tests.diagnosis.faults").FAULTS
    test = "tests/diagnosis/test_faults.py::test_the_verdict_the_cause_and_the_place"
    ids = [f"{test}[{name}]" for name in faults]
    assert set(ids) >= ALWAYS and not ALWAYS & left_out(ids)


def test_every_architecture_is_taken_where_each_has_its_row() -> None:
    makers = pytest.importorskip("tests.models").MAKERS
    for test in (name for name, family in FAMILIES.items() if family.kind is architecture):
        ids = [f"{test}[{name}{more}]" for name in makers for more in ("", "-x", "-y")]
        out = left_out(ids)
        taken = {architecture(node.partition("[")[2]) for node in ids if node not in out}
        assert taken == set(makers) and len(out) > len(ids) / 2
    assert FAMILIES[f"{FORWARD}::test_float64_is_transformers_at_every_point"].kind is architecture


def test_old_model_types_are_tried_less_and_their_namesakes_are_not() -> None:
    test = "tests/inference/test_cache.py::test_x"
    share = {}
    for name in ("qwen2", "falcon", "falcon_mamba", "bloom"):
        ids = [f"{test}[{name}-{n}]" for n in range(9000)]
        share[name] = len(ids) - len(left_out(ids))
    assert share["falcon"] < share["qwen2"] / 3 and share["bloom"] < share["qwen2"] / 3
    assert share["falcon_mamba"] > share["qwen2"] / 2


def test_a_functions_own_row_is_its_familys() -> None:
    own = next(name for name in FAMILIES if "::" in name and name.partition("::")[0] in FAMILIES)
    file, _, function = own.partition("::")
    assert family_of(file, function) is FAMILIES[own]
    assert family_of(file, "test_x") is FAMILIES[file]
    assert family_of("tests/x.py", function) is None


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folders_family_is_that_of_what_has_none(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    for file in (f"{folder}/test_x.py", f"{folder}/inner/test_x.py"):
        assert family_of(file, "test_y") is FOLDERS[folder]
        ids = [f"{file}::test_y[{n}]" for n in range(240)]
        assert ids[0] not in left_out(ids) and 120 < len(left_out(ids)) < 230


def test_tests_of_parts_alone_and_those_that_cost_nothing_are_all_taken() -> None:
    for file in (*CHEAP, *(f"{folder}/test_x{ALONE}" for folder in FOLDERS)):
        ids = [f"{file}::test_y[{n}]" for n in range(240)]
        assert not left_out(ids) and family_of(file, "test_y") is None
        assert (ROOT / file).is_file() is (file in CHEAP)
    of_families = {name.partition("::")[0] for name in FAMILIES}
    assert not [name for name in of_families if name in CHEAP or name.endswith(ALONE)]


def test_each_hostile_file_is_opened_and_a_file_of_each_format_and_level_is_judged() -> None:
    files, smoke = (f"tests/robustness/test_{name}.py" for name in ("files", "smoke"))
    judged = [
        f"{files}::test_verdict[{kind}-{level}-{n}]"
        for kind in ("apr", "gguf")
        for level in ("legal", "malformed")
        for n in range(9)
    ]
    opened = [f"{smoke}::test_command_on_file[inspect-{n}]" for n in range(30)]
    others = [f"{smoke}::test_command_on_file[convert-{n}]" for n in range(60)]
    out = left_out([*judged, *opened, *others])
    assert not out & {*judged[::9], *opened, others[0]}
    assert len(out) > 60


def test_the_first_of_each_function_and_what_a_requirement_names_are_taken() -> None:
    file = "tests/cli/test_damage.py"
    ids = [f"{file}::test_{test}[{n}]" for test in "ab" for n in range(30)]
    out = left_out(ids, frozenset(ids[7:9]))
    assert not out & {ids[0], ids[7], ids[8], ids[30]} and len(out) > 30
    everywhere = [name for name in NAMED if "[" in name]
    assert not left_out(everywhere, NAMED)


def test_every_long_test_is_there_and_left_out() -> None:
    for node in LONG:
        file, _, name = node.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()
    assert left_out([*LONG, "tests/checks/gates/test_report.py::test_x"]) == LONG
    assert left_out([f"{node}[some-1]" for node in LONG]) == {f"{node}[some-1]" for node in LONG}
    assert not left_out([*LONG], LONG)


def test_the_name_of_a_group_changes_nothing() -> None:
    file = "tests/robustness/test_side_inputs.py"
    ids = [f"{file}::test_x[list-{n}]" for n in range(30)]
    assert {f"{node}@side" for node in left_out(ids)} == left_out([f"{node}@side" for node in ids])
    assert without_group("a.py::t[x@torch:cpu]@docs/how-to/a-b.md") == "a.py::t[x@torch:cpu]"


@pytest.mark.xdist_group("kept.together")
def test_groups_reach_the_workers(request: pytest.FixtureRequest) -> None:
    """Else what a group prepares once is prepared in every worker, and files are written twice."""
    if not getattr(request.config.option, "loadgroup", False):  # --dist loadgroup, in a worker
        not_run("no workers that keep groups together")
    assert request.node.nodeid.endswith("@kept.together")


def test_the_choice_is_the_same_everywhere() -> None:
    picked = [n for n in range(40) if chosen(f"tests/x.py::test_y[{n}]", 4)]
    assert picked == [1, 15, 24]
    assert left_out(["tests/x.py::test_y[1]", "tests/arch/test_find.py::test_z"]) == set()


# --- what runs in one worker ------------------------------------------------------------------


def test_a_file_a_group_and_an_architecture_are_units() -> None:
    assert unit("tests/x.py::test_y[llama]@pages") == "pages"
    assert unit("tests/x.py::test_y[a@b]") == unit("tests/x.py::test_z") == "tests/x.py"
    one = unit("tests/inference/test_forward.py::test_y[llama-numpy:float32]")
    assert one == unit("tests/inference/test_points.py::test_z[llama]") != "tests/x.py"
    other = unit("tests/inference/test_points.py::test_z[llama4]")
    assert other not in (one, unit("tests/inference/test_points.py::test_z"))


def test_long_units_are_begun_first() -> None:
    scheduling = pytest.importorskip("xdist.scheduler", reason="NOT-RUN: xdist is not installed")
    config = SimpleNamespace(getoption=lambda name: "loadgroup", getvalue=lambda name: ["2*popen"])
    given = scheduler(config, None)
    assert isinstance(given, scheduling.LoadGroupScheduling)
    assert scheduler(SimpleNamespace(getoption=lambda name: "load"), None) is None
    queue = ["tests/x.py", *reversed(FIRST), "tests/y.py"]
    given.workqueue.update({name: {} for name in queue})
    node = Mock()
    given.registered_collections[node] = []
    for _ in queue:
        given._assign_work_unit(node)
    assert list(given.assigned_work[node]) == [*FIRST, "tests/x.py", "tests/y.py"]


@pytest.mark.parametrize("name", FIRST)
def test_what_is_begun_first_is_there(name: str) -> None:
    text = "".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    assert (ROOT / name).is_file() or f'xdist_group("{name}")' in text
