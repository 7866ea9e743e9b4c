"""What a site is: a host, a hub repository or a bucket that gives bytes of its files by range."""

import hashlib
import re
from dataclasses import dataclass
from typing import Protocol

from aprfmt.errors import RemoteError

FIRST = 128 << 10  # bytes of a file's first answer: most headers, and all small files


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a site says of a file.

    `tag` is compared on every answer: the ETag, and the date where that is not a strong one.
    `identity` names these very bytes for ever, at the endpoint that gave them, so that ranges of
    them may be kept on disk; "" where nothing does, and where an unchanged `tag` proves nothing.
    `sha256` is the digest that the site publishes, "" without one.
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


def identity_of(*facts: str | int) -> str:
    """Return what names bytes for ever, of all facts that do: endpoint, name, tag or digest, size.

    It is a digest: addresses may hold signatures, and this goes into files.
    """
    text = "\0".join(map(str, facts))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Site(Protocol):
    """A root under which files have names."""

    def facts(self, inner: str) -> FileFacts | None:
        """Return what is known of a file, None if the site has no file of that name."""
        ...

    def is_folder(self, inner: str) -> bool:
        """Say whether files lie below that name."""
        ...

    def names(self, inner: str) -> list[str]:
        """Return the names of the files in a folder; none where the site has no lists."""
        ...

    def lists(self, inner: str) -> bool:
        """Say whether a folder's files are known without asking for each, or the user named it."""
        ...

    def first(self, inner: str) -> tuple[FileFacts, bytes]:
        """Return what is known of a file, and its first FIRST bytes; RemoteError without it."""
        ...

    def fetch(self, inner: str, facts: FileFacts, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop); one request. RemoteError where the file has changed."""
        ...

    def one_pass(self, inner: str, facts: FileFacts) -> str:
        """Return the SHA-256 of the file as one answer brings it, whatever came before."""
        ...


def not_found_error(where: str) -> RemoteError:
    """Return the error of a file that is not there."""
    return RemoteError(f"{where}: the site has no such file; check the address")


def require_answer(found: tuple[FileFacts, bytes] | None, where: str) -> tuple[FileFacts, bytes]:
    """Return a first answer; RemoteError where there was none."""
    if found is None:
        raise not_found_error(where)
    return found


def changed_error(where: str, what: str, found: object, expected: object) -> RemoteError:
    """Return the error of a file whose bytes are not those of its first answer any more."""
    return RemoteError(
        f"{where}: changed while it was read ({what} is {found}, it was {expected}); start again"
    )
