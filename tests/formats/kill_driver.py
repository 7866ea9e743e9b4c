"""Kills writers, as a program of its own: forking is safe in a process without threads.

`python -m tests.formats.kill_driver {calls,random,SIGTERM,SIGINT} SUBJECT FOLDER [KILLS]` prints a
JSON list with one record for each kill; a failed check ends it with a traceback. SUBJECT is a
scenario of `publishing` or a writer of `writers`.
"""

import atexit
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aprfmt.formats import atomic
from aprfmt.formats.atomic import complete_renames, pending_journals, swap_names
from aprfmt.formats.cleanup import install_signal_handlers
from tests.formats.publishing import CALLS, SCENARIOS, Scenario
from tests.formats.writers import VERSIONS, WRITERS, Writer
from tests.patience import PATIENCE

Subject = Scenario | Writer

KILLS = 20
LONGEST = 0.02  # seconds a writer lives at least: some versions are written in it


def in_child(work: Callable[[], None]) -> int:
    """Start `work` in a child process and return its pid; it ends by the usual exit codes."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(PATIENCE)  # whatever happens, no writer outlives its test
    code = 0
    try:
        work()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as leaving:
        code = int(str(leaving.code))
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        code = 99
    atexit._run_exitfuncs()
    os._exit(code)


def check(scenario: Subject, root: Path, versions: set[int], record: dict[str, Any]) -> None:
    """Verify that `root` holds one of `versions`, whole, and that the next run leaves it tidy."""
    target = scenario.target(root)
    record["pending"] = len(pending_journals(target))
    record["litter"] = len(scenario.litter(root))
    if record["pending"]:
        complete_renames(target)
        assert pending_journals(target) == []
    record["version"] = scenario.version_of(root)
    assert not versions or record["version"] in versions, record
    scenario.write(root, 1)
    assert scenario.version_of(root) == 1
    assert scenario.litter(root) == [], scenario.litter(root)


def kill_at_every_call(scenario: Subject, root: Path) -> list[dict[str, Any]]:
    """Write version 2 over 1 and die right before the n-th system call, for every n."""
    records: list[dict[str, Any]] = []
    for n in itertools.count(1):
        status = os.waitpid(in_child(lambda n=n: _write_and_die(scenario, root, n)), 0)[1]  # type: ignore[misc]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert scenario.version_of(root) == 2
            return records
        record = {"n": n}
        check(scenario, root, {1, 2}, record)
        records.append(record)
    raise AssertionError


def _write_and_die(scenario: Subject, root: Path, n: int) -> None:
    calls = itertools.count(1)

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    assert "swap_names" in vars(atomic)
    vars(atomic)["swap_names"] = dying(swap_names)
    scenario.write(root, 2)


def signal_at_random(
    scenario: Subject, root: Path, number: int, kills: int
) -> list[dict[str, Any]]:
    """Write version after version and send a signal at a random moment, `kills` times."""
    seed = random.Random(7)
    began = time.monotonic()
    scenario.write(root, 1)
    longest = max(LONGEST, 2 * (time.monotonic() - began))
    records: list[dict[str, Any]] = []
    for kill in range(kills):
        ready, started = os.pipe()

        def writes(started: int = started) -> None:
            install_signal_handlers()
            os.write(started, b"!")
            for version in itertools.count(2):
                scenario.write(root, version)

        pid = in_child(writes)
        os.read(ready, 1)  # before that, Python's own code after a fork would swallow the signal
        os.close(ready)
        os.close(started)
        time.sleep(seed.uniform(0, longest))
        os.kill(pid, number)
        status = os.waitpid(pid, 0)[1]
        record: dict[str, Any] = {"n": kill, "exit": os.waitstatus_to_exitcode(status)}
        check(scenario, root, set(), record)
        records.append(record)
    return records


def main() -> None:
    """Run one experiment."""
    what, name, folder, *rest = sys.argv[1:]
    kills = int(rest[0]) if rest else KILLS
    root = Path(folder)
    scenario: Subject = SCENARIOS[name] if name in SCENARIOS else WRITERS[name]
    # Started in a shell's background, SIGINT would be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fsync = lambda fd: None  # a kill loses nothing that was written; only a power cut does
    if isinstance(scenario, Writer):
        for version in VERSIONS:
            scenario.expected(version)  # in peace, and everything is imported before the first fork
    scenario.prepare(root)
    if what == "calls":
        records = kill_at_every_call(scenario, root)
    else:
        number = signal.SIGKILL if what == "random" else signal.Signals[what]
        records = signal_at_random(scenario, root, number, kills)
    print(json.dumps(records))


if __name__ == "__main__":
    main()
