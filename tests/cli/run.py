"""Running the command line in this process or in one of its own."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """Exit code and both streams of one command."""

    code: int
    out: str
    err: str

    @cached_property
    def json(self) -> Any:
        """The one object on stdout, which must fit the schema of its command."""
        from tests.schemas.validation import faults

        found = json.loads(self.out)
        wrong = faults(found)
        assert not wrong, f"aprfmt/schemas does not allow this: {wrong[:5]}"
        return found


def aprfmt(*args: object) -> Done:
    """Run `aprfmt ARGS` in this process."""
    from aprfmt.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(arg) for arg in args])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def process(*args: object, cwd: Path | None = None, timeout: float = PATIENCE) -> Done:
    """Run `aprfmt ARGS` as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "aprfmt", *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    return Done(done.returncode, done.stdout, done.stderr)
