"""Reads byte ranges over HTTP, and checks each answer's headers before its body is read."""

import hashlib
import re
import threading
from collections.abc import Mapping

from aprfmt.base.text_escape import shorten
from aprfmt.errors import RemoteError
from aprfmt.remote import client
from aprfmt.remote.client import Headers
from aprfmt.remote.response_body import content_length
from aprfmt.remote.site import (
    FIRST,
    FileFacts,
    changed_error,
    hash_identity,
    is_strong,
    not_found_error,
)

_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19})")
_DENIED = (401, 403)


class AccessDenied(RemoteError):
    """Raised for status 401 and 403; `headers` are those of the answer."""

    def __init__(self, message: str, headers: Headers) -> None:
        """Store the headers of the answer, which may say why."""
        super().__init__(message)
        self.headers = headers


class NotFoundError(RemoteError):
    """Raised where there is no file at that address."""


class RangeReader:
    """Reads ranges of files by URL; the target of a redirect is used again while it works."""

    def __init__(self) -> None:
        """Start without known redirects."""
        self._final: dict[str, str] = {}
        self._lock = threading.Lock()

    def first(
        self, url: str, where: str, headers: Mapping[str, str], count: int = FIRST
    ) -> tuple[FileFacts, bytes]:
        """Return (facts, first bytes) of the file at `url` by one request of `count` bytes.

        `where` begins messages, `headers` are sent too. Raises RemoteError.
        """
        size = 0

        def check_first(status: int, found: Headers) -> int:
            """Return how many bytes of the answer to read, from its status and headers.

            Sets `size` to the file's. Raises RemoteError if the bytes are not the file's
            beginning.
            """
            nonlocal size
            if status == 416 and _content_range(found)[-1:] == (
                0,
            ):  # of an empty file: no first byte
                return 0
            start, stop, size = _check_range_answer(status, found, where)
            if start != 0 or stop != min(count, size):
                raise _range_error(where, found, f"bytes 0-{min(count, size) - 1}/{size}")
            return stop

        answer = client.CLIENT.get(
            url, where, {**headers, "Range": f"bytes=0-{count - 1}"}, check_first
        )
        with self._lock:
            self._final[url] = answer.url
        tag = _version_tag(answer.headers)
        identity = hash_identity("http", url, tag, size) if is_strong(tag) else ""
        return FileFacts(size, tag, identity), bytes(answer.body)

    def fetch(
        self,
        url: str,
        where: str,
        headers: Mapping[str, str],
        facts: FileFacts,
        start: int,
        stop: int,
    ) -> memoryview:
        """Return bytes [start, stop) of the file at `url`; RemoteError if it does not fit `facts`.

        `headers` are sent with the request; `where` begins messages.
        """
        return self._request_range(url, where, headers, facts, start, stop).body

    def one_pass(self, url: str, where: str, headers: Mapping[str, str], facts: FileFacts) -> str:
        """Return the SHA-256 of the file at `url`, read whole by one request.

        Raises RemoteError if it no longer fits `facts`. `headers` are sent with the request;
        `where` begins messages.
        """
        if not facts.size:
            return hashlib.sha256().hexdigest()
        return self._request_range(url, where, headers, facts, 0, facts.size, hashed=True).sha256

    def _request_range(
        self,
        url: str,
        where: str,
        headers: Mapping[str, str],
        facts: FileFacts,
        start: int,
        stop: int,
        hashed: bool = False,
    ) -> client.Response:
        """Return the answer with bytes [start, stop), or with their digest if `hashed`.

        The target of an earlier redirect is asked first, without the token. Raises RemoteError if
        the file no longer fits `facts`. `where` begins messages.
        """

        def check_range(status: int, found: Headers) -> int:
            """Return how many bytes of the answer to read, from its status and headers.

            Raises RemoteError if they are not bytes [start, stop), or the file has changed.
            """
            begin, end, size = _check_range_answer(status, found, where)
            if size != facts.size:
                raise changed_error(where, "its size", size, facts.size)
            if (tag := _version_tag(found)) != facts.tag:
                what = "its ETag" if '"' in facts.tag + tag else "its date"
                raise changed_error(where, what, _short_tag(tag), _short_tag(facts.tag))
            if (begin, end) != (start, stop):
                raise _range_error(where, found, f"bytes {start}-{stop - 1}/{size}")
            return stop - start

        sent = {**headers, "Range": f"bytes={start}-{stop - 1}"}
        final = self._final.get(url, url)
        if final != url:
            try:
                safe = {name: value for name, value in sent.items() if name != "Authorization"}
                return client.CLIENT.get(final, where, safe, check_range, hashed)
            except (AccessDenied, NotFoundError):
                pass  # a signed address has run out: ask for a new one
        answer = client.CLIENT.get(url, where, sent, check_range, hashed)
        with self._lock:
            self._final[url] = answer.url
        return answer

    def whole(self, url: str, where: str, headers: Mapping[str, str], most: int) -> bytes:
        """Return a small file, or an answer of an API; RemoteError for more than `most` bytes.

        `where` begins messages.
        """

        def check_whole(status: int, found: Headers) -> int:
            """Return how many bytes of the answer to read; -most where it does not say how many.

            Raises RemoteError for more than `most` bytes.
            """
            _check_status(status, found, where, 200)
            length = None if "transfer-encoding" in found else content_length(found)
            if length is None:
                return -most
            if length > most:
                raise RemoteError(f"{where}: answers with {length} bytes; expected at most {most}")
            return length

        return bytes(client.CLIENT.get(url, where, headers, check_whole).body)


