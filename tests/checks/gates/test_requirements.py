"""docs/notes/requirements.md: one row for each requirement, and every test it names exists.

Seen red: a test renamed, a row left out, a skipped test counted as shown, one passed variant of a
test whose others were skipped counted as all of them.
"""

import ast
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.checks.gates.golden import read_golden
from aprfmt.checks.table import gates
from aprfmt.cli.commands import COMMANDS
from tests import requirements
from tests.checks.gates.faults import FAULTS
from tests.requirements import IDS, OUT_OF_SCOPE, PAGE, ROOT, Row, rows, standing, summary

ROWS = rows(PAGE.read_text())


def functions_of(path: Path) -> set[str]:
    """Return the test functions of a file, without importing it."""
    body = ast.parse(path.read_text()).body
    return {
        node.name
        for node in body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
    }


def test_every_requirement_has_its_row() -> None:
    assert tuple(row.id for row in ROWS) == IDS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_named_test_exists(row: Row) -> None:
    for name in row.tests:
        file, _, function = name.partition("::")
        plain, _, variant = function.partition("[")
        assert (ROOT / file).is_file(), file
        assert plain in functions_of(ROOT / file), name
        if plain == "test_a_fault_fails_its_gates_and_no_other" and variant:
            assert variant.removesuffix("]") in {fault.name for fault in FAULTS}


def test_a_row_out_of_scope_says_why_and_no_other_command_is_promised() -> None:
    import re

    for row in ROWS:
        if row.met.startswith(OUT_OF_SCOPE):
            assert len(row.met) > len(OUT_OF_SCOPE) + 10
        for words in re.findall(r"`([^`]+)`", row.met):
            first = words.split()[0]
            known = {*COMMANDS, "python"}
            assert first in known or first.startswith("--"), f"{row.id}: {first}"


def test_the_page_of_the_gates_is_the_table() -> None:
    """Every gate with what it proves, and the requirements it was made for."""
    lines = (ROOT / "docs" / "reference" / "gates.md").read_text().splitlines()
    shown = [line for line in lines if line.startswith("| `") and line.count("|") == 4]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown]
    assert [each[:2] for each in cells] == [[f"`{row.name}`", row.proves] for row in gates()]
    known = {row.id for row in ROWS}
    for name, _, ids in cells:
        assert ids and set(ids.split(", ")) <= known, name


def test_the_example_of_a_golden_file_is_one(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "gates.md").read_text()
    path = tmp_path / "golden.json"
    path.write_text(page.partition("```json\n")[2].partition("```")[0])
    found = read_golden(path)
    assert [prompt.form for prompt in found.prompts] == ["chat", "direct", "direct"]
    assert found.prompts[1].defines == ("fib",) and found.texts[0].nats == 3.21


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({"a.py::t": "passed", "b.py::u[x]": "passed"}, "R01 shown"),
        ({"a.py::t": "passed", "b.py::u[x]": "skipped"}, "R01 NOT-RUN (1 of 2 variants)"),
        ({"a.py::t": "passed", "b.py::u[x]": "passed", "b.py::u[y]": "skipped"},
         "R01 NOT-RUN (2 of 3 variants)"),
        ({"a.py::t": "skipped", "b.py::u[x]": "passed", "b.py::u[y]": "passed"},
         "R01 NOT-RUN (2 of 3 variants)"),
        ({"a.py::t": "passed", "b.py::u[x]": "failed"}, "R01 FAILED"),
        ({"a.py::t": "skipped", "b.py::u[x]": "failed", "b.py::u[y]": "passed"}, "R01 FAILED"),
        ({"a.py::t": "failed"}, "R01 FAILED"),
        ({"a.py::t": "passed", "b.py::u2": "passed"}, "R01 missing"),
        ({"a.py::t": "passed", "c.py::u[x]": "skipped"}, "R01 missing"),
        ({}, "R01 missing"),
    ],
)  # fmt: skip
def test_every_variant_must_have_passed(outcomes: Mapping[str, str], expected: str) -> None:
    row = Row("R01", "text", "`diff`", ("tests/a.py::t", "tests/b.py::u"))
    stood = standing(row, {f"tests/{id}": outcome for id, outcome in outcomes.items()})
    assert str(stood) == expected
    said = [f"requirements: 1 {stood.how}", f"  {expected}"]
    assert summary([stood]) == (said[:1] if stood.how == "shown" else said)


