"""The parts: places of rows, operators, what is drawn, blocks, names, and how a run is read."""

import ast
import builtins
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from tests.mutations import judge
from tests.mutations.draw import COUNT, drawn, one_of_each, sites
from tests.mutations.hand import ROWS
from tests.mutations.instrument import CALL, instrumented
from tests.mutations.mutation import Gone, Mutation, Row, locate, placed
from tests.mutations.names import bound, users
from tests.mutations.product import ROOT, product
from tests.mutations.reach import Chosen, Known, Reach
from tests.mutations.results import Verdict
from tests.mutations.source import Source
from tests.mutations.work import in_parallel, wait
from tests.mutations.workcopy import Ran

# --- rows -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {name: (ROOT / name).read_text() for name in product(ROOT)}


@pytest.fixture(scope="module")
def sources(texts: dict[str, str]) -> list[Source]:
    return [Source(name, text) for name, text in texts.items() if name.endswith(".py")]


def test_every_row_has_its_place(texts: dict[str, str]) -> None:
    gone = [row for row in placed(ROWS, texts) if isinstance(row, Gone)]
    assert not gone, "the product changed: give these rows its new text, or a better mistake"


def test_a_row_names_the_file_that_has_its_text(texts: dict[str, str]) -> None:
    """A moved file is found too, but a reader of the table opens the file that it names."""
    moved = {row.id: row.path for row in placed(ROWS, texts) if isinstance(row, Mutation)}
    assert {row.id: moved.get(row.id) for row in ROWS} == {row.id: row.file for row in ROWS}


def test_there_are_enough_rows() -> None:
    native = [row for row in ROWS if row.file.endswith((".c", ".h"))]
    judged = ("aprfmt/diagnosis/", "aprfmt/measure/tolerances", "aprfmt/measure/traces")
    assert len(ROWS) >= 60 and len(native) >= 10
    assert sum(row.file.startswith(judged) for row in ROWS) >= 10


def test_a_row_finds_a_file_that_moved() -> None:
    row = Row("id", "aprfmt/sums.py", "a + b", "a - b", "")
    moved = locate(row, {"aprfmt/tensors/sums.py": "x = a + b\n", "aprfmt/sums.py": "x = 1\n"})
    assert isinstance(moved, Mutation) and moved.path == "aprfmt/tensors/sums.py"
    renamed = locate(row, {"aprfmt/tensors/totals.py": "x = a + b\n"})
    assert isinstance(renamed, Mutation) and renamed.applied("x = a + b\n") == "x = a - b\n"


@pytest.mark.parametrize(
    ("row", "text", "why"),
    [
        (Row("id", "aprfmt/a.py", "a + b", "a - b", ""), "a + b\na + b\n", "stands 2 times"),
        (Row("id", "aprfmt/a.py", "a + b", "a - b", ""), "a\n", "in no file any more"),
        (Row("id", "aprfmt/a.py", "a + b", "a - ", ""), "a + b\n", "does not parse"),
        (Row("id", "aprfmt/a.py", "a + b", "a + b", ""), "a + b\n", "are the same"),
        (Row("id", "aprfmt/a.c", "a + b", "a - b", ""), "a + b\n", "name the test files"),
    ],
)
def test_a_row_without_a_place_is_said(row: Row, text: str, why: str) -> None:
    gone = locate(row, {row.file: text})
    assert isinstance(gone, Gone) and why in gone.why


def test_a_row_names_files_of_tests_or_single_tests() -> None:
    ids = ("tests/test_a.py::test_x[one-1]", "tests/test_a.py::test_x[two-2]", "tests/test_b.py::y")
    known = SimpleNamespace(tests={name: Known(name, 1.0, frozenset()) for name in ids})

    def covering(*globs: str) -> tuple[str, ...]:
        mutation = Mutation("id", "aprfmt/a.c", 0, "a", "b", "", globs)
        return tuple(test.id for test in Reach.covering(cast(Reach, known), mutation))

    assert covering("tests/test_a.py") == ids[:2]
    assert covering("tests/test_*.py::test_x?two-*") == ids[1:2]
    assert covering("tests/test_b.py", "*::test_x?one*") == (ids[0], ids[2])


def test_one_of_each_function_and_others_by_another_seed(sources: list[Source]) -> None:
    some = sources[::5]
    first, second = (one_of_each(some, 60, seed) for seed in (1, 2))
    for found in (first, second):
        assert len({(row.path, row.start) for row in found}) == 60
        assert len({source_function(sources, row) for row in found}) == 60
    assert len({row.id for row in first} & {row.id for row in second}) < 12


