"""One bounded cursor over a buffer; every parser of the package reads through it.

A length from a file is compared with the bytes that are left before anything is sliced, counted
or allocated. The cursor works on any buffer, so parsers can be tested and fuzzed without files.
"""

import struct
from functools import lru_cache

from aprfmt.base.protocols import Region, RemoteRegion
from aprfmt.errors import FormatError, TruncatedError
from aprfmt.formats.damage import Faults

# Limits, one constant each. They bound memory and time by the file's own size, not by its claims.
MAX_STRING = 64 << 20  # far above any real name, template or JSON value; bounds one slice
MAX_COUNT = 1_000_000  # keys, tensors: a hundred times the largest real model
MAX_ARRAY = 1 << 27  # array elements: 500 times the largest vocabulary
MAX_NESTING = 16  # arrays in arrays; ggml's own writer makes none
MAX_METADATA = 512 << 20  # all metadata together
MAX_HEADER = 100_000_000  # a JSON header, as the safetensors format page says
SLACK = 512 << 10  # fetched beyond what a header is known to have, or a quarter of that
MAX_DIMS = 64  # ggml has 4, APR's writer 8, safetensors no limit; beyond this it is damage


@lru_cache(maxsize=64)
def _compiled_struct(fmt: str) -> struct.Struct:
    """Return the compiled struct of a format string; the last 64 are cached."""
    return struct.Struct(fmt)


def read_prefix(region: Region, stop: int, wish: int = 0) -> memoryview:
    """Return the beginning of a file, at least its first `stop` bytes, as one memory view.

    For a mapped file it is the whole file. For a remote one `wish` bytes are fetched if `stop` are
    not there yet.
    """
    if isinstance(region, memoryview):
        return region
    assert isinstance(region, RemoteRegion)
    return region.head(stop, wish)


class Cursor:
    """Reads forward through `buffer[offset:end]`; `where` names the file in messages.

    Parsers report to `faults` what is wrong with a value that could be read. `size` is that
    of the file. `buffer` is its beginning: all of a mapped file, and at least everything before the
    cursor of a remote one, which is fetched in steps.
    """

    __slots__ = (
        "_header_end",
        "_remote",
        "buffer",
        "end",
        "faults",
        "offset",
        "order",
        "size",
        "where",
    )

    def __init__(self, buffer: Region, where: str, offset: int = 0, end: int | None = None) -> None:
        """Start at `offset`; `end` is the file's end by default. TruncatedError beyond it."""
        self._remote = None if isinstance(buffer, memoryview) else buffer
        self._header_end = 0  # where the header reaches at least, by the counts read so far
        self.size = len(buffer)
        self.buffer = read_prefix(buffer, min(offset, self.size))
        self.where = where
        self.faults = Faults(where, False)
        self.end = len(buffer) if end is None else end
        self.offset = offset
        self.order = "<"
        if not 0 <= offset <= self.end <= len(buffer):
            raise TruncatedError(
                f"{where}: region {offset}..{self.end} reaches past the end, "
                f"the file has {len(buffer)} bytes"
            )

    @property
    def remaining(self) -> int:
        """The number of bytes between the cursor and its end."""
        return self.end - self.offset

    def need(self, count: int, what: str) -> None:
        """Raise TruncatedError if fewer than `count` bytes are left; fetch them from a remote file.

        `what` names the bytes in the message.
        """
        if count < 0 or count > self.remaining:
            raise TruncatedError(
                f"{self.where}: {what} at offset {self.offset} needs {count} bytes, "
                f"{self.remaining} remain; the file is cut or damaged"
            )
        if self._remote is not None and self.offset + count > len(self.buffer):
            known = max(self.offset + count, self._header_end)
            self.buffer = read_prefix(
                self._remote, self.offset + count, known + max(known // 4, SLACK)
            )

    def take(self, count: int, what: str) -> memoryview:
        """Return the next `count` bytes as a view and move past them; TruncatedError if too few."""
        self.need(count, what)
        view = self.buffer[self.offset : self.offset + count]
        self.offset += count
        return view

    def skip(self, count: int, what: str) -> None:
        """Move past `count` bytes without reading them; TruncatedError if fewer are left."""
        self.need(count, what)
        self.offset += count

    def unpack(self, fmt: str, what: str) -> tuple[int | float | bytes, ...]:
        """Return the values of one struct and move past it.

        `fmt` has no byte-order mark: the cursor's own order is used.
        """
        layout = _compiled_struct(self.order + fmt)
        self.need(layout.size, what)
        values = layout.unpack_from(self.buffer, self.offset)
        self.offset += layout.size
        return values

    def uint(self, size: int, what: str) -> int:
        """Return the next `size` bytes as an unsigned integer in the cursor's byte order."""
        return int.from_bytes(self.take(size, what), "little" if self.order == "<" else "big")

    def count(self, size: int, smallest: int, what: str, limit: int = MAX_COUNT) -> int:
        """Return a count stored in `size` bytes, checked against the bytes that are left.

        FormatError above `limit`, TruncatedError if `count * smallest` bytes are not left.
        """
        at = self.offset
        value = self.uint(size, what)
        if value > limit:
            raise FormatError(
                f"{self.where}: {what} at offset {at} is {value}, the limit is {limit}; "
                "the file is damaged"
            )
        if value * smallest > self.remaining:
            raise TruncatedError(
                f"{self.where}: {what} at offset {at} is {value}, which takes at least "
                f"{value * smallest} bytes, {self.remaining} remain; the file is cut or damaged"
            )
        self._header_end = max(self._header_end, self.offset + value * smallest)
        return value

    def text(self, count: int, what: str) -> str:
        """Return the next `count` bytes as text; FormatError if they are not UTF-8."""
        text, error = self._decode(count, what)
        if error is not None:
            raise error
        return text

    def name(self, count: int, what: str) -> tuple[str, FormatError | None]:
        """Return (the next `count` bytes as text, the fault or None).

        Invalid bytes are escaped and reported as a fault. The fault is returned so that the caller
        can say which tensors it concerns.
        """
        text, error = self._decode(count, what)
        if error is not None:
            self.faults.add(error)
        return text, error

    def _decode(self, count: int, what: str) -> tuple[str, FormatError | None]:
        """Return (the next `count` bytes as text, the error or None); invalid bytes are escaped."""
        at = self.offset
        raw = self.take(count, what)
        try:
            return str(raw, "utf-8"), None
        except UnicodeDecodeError as error:
            return str(raw, "utf-8", "backslashreplace"), FormatError(
                f"{self.where}: {what} at offset {at} is not UTF-8 "
                f"(byte {error.start} is 0x{raw[error.start]:02x}); the file is damaged"
            )
