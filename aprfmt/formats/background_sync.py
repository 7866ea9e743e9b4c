"""Syncs a file's first bytes to disk while more are written, so that the last sync is short.

Having the system begin to write (Linux's sync_file_range) is not enough where a disk keeps what
it was given in a cache of its own: only a sync empties that. So a thread syncs, again and again.
Where there is no fdatasync (Windows, macOS), nothing happens.
"""

import os
import threading

_SYNC = getattr(os, "fdatasync", None)


class BackgroundSync:
    """Syncs of one open file, one at a time, in a thread other than those that write."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._running: threading.Thread | None = None
        self._error: OSError | None = None

    def begin(self, fd: int) -> bool:
        """Start a thread that syncs the file, unless one is running; return whether it started.

        True where the system cannot do it. Raises the OSError of the sync before: the system
        reports a lost write once.
        """
        if _SYNC is None:
            return True
        with self._turn:
            if self._running is not None and self._running.is_alive():
                return False
            self._raise_error()
            self._running = threading.Thread(
                target=self._sync, args=(fd,), name="aprfmt-sync", daemon=True
            )
            self._running.start()
            return True

    def end(self) -> None:
        """Wait for the running sync, so that the file can be closed; raises its OSError."""
        with self._turn:
            if self._running is not None:
                self._running.join()
            self._raise_error()

    def _sync(self, fd: int) -> None:
        """Sync the file; an OSError is stored, to be raised by the next call."""
        assert _SYNC is not None
        try:
            _SYNC(fd)
        except OSError as error:
            self._error = error

    def _raise_error(self) -> None:
        """Raise the stored OSError of an earlier sync, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
