"""A cache on disk of ranges of remote files, by the identity of the file and the range.

One file a range, its SHA-256 after its bytes, so that a damaged one is fetched again. One run adds
at most half of the limit (of a larger model the last ranges would only replace the first), and the
ranges that were not used for the longest time are removed first.
"""

import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path

from aprfmt.errors import UsageError

FOLDER = "APRFMT_CACHE"  # where; default: aprfmt/ranges in the user's cache folder
LIMIT = "APRFMT_CACHE_SIZE"  # bytes; with 0 nothing is cached
DEFAULT_LIMIT = 2 << 30
_DIGEST = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """Return the folder of the cache: $APRFMT_CACHE, or in the user's cache folder."""
    chosen = os.environ.get(FOLDER)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(chosen) if chosen else Path(home) / "aprfmt" / "ranges"


def cache_limit() -> int:
    """Return the bytes that the cache may hold; UsageError for a limit that is not a number."""
    text = os.environ.get(LIMIT, str(DEFAULT_LIMIT))
    if not text.isdecimal():
        raise UsageError(
            f"{LIMIT}={text!r}: is no number of bytes; expected for example 2000000000"
        )
    return int(text)


class DiskCache:
    """The cached ranges on disk; a disk that fails only means that nothing is cached."""

    def __init__(self) -> None:
        """Start with nothing counted as added; the folder is made when a range is stored."""
        self._lock = threading.Lock()
        self._added = 0

    def get(self, identity: str, start: int, stop: int) -> memoryview | None:
        """Return bytes [start, stop) of the file with this identity, None if not cached.

        A range whose digest is wrong is deleted.
        """
        if not identity or not cache_limit():
            return None
        path = _range_path(identity, start, stop)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        body = memoryview(data)[:-_DIGEST]
        if len(body) != stop - start or hashlib.sha256(body).digest() != data[-_DIGEST:]:
            with suppress(OSError):
                path.unlink()
            return None
        return body

    def put(self, identity: str, start: int, data: memoryview) -> None:
        """Store `data`, the bytes from `start` on; one run adds at most half of the limit.

        `identity` names the version of the file. A file without one is not cached.
        """
        most = cache_limit() // 2
        with self._lock:
            if not identity or self._added + len(data) > most:
                return
            self._added += len(data)
        import tempfile

        path = _range_path(identity, start, start + len(data))
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.write(hashlib.sha256(data).digest())
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        self._trim()

    def _trim(self) -> None:
        """Remove the ranges that were not used for the longest time, until the limit holds."""
        with self._lock, suppress(OSError):
            found = [(path, path.stat()) for path in cache_folder().glob("*/*")]
            total = sum(facts.st_size for _, facts in found)
            for path, facts in sorted(found, key=lambda row: row[1].st_mtime_ns):
                if total <= cache_limit():
                    return
                path.unlink()
                total -= facts.st_size


CACHE = DiskCache()


def _range_path(identity: str, start: int, stop: int) -> Path:
    """Return the path in the cache of bytes [start, stop) of the file with this identity."""
    name = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:40]
    return cache_folder() / name / f"{start}-{stop}"
