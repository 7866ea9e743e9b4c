"""Kill writers at every system call and at random moments: old or new, whole, never mixed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aprfmt.formats import temporary_files
from aprfmt.formats.cleanup import install_signal_handlers
from tests.formats.publishing import SCENARIOS
from tests.formats.writers import WRITERS
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
EVERY = pytest.mark.parametrize("scenario", SCENARIOS)
JOURNALED = {"shards", "journal", "inside"}


def drive(what: str, scenario: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Run the driver; its own assertions fail the test."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.formats.kill_driver", what, scenario, str(tmp_path / "x")],
        cwd=ROOT,
        # No threads of numpy's: the driver forks.
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    records: list[dict[str, Any]] = json.loads(run.stdout)
    return records


@EVERY
def test_a_kill_before_each_call_leaves_one_whole_version(scenario: str, tmp_path: Path) -> None:
    records = drive("calls", scenario, tmp_path)
    versions = [record["version"] for record in records]
    assert versions == sorted(versions), "old up to one moment, new from then on"
    assert set(versions) == {1, 2}
    assert any(record["litter"] for record in records), "the kills came while files were written"
    assert any(record["pending"] for record in records) == (scenario in JOURNALED)


@EVERY
def test_a_kill_at_any_moment_leaves_one_whole_version(scenario: str, tmp_path: Path) -> None:
    records = drive("random", scenario, tmp_path)
    assert len(records) == 20
    assert {record["exit"] for record in records} == {-9}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_killed_writer_leaves_one_whole_version(writer: str, tmp_path: Path) -> None:
    records = drive("random", writer, tmp_path)
    assert len(records) == 20
    assert {record["exit"] for record in records} == {-9}


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.parametrize("writer", ["gguf-shards", "hf-shards", "aprt"])
def test_an_interrupted_writer_leaves_no_litter(
    writer: str, name: str, code: int, tmp_path: Path
) -> None:
    records = drive(name, writer, tmp_path)
    assert {record["exit"] for record in records} == {code}
    for record in records:
        assert (record["litter"], record["pending"]) == (0, 0)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
@EVERY
def test_a_signal_that_can_be_caught_leaves_no_litter(
    scenario: str, name: str, code: int, tmp_path: Path
) -> None:
    records = drive(name, scenario, tmp_path)
    assert {record["exit"] for record in records} == {code}
    for record in records:
        assert (record["litter"], record["pending"]) == (0, 0)


def test_signals_are_held_back_and_delivered() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt), temporary_files.delay_signals():
            with temporary_files.delay_signals():
                signal.raise_signal(signal.SIGINT)
            done = True
        assert done
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_that_somebody_set_stay() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        install_signal_handlers()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with pytest.raises(SystemExit) as leaving:
            signal.raise_signal(signal.SIGTERM)
        assert leaving.value.code == 143
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_IN_A_FINALIZER = """
import os, signal, sys, time
from aprfmt.formats.cleanup import install_signal_handlers

class Noted:
    def __del__(self):
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        time.sleep(5)  # the exception comes here, where Python ignores it

signal.signal(signal.SIGINT, signal.default_int_handler)
install_signal_handlers()
try:
    Noted()
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_that_comes_in_a_finalizer_ends_the_program(name: str, code: int) -> None:
    """Seen red without the hook: the program slept on."""
    command = [sys.executable, "-c", _IN_A_FINALIZER, name]
    run = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (code, "")


def test_other_exceptions_of_a_finalizer_are_reported() -> None:
    code = "; ".join(
        (
            "from aprfmt.formats.cleanup import install_signal_handlers as install",
            "install()",
            "install()",
            "type('X', (), {'__del__': lambda self: [][0]})()",
        )
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stderr.count("IndexError") == 1


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGKILL", -9)])
def test_a_whole_command_is_interrupted_and_run_again(
    name: str, code: int, demo_model: Path, tmp_path: Path
) -> None:
    old = tmp_path / "m.gguf"
    old.write_bytes(b"old")
    assert _interrupt(["convert", str(demo_model), str(old), "--force"], name) == code
    assert old.read_bytes() == b"old"
    left = [path.name for path in tmp_path.iterdir() if path != old]
    assert bool(left) == (name == "SIGKILL"), left
    again = ["convert", str(demo_model), str(old), "--force"]
    assert subprocess.run(_command(again), env=_environment(), check=False).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def _interrupt(args: list[str], name: str) -> int:
    """Send a signal to a command that has stopped in the middle of writing; its exit code."""
    with subprocess.Popen(
        _command(args, _STOPS),
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read(1) == b"!", "it ended before it had written so much"
        folder = Path(args[2]).parent
        assert any(path.name.endswith(temporary_files.SUFFIX) for path in folder.iterdir())
        running.send_signal(signal.Signals[name])
        return running.wait(timeout=PATIENCE)


# Says so and waits for a signal once it has written a few pieces.
_STOPS = """
import itertools
from aprfmt.formats.output_file import OutputFile
write, pieces = OutputFile.write, itertools.count(1)
def writes(self, data):
    write(self, data)
    if next(pieces) == 5:
        print("!", end="", flush=True)
        while True:
            signal.pause()
OutputFile.write = writes
"""


def _command(args: list[str], before: str = "") -> list[str]:
    # A shell in the background lets programs ignore SIGINT; this one has it back.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"{before}\n"
        "from aprfmt.cli.main import main; main()"
    )
    return [sys.executable, "-c", code, *args]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
