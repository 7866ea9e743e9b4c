"""How each requirement of docs/notes/requirements.md stands after a run, by the tests it names.

`conftest.py` imports the hooks. They count on the process that reports (with xdist: the
controller), print a line at the end, and fail a whole run in which a named test never appeared.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.scope import without_group

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "notes" / "requirements.md"
IDS = tuple(f"R{number:02}" for number in range(1, 81))
OUT_OF_SCOPE = "out of scope: "
Standing = Literal["shown", "NOT-RUN", "FAILED", "missing", "out of scope"]
_TEST = re.compile(r"^`(?P<id>[\w/]+\.py::\w+(?:\[[^\]`]*\])?)`(?: \*GPU\*)?$")


@dataclass(frozen=True)
class Row:
    """One requirement: how it is met, or why it is not asked for here, and the tests named."""

    id: str
    text: str
    met: str
    tests: tuple[str, ...]


def rows(page: str) -> list[Row]:
    """Return the table of the page; ValueError for a malformed row."""
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not re.fullmatch(r"R\d\d", cells[0].removeprefix("| ").strip()):
            continue
        if len(cells) != 4 or not all(cells):
            raise ValueError(f"{line[:40]}...: {len(cells)} cells; expected 4, none empty")
        names = []
        for name in cells[3].split(", "):
            match = _TEST.match(name)
            if match is None:
                raise ValueError(f"{cells[0]}: {name!r} is no test; expected file.py::test")
            names.append(f"tests/{match['id']}")
        found.append(Row(cells[0], cells[1], cells[2], tuple(names)))
    return found


def test_of(nodeid: str, name: str) -> bool:
    """Say whether a run test is the named one.

    A name without [...] stands for all variants, one that ends in `*]` for those that begin so.
    """
    if name.endswith("*]"):
        return nodeid.startswith(name[:-2])
    return nodeid == name or (not name.endswith("]") and nodeid.startswith(f"{name}["))


@dataclass(frozen=True)
class Stood:
    """How a requirement stands: shown only if all variants of all tests it names passed."""

    row: Row
    how: Standing
    passed: int  # variants, counted once where two names stand for one
    variants: int

    def __str__(self) -> str:
        if self.how != "NOT-RUN":
            return f"{self.row.id} {self.how}"
        return f"{self.row.id} NOT-RUN ({self.passed} of {self.variants} variants)"


def standing(row: Row, outcomes: Mapping[str, str]) -> Stood:
    """Return how a requirement stands by the outcomes of tests: passed, failed, skipped."""
    named = [{id for id in outcomes if test_of(id, name)} for name in row.tests]
    seen: set[str] = set().union(*named)
    passed = sum(outcomes[id] == "passed" for id in seen)
    how: Standing = "shown" if passed == len(seen) else "NOT-RUN"
    if row.met.startswith(OUT_OF_SCOPE):
        how = "out of scope"
    if not all(named):
        how = "missing"
    if any(outcomes[id] == "failed" for id in seen):
        how = "FAILED"
    return Stood(row, how, passed, len(seen))


def summary(found: Sequence[Stood]) -> list[str]:
    """Return the lines that say how all requirements stand: counts, then each that is not shown."""
    counts = Counter(each.how for each in found)
    said = ", ".join(f"{count} {how}" for how, count in counts.items())
    named = [f"  {each}" for each in found if each.how != "shown"]
    return [f"requirements: {said}", *named]


# --- the hooks ----------------------------------------------------------------------------------

_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember how each test ended; a failing setup or teardown counts."""
    name = without_group(report.nodeid)
    if report.when == "call" or report.outcome != "passed":
        if _outcomes.get(name) != "failed":
            _outcomes[name] = report.outcome


def whole(config: pytest.Config) -> bool:
    """Say whether this run was asked for every test there is."""
    options: Any = config.option
    chosen = (
        options.keyword,
        options.markexpr,
        getattr(options, "lf", False),
        getattr(options, "deselect", None),
        getattr(options, "ignore", None),
        options.collectonly,
        options.maxfail,
    )
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not any(chosen)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a whole run in which a test that a requirement names did not appear."""
    if hasattr(session.config, "workerinput") or not whole(session.config):
        return
    every = [standing(row, _outcomes) for row in rows(PAGE.read_text())]
    if any(each.how == "missing" for each in every) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how every requirement stands."""
    if not whole(config):
        return
    every = [standing(row, _outcomes) for row in rows(PAGE.read_text())]
    terminalreporter.section("requirements")
    for line in summary(every):
        terminalreporter.write_line(line)
