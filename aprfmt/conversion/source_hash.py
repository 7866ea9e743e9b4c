"""The SHA-256 of a source, computed on another thread while its tensors are planned and copied.

It is metadata of the output: a placeholder of the same length stands in the header until the digest
is written over it, before anything is published.
"""

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from aprfmt.tensors.digest import file_sha256

if TYPE_CHECKING:
    from aprfmt.base.protocols import Source

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
        self._pool = ThreadPoolExecutor(1, "aprfmt-hash")
        self._digest = self._pool.submit(_digest, source, self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.append(True)
        self._pool.shutdown(wait=True, cancel_futures=True)
        sys.setswitchinterval(self._turn)

    def done(self) -> bool:
        """Say whether nothing is left to wait for."""
        return self._digest.done()

    def result(self) -> str:
        """Wait for the digest, in hexadecimal; raises what reading the source raised."""
        return self._digest.result()


def _digest(source: "Source", stop: list[bool]) -> str:
    """SHA-256 of the source file; of a set, SHA-256 over its `digest  name` lines in order."""
    digests = [(file_sha256(path, stop), path.name) for path in source.files]
    if len(digests) == 1:
        return digests[0][0]
    lines = "".join(f"{digest}  {name}\n" for digest, name in digests)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()
