"""Start child processes: by path, isolated, and away from the user's folder.

`python -m` and `python -c` put the working folder first in `sys.path`, so that a `numpy.py` that
lies next to a downloaded model would be run. A child is therefore started with `-I` (no PYTHON*
variables, no script's or working folder in `sys.path`), in the root folder, and is given the search
path of this process without the working folder.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_MAIN = Path(__file__).with_name("child_main.py")
_ROOT = Path(__file__).resolve().parents[2]  # what holds the package


def import_path() -> list[str]:
    """Return `sys.path` for a child process: absolute paths, that of this package first.

    The working folder is left out, also where an empty entry or PYTHONPATH names it, unless the
    package itself is in it.
    """
    here = _real_path(os.curdir)
    found = [str(_ROOT)]
    for entry in sys.path:
        if entry and _real_path(entry) != here and os.path.abspath(entry) not in found:
            found.append(os.path.abspath(entry))
    return found


def start_module(module: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start a module of this package as a program and return the process.

    `arguments` are the program's. Standard input and output are pipes. The child has this process's
    environment, because a worker reads the user's settings and caches.
    """
    return start_file(_MAIN, json.dumps(import_path()), module, *arguments)


def start_file(
    script: Path,
    *arguments: str,
    flags: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    stderr: int | None = None,
    new_session: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start a Python file of this package in isolation and return the process.

    `arguments` are the script's. `flags` are Python's own, besides `-I`. `environment` and `stderr`
    are None for this process's. With `new_session` signals of the terminal do not reach it.
    Standard input and output are pipes. Raises OSError where no process can be started.
    """
    return subprocess.Popen(
        [sys.executable, "-I", *flags, str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
        cwd=os.path.abspath(os.sep),
        start_new_session=new_session,
    )


def start_library_child(script: Path) -> "subprocess.Popen[bytes]":
    """Start a script that runs a library on content of a file, and return the process.

    The script reads its request from stdin and answers on stdout. Nothing comes from the
    environment, the working folder or site hooks (-I -S). Raises OSError where no process can be
    started.
    """
    return start_file(
        script, flags=("-S",), environment={}, stderr=subprocess.DEVNULL, new_session=True
    )


def end_child(child: "subprocess.Popen[bytes]") -> None:
    """Kill a child process, close its pipes and wait for it; nothing is raised.

    Closing writes what is still buffered, which fails where the process has ended already.
    """
    child.kill()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    child.wait()


def _real_path(path: str) -> str:
    """Return a path with links resolved; "" for a working folder that was removed."""
    try:
        return os.path.realpath(path)
    except OSError:
        return ""
