"""What went over the network in this process, and what a user has to be told about it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Traffic:
    """Counts requests, body bytes and the seconds in which at least one request was under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active, self._since = 0, 0.0
        self.reset()

    def reset(self) -> None:
        """Begin to count again."""
        self.requests = self.received = self.cached = 0
        self.seconds = 0.0
        self.told: list[str] = []

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request, and the time until the block ends."""
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
        """Count bytes of bodies that came, and of ranges that lay in the cache on disk."""
        with self._lock:
            self.received += received
            self.cached += cached

    def tell(self, text: str) -> None:
        """Have a line printed on stderr, once."""
        with self._lock:
            if text not in self.told:
                self.told.append(text)

    def facts(self) -> dict[str, Any]:
        """Return the counts as the JSON of commands has them."""
        return {
            "requests": self.requests,
            "bytes": self.received,
            "cached_bytes": self.cached,
            "seconds": round(self.seconds, 3),
        }


TRAFFIC = Traffic()
