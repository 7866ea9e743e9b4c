"""Ends the process with one line when a mapped file is cut while it is read.

The system signals it by SIGBUS, in the middle of whatever reads the page. No exception can be
raised then: a handler of Python's own would never run, as the read is tried again and again. So
the C library calls ours at once, which removes unfinished output, prints the line and exits.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from aprfmt.formats.cleanup import discard_open
from aprfmt.formats.mapped_file import truncated_files, truncation_line

_kept: list[Any] = []  # what the C library calls must outlive everything


def exit_on_truncation(say: Callable[[str], int]) -> None:
    """Have the process exit, from now on, when a mapped file is cut while it is read.

    `say` prints the message and returns the exit code. Does nothing where the system has no such
    signal, or the program handles it itself.
    """
    number = getattr(signal, "SIGBUS", None)
    if number is None or _kept or signal.getsignal(number) != signal.SIG_DFL:
        return
    import ctypes

    def handle_sigbus(_: int) -> None:
        """Discard unfinished outputs, print that a file was cut, and end the process."""
        code = 2
        try:
            discard_open()
            code = say(_sigbus_message())
        finally:
            os._exit(code)  # what was interrupted cannot continue

    try:
        install = ctypes.CDLL(None).signal
    except (AttributeError, OSError, TypeError):
        return
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle_sigbus)
    install.argtypes, install.restype = (ctypes.c_int, type(handler)), ctypes.c_void_p
    _kept.append(handler)
    if threading.current_thread() is threading.main_thread():
        install(number, handler)


def _sigbus_message() -> str:
    """Return the message: which mapped file was cut, or that one cannot be read."""
    found = truncated_files()
    if not found:
        return "a mapped file cannot be read: its disk fails, or it was cut meanwhile; start again"
    return truncation_line(*found[0])
