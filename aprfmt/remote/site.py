"""What a site is: a host, a hub repository or a bucket that gives bytes of its files by range."""

from dataclasses import dataclass
from typing import Protocol

from aprfmt.errors import RemoteError

FIRST = 128 << 10  # bytes of a file's first answer: most headers, and all small files


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a site says of a file.

    `tag` is compared on every answer ("" where the site gives none). `identity` names these very
    bytes for ever, so that ranges of them may be kept on disk; "" where nothing does.
    `sha256` is the digest that the site publishes, "" without one.
    """

    size: int
    tag: str = ""
    identity: str = ""
    sha256: str = ""


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


def missing(where: str) -> RemoteError:
    """Return the error of a file that is not there."""
    return RemoteError(f"{where}: the site has no such file; check the address")


def known(found: tuple[FileFacts, bytes] | None, where: str) -> tuple[FileFacts, bytes]:
    """Return a first answer; RemoteError where there was none."""
    if found is None:
        raise missing(where)
    return found


def changed(where: str, what: str, found: object, expected: object) -> RemoteError:
    """Return the error of a file whose bytes are not those of its first answer any more."""
    return RemoteError(
        f"{where}: changed while it was read ({what} is {found}, it was {expected}); start again"
    )