def test_some_variants_can_be_named_apart() -> None:
    outcomes = {
        "tests/a.py::t[cpu-1]": "passed",
        "tests/a.py::t[cpu-2]": "passed",
        "tests/a.py::t[gpu-1]": "skipped",
    }

    def stood(*names: str) -> str:
        return str(standing(Row("R01", "text", "`diff`", names), outcomes))

    assert stood("tests/a.py::t[cpu-*]") == stood("tests/a.py::t[cpu-2]") == "R01 shown"
    assert stood("tests/a.py::t[gpu-*]") == "R01 NOT-RUN (0 of 1 variants)"
    assert stood("tests/a.py::t[c*]", "tests/a.py::t") == "R01 NOT-RUN (2 of 3 variants)"
    assert stood("tests/a.py::t[tpu-*]") == stood("tests/a.py::t[cpu]") == "R01 missing"


def test_a_requirement_out_of_scope_is_neither_shown_nor_forgotten() -> None:
    row = Row("R02", "text", f"{OUT_OF_SCOPE}nothing is trained here", ("tests/a.py::t",))
    assert str(standing(row, {"tests/a.py::t": "passed"})) == "R02 out of scope"
    assert str(standing(row, {"tests/a.py::t": "skipped"})) == "R02 out of scope"
    assert str(standing(row, {"tests/a.py::t": "failed"})) == "R02 FAILED"
    assert str(standing(row, {})) == "R02 missing"


@pytest.mark.parametrize(
    "line",
    [
        "| R01 | text | `diff` |",
        "| R01 | text | `diff` | not a test |",
        "| R01 | text | `diff` | a.py::t and b.py::u |",
    ],
)
def test_a_row_that_is_none_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="R01"):
        rows(line)


def session(status: pytest.ExitCode = pytest.ExitCode.OK, **options: Any) -> Any:
    """Return a session of a run that asked for every test, unless `options` narrow it."""
    names = ("keyword", "markexpr", "lf", "deselect", "ignore", "collectonly", "maxfail")
    config = SimpleNamespace(
        option=SimpleNamespace(**(dict.fromkeys(names) | options)),
        args_source=pytest.Config.ArgsSource.TESTPATHS,
    )
    return SimpleNamespace(config=config, exitstatus=status)


def test_a_whole_run_without_a_named_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {name.replace("*", "1"): "passed" for row in ROWS for name in row.tests}
    monkeypatch.setattr(requirements, "_outcomes", every)
    run = session()
    requirements.pytest_sessionfinish(run)
    assert run.exitstatus == pytest.ExitCode.OK
    del every[ROWS[10].tests[0]]
    requirements.pytest_sessionfinish(run)
    assert run.exitstatus == pytest.ExitCode.TESTS_FAILED
    part = session(keyword="qa")
    requirements.pytest_sessionfinish(part)
    assert part.exitstatus == pytest.ExitCode.OK  # a part of the tests was asked for


def test_outcomes_are_kept_by_test_and_a_failure_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, str] = {}
    monkeypatch.setattr(requirements, "_outcomes", kept)

    def report(nodeid: str, when: str, outcome: str) -> None:
        requirements.pytest_runtest_logreport(
            SimpleNamespace(nodeid=nodeid, when=when, outcome=outcome)  # type: ignore[arg-type]
        )

    report("a", "setup", "passed")
    assert kept == {}
    report("a", "call", "passed")
    report("b@group", "setup", "skipped")
    report("c", "call", "failed")
    report("c", "teardown", "passed")
    report("d", "call", "passed")
    report("d", "teardown", "failed")
    assert kept == {"a": "passed", "b": "skipped", "c": "failed", "d": "failed"}
