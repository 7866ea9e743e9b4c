"""Has the disk hold a file's first bytes while more are written; the sync at the end finds little.

Having the system begin to write (Linux's sync_file_range) is not enough where a disk keeps what it
was given in a cache of its own: only a sync empties that. So a thread syncs, again and again. Where
there is no fdatasync (Windows, macOS), nothing happens.
"""

import os
import threading

_SYNC = getattr(os, "fdatasync", None)


class BackgroundSync:
    """Syncs of one open file, one at a time, beside the threads that write it."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._running: threading.Thread | None = None
        self._error: OSError | None = None

    def begin(self, fd: int) -> bool:
        """Have a thread sync a file, unless one does; say whether one was begun.

        Raises the OSError of the one before: the system tells of a lost write once.
        """
        if _SYNC is None:
            return True
        with self._turn:
            if self._running is not None and self._running.is_alive():
                return False
            self._tell()
            self._running = threading.Thread(
                target=self._sync, args=(fd,), name="aprfmt-sync", daemon=True
            )
            self._running.start()
            return True

    def end(self) -> None:
        """Wait for the last one, so that the file can be closed; raises its OSError."""
        with self._turn:
            if self._running is not None:
                self._running.join()
            self._tell()

    def _sync(self, fd: int) -> None:
        assert _SYNC is not None
        try:
            _SYNC(fd)
        except OSError as error:
            self._error = error

    def _tell(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
