"""The sample of `python -m tests`: the same tests everywhere, one of each kind, nothing named lost.

Seen red: a family whose file is gone, a cause of which no row is taken, a hash that is seeded, a
requirement's test left out.
"""

import pytest

from tests.conftest import not_run
from tests.requirements import PAGE, ROOT, rows
from tests.scope import FAMILIES, LONG, chosen, left_out, without_group

NAMED = frozenset(test for row in rows(PAGE.read_text()) for test in row.tests)


@pytest.mark.parametrize("file", FAMILIES)
def test_every_family_is_a_file_with_a_part_inside_and_outside(file: str) -> None:
    assert (ROOT / file).is_file()
    assert "parametrize" in (ROOT / file).read_text()
    if FAMILIES[file].every == 1 << 64:
        assert left_out([f"{file}::test_x[{n}]" for n in range(9)])
    elif FAMILIES[file].unit is not None:
        units = [f"{file}::test_x[page{n}:{m}]" for n in range(40) for m in range(2)]
        out = left_out(units)
        assert 40 < len(out) < 80
        assert all((f"{node[:-2]}0]" in out) == (f"{node[:-2]}1]" in out) for node in units)
    elif FAMILIES[file].kind is None:
        ids = [f"{file}::test_x[{n}]" for n in range(60)]
        assert max(1, 60 // FAMILIES[file].every // 3) <= 60 - len(left_out(ids)) < 50


def test_a_row_of_every_cause_and_verdict_is_taken() -> None:
    faults = pytest.importorskip("tests.diagnose.faults").FAULTS
    test = "tests/diagnose/test_faults.py::test_the_verdict_the_cause_and_the_place"
    ids = [f"{test}[{name}]" for name in faults]
    taken = [name for name, node in zip(faults, ids, strict=True) if node not in left_out(ids)]
    kinds = {(fault.causes[:1], fault.verdict) for fault in faults.values()}
    assert {(faults[name].causes[:1], faults[name].verdict) for name in taken} == kinds
    assert len(taken) < len(faults)


def test_every_architecture_is_taken_once() -> None:
    makers = pytest.importorskip("tests.models").MAKERS
    test = "tests/inference/test_rounding.py::test_logits_are_transformers_own"
    ids = [f"{test}[{name}-{dtype}]" for name in makers for dtype in ("bfloat16", "float16", "x")]
    out = left_out(ids)
    taken = [node for node in ids if node not in out]
    assert {node.split("[")[1].rsplit("-", 1)[0] for node in taken} == set(makers)
    assert len(taken) < len(ids) * 2 / 3


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
    assert left_out([*LONG, "tests/qa/test_report.py::test_x"]) == LONG
    assert not left_out([*LONG], LONG)


def test_the_name_of_a_group_changes_nothing() -> None:
    file = "tests/robustness/test_side_inputs.py"
    ids = [f"{file}::test_x[list-{n}]" for n in range(30)]
    assert {f"{node}@side" for node in left_out(ids)} == left_out([f"{node}@side" for node in ids])
    assert without_group("a.py::t[x@torch:cpu]@docs/extending/a-b.md") == "a.py::t[x@torch:cpu]"


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