def source_function(sources: Sequence[Source], row: Mutation) -> tuple[str, str]:
    source = next(each for each in sources if each.path == row.path)
    block = source.block_at(row.start)
    return row.path, "" if block is None else block.function


# --- drawn ----------------------------------------------------------------------------------


def after(text: str) -> set[str]:
    """Return every text that one mutation of a file makes."""
    source = Source("aprfmt/a.py", text)
    return {mutation.applied(text) for _, _, mutation in sites(source)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = a < b\n", {"x = a >= b\n", "x = a <= b\n"}),
        ("x = a is not b\n", {"x = a is b\n"}),
        ("x = a not in b\n", {"x = a in b\n"}),
        ("x = not a\n", {"x = a\n"}),
        ("x = a and b\n", {"x = a or b\n"}),
        ("x = a + b\n", {"x = a - b\n"}),
        ("x = a[b:c]\n", {"x = a[(b) + 1:c]\n", "x = a[b:(c) + 1]\n"}),
        ("x = 5\n", {"x = 6\n", "x = 4\n"}),
        ("x = True\n", {"x = False\n"}),
        ("x = 0.5\n", {"x = 1.0\n"}),
        ("f(a, b)\n", {"pass\n", "f(b, a)\n"}),
        ("x = max(a, b)\n", set()),
        ("x: int = f(a)\n", set()),
        ("x = f'{a + 1}'\n", set()),
        ("x = 'a' + b\n", set()),
        ('"""Text of 5 < 6."""\n', set()),
        ("assert a < b\n", set()),
        ("def f(a: 'x[1]' = 5) -> 'y[2]':\n    return a\n", {
            "def f(a: 'x[1]' = 6) -> 'y[2]':\n    return a\n",
            "def f(a: 'x[1]' = 4) -> 'y[2]':\n    return a\n",
            "def f(a: 'x[1]' = 5) -> 'y[2]':\n    return None\n",
        }),
        ("if a:\n    raise E(1 + 2)\n", {"if not (a):\n    raise E(1 + 2)\n", "if a:\n    pass\n"}),
        ("if TYPE_CHECKING:\n    x = 5\n", set()),
        ("def __repr__(self):\n    return a < b\n", set()),
        ("log.debug(a, b)\n", {"log.debug(b, a)\n"}),
        ("x = zip(a, strict=True)\n", set()),
    ],
)  # fmt: skip
def test_operators(text: str, expected: set[str]) -> None:
    assert after(text) == expected
    for made in after(text):
        ast.parse(made)


def test_places_are_of_characters_and_not_of_bytes() -> None:
    assert after("x = 'äöü', a < b\n") == {"x = 'äöü', a >= b\n", "x = 'äöü', a <= b\n"}


def test_the_same_is_drawn_every_time_and_after_a_move(texts: dict[str, str]) -> None:
    some = [
        Source(name, text)
        for name, text in texts.items()
        if name.startswith("aprfmt/checks/file/") and name.endswith(".py")
    ]
    first = drawn(some, 20)
    assert first == drawn(some, 20) and len({each.id for each in first}) == 20
    moved = [Source(source.path.replace("checks/", "checks/new/"), source.text) for source in some]
    assert {each.id for each in drawn(moved, 20)} == {each.id for each in first}
    assert {each.id for each in drawn(some, 20, seed=1)} != {each.id for each in first}


def test_what_is_drawn_of_the_product_parses(sources: list[Source]) -> None:
    found = drawn(sources)
    texts = {source.path: source.text for source in sources}
    assert len(found) == COUNT >= 120
    assert all(ast.parse(each.applied(texts[each.path])) for each in found)
    assert len({each.path for each in found}) > COUNT / 2, "spread over the product"


# --- blocks ---------------------------------------------------------------------------------

BLOCKS = '''"""Text."""
from __future__ import annotations


def wrap(f):
    return f


@wrap
def choose(a, b=lambda: 7):
    """Text."""
    if a == 1: return "one"
    elif a == 2:
        return "two"
    elif a == 3:
        for i in range(2):
            a += i
    else:
        try:
            a = 1 / b()
        except ZeroDivisionError:
            return "none"
        finally:
            a = 0

    def inner():
        return (lambda: a)()
    return inner()
'''