def _version_tag(headers: Headers) -> str:
    """Return a strong ETag, else ETag and Last-Modified together: what changes with the file."""
    tag = headers.get("etag", "").strip()
    return tag if is_strong(tag) else f"{tag} {headers.get('last-modified', '').strip()}".strip()


def _short_tag(tag: str) -> str:
    """Return a tag shortened for a message, "absent" for none."""
    return shorten(tag, 80) or "absent"


def _content_range(headers: Headers) -> tuple[int, ...]:
    """Return (first, last, size) of Content-Range, (-1, -1, size) for `*`, () without it."""
    match = _RANGE.fullmatch(headers.get("content-range", "").strip())
    if match is None:
        return ()
    first, last, size = (int(number) if number else -1 for number in match.groups())
    return first, last, size


def _check_status(status: int, headers: Headers, where: str, expected: int) -> None:
    """Raise RemoteError unless the status is `expected` and the body is not compressed.

    Raises NotFoundError for 404 and 410, AccessDenied for 401 and 403. `where` begins messages.
    """
    if status in (404, 410):
        raise NotFoundError(str(not_found_error(where)))
    if status in _DENIED:
        raise AccessDenied(
            f"{where}: the server answers {status}: it wants to know who asks", headers
        )
    if status == 200 and expected == 206:
        raise RemoteError(
            f"{where}: the server sends whole files only (200 to a request for a range), which is "
            "refused; download the file"
        )
    if status != expected:
        raise RemoteError(f"{where}: the server answers {status}; expected {expected}")
    coding = headers.get("content-encoding", "identity")
    if coding != "identity":
        raise RemoteError(
            f"{where}: is sent as {shorten(coding, 40)}; expected the file's own bytes"
        )


def _check_range_answer(status: int, headers: Headers, where: str) -> tuple[int, int, int]:
    """Return (start, stop, size) of an answer's range; RemoteError if it is no range or wrong.

    `where` begins messages.
    """
    _check_status(status, headers, where, 206)
    found = _content_range(headers)
    if len(found) != 3 or not 0 <= found[0] <= found[1] < found[2]:
        raise _range_error(where, headers, "bytes FIRST-LAST/SIZE")
    length = headers.get("content-length")
    if length is not None and length != str(found[1] + 1 - found[0]):
        raise RemoteError(
            f"{where}: Content-Length is {shorten(length, 40)}, Content-Range "
            f"{shorten(headers['content-range'], 80)!r}; the server contradicts itself"
        )
    return found[0], found[1] + 1, found[2]


def _range_error(where: str, headers: Headers, expected: str) -> RemoteError:
    """Return the error of an answer with another Content-Range than was expected.

    `where` begins messages.
    """
    found = shorten(headers.get("content-range", "absent"), 80)
    return RemoteError(f"{where}: Content-Range is {found!r}; expected {expected!r}")
