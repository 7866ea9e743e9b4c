"""Kills conversions that may be continued, as a program of its own: forking needs no threads.

`python -m tests.conversion.resume_driver SUBJECT FOLDER KILLS` kills with SIGKILL at random
moments, continues until the conversion is through, and begins another one until there were so many
kills. It prints a JSON list, a record for each kill; a failed check ends it with a traceback.

A moment is a system call of the run, drawn at random: the process ends right before it, and of a
write half is done.
"""

import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from aprfmt.conversion import convert
from tests.conversion.folders import llama_folder
from tests.formats.kill_driver import in_child
from tests.formats.writers import contents

CALLS = ("open", "write", "replace", "rename", "mkdir", "ftruncate", "unlink", "rmdir", "fsync",
         "lseek", "pwrite", "copy_file_range")  # fmt: skip
# Name of the output, and the options: one file, a split, a folder; copied and encoded again.
SUBJECTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "file": ("x.gguf", {}),
    "checked": ("x.apr", {}),
    "quantized": ("x.gguf", {"quantize": "Q8_0"}),
    "split": ("x.gguf", {"max_shard_size": 60_000}),
    "folder": ("x", {"encoding": "F16", "max_shard_size": 60_000}),
    "jobs": ("x.gguf", {"quantize": "Q8_0", "jobs": 2}),
    "jobs_split": ("x.apr", {"encoding": "F16", "max_shard_size": 60_000, "jobs": 2}),
    "jobs_copied": ("x.apr", {"max_shard_size": 60_000, "jobs": 3, "complete": False}),
}


def run(subject: str, source: Path, root: Path) -> None:
    """Convert once, continuing what is there."""
    name, options = SUBJECTS[subject]
    convert(source, root / name, resume=True, **options)


def killed(n: int, subject: str, source: Path, root: Path) -> None:
    """Convert, and die at the n-th system call."""
    die_at(n)
    run(subject, source, root)


def die_at(n: int) -> None:
    """Let the process end at its n-th system call; half of a write is done then."""
    calls = itertools.count(1)

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == n:
                if name in ("write", "pwrite"):
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, dying(name, getattr(os, name)))


def count_calls(work: Callable[[], None]) -> int:
    """Return how many system calls `work` makes."""
    made = itertools.count()
    reals = {name: getattr(os, name) for name in CALLS}

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            next(made)
            return real(*args, **kwargs)

        return call

    try:
        for name, real in reals.items():
            setattr(os, name, counting(real))
        work()
    finally:
        for name, real in reals.items():
            setattr(os, name, real)
    return next(made)


def main() -> None:
    """Run one experiment."""
    subject, folder, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.fsync = lambda fd: None  # a kill loses nothing that was written; only a power cut does
    folder.mkdir()
    source = llama_folder(folder / "source", "BF16", layers=3)
    seed = random.Random(11)
    whole = folder / "whole"
    whole.mkdir()
    total = count_calls(lambda: run(subject, source, whole))
    expected = contents(whole)
    records: list[dict[str, Any]] = []
    for attempt in itertools.count():
        root = folder / str(attempt)
        root.mkdir()
        while True:
            n = seed.randint(1, total) if len(records) < kills else 1 << 60
            status = os.waitpid(in_child(partial(killed, n, subject, source, root)), 0)[1]
            code = os.waitstatus_to_exitcode(status)
            if code != -signal.SIGKILL:
                break
            name = SUBJECTS[subject][0]
            records.append({"attempt": attempt, "call": n, "there": (root / name).exists()})
            if (root / name).is_file():
                assert (root / name).read_bytes() == expected[name], (
                    "put in place before it was whole"
                )
        if code == 99 and finished(root, expected):
            code = 0  # it was killed after its very last step: "exists"
        assert code == 0, records[-3:]
        assert contents(root) == expected, records[-3:]
        assert not [path for path in root.iterdir() if path.name.startswith(".")], records[-3:]
        if len(records) >= kills:
            break
    print(json.dumps(records))


def finished(root: Path, expected: Mapping[str, bytes]) -> bool:
    """Say whether a run was killed when nothing was left to do."""
    return contents(root) == expected


if __name__ == "__main__":
    main()