def test_traced_text_says_which_blocks_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("aprfmt/blocks.py", BLOCKS)
    seen: set[int] = set()
    monkeypatch.setattr(builtins, CALL, seen.add, raising=False)
    made: dict[str, object] = {}
    exec(compile(instrumented(source), "blocks", "exec"), made)
    choose = made["choose"]
    assert callable(choose)

    def ran(*args: object) -> set[str]:
        seen.clear()
        choose(*args)
        found = [block for block in source.blocks if block.number in seen]
        return {source.text[block.start : block.stop].split("\n")[0] for block in found}

    head, tail = 'if a == 1: return "one"', {"def inner():", "return (lambda: a)()", "a"}
    assert ran(1) == {head, 'return "one"'}
    assert ran(2) == {head, 'return "two"'}
    assert ran(3) == {head, "for i in range(2):", "a += i", *tail}
    assert ran(4) == {head, "try:", "a = 1 / b()", "7", "a = 0", *tail}
    assert ran(4, int) == {head, "try:", "a = 1 / b()", 'return "none"', "a = 0"}


def test_every_product_file_can_be_traced(sources: list[Source]) -> None:
    numbers = [block.number for source in sources for block in source.blocks]
    assert len(set(numbers)) == len(numbers) > 5000
    for source in sources[::7]:
        ast.parse(instrumented(source))


def test_who_uses_a_constant() -> None:
    one = Source("aprfmt/a.py", "SIZE = 4\nTABLE = {'x': SIZE}\n\n\ndef f():\n    return 1\n")
    two = Source("aprfmt/b.py", "from aprfmt.a import TABLE\n\n\ndef g():\n    return TABLE\n")
    assert bound(one, one.text.index("4")) == {"SIZE"}
    assert users({"SIZE"}, {"a": one, "b": two}) == {two.blocks[0].number}


# --- running --------------------------------------------------------------------------------


def test_what_runs_ends_when_the_caller_does() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def sleep(seconds: int) -> int | None:
        command = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
        started.append(subprocess.Popen(command, start_new_session=True))
        return wait(started[-1], 600)

    running = in_parallel(2, sleep, [0, 600, 600, 600])
    assert next(running) == 0
    running.close()
    assert len(started) < 4 and all(child.poll() is not None for child in started)


# --- reading a run --------------------------------------------------------------------------

TEST = Known("tests/test_a.py::test_it", 1.0, frozenset())


class Copy:
    """Stands for a copy: gives the runs it was told."""

    def __init__(self, *runs: Ran) -> None:
        self.runs = list(runs)

    def mutated(self, mutation: Mutation) -> "Copy":
        return self

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *args: object) -> None:
        return None

    def pytest(self, where: Sequence[str], task: object, **_: object) -> Ran:
        return self.runs.pop(0)


def judged(*runs: Ran, left: int = 0) -> Verdict:
    chosen = Chosen(((TEST,),), left)
    mutation = Mutation("id", "aprfmt/a.py", 0, "a", "b", "")
    return judge.judge(Copy(*runs), mutation, chosen)  # type: ignore[arg-type]


def test_a_failure_is_a_kill() -> None:
    assert judged(Ran(1, 1.0, (TEST.id,), TEST.id, 1)).by == TEST.id


def test_a_crash_and_a_broken_import_are_kills() -> None:
    crashed, broken = judged(Ran(-11, 1.0, (), TEST.id, 1)), judged(Ran(2, 1.0))
    assert (crashed.ending, crashed.by, crashed.how) == ("killed", TEST.id, "signal 11")
    assert (broken.ending, broken.by) == ("killed", "")


def test_a_hang_counts_only_where_the_clean_test_ends() -> None:
    hang = Ran(None, 100.0, (), TEST.id, 1)
    assert judged(hang, Ran(0, 2.0, ran=1)).how == "hangs"
    assert judged(hang, Ran(0, 60.0, ran=1)).ending == "error"
    assert judged(hang, Ran(None, 100.0)).ending == "error"
    assert judged(Ran(None, 100.0)).ending == "error", "stopped before any test"


def test_what_the_budget_leaves_out_is_a_survivor_that_says_so() -> None:
    row = judged(Ran(0, 1.0, ran=1), left=7)
    assert (row.ending, row.left) == ("survived", 7) and "--budget" in row.how


def test_pytest_in_trouble_is_no_kill() -> None:
    assert judged(Ran(4, 1.0, said="usage")).ending == "error"
