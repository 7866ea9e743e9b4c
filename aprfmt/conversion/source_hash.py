"""The SHA-256 of a source, computed on another thread while its tensors are planned and copied.

It is metadata of the output: a placeholder of the same length stands in the header until the digest
is written over it, before anything is published.
"""

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from aprfmt.remote.paths import RemotePath
from aprfmt.tensors.digest import file_sha256

if TYPE_CHECKING:
    from aprfmt.base.protocols import Source
    from aprfmt.remote.passing import PassingHash

PLACEHOLDER = hashlib.sha256(b"aprfmt: the digest of the source is written here").hexdigest()


TURN = 0.001  # seconds after which a thread that waits for the interpreter gets it


class SourceHash:
    """The digest of a source, begun at once; a context manager, which gives it up on leaving.

    It is what a conversion waits for last, and asks for the interpreter between pieces that take
    less than a millisecond: as long as it runs nobody keeps that for Python's usual five.
    """

    def __init__(self, source: "Source") -> None:
        self._stop: list[bool] = []
        self._turn = sys.getswitchinterval()
        sys.setswitchinterval(min(self._turn, TURN))
        self._files, self._passing = source.files, _passing(source)
        self._pool = ThreadPoolExecutor(1, "aprfmt-hash")
        self._digests = None if self._passing else self._pool.submit(_digests, source, self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.append(True)
        for each in self._passing:
            each.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        sys.setswitchinterval(self._turn)

    def done(self) -> bool:
        """Say whether nothing is left to wait for."""
        if self._digests is None:
            return all(each.done for each in self._passing)
        return self._digests.done()

    def result(self) -> str:
        """Wait for the digest, in hexadecimal; raises what reading the source raised.

        Of a set it is the SHA-256 over its `digest  name` lines in order.
        """
        waited = self._digests
        found = [e.result() for e in self._passing] if waited is None else waited.result()
        if len(found) == 1:
            return found[0]
        named = zip(found, self._files, strict=True)
        lines = "".join(f"{digest}  {path.name}\n" for digest, path in named)
        return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _digests(source: "Source", stop: list[bool]) -> list[str]:
    return [file_sha256(path, stop) for path in source.files]


def _passing(source: "Source") -> "list[PassingHash]":
    """Return the digests of files that are fetched, of their bytes as they come to be converted.

    Empty where not all of them are.
    """
    if not all(isinstance(path, RemotePath) for path in source.files):
        return []
    from aprfmt.remote.file import RemoteFile
    from aprfmt.remote.passing import PassingHash

    return [PassingHash(RemoteFile(path)) for path in source.files if isinstance(path, RemotePath)]
