"""Discards unfinished outputs whenever the program ends, whatever ends it."""

import atexit
import os
import signal
import threading
from types import FrameType
from typing import NoReturn, Protocol


class Unpublished(Protocol):
    """An output that was neither published nor discarded, with the process that opened it."""

    pid: int

    def discard(self) -> None:
        """Remove the files of the output."""
        ...


# An interrupt may come between the last line of a `with` block and the first line of `__exit__`:
# then what is here is discarded when the program ends.
OPEN: set[Unpublished] = set()


@atexit.register
def discard_open() -> None:
    """Discard every output of this process that is neither published nor discarded."""
    for files in list(OPEN):
        if files.pid == os.getpid():  # a forked child must not remove its parent's files
            files.discard()


def install_signal_handlers() -> None:
    """Let SIGTERM and SIGHUP (a closed terminal) raise SystemExit, so that outputs clean up.

    The exit codes are 143 and 129. Signals already ignored or handled are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may install handlers

    def raise_exit(number: int, frame: FrameType | None) -> NoReturn:
        """Raise SystemExit with 128 plus the signal's number."""
        raise SystemExit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, raise_exit)
