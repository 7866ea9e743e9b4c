"""Files mapped read-only, and stored tensors as views of them.

Only regular files are opened: a pipe or a device is refused before a byte is read. Mapped pages
count as resident memory, so code that walks over a large tensor calls `drop` for parts it has read.
"""

import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from aprfmt.base.protocols import LazyTensor, TensorInfo
from aprfmt.base.text import shorten
from aprfmt.errors import FormatError, TruncatedError, UsageError

Buffer = bytes | bytearray | memoryview

_PAGE = mmap.PAGESIZE
_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)


def open_regular(path: Path) -> int:
    """Open a regular file for reading; FormatError for anything else, without waiting on a pipe."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        fd = os.open(path, flags)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise FormatError(f"{path}: cannot be opened: {reason}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(
            f"{path}: is not a regular file (pipe, device or folder); give a file on disk"
        )
    return fd


class MappedFile:
    """One regular file, mapped whole and read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        fd = open_regular(path)
        try:
            self.size = os.fstat(fd).st_size
            if self.size:
                self._map = mmap.mmap(fd, self.size, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self.view = memoryview(self._map) if self._map is not None else memoryview(b"")

    def drop(self, start: int, stop: int) -> None:
        """Release the whole pages inside [start, stop); they are read again if needed."""
        if self._map is None or _DONTNEED is None:
            return
        first, last = -(-start // _PAGE) * _PAGE, stop // _PAGE * _PAGE
        if last > first:
            self._map.madvise(_DONTNEED, first, last - first)

    def close(self) -> None:
        """Unmap; views that callers still hold keep the mapping alive until they are gone."""
        self.view.release()
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                pass  # a caller still holds a view: the file is unmapped with the last one
            self._map = None


class BufferFile(MappedFile):
    """A file's bytes in memory, used in place of a MappedFile."""

    def __init__(self, buffer: Buffer, path: Path) -> None:
        self.path = path
        self._map = None
        self.view = memoryview(buffer).toreadonly().cast("B")
        self.size = len(self.view)


class StoredTensor:
    """A tensor whose bytes are one contiguous region of a mapped file."""

    __slots__ = ("_file", "info")

    parts: Mapping[str, LazyTensor] = {}
    damage = ""
    spoilt = False  # True: nothing the file says about it can be trusted, not even the shape

    def __init__(self, file: MappedFile, info: TensorInfo) -> None:
        self._file = file
        self.info = info

    @property
    def path(self) -> Path:
        """The file (shard) that holds the bytes."""
        return self._file.path

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return a read-only view of stored bytes [start, stop), valid until the source closes."""
        stop = self.info.nbytes if stop is None else stop
        if not 0 <= start <= stop <= self.info.nbytes:
            raise ValueError(f"{self.info.name}: bytes {start}..{stop} of {self.info.nbytes}")
        base = self.info.offset
        try:
            return self._file.view[base + start : base + stop]
        except ValueError:  # the view was released
            raise UsageError(
                f"{self._file.path}: is closed; read {self.info.name} before that"
            ) from None

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the mapped pages of stored bytes [start, stop)."""
        base = self.info.offset
        stop = self.info.nbytes if stop is None else stop
        self._file.drop(base + start, base + stop)


class CutTensor(StoredTensor):
    """A tensor of a truncated file that ends beyond it."""

    __slots__ = ()

    @property
    def damage(self) -> str:  # type: ignore[override]
        """Which bytes are missing."""
        info = self.info
        return (
            f"{self.path}: tensor {shorten(info.name, 100)!r} needs bytes {info.offset}.."
            f"{info.offset + info.nbytes}, the file has {self._file.size}; get the file again"
        )

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Raise TruncatedError: the bytes are not there."""
        raise TruncatedError(self.damage)

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Do nothing: there is nothing to release."""


class DamagedTensor(StoredTensor):
    """A tensor whose offset, size or shape cannot be trusted."""

    __slots__ = ("_error",)

    spoilt = True

    def __init__(self, file: MappedFile, info: TensorInfo, error: FormatError) -> None:
        super().__init__(file, info)
        self._error = error

    @property
    def damage(self) -> str:  # type: ignore[override]
        """What is wrong with it."""
        return str(self._error)

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Raise what is wrong with it."""
        raise type(self._error)(str(self._error))

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Do nothing: there is nothing to release."""


def stored_tensor(
    file: MappedFile,
    info: TensorInfo,
    broken: Mapping[str, FormatError] = MappingProxyType({}),
    whole: type[StoredTensor] = StoredTensor,
) -> StoredTensor:
    """Return a tensor of a file; if it is in `broken` or cut, reading it raises."""
    if info.name in broken:
        return DamagedTensor(file, info, broken[info.name])
    there = info.offset + info.nbytes <= file.size or not info.nbytes
    return (whole if there else CutTensor)(file, info)


class MemoryTensor:
    """A tensor held in memory: computed ones, and for tests."""

    __slots__ = ("_data", "info")

    parts: Mapping[str, LazyTensor] = {}

    def __init__(self, info: TensorInfo, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        if len(view) != info.nbytes:
            raise ValueError(f"{info.name}: {len(view)} bytes given, its info says {info.nbytes}")
        self._data = view.toreadonly()
        self.info = info

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return a read-only view of bytes [start, stop)."""
        return self._data[start:stop]

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Do nothing: the bytes are ours."""
