"""The start of a process that runs what a file brings: a chat template, a tokenizer."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess


def import_path() -> list[str]:
    """Return the import path that a child is sent with its request: the package's, then ours."""
    return [str(Path(__file__).parents[2]), *map(os.path.abspath, sys.path)]


def start(script: Path) -> "subprocess.Popen[bytes]":
    """Start a script of this package, which reads its request from stdin and answers on stdout.

    Nothing comes from the environment, the working folder or site hooks (-I -S). Raises OSError.
    """
    import subprocess

    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={}, cwd="/", start_new_session=True,
    )  # fmt: skip
