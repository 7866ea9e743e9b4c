"""Pytest inside a copy: runs chosen tests, or notes which blocks of the product each test runs.

The file named by APRFMT_MUTATIONS says which: {"mode": "judge", "tests": [...]} runs those alone;
{"mode": "map", "into": folder} writes a file for each test file.
"""

import functools
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

MEMORY = 12 << 30  # bytes of data: a mutation that takes more and more comes to an end


class Judge:
    """Run the tests of the task, and say which runs and which failed."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.wanted = set(task["tests"])
        self.path = Path(task["said"])
        self.found: dict[str, Any] = {"failed": [], "current": "", "ran": 0}

    def say(self) -> None:
        """Write it down, for whoever stops this process."""
        self.path.write_text(json.dumps(self.found))

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the wanted tests."""
        out = [item for item in items if item.nodeid not in self.wanted]
        items[:] = [item for item in items if item.nodeid in self.wanted]
        config.hook.pytest_deselected(items=out)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Remember what runs."""
        self.found["current"] = nodeid
        self.found["ran"] += 1
        self.say()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember what failed."""
        if report.failed:
            self.found["failed"].append(report.nodeid)
            self.say()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember a file that cannot be imported: with -x its exit code is that of a failure."""
        if report.failed:
            self.found["failed"].append(report.nodeid)
            self.say()


class Map:
    """Note seconds, outcome and blocks of each test; a file is written when its last test ended.

    What a fixture of several tests runs belongs to all of them, and what a cached function of
    ours ran when it was called first belongs to whoever calls it.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.into = Path(task["into"])
        self.children = Path(task["seen"])
        self.blocks: set[int] = set()
        self.fixtures: dict[Any, frozenset[int]] = {}
        self.outcome = "passed"
        self.tests: dict[str, tuple[float, str, frozenset[int]]] = {}

    def start(self) -> None:
        """Begin to note; before any test is imported."""
        from aprfmt import _seen  # type: ignore[attr-defined]

        self.blocks = _seen.in_memory()
        functools.lru_cache = remembering(self.blocks)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Keep what a fixture of a wider scope ran."""
        if fixturedef.scope == "function":
            return (yield)
        outer = set(self.blocks)
        self.blocks.clear()
        try:
            return (yield)
        finally:
            self.fixtures[fixturedef] = frozenset(self.blocks | self._from_children())
            self.blocks |= outer

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Add what the fixtures that a test used ran, whoever used them first."""
        request = getattr(item, "_request", None)
        for used in getattr(request, "_fixture_defs", {}).values():
            self.blocks |= self.fixtures.get(used, frozenset())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember how the running test ends."""
        if report.failed or (report.skipped and self.outcome == "passed"):
            self.outcome = report.outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        """Note one test."""
        self.blocks.clear()
        self._from_children()
        self.outcome, began = "passed", _worked()
        done = yield
        seconds = _worked() - began
        found = frozenset(self.blocks | self._from_children())
        self.tests[item.nodeid] = (round(seconds, 3), self.outcome, found)
        if nextitem is None or nextitem.path != item.path:
            name = item.nodeid.partition("::")[0]
            (self.into / f"{name.replace('/', '+')}.json").write_text(self._written(name))
            self.tests = {}
        return done

    def _from_children(self) -> set[int]:
        """Take what processes of the test have noted."""
        found: set[int] = set()
        for path in self.children.iterdir():
            found.update(map(int, path.read_text().split()))
            path.unlink()
        return found

    def _written(self, name: str) -> str:
        """Return the file of one test file: sets of blocks, which many tests share, stand once."""
        blocks = sorted(set[int]().union(*(found for _, _, found in self.tests.values())))
        number = {block: i for i, block in enumerate(blocks)}
        sets = {found: i for i, found in enumerate({row[2]: None for row in self.tests.values()})}
        return json.dumps(
            {
                "file": name,
                "blocks": blocks,
                "sets": [sorted(number[block] for block in found) for found in sets],
                "tests": {
                    test: [s, how, sets[found]] for test, (s, how, found) in self.tests.items()
                },
            }
        )


def _worked() -> float:
    """Return seconds of processor time, of ended children too: a busy machine changes little."""
    return time.process_time() + sum(os.times()[2:4])


def remembering(blocks: set[int]) -> Callable[..., Any]:
    """Return an `lru_cache` that notes for every call what ran when the value was made."""
    real, here = functools.lru_cache, os.getcwd() + os.sep

    def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
        def cached(function: Callable[..., Any]) -> Any:
            code = getattr(function, "__code__", None)
            if code is None or not code.co_filename.startswith(here):
                return real(size, typed)(function)

            def make(*args: Any, **named: Any) -> tuple[Any, Iterable[int]]:
                outer = set(blocks)
                blocks.clear()
                try:
                    value = function(*args, **named)
                    return value, frozenset(blocks)
                finally:
                    blocks.update(outer)

            kept = real(size, typed)(make)

            @functools.wraps(function)
            def call(*args: Any, **named: Any) -> Any:
                value, ran = kept(*args, **named)
                blocks.update(ran)
                return value

            for name in ("cache_clear", "cache_info", "cache_parameters"):
                setattr(call, name, getattr(kept, name))
            return call

        size = 128 if callable(maxsize) else maxsize
        return cached(maxsize) if callable(maxsize) else cached

    return lru_cache


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Take up the task, before anything of ours is imported."""
    task = json.loads(Path(os.environ["APRFMT_MUTATIONS"]).read_text())
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, hard))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    if task["mode"] == "judge":
        early_config.pluginmanager.register(Judge(task))
    elif task["mode"] == "map":
        traced = Map(task)
        traced.start()
        early_config.pluginmanager.register(traced)
