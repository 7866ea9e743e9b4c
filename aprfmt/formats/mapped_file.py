"""Files mapped read-only, and stored tensors as views of them.

Only regular files are opened: a pipe or a device is refused before a byte is read. Mapped pages
count as resident memory, so code that walks over a large tensor calls `drop` for parts it has read.
"""

import mmap
import os
import stat
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar

from aprfmt.base.memory import release_pages
from aprfmt.base.protocols import ByteSource, Damage, LazyTensor, Note, TensorInfo
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, TruncatedError, UsageError
from aprfmt.formats.damage import Structure
from aprfmt.remote.paths import RemotePath

Buffer = bytes | bytearray | memoryview


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


def open_bytes(path: Path) -> ByteSource:
    """Open a file where it lies: mapped from this machine, or read by range from elsewhere.

    Raises FormatError if it is not a regular file, RemoteError where an address does not answer.
    """
    if isinstance(path, RemotePath):
        from aprfmt.remote.remote_file import RemoteFile

        return RemoteFile(path)
    return MappedFile(path)


class _Map(mmap.mmap):
    """A mapping that knows whose it is: `view.obj` of every view into it."""

    owner: "weakref.ref[MappedFile]"


def mapped_origin(view: memoryview) -> tuple[int, int] | None:
    """Return the descriptor and the offset that a view of a mapped file reads; None for others.

    With these two numbers the system can copy the bytes into another file by itself.
    """
    if not isinstance(view.obj, _Map) or not view.c_contiguous:
        return None
    file = view.obj.owner()
    fd = None if file is None else file.descriptor()
    if fd is None:
        return None
    import numpy as np

    start, at = (np.frombuffer(part, np.uint8).ctypes.data for part in (view.obj, view))
    return fd, at - start


class MappedFile:
    """One regular file, mapped whole and read-only."""

    view: memoryview
    sha256 = ""
    _fd: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: _Map | None = None
        fd = open_regular(path)
        try:
            facts = os.fstat(fd)
            self.size = facts.st_size
            self.identity = file_identity(facts)
            if self.size:
                self._map = _Map(fd, self.size, access=mmap.ACCESS_READ)
                self._map.owner = weakref.ref(self)
        finally:
            os.close(fd)
        self.view = memoryview(self._map) if self._map is not None else memoryview(b"")
        _mapped.add(self)

    def descriptor(self) -> int | None:
        """Return an open descriptor of the file; None where another lies at its path by now."""
        with _opening:  # any thread may ask
            if self._fd is None and self._map is not None:
                try:
                    fd = open_regular(self.path)
                except FormatError:
                    return None
                if file_identity(os.fstat(fd)) != self.identity:
                    os.close(fd)
                    return None
                self._fd = fd
            return self._fd

    def refuse_changed(self) -> None:
        """Raise FormatError where another file lies at its path by now, or one of other bytes."""
        try:
            same = not self.identity or file_identity(os.stat(self.path)) == self.identity
        except OSError:
            same = False
        if not same:
            raise FormatError(
                f"{self.path}: changed while it was read (its size, its time or the file itself); "
                "start again when nothing writes it"
            )

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of every range [start, stop), in order."""
        return [self.view[start:stop] for start, stop in ranges]

    def expect(self, start: int, stop: int) -> None:
        """Do nothing: the system reads ahead by itself."""

    def drop(self, start: int, stop: int) -> None:
        """Release the pages of [start, stop); they are read again if needed."""
        if self._map is not None:
            release_pages(self._map, start, stop)

    def windows(self, start: int, stop: int, size: int = 8 << 20) -> Iterator[memoryview]:
        """Yield the bytes of [start, stop) that are there; pages behind a window are dropped."""
        stop = min(stop, self.size)
        for first in range(start, stop, size):
            last = min(first + size, stop)
            yield self.view[first:last]
            self.drop(first, last)

    def close(self) -> None:
        """Unmap; views that callers still hold keep the mapping alive until they are gone."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        self.view.release()
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                pass  # a caller still holds a view: the file is unmapped with the last one
            self._map = None


_mapped: "weakref.WeakSet[MappedFile]" = weakref.WeakSet()
_opening = threading.Lock()


def truncated_files() -> list[tuple[Path, int, int]]:
    """Return the files that are mapped and shorter by now: their size then, and now.

    One that another file has replaced is whole as long as it is mapped.
    """
    found = []
    for file in list(_mapped):
        try:
            facts = os.stat(file.path)
        except OSError:
            continue
        if facts.st_size < file.size and _place(file_identity(facts)) == _place(file.identity):
            found.append((file.path, file.size, facts.st_size))
    return found


def truncation_line(path: Path, had: int, has: int) -> str:
    """Return what is to be said of a file that is shorter by now."""
    cut = f"was cut while it was read, from {had} to {has} bytes"
    return f"{path}: {cut}; start again when nothing writes it"


def file_identity(facts: os.stat_result) -> str:
    """Return what changes when a file's bytes do."""
    return f"{facts.st_dev}:{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}"


