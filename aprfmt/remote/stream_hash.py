"""Computes SHA-256 and CRC-32 of a remote file from its bytes as others fetch them.

Bytes that come in the file's order are counted at once; others wait, up to HELD of them. What never
came, or came too early, is fetched at the end.
"""

import hashlib
import heapq
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.crc import crc32
from aprfmt.errors import RemoteError
from aprfmt.remote.paths import RemotePath
from aprfmt.remote.site import changed_error

if TYPE_CHECKING:
    from aprfmt.remote.remote_file import RemoteFile

HELD = 192 << 20  # bytes that wait: more than are fetched ahead


class StreamHash:
    """The digest of one remote file, computed from its opening on; `stop` ends it."""

    def __init__(self, file: "RemoteFile") -> None:
        """Start with the bytes that the file has in memory, and take all that it fetches."""
        self._file, self._digest = file, hashlib.sha256()
        self.crc = 0  # of the bytes so far
        self._judged = ""  # the digest that was compared
        self._turn = threading.Lock()
        self._waiting: list[tuple[int, int, memoryview]] = []
        self._held = self._came = self._at = 0
        file.observe(self.take)
        self.take(0, file.head(0))

    def take(self, start: int, data: memoryview) -> None:
        """Add bytes of the file from `start` on; any thread may add them, in any order, also twice.

        Bytes that come too early wait for those before them; beyond HELD waiting bytes they are
        ignored, and `complete` fetches them again.
        """
        with self._turn:
            if start > self._at and self._held + len(data) > HELD:
                return
            self._came += 1
            heapq.heappush(self._waiting, (start, self._came, data))
            self._held += len(data)
            while self._waiting and self._waiting[0][0] <= self._at:
                first, _, piece = heapq.heappop(self._waiting)
                self._held -= len(piece)
                if first + len(piece) > self._at:
                    self._digest.update(piece[self._at - first :])
                    self.crc = crc32(piece[self._at - first :], self.crc)
                    self._at = first + len(piece)

    @property
    def done(self) -> bool:
        """Whether every byte of the file was added."""
        return self._at >= self._file.size

    def complete(self) -> None:
        """Fetch and add the bytes that were not added yet."""
        while not self.done:
            with self._turn:
                stop = self._waiting[0][0] if self._waiting else self._file.size
            at = self._at
            for window in self._file.windows(at, stop):
                self.take(at, window)
                at += len(window)

    def result(self) -> str:
        """Return the SHA-256 in hexadecimal, after fetching the bytes that were not added yet.

        Where nothing proves that the answers are of one version, the file is fetched once more by
        one request. Raises RemoteError where that, or the site, has another digest.
        """
        if self._judged:
            return self._judged
        self.complete()
        found, published = self._digest.hexdigest(), self._file.sha256
        if published and published != found:
            raise RemoteError(
                f"{self._file.path}: its bytes as they were fetched have SHA-256 {found}, the site "
                f"publishes {published}; try again"
            )
        if not published and not self._file.proven and (again := self._file.one_pass()) != found:
            raise changed_error(str(self._file.path), "its SHA-256 by one answer", again, found)
        self._judged = found
        return found

    def check(self) -> None:
        """Raise what `result` raises (RemoteError) if every byte was added; else do nothing."""
        if self.done:
            self.result()

    def stop(self) -> None:
        """Take no more bytes, and close the file."""
        self._file.observe(None)
        self._file.close()


def hash_fetched_files(files: Sequence[Path]) -> dict[Path, StreamHash]:
    """Return {path: hash} of remote files, computed from their bytes as they are fetched.

    {} where all files are local. The caller stops each.
    """
    fetched = [path for path in files if isinstance(path, RemotePath)]
    if not fetched:
        return {}
    from aprfmt.remote.remote_file import RemoteFile

    return {path: StreamHash(RemoteFile(path)) for path in fetched}


@contextmanager
def checked_by_published_digests(files: Sequence[Path]) -> Iterator[None]:
    """Inside the `with`, hash remote files as they are read, and check the digests at its end.

    What was not read inside is fetched at the end. Raises RemoteError where a digest is not the
    SHA-256 that the site publishes. Files on this machine and those without a published digest
    are not looked at.
    """
    published = [path for path in files if isinstance(path, RemotePath) and _has_digest(path)]
    hashes = hash_fetched_files(published).values()
    try:
        yield
        for each in hashes:
            each.result()
    finally:
        for each in hashes:
            each.stop()


def _has_digest(path: RemotePath) -> bool:
    """Return whether the site publishes the SHA-256 of a file."""
    from aprfmt.remote.remote_file import open_object

    return bool(open_object(path).facts.sha256)
