"""Compute the SHA-256 of a source on another thread, while its tensors are planned and copied.

It is metadata of the output: a placeholder of the same length stands in the header until the digest
is written over it, before anything is published.
"""

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from aprfmt.remote.stream_hash import hash_fetched_files
from aprfmt.tensors.digest import file_sha256

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from aprfmt.base.protocols import Source

PLACEHOLDER = hashlib.sha256(b"aprfmt: the digest of the source is written here").hexdigest()


TURN = 0.001  # seconds after which a thread that waits for the interpreter gets it


class SourceHash:
    """The SHA-256 of a source, computed on another thread; a context manager that stops on leaving.

    A conversion waits for it last. Its thread asks for the interpreter after each chunk of less
    than a millisecond, so Python's switch interval is shortened while it runs. Where it is not
    `recorded`, only files that are fetched are read.
    """

    def __init__(self, source: "Source", recorded: bool = True) -> None:
        """Start hashing the source's local files; remote ones are hashed as they are fetched.

        Without `recorded` no digest is wanted: only remote files are watched, for changes.
        """
        self.recorded = recorded
        self._stop: list[bool] = []
        self._turn = sys.getswitchinterval()
        sys.setswitchinterval(min(self._turn, TURN))
        self._files, self._passing = source.files, hash_fetched_files(source.files)
        self._pool = ThreadPoolExecutor(1, "aprfmt-hash")
        here = [path for path in source.files if path not in self._passing]
        self._digests = self._pool.submit(_file_digests, here if recorded else [], self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop hashing, wait for the threads and restore Python's switch interval."""
        self._stop.append(True)
        for each in self._passing.values():
            each.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        sys.setswitchinterval(self._turn)

    def done(self) -> bool:
        """Return whether nothing is left to wait for."""
        return self._digests.done() and all(each.done for each in self._passing.values())

    def check(self) -> None:
        """Raise RemoteError for a fetched file that has changed since, if that can be known."""
        for each in self._passing.values():
            each.check()

    def checksums(self) -> "dict[Path, int]":
        """Return {path: CRC-32} of every fetched file; fetches what was not read yet."""
        for each in self._passing.values():
            each.complete()
        return {path: each.crc for path, each in self._passing.items()}

    def result(self) -> str:
        """Wait for the digest and return it as hex; raises what reading the source raised.

        For several files it is the SHA-256 over their `digest  name` lines in order.
        """
        digests = self._digests.result()
        digests |= {path: each.result() for path, each in self._passing.items()}
        if len(self._files) == 1:
            return digests[self._files[0]]
        lines = "".join(f"{digests[path]}  {path.name}\n" for path in self._files)
        return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _file_digests(files: "Sequence[Path]", stop: list[bool]) -> "dict[Path, str]":
    """Return {path: hex SHA-256} of files; stops early once `stop` is not empty."""
    return {path: file_sha256(path, stop) for path in files}