def _place(identity: str) -> list[str]:
    """Return what stays of an identity while a file's bytes change: device and inode."""
    return identity.split(":")[:2]


class BufferFile(MappedFile):
    """A file's bytes in memory, used in place of a MappedFile."""

    def __init__(self, buffer: Buffer, path: Path) -> None:
        self.path = path
        self._map = None
        self.view = memoryview(buffer).toreadonly().cast("B")
        self.size = len(self.view)
        self.identity = ""


class StoredTensor(LazyTensor):
    """A tensor whose bytes are one contiguous region of a mapped file."""

    __slots__ = ("_file", "info")

    info: TensorInfo

    def __init__(self, file: ByteSource, info: TensorInfo) -> None:
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

    def lies(self, start: int = 0) -> tuple[ByteSource, int] | None:
        """Return the file, and where byte `start` lies in it."""
        return self._file, self.info.offset + start

    def expect(self, start: int = 0, stop: int | None = None) -> None:
        """Say that stored bytes [start, stop) will be read soon."""
        base = self.info.offset
        self._file.expect(base + start, base + (self.info.nbytes if stop is None else stop))

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the mapped pages of stored bytes [start, stop)."""
        base = self.info.offset
        stop = self.info.nbytes if stop is None else stop
        self._file.drop(base + start, base + stop)


def in_mapped_file(tensor: LazyTensor) -> bool:
    """Say whether its bytes, or those it is made of, lie in mapped files: any thread reads them."""
    beneath = (*tensor.made_of, *tensor.parts.values())
    if beneath:
        return all(map(in_mapped_file, beneath))
    lies = None if tensor.spoilt else tensor.held.lies()
    return lies is not None and isinstance(lies[0], MappedFile)


class DamagedTensor(StoredTensor):
    """A tensor whose offset, size or shape cannot be trusted."""

    __slots__ = ("_error",)

    spoilt = True

    def __init__(self, file: ByteSource, info: TensorInfo, error: FormatError) -> None:
        super().__init__(file, info)
        self._error = error

    @property
    def damage(self) -> str:
        """What is wrong with it."""
        return str(self._error)

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Raise what is wrong with it."""
        raise type(self._error)(str(self._error))

    def expect(self, start: int = 0, stop: int | None = None) -> None:
        """Do nothing: reading it raises."""

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Do nothing: there is nothing to release."""


class CutTensor(DamagedTensor):
    """A tensor of a truncated file that ends beyond it."""

    __slots__ = ()

    spoilt = False

    def __init__(self, file: ByteSource, info: TensorInfo) -> None:
        text = (
            f"{file.path}: tensor {shorten(info.name, 100)!r} needs bytes {info.offset}.."
            f"{info.offset + info.nbytes}, the file has {file.size}; get the file again"
        )
        super().__init__(file, info, TruncatedError(text))


def stored_tensor(
    file: ByteSource,
    info: TensorInfo,
    broken: Mapping[str, FormatError] = MappingProxyType({}),
    whole: type[StoredTensor] = StoredTensor,
) -> StoredTensor:
    """Return a tensor of a file; if it is in `broken` or cut, reading it raises."""
    if info.name in broken:
        return DamagedTensor(file, info, broken[info.name])
    there = info.offset + info.nbytes <= file.size or not info.nbytes
    return (whole if there else CutTensor)(file, info)


ParsedT = TypeVar("ParsedT", bound=Structure)
ShardT = TypeVar("ShardT", bound="Shard[Any]")


@dataclass(frozen=True, slots=True)
class Shard(Generic[ParsedT]):
    """One open file and its structure."""

    file: ByteSource
    parsed: ParsedT

    @property
    def data(self) -> ByteSource:
        """What the tensors' offsets count in."""
        return self.file

    @property
    def whole(self) -> type[StoredTensor]:
        """What a tensor is that nothing is wrong with."""
        return StoredTensor

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        """The tensors, in the file's order."""
        data, broken, whole = self.data, self.parsed.faults.broken, self.whole
        infos = self.parsed.infos
        end = max((info.offset + info.nbytes for info in infos.values()), default=0)
        if not broken and end <= data.size:
            return {name: whole(data, info) for name, info in infos.items()}
        return {name: stored_tensor(data, info, broken, whole) for name, info in infos.items()}


class MappedSource(Generic[ShardT]):
    """Open files as one model: what every source says of them; closing unmaps them all."""

    def __init__(self, path: Path, shards: Sequence[ShardT], notes: Sequence[Note] = ()) -> None:
        self.path = path
        self.shards = tuple(shards)
        self.files: tuple[Path, ...] = tuple(shard.file.path for shard in shards)
        found = [note for shard in shards for note in shard.parsed.notes]
        self.notes: Sequence[Note] = [*notes, *found]
        self.damage: Sequence[Damage] = [d for shard in shards for d in shard.parsed.faults.damage]

    def close(self) -> None:
        """Unmap all files; lazy values and raw views end here."""
        for shard in self.shards:
            shard.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MemoryTensor(LazyTensor):
    """A tensor held in memory: computed ones, and for tests."""

    __slots__ = ("_data", "info")

    info: TensorInfo

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
