"""Files at https:// addresses, and at http:// addresses of this machine.

An address that ends in `/` is a folder: config.json and tokenizer files next to the weights are
requested by name. Any other address is one file, next to which only files are read that it names.
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import unquote, urlunsplit

from aprfmt.errors import UsageError
from aprfmt.remote.address_policy import parse_target, split_url
from aprfmt.remote.ranges import AccessDenied, NotFoundError, RangeReader
from aprfmt.remote.site import FileFacts, require_answer
from aprfmt.remote.sites import SiteSpec

T = TypeVar("T")

# (scheme, host) -> what a user's address said that must not be shown: queries by path, a password
_QUERIES: dict[tuple[str, str], dict[str, str]] = {}
_PASSWORDS: dict[tuple[str, str], str] = {}
_FOLDERS: dict[tuple[str, str], set[str]] = {}


def _parse_address(text: str) -> Sequence[str]:
    """Return an address as [scheme and colon, host, components]; query and login are stored apart.

    Raises UsageError for text that is no address of a file.
    """
    parts, bare = split_url(text), _without_secrets(text)
    if parts is None:
        raise UsageError(f"{bare}: is no address; expected https://HOST/FILE")
    host = parts.netloc.rpartition("@")[2].lower()
    key, path = (f"{parts.scheme}:", host), parts.path.strip("/")
    if not host or ".." in path.split("/"):
        raise UsageError(f"{parts.scheme}://{host}{parts.path}: is no address of a file")
    parse_target(f"{key[0]}//{host}/", bare)  # raises where no request could be made of it
    _store_secret(_QUERIES.setdefault(key, {}), path, parts.query, bare, "query")
    if "@" in parts.netloc:
        login = unquote(parts.netloc.rpartition("@")[0])
        _store_secret(_PASSWORDS, key, login, bare, "name and password")
    if parts.path.endswith("/") or not path:
        _FOLDERS.setdefault(key, set()).add(path)
    return [*key, *(part for part in path.split("/") if part)]


def _without_secrets(text: str) -> str:
    """Return an address without a password and without the query, which may be secret."""
    scheme, _, rest = text.partition("://")
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _store_secret(known: dict[T, str], key: T, found: str, bare: str, what: str) -> None:
    """Store the query or login of an address in `known`; UsageError if another is stored already.

    Two addresses that differ only in these would be read as one file, and be equal. `key` is where
    it is stored, `found` the text, `bare` the address without secrets, `what` the name of it in
    the message.
    """
    if known.setdefault(key, found) != found:
        raise UsageError(
            f"{bare}: was given before with another {what}, which names another file; "
            "read one of them at a time, or download one"
        )


class HttpSite:
    """One host with its scheme as a site."""

    def __init__(self, root: Sequence[str]) -> None:
        """Set the header for the login, if the user's address had one.

        `root` is [scheme and colon, host].
        """
        self._key = root[0], root[1]
        self._ranges = RangeReader()
        self._headers = {}
        if self._key in _PASSWORDS:
            login = b64encode(_PASSWORDS[self._key].encode()).decode("ascii")
            self._headers["Authorization"] = f"Basic {login}"
        self._first: dict[str, tuple[FileFacts, bytes] | None] = {}

    def _url(self, path: str) -> str:
        """Return the URL of a file, with the query that the user's address had."""
        query = _QUERIES.get(self._key, {}).get(path, "")
        return urlunsplit((self._key[0][:-1], self._key[1], "/" + path, query, ""))

    def _address(self, path: str) -> str:
        """Return the address of a file without secrets, for messages."""
        return f"{self._key[0]}//{self._key[1]}/{path}"

    def _first_answer(self, path: str) -> tuple[FileFacts, bytes] | None:
        """Return (facts, first bytes) of a file, requested once; None where it does not exist."""
        if path not in self._first:
            try:
                found = self._ranges.first(self._url(path), self._address(path), self._headers)
            except NotFoundError:
                self._first[path] = None
            except AccessDenied as error:
                raise type(error)(f"{error}; give an address that may be read", {}) from None
            else:
                self._first[path] = found
        return self._first[path]

    def facts(self, path: str) -> FileFacts | None:
        """Return a file's size, version tag and identity; None if it is a folder or missing.

        They come with its first bytes, which opening it will need anyway.
        """
        found = None if self.is_folder(path) else self._first_answer(path)
        return None if found is None else found[0]

    def is_folder(self, path: str) -> bool:
        """Return whether the user gave this address as a folder's, with a slash at its end."""
        return path in _FOLDERS.get(self._key, ())

    def names(self, path: str) -> list[str]:
        """Return []: hosts do not list their files."""
        return []

    def lists(self, path: str) -> bool:
        """Return whether the user gave this folder's address: its files are asked for by name."""
        return self.is_folder(path)

    def first(self, path: str) -> tuple[FileFacts, bytes]:
        """Return (facts, first bytes) of a file; RemoteError where it does not exist."""
        return require_answer(self._first_answer(path), self._address(path))

    def fetch(self, path: str, facts: FileFacts, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a file; RemoteError if it no longer fits `facts`."""
        return self._ranges.fetch(
            self._url(path), self._address(path), self._headers, facts, start, stop
        )

    def one_pass(self, path: str, facts: FileFacts) -> str:
        """Return the SHA-256 of the file, read whole by one request."""
        return self._ranges.one_pass(self._url(path), self._address(path), self._headers, facts)


SITE = SiteSpec(1, HttpSite, _parse_address, first="host")
