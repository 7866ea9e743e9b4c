"""The protocol of a site: a host, a hub repository or a bucket whose files are read by range."""

import hashlib
import re
from dataclasses import dataclass
from typing import Protocol

from aprfmt.errors import RemoteError

FIRST = 128 << 10  # bytes of a file's first answer: most headers, and all small files


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a site says of a file: size, version tag, identity and digest.

    `tag` is compared on every answer: the ETag, and the date where that is not a strong one.
    `identity` is a digest that never stands for other bytes, at the endpoint that gave them, so
    that ranges of them may be cached on disk; "" where there is none, and where an unchanged `tag`
    proves nothing. `sha256` is the digest that the site publishes, "" without one.
    """

    size: int
    tag: str = ""
    identity: str = ""
    sha256: str = ""

    @property
    def proven(self) -> bool:
        """Whether equal tags show that answers are of one version of the file."""
        return bool(self.identity)


_STRONG = re.compile(r'"[\x21\x23-\x7e\x80-\xff]+"')  # RFC 9110, 8.8.3; but one with nothing in it


def is_strong(tag: str) -> bool:
    """Return whether an ETag changes with every byte (RFC 9110, 8.8.1): quoted, without W/."""
    return _STRONG.fullmatch(tag) is not None


def hash_identity(*facts: str | int) -> str:
    """Return a digest of the facts that identify a file's bytes: endpoint, name, tag, size.

    It is a digest because addresses may hold signatures, and it is written into files.
    """
    text = "\0".join(map(str, facts))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Site(Protocol):
    """A host, repository or bucket with files: their facts, listings and bytes.

    `path` is that of a file or folder within the site, of components joined by `/`; "" is the site.
    """

    def facts(self, path: str) -> FileFacts | None:
        """Return the facts of a file, None if the site has no file at that path."""
        ...

    def is_folder(self, path: str) -> bool:
        """Return whether there are files below a path."""
        ...

    def names(self, path: str) -> list[str]:
        """Return the names of the files in a folder; [] where the site cannot list."""
        ...

    def lists(self, path: str) -> bool:
        """Return whether a folder's files are known without requests, or the user named it."""
        ...

    def first(self, path: str) -> tuple[FileFacts, bytes]:
        """Return (facts, first FIRST bytes) of a file; RemoteError where it does not exist."""
        ...

    def fetch(self, path: str, facts: FileFacts, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) by one request; RemoteError where the file has changed."""
        ...

    def one_pass(self, path: str, facts: FileFacts) -> str:
        """Return the SHA-256 of a file, which is read whole by one request.

        Bytes that were fetched before are fetched again.
        """
        ...


def not_found_error(where: str) -> RemoteError:
    """Return the error of a file that does not exist.

    `where` is the address, which begins the message.
    """
    return RemoteError(f"{where}: the site has no such file; check the address")


def require_answer(found: tuple[FileFacts, bytes] | None, where: str) -> tuple[FileFacts, bytes]:
    """Return `found`, the (facts, first bytes) of a file; RemoteError where it is None.

    `where` is the address, which begins the message.
    """
    if found is None:
        raise not_found_error(where)
    return found


def changed_error(where: str, what: str, found: object, expected: object) -> RemoteError:
    """Return the error of a file that has changed since its first answer.

    `what` names the fact that is `found` and was `expected`. `where` is the address, which begins
    the message.
    """
    return RemoteError(
        f"{where}: changed while it was read ({what} is {found}, it was {expected}); start again"
    )
