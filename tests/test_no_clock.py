"""No test is decided by the clock: a static check that nothing in the tests measures or waits.

What only ends a hang waits for tests.patience.PATIENCE. Seen red: a wait of 20 s for three threads,
a bound of 5.7 s on processor time, a sleep of 10 ms in which threads were to start.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Programs beside the tests, whose work is to measure or to run long.
NO_TESTS = ("tests/benchmarks/", "tests/long/", "tests/__main__.py")
# (file, what is used) -> why it decides nothing
ALLOWED = {
    ("tests/formats/kill_driver.py", "time.monotonic"): "how long to draw random moments from",
    ("tests/formats/kill_driver.py", "time.sleep"): "a random moment; the same is owed at each",
    ("tests/formats/test_atomic.py", "time.time"): "the age a file is given, a day and more",
    ("tests/fuzz/contract.py", "time.process_time"): "judged by `python -m tests.fuzz` alone",
    ("tests/robustness/pickle_corpora.py", "time.process_time"): "a program: what is slow is told",
    ("tests/field/judge.py", "time.perf_counter"): "how long an answer took, to be told",
    ("tests/cli/browser.py", "time.monotonic"): "the end of PATIENCE",
    ("tests/agents/play.py", "time.monotonic"): "how long an answer took, to be told",
    ("tests/tokenizer/test_template_engines.py", "time.sleep"): "between looks, until PATIENCE",
    ("tests/mutations/plugin.py", "time.process_time"): "what a test costs: quick ones run first",
    ("tests/mutations/workcopy.py", "time.monotonic"): "how long a run took, to be told",
}
CLOCKS = frozenset(
    "time.sleep time.time time.time_ns time.monotonic time.monotonic_ns time.perf_counter "
    "time.perf_counter_ns time.process_time time.thread_time resource.RLIMIT_CPU".split()
)
WAITS = ("timeout", "deadline")  # arguments
_WORDS = ("time.", "from time", "timeout", "deadline", "alarm", "RLIMIT_CPU")  # of what is found


def uses(text: str) -> Iterator[str]:
    """Yield every clock a source text reads, and every wait of so many seconds in it."""
    if not any(word in text for word in _WORDS):
        return  # most files: a tree of each costs seconds
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in CLOCKS:
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield "from time import"
        if isinstance(node, ast.Call):
            alarm = ast.unparse(node.func) == "signal.alarm"
            waits = [word.value for word in node.keywords if word.arg in WAITS]
            for value in [*waits, *(node.args if alarm else ())]:
                if isinstance(value, ast.Constant) and value.value is not None:
                    yield ast.unparse(node.func)


FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py"))


def test_no_test_asks_the_clock() -> None:
    found = {
        (file, use)
        for file in FILES
        if not file.startswith(NO_TESTS)
        for use in uses(Path(ROOT, file).read_text())
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize("text", [
    "time.sleep(0.01)", "assert time.perf_counter() - began < 2", "run(x, timeout=60)",
    "settings(deadline=200)", "signal.alarm(30)", "from time import sleep",
    "threading.Barrier(3, timeout=20)", "setrlimit(resource.RLIMIT_CPU, (2, 3))",
])  # fmt: skip
def test_the_check_sees_a_clock(text: str) -> None:
    assert list(uses(text))


@pytest.mark.parametrize("text", ["run(x, timeout=PATIENCE)", "settings(deadline=None)", "x.time"])
def test_the_check_lets_the_rest_pass(text: str) -> None:
    assert not list(uses(text))
