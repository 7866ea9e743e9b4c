"""A remedy is no string: the printed command is run, and the model it writes is A's.

Seen red: a value of another key in `set`, `convert` of B instead of A.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aprfmt.diagnosis import diagnose
from tests.diagnose.faults import FAULTS, FILES
from tests.diagnose.table import answer

BY_FILE = [fault.name for fault in FILES if not fault.control]


def written(command: str, b: Path, folder: Path) -> Path:
    """Run a command on a copy of B from an empty folder; return what it wrote, or the copy."""
    copy, empty = folder / "b" / b.name, folder / "empty"
    empty.mkdir()
    if b.is_dir():
        shutil.copytree(b, copy)
    else:
        copy.parent.mkdir()
        shutil.copy(b, copy)
    words = shlex.split(command.replace(str(b), str(copy)))
    assert words[0] in ("aprfmt", "mv"), command
    run = [sys.executable, "-m", "aprfmt", *words[1:]] if words[0] == "aprfmt" else words
    done = subprocess.run(run, cwd=empty, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    made = list(empty.iterdir())
    assert len(made) <= 1, made
    return made[0] if made else copy


@pytest.mark.parametrize("name", BY_FILE)
def test_a_remedy_mends_b(name: str, tmp_path: Path) -> None:
    """Where one command is said to mend all causes, it does; else none claims that it does."""
    fault, found = FAULTS[name], answer(name)
    causes = [one for one in found.causes if one.cause]
    commands = {one.remedy.command for one in causes if one.remedy is not None}
    if len(commands) != 1 or any(one.remedy is None for one in causes):
        pytest.skip("no one command is said to mend all of it")
    a, b = fault.make()
    mended = written(commands.pop(), Path(str(b)), tmp_path)
    again = diagnose(str(a), str(mended), **fault.options)
    assert again.verdict in ("same", "precision"), again.sentence
