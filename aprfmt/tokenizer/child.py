"""The start of a process that runs what a file brings: a chat template, a tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.child_process import start_file

if TYPE_CHECKING:
    import subprocess


def start_library_child(script: Path) -> "subprocess.Popen[bytes]":
    """Start a script of this package, which reads its request from stdin and answers on stdout.

    Nothing comes from the environment, the working folder or site hooks (-I -S). Raises OSError.
    """
    import subprocess

    return start_file(
        script, flags=("-S",), environment={}, stderr=subprocess.DEVNULL, new_session=True
    )
