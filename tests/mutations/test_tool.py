"""The whole tool on a tiny checkout: what it kills, lists, keeps and leaves alone."""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mutations import __main__ as tool
from tests.mutations import judge, tiny
from tests.mutations.mutation import Mutation, Row
from tests.mutations.names import run_at_import
from tests.mutations.product import STATE, digest, files_of_tests
from tests.mutations.reach import Known, Reach
from tests.mutations.results import PAGE
from tests.mutations.source import Source

ROWS = (
    Row("total-wrong", "aprfmt/sums.py", "found += number", "found -= number", "sums are wrong"),
    Row("limit-kept", "aprfmt/old/sums.py", "> LIMIT", ">= LIMIT", "the limit is the limit"),
    Row("limit-lower", "aprfmt/sums.py", "LIMIT = 3", "LIMIT = 2", "tests take the limit"),
    Row("unused-wrong", "aprfmt/sums.py", "number + 1", "number + 2", "nobody sees it"),
    Row(
        "never-imported",
        "aprfmt/sums.py",
        "LIMIT = 3\n",
        "LIMIT = [] + 3\n",
        "no test can be imported",
    ),
    Row("gone", "aprfmt/sums.py", "found *= number", "pass", "the product has no product"),
)


@dataclass(frozen=True)
class Tried:
    """A checkout after one run, what that said, and what stood there before."""

    root: Path
    code: int
    said: str
    before: dict[str, str]

    def rows(self) -> dict[str, Any]:
        """The verdicts by id."""
        lines = (self.root / STATE / "results.jsonl").read_text().splitlines()
        return {row["id"]: row for row in map(json.loads, lines)}


def run(root: Path, *options: str) -> tuple[int, str]:
    """Run the tool there."""
    digest.cache_clear()
    files_of_tests.cache_clear()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = tool.main(["--jobs", "1", *options], root)
    return code, said.getvalue()


def content(root: Path) -> dict[str, str]:
    """Every file of the product and its tests."""
    return {str(path): path.read_text() for path in root.rglob("*.py")}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    root = tiny.checkout(tmp_path_factory.mktemp("checkout"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "ROWS", ROWS)
        before = content(root)
        yield Tried(root, *run(root, "--hand"), before)


def test_a_planted_mistake_is_killed_by_the_test_that_sees_it(tried: Tried) -> None:
    row = tried.rows()["total-wrong"]
    assert (row["ending"], row["by"]) == ("killed", "tests/test_sums.py::test_total")


def test_survivors_are_listed_with_their_diff(tried: Tried) -> None:
    assert tried.code == 1
    assert "survived: limit-kept: the limit is the limit" in tried.said
    assert "-    if total(numbers) > LIMIT:\n+    if total(numbers) >= LIMIT:" in tried.said
    assert tried.rows()["limit-kept"]["ran"] == 2, "the two tests that call it"


def test_a_product_that_cannot_be_imported_is_killed(tried: Tried) -> None:
    row = tried.rows()["never-imported"]
    assert (row["ending"], row["by"]) == ("killed", "tests/test_sums.py")


def test_a_constant_is_judged_by_the_tests_of_what_uses_it(tried: Tried) -> None:
    row = tried.rows()["limit-lower"]
    assert row["ending"] == "survived" and row["ran"] == 7, "the file mentions it, so all of it"


def test_what_no_test_reaches_survives(tried: Tried) -> None:
    row = tried.rows()["unused-wrong"]
    assert row["ending"] == "survived" and row["ran"] > 0, "judged by the file's tests"


def test_a_row_whose_text_is_gone_is_an_error(tried: Tried) -> None:
    assert "error: gone: its old text is in no file any more" in tried.said
    assert "6 mutations: 2 killed, 3 survived, 1 error" in tried.said


def test_the_checkout_is_left_as_it_was(tried: Tried) -> None:
    assert content(tried.root) == tried.before
    assert {path.name for path in tried.root.iterdir()} == {
        ".git",
        ".gitignore",
        "aprfmt",
        "tests",
        "build",
    }


def test_shared_work_belongs_to_every_test_that_uses_it(tried: Tried) -> None:
    made = json.loads((tried.root / STATE / "map" / "tests+test_sums.py.json").read_text())
    reach = {
        test.partition("::")[2]: len(made["sets"][which])
        for test, (_, _, which) in made["tests"].items()
    }
    assert reach["test_fixture_again"] == reach["test_fixture"] == reach["test_total"] == 3
    assert reach["test_cached_again"] == reach["test_cached"] == 3
    assert reach["test_process"] == 5, "what a process of the test ran"
    assert [outcome for _, outcome, _ in made["tests"].values()].count("skipped") == 1


def test_a_second_run_runs_nothing(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge.Session, "judge_all", None)
    code, said = run(tried.root, "--hand")
    assert code == 1 and said == tried.said[-len(said) :]


def test_an_explained_survivor_does_not_count(tried: Tried) -> None:
    page = tried.root / PAGE
    page.parent.mkdir(parents=True)
    page.write_text("| id | why |\n| --- | --- |\n| `limit-kept` | the same number |\n")
    try:
        code, said = run(tried.root, "--report", "--only", "limit-kept", "total-wrong")
    finally:
        page.unlink()
        page.parent.rmdir()
    assert code == 0 and "1 survived and explained" in said


def test_a_change_of_a_file_asks_again_for_its_mutations(tried: Tried) -> None:
    path = tried.root / "aprfmt" / "sums.py"
    path.write_text(tiny.SUMS + "\n\ndef more():\n    return 1\n")
    try:
        _, said = run(tried.root, "--report", "--only", "limit-kept", "total-wrong")
    finally:
        path.write_text(tiny.SUMS)
    assert "2 mutations: 2 not judged" in said


def test_a_new_test_asks_again_for_survivors_and_not_for_kills(tried: Tried) -> None:
    path = tried.root / "tests" / "test_more.py"
    path.write_text(
        "from aprfmt.sums import capped\n\n\ndef test_it():\n    assert capped([1]) == 1\n"
    )
    try:
        _, said = run(tried.root, "--report", "--only", "limit-kept", "total-wrong")
    finally:
        path.unlink()
    assert "1 not judged" in said and "1 killed" in said


def test_no_such_mutation_is_said_on_one_line(
    tried: Tried, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["--only", "nothing"], tried.root) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_runs_at_import_is_judged_by_all_that_reach_the_file() -> None:
    """The test that imports a file first runs its tables; others see what is wrong in them."""
    text = """
def rule(name):
    def read(facts):
        return facts[name]
    return read, doubled(name)

def doubled(name):
    return name * 2

def apply(x):
    return [f(x) for f in TABLE]

def unused():
    return rule("x")

TABLE = (*(rule(each) for each in "ab"),)
"""
    source = Source("aprfmt/table.py", text)
    assert run_at_import(source) == {"rule", "doubled"}
    numbers = {block.function: block.number for block in source.blocks if block.function}
    reach = Reach.__new__(Reach)
    reach.sources, reach.texts = {source.path: source}, {}
    reach.tests = {
        name: Known(name, 1.0, frozenset(numbers[function] for function in functions))
        for name, functions in {
            "first": ["rule", "doubled"], "reads": ["rule.read"], "applies": ["apply"],
        }.items()
    }  # fmt: skip

    def judged_by(old: str) -> set[str]:
        mutation = Mutation("x", source.path, text.index(old), old, "", "")
        return {test.id for test in reach.covering(mutation)}

    assert judged_by("name * 2") == {"first", "reads", "applies"}
    assert judged_by("facts[name]") == {"reads"}
