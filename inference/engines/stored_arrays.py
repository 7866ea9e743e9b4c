"""An array as a file stores it, read by range; files that are mapped only while they are used.

A *region* is where a file has the bytes of one array. A *window* is bytes of it that are read
together.

A dump may have a file for each of 100,000 arrays. Where its array begins is noted once; its bytes
are then read without opening the file's container again.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.protocols import LazyTensor
from aprfmt.codecs import decode, native_kernels
from aprfmt.errors import AprfmtError, FormatError, UsageError
from aprfmt.formats.mapped_file import MappedFile, StoredTensor, changed_error
from aprfmt.inference.engines.tiles import StoredRows, Tiles

Numbers = NDArray[Any]
INTEGERS: Mapping[str, str] = {
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?",
    "U64": "<u8", "U32": "<u4", "U16": "<u2",
}  # fmt: skip
COMPLEX = ("C64",)  # encodings of which a float would be half
_SINGLE = ("F32", "F16", "BF16")  # encodings of one number after another, read as float32
# Bytes of an array that are looked at together; smaller ones of a mapped file cost more.
WINDOW = 1 << 21


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of an array as a file stores them: equal bytes of one `form` are equal numbers.

    `form` is the encoding, or the dtype with the order of axes. `windows` yields the bytes in
    order, at most WINDOW at a time, each window valid until the next.
    """

    form: str
    windows: Callable[[], Generator[memoryview, None, None]]


@dataclass(frozen=True, slots=True)
class Region:
    """Where a file has the bytes of an array, from `start` on; `identity` is the file's content."""

    path: Path
    identity: str
    start: int
    nbytes: int
    encoding: str
    shape: tuple[int, ...]


def region_of(tensor: LazyTensor) -> Region | None:
    """Return where a tensor's bytes are; None unless a mapped file has them as plain bytes."""
    if type(tensor) is not StoredTensor:
        return None
    file, start = tensor.location() or (None, 0)
    if not isinstance(file, MappedFile) or not file.identity:
        return None
    info = tensor.info
    return Region(file.path, file.identity, start, info.nbytes, info.encoding, tuple(info.shape))


class FilePool:
    """Maps files when bytes of them are asked for, and closes those that were used longest ago.

    All are closed with the stack; reading raises UsageError from then on.
    """

    MOST = 128  # files that are mapped at a time: each has a descriptor

    def __init__(self, stack: ExitStack) -> None:
        """Start without files; the stack closes them."""
        self._files: OrderedDict[Path, MappedFile] = OrderedDict()
        self._closed = False
        self._lock = Lock()  # any thread may read
        stack.callback(self._close)

    def view(self, region: Region, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a region.

        They stay valid while the view is held. FormatError where the file was changed or replaced
        since the region was noted.
        """
        with self._lock:
            if self._closed:
                raise UsageError(f"{region.path}: is closed; read its array before that")
            file = self._files.get(region.path)
            if file is None:
                file = MappedFile(region.path)
                while len(self._files) >= self.MOST:
                    self._files.popitem(last=False)[1].close()
                self._files[region.path] = file
            else:
                self._files.move_to_end(region.path)
            if file.identity != region.identity:
                raise changed_error(region.path)
            return file.view[region.start + start : region.start + stop]

    def drop(self, region: Region, start: int, stop: int) -> None:
        """Release the mapped pages of bytes [start, stop) of a region."""
        with self._lock:
            file = self._files.get(region.path)
            if file is not None:
                file.drop(region.start + start, region.start + stop)

    def array(self, region: Region, place: str) -> "StoredArray":
        """Return the array that a region of a file contains; `place` names it in messages."""
        return StoredArray(
            place,
            region.encoding,
            region.shape,
            region.nbytes,
            partial(self.view, region),
            partial(self.drop, region),
        )

    def _close(self) -> None:
        """Close all files of the pool."""
        with self._lock:
            self._closed = True
            for file in self._files.values():
                file.close()
            self._files.clear()


@dataclass(frozen=True)
class StoredArray:
    """An array whose bytes are read by range; `place` names it in messages.

    `raw(start, stop)` returns stored bytes, `drop(start, stop)` releases their mapped pages.
    """

    place: str
    encoding: str
    shape: tuple[int, ...]
    nbytes: int
    raw: Callable[[int, int], memoryview]
    drop: Callable[[int, int], None]

    def read(self) -> Numbers:
        """Return the array's numbers in their shape, floats as float32 or float64.

        Raises FormatError for an array that cannot be decoded.
        """
        encoding = self.encoding
        if encoding in COMPLEX:
            raise FormatError(f"{self.place}: holds complex numbers; expected real ones")
        held = self.raw(0, self.nbytes)
        try:
            if encoding in INTEGERS:
                return np.frombuffer(bytes(held), INTEGERS[encoding]).reshape(self.shape)
            try:
                values = decode(encoding, held, self.shape)
            except AprfmtError as error:
                raise FormatError(f"{self.place}: {error}") from error
            return np.asarray(values, np.float64 if encoding == "F64" else np.float32)
        finally:
            self.drop(0, self.nbytes)

    def stored(self) -> StoredBytes:
        """Return the array's stored bytes; mapped pages are released after each window."""
        return StoredBytes(self.encoding, self._windows)

    def _windows(self) -> Generator[memoryview, None, None]:
        """Yield the array's stored bytes in windows.

        The mapped pages of each window are released after it.
        """
        for start in range(0, self.nbytes, WINDOW):
            stop = min(start + WINDOW, self.nbytes)
            yield self.raw(start, stop)
            self.drop(start, stop)

    def tiles(self) -> Tiles | None:
        """Return the array as blocks of rows and columns, read from the file when asked for.

        None where its rows are not rows of floats in the file.
        """
        encoding, shape = self.encoding, self.shape
        one = len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)
        if encoding not in _SINGLE or not one or not math.prod(shape):
            return None
        width, size = shape[-1], self.nbytes // math.prod(shape)

        def fill(row: int, column: int, out: Numbers) -> None:
            """Fill `out` with the array's block at `row` and `column`.

            Then release the file's pages. Raises FormatError where the stored bytes cannot be
            decoded.
            """
            first, last = row * width * size, (row + len(out)) * width * size
            held, native = self.raw(first, last), native_kernels()
            try:
                if native is None or not native.decode_rows(encoding, held, width, column, out):
                    values = decode(encoding, held, (len(out), width))
                    out[...] = values[:, column : column + out.shape[1]]
            except AprfmtError as error:
                raise FormatError(f"{self.place}: {error}") from error
            finally:
                self.drop(first, last)

        def rows_stored(row: int, rows: int) -> list[StoredRows]:
            """Return the stored bytes of `rows` whole rows from `row` on, a list of one entry."""
            first, last = row * width * size, (row + rows) * width * size
            release = partial(self.drop, first, last)
            held = self.raw(first, last)
            return [StoredRows(encoding, held, width, 0, width, release, self.place)]

        return Tiles(shape[-2], width, fill, rows_stored)
