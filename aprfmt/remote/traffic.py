"""Counts the network traffic of this process, and collects lines about it for the user."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Traffic:
    """Counts requests, body bytes and the seconds in which at least one request was under way."""

    def __init__(self) -> None:
        """Start with no request under way and all counts zero."""
        self._lock = threading.Lock()
        self._active, self._since = 0, 0.0
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero."""
        self.requests = self.received = self.cached = 0
        self.seconds = 0.0
        self.told: list[str] = []

    @contextmanager
    def request(self) -> Iterator[None]:
        """Context that counts one request, and the time until it ends.

        Time in which several requests run counts once.
        """
        with self._lock:
            if not self._active:
                self._since = time.monotonic()
            self._active += 1
            self.requests += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                if not self._active:
                    self.seconds += time.monotonic() - self._since

    def count(self, received: int = 0, cached: int = 0) -> None:
        """Add bytes of bodies that were received, and of ranges found in the disk cache."""
        with self._lock:
            self.received += received
            self.cached += cached

    def tell(self, text: str) -> None:
        """Add a line to be printed on stderr once, at the end of the command."""
        with self._lock:
            if text not in self.told:
                self.told.append(text)

    def facts(self) -> dict[str, Any]:
        """Return requests, bytes, cached bytes and seconds as the JSON of commands has them."""
        return {
            "requests": self.requests,
            "bytes": self.received,
            "cached_bytes": self.cached,
            "seconds": round(self.seconds, 3),
        }


TRAFFIC = Traffic()
