"""Discards unfinished outputs whenever the program ends, whatever ends it."""

import _thread
import atexit
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn, Protocol

# Exit codes by which a program ends that got a signal, and the signal; Windows has no SIGHUP.
EXITS = {
    128 + getattr(signal, name): getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP")
    if hasattr(signal, name)
}
AGAIN = 0.05  # seconds until a lost signal comes again, outside of what swallowed it


class Unpublished(Protocol):
    """An output until it is published or discarded; `pid` is the process that opened it."""

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
    """Let SIGTERM and SIGHUP (a closed terminal) raise SystemExit, so that outputs are cleaned up.

    The exit codes are 143 and 129. Signals that are ignored or handled already are not changed. An
    exception of a signal or interrupt that is raised in a finalizer, where Python ignores it, is
    raised again.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may install handlers

    def raise_exit(number: int, frame: FrameType | None) -> NoReturn:
        """Raise SystemExit with 128 plus the signal's number."""
        raise SystemExit(128 + number)

    for number in EXITS.values():
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, raise_exit)
    if not isinstance(sys.unraisablehook, RepeatedSignals):
        sys.unraisablehook = RepeatedSignals()


class RepeatedSignals:
    """A hook for exceptions that Python ignores; that of a signal has the signal sent again.

    Python only reports what is raised in `__del__` and in callbacks of weak references
    (`sys.unraisablehook`), such as those of the threads that it keeps: Ctrl-C would do nothing.
    """

    def __init__(self) -> None:
        """Store the present hook, which reports all other exceptions."""
        self._report = sys.unraisablehook

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Report an ignored exception, or have its signal sent again."""
        error = unraisable.exc_value
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
        if isinstance(error, SystemExit) and error.code in EXITS:
            number = EXITS[error.code]
        if number is None:
            self._report(unraisable)
        else:  # a finalizer may run while the locks of `threading` are held
            _thread.start_new_thread(_send_again, (number,))


def _send_again(number: int) -> None:
    """Send a signal to this process once more, after AGAIN seconds.

    Its first exception may have been raised where Python ignores it, as in a weak reference's
    callback.
    """
    time.sleep(AGAIN)
    os.kill(os.getpid(), number)
