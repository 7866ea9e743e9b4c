"""The body of an HTTP answer, with its length or chunk sizes checked.

http.client takes `-1` for the length of a chunk, and then reads whatever comes. RFC 9112, 6 and 7,
say what is right.
"""

import re
from collections.abc import Mapping
from http.client import HTTPResponse

from aprfmt.base.text_escape import shorten
from aprfmt.remote.timed_socket import BadAnswer

_NUMBER = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")
_LINE = 4096  # bytes of a chunk's first line, or of a line after the last chunk
_LINES = 100  # lines after the last chunk


def content_length(headers: Mapping[str, str]) -> int | None:
    """Return `headers`' Content-Length, None without one; BadAnswer if it is no number."""
    text = headers.get("content-length")
    if text is None:
        return None
    if _NUMBER.fullmatch(text) is None:
        found = shorten(text, 40)
        raise BadAnswer(f"Content-Length is {found!r}; expected a number of at most 18 digits")
    return int(text)


class ResponseBody:
    """The body of one answer, chunked or of a known length."""

    def __init__(self, response: HTTPResponse, headers: Mapping[str, str]) -> None:
        """Find the length of an answer's body, or that it is chunked.

        Raises BadAnswer for another transfer coding.
        """
        self._file = response.fp
        self._chunked = response.chunked
        coding = headers.get("transfer-encoding", "chunked").strip().lower()
        if coding != "chunked":
            raise BadAnswer(f"Transfer-Encoding is {shorten(coding, 40)!r}; expected chunked")
        self._left = 0 if self._chunked else content_length(headers)  # of a chunk, or of all
        if response.length == 0 and not self._chunked:
            self._left = 0  # an answer without a body: 204, 304
        self._last = False  # the chunk of length 0 came

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes; fewer where the body ends before."""
        if not self._chunked:
            most = count if self._left is None else min(count, self._left)
            data = self._file.read(most)
            self._left = None if self._left is None else self._left - len(data)
            return data
        pieces = []
        while count and self._begin_chunk():
            assert self._left is not None
            piece = self._file.read(min(count, self._left))
            if not piece:
                break
            pieces.append(piece)
            self._left -= len(piece)
            count -= len(piece)
            if not self._left:
                self._read_chunk_end()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def ended(self) -> bool:
        """Return whether the body was read to its end, so that the connection can be reused."""
        if not self._chunked:
            return self._left == 0
        return not self._begin_chunk()

    def _begin_chunk(self) -> bool:
        """Read the next chunk's size line unless within a chunk; return False after the last.

        True too where the connection was lost: then no byte follows. Raises BadAnswer for a line
        that is no size.
        """
        if self._left or self._last:
            return not self._last
        line = self._file.readline(_LINE)
        match = _CHUNK.fullmatch(line)
        if match is None:
            if not line:
                return True  # the connection was lost: what is read next is nothing
            found = shorten(line.decode("latin-1").rstrip("\r\n"), 40)
            raise BadAnswer(f"a chunk begins with {found!r}; expected its length in hexadecimal")
        self._left = int(match[1], 16)
        if not self._left:
            self._last = True
            if all(self._file.readline(_LINE).strip() for _ in range(_LINES)):
                raise BadAnswer(f"more than {_LINES} lines follow the last chunk")
        return not self._last

    def _read_chunk_end(self) -> None:
        """Read the line end after a chunk's bytes; BadAnswer for anything else."""
        if self._file.readline(3) not in (b"\r\n", b"\n", b""):
            raise BadAnswer("a chunk is longer than it says")
