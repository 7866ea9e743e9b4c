"""Every fuzz target: under Atheris where it is installed, and under hypothesis everywhere."""

import importlib.util
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from aprfmt.errors import FormatError
from tests.conftest import ROOT, not_run
from tests.fuzz import contract
from tests.fuzz.contract import BrokenPromiseError, Target, judge
from tests.fuzz.mutation import damaged
from tests.fuzz.targets import TARGETS
from tests.patience import PATIENCE

RUNS, ASIDE_RUNS = 10_000, 3_000  # executions; the seed is fixed, so that a finding comes again
EVERY = pytest.mark.parametrize("name", TARGETS)
PEAK = 64 << 20  # bytes beyond the input itself


def fuzz(name: str, folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run the engine on a target in a process of its own."""
    if importlib.util.find_spec("atheris") is None:
        not_run("atheris is not installed (extra: fuzz)")
    # A process inherits the peak memory of the one that started it, here of all tests before: the
    # shell between forks a new one.
    return subprocess.run(
        [
            "sh",
            "-c",
            '"$@"; exit $?',
            "sh",
            sys.executable,
            "-m",
            "tests.fuzz",
            name,
            f"--patience={PATIENCE}",
            f"--cpu-seconds={PATIENCE}",
            f"--corpus={folder / 'corpus'}",
            f"--findings={folder / 'findings'}",
            *options,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE,
        check=False,
    )


@EVERY
def test_atheris_finds_nothing(name: str, tmp_path: Path) -> None:
    runs = ASIDE_RUNS if TARGETS[name].aside else RUNS
    run = fuzz(name, tmp_path, f"--runs={runs}", "--seed=1")
    found = [path.read_bytes() for path in (tmp_path / "findings").glob("*")]
    assert run.returncode == 0, f"{found}\n{run.stderr[-3000:]}"
    executed = re.search(r"number_of_executed_units:\s*(\d+)", run.stderr)
    assert executed is not None and int(executed[1]) >= runs
    # What was discovered beyond the seeds shows that coverage reached the engine.
    assert len(list((tmp_path / "corpus").iterdir())) > len(TARGETS[name].seeds())


def test_atheris_finds_a_parser_that_breaks_its_promise(tmp_path: Path) -> None:
    run = fuzz("tests.fuzz.broken:BROKEN", tmp_path, "--runs=200000", "--seed=1")
    assert run.returncode != 0
    assert "KeyError" in run.stdout + run.stderr
    (finding,) = (tmp_path / "findings").glob("crash-*")
    assert b"}" in finding.read_bytes()


@EVERY
def test_mutations_end_in_content_or_one_error(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()

    @settings(max_examples=150)
    @given(damaged(seeds, [[]] * len(seeds)) | st.binary(max_size=60))
    def run(data: bytes) -> None:
        event("accepted" if judge(target, data) else "refused")

    run()


@EVERY
def test_seeds_are_read_in_little_memory(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    assert any(judge(target, seed) for seed in seeds), "no seed is valid"
    tracemalloc.start()
    try:
        for seed in seeds:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            judge(target, seed)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < PEAK + 12 * len(seed), f"{peak} bytes for {seed[:80]!r}"
    finally:
        tracemalloc.stop()


def broken(error: Exception | None) -> Target:
    def use(data: bytes) -> None:
        if error is not None:
            raise error

    return Target("broken", use, lambda: [b""])


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), MemoryError(), OSError()])
def test_the_contract_lets_no_other_exception_pass(error: Exception) -> None:
    with pytest.raises(type(error)):
        judge(broken(error), b"")


def test_the_contract_refuses_long_and_empty_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("x" * 3000, ""):
        with pytest.raises(BrokenPromiseError, match="a message of"):
            judge(broken(FormatError(text)), b"")
    assert judge(broken(FormatError("a\x1b[2J\u202e\nb")), b"") is False  # escaped where printed
    monkeypatch.setattr(contract, "escape", str)
    for text in ("a\x1b[2J", "a\u202eb", "a\nb", "\ud800"):
        with pytest.raises(BrokenPromiseError, match="not fit to be shown"):
            judge(broken(FormatError(text)), b"")


def test_the_contract_refuses_slow_inputs() -> None:
    assert judge(broken(None), b"") is True
    with pytest.raises(BrokenPromiseError, match="of CPU"):
        judge(broken(None), b"", seconds=-1.0)


def test_the_contract_compares() -> None:
    contract.same({"a": 1}, {"a": 1}, "x")
    with pytest.raises(BrokenPromiseError, match="x: read 1, then 2"):
        contract.same(1, 2, "x")
