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
    from collections.abc import Sequence
    from pathlib import Path

    from aprfmt.base.protocols import Source
    from aprfmt.remote.stream_hash import StreamHash

PLACEHOLDER = hashlib.sha256(b"aprfmt: the digest of the source is written here").hexdigest()


TURN = 0.001  # seconds after which a thread that waits for the interpreter gets it


class SourceHash:
    """The digest of a source, begun at once; a context manager, which gives it up on leaving.

    It is what a conversion waits for last, and asks for the interpreter between pieces that take
    less than a millisecond: as long as it runs nobody keeps that for Python's usual five. Where it
    is not `recorded`, only files that are fetched are looked at.
    """

    def __init__(self, source: "Source", recorded: bool = True) -> None:
        self.recorded = recorded
        self._stop: list[bool] = []
        self._turn = sys.getswitchinterval()
        sys.setswitchinterval(min(self._turn, TURN))
        self._files, self._passing = source.files, _passing(source)
        self._pool = ThreadPoolExecutor(1, "aprfmt-hash")
        here = [path for path in source.files if path not in self._passing]
        self._digests = self._pool.submit(_digests, here if recorded else [], self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.append(True)
        for each in self._passing.values():
            each.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        sys.setswitchinterval(self._turn)

    def done(self) -> bool:
        """Say whether nothing is left to wait for."""
        return self._digests.done() and all(each.done for each in self._passing.values())

    def check(self) -> None:
        """Raise RemoteError for a file that is not of one version, as far as that can be known."""
        for each in self._passing.values():
            each.check()

    def checksums(self) -> "dict[Path, int]":
        """Return the CRC-32 of every fetched file; fetches what did not come by."""
        for each in self._passing.values():
            each.complete()
        return {path: each.crc for path, each in self._passing.items()}

    def result(self) -> str:
        """Wait for the digest, in hexadecimal; raises what reading the source raised.

        Of a set it is the SHA-256 over its `digest  name` lines in order.
        """
        digests = self._digests.result()
        digests |= {path: each.result() for path, each in self._passing.items()}
        if len(self._files) == 1:
            return digests[self._files[0]]
        lines = "".join(f"{digests[path]}  {path.name}\n" for path in self._files)
        return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _digests(files: "Sequence[Path]", stop: list[bool]) -> "dict[Path, str]":
    return {path: file_sha256(path, stop) for path in files}


def _passing(source: "Source") -> "dict[Path, StreamHash]":
    """Return the digests of files that are fetched, of their bytes as they come to be converted."""
    fetched = [path for path in source.files if isinstance(path, RemotePath)]
    if not fetched:
        return {}
    from aprfmt.remote.remote_file import RemoteFile
    from aprfmt.remote.stream_hash import StreamHash

    return {path: StreamHash(RemoteFile(path)) for path in fetched}
