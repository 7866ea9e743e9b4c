"""Opens files mapped read-only; their stored tensors are views of the mapping.

Only regular files are opened: a pipe or a device is refused before a byte is read. Mapped pages
count as resident memory, so code that walks over a large tensor calls `drop` for bytes that it has
read.
"""

import mmap
import os
import stat
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar

from aprfmt.base.budget import end_where_time_is_over
from aprfmt.base.memory import release_pages
from aprfmt.base.protocols import ByteSource, Damage, LazyTensor, Note, TensorInfo
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, TruncatedError, UsageError
from aprfmt.formats.damage import Structure
from aprfmt.remote.paths import RemotePath

Buffer = bytes | bytearray | memoryview
HEAD = 512  # bytes at the beginning of a file that show what it is


def open_regular(path: Path) -> int:
    """Return a descriptor of a regular file, open for reading; FormatError for anything else.

    Opening never waits: a pipe or a device is refused.
    """
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


def first_bytes(path: Path) -> bytes:
    """Return the first HEAD bytes of a regular file on this machine; FormatError for others."""
    return read_head(path, HEAD)[0]


def open_bytes(path: Path) -> ByteSource:
    """Return a file's bytes: mapped if it is on this machine, read by range from an address.

    Raises FormatError if it is not a regular file, RemoteError where an address does not answer.
    """
    if isinstance(path, RemotePath):
        from aprfmt.remote.remote_file import RemoteFile

        return RemoteFile(path)
    return MappedFile(path)


def read_head(path: Path, count: int) -> tuple[bytes, int]:
    """Return (the first `count` bytes of a file, or all of a shorter one, and the file's size).

    A file on this machine is not mapped for them. Raises FormatError if it is not a regular file,
    RemoteError where an address does not answer.
    """
    if isinstance(path, RemotePath):
        with closing(open_bytes(path)) as file:
            return bytes(file.view[:count]), file.size
    fd = open_regular(path)
    try:
        return os.read(fd, count), os.fstat(fd).st_size
    finally:
        os.close(fd)


class _Map(mmap.mmap):
    """A memory mapping that knows its MappedFile; it is `view.obj` of every view into it."""

    owner: "weakref.ref[MappedFile]"


def mapped_origin(view: memoryview) -> tuple[int, int] | None:
    """Return (descriptor, offset) of the bytes that a view of a mapped file shows.

    None for any other view. With these two numbers the system can copy the bytes into another file
    without passing them through this process.
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
        """Map the file at `path`; FormatError if it is not a regular file."""
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
        """Return an open descriptor of the file; None if another file is at its path now.

        The first call opens it; the MappedFile closes it. None for an empty file, too.
        """
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
        """Raise FormatError if the file was changed or replaced since it was mapped."""
        try:
            same = not self.identity or file_identity(os.stat(self.path)) == self.identity
        except OSError:
            same = False
        if not same:
            raise changed_error(self.path)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return a view of the bytes of every range [start, stop), in the order given."""
        return [self.view[start:stop] for start, stop in ranges]

    def expect(self, start: int, stop: int) -> None:
        """Do nothing: the system reads mapped files ahead by itself."""

    def drop(self, start: int, stop: int) -> None:
        """Release the mapped pages of [start, stop); a later read loads them again."""
        if self._map is not None:
            release_pages(self._map, start, stop)

    def windows(self, start: int, stop: int, size: int = 8 << 20) -> Iterator[memoryview]:
        """Yield views of at most `size` bytes that cover [start, stop), cut at the end of the file.

        The pages of a window are released when the next one is asked for.
        """
        stop = min(stop, self.size)
        for first in range(start, stop, size):
            end_where_time_is_over()
            last = min(first + size, stop)
            yield self.view[first:last]
            self.drop(first, last)

    def close(self) -> None:
        """Unmap the file; a view that a caller still has keeps the mapping alive."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        self.view.release()
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                pass  # a caller still has a view: the file is unmapped with the last one
            self._map = None


def changed_error(path: Path) -> FormatError:
    """Return the error for a file of which other bytes are there than were mapped."""
    return FormatError(
        f"{path}: changed while it was read (its size, its time or the file itself); "
        "start again when nothing writes it"
    )


_mapped: "weakref.WeakSet[MappedFile]" = weakref.WeakSet()
_opening = threading.Lock()


def truncated_files() -> list[tuple[Path, int, int]]:
    """Return (path, size when mapped, size now) of every mapped file that is shorter now.

    A file that was replaced by another one is not listed: its mapping still has all its bytes.
    """
    found = []
    for file in list(_mapped):
        try:
            facts = os.stat(file.path)
        except OSError:
            continue
        if facts.st_size < file.size and _device_and_inode(
            file_identity(facts)
        ) == _device_and_inode(file.identity):
            found.append((file.path, file.size, facts.st_size))
    return found


def truncation_line(path: Path, before: int, has: int) -> str:
    """Return the error message of a file that was cut from `before` to `has` bytes while mapped."""
    cut = f"was cut while it was read, from {before} to {has} bytes"
    return f"{path}: {cut}; start again when nothing writes it"


def file_identity(facts: os.stat_result) -> str:
    """Return device, inode, size and time of change of a file as text; new bytes change it."""
    return f"{facts.st_dev}:{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}"


def _device_and_inode(identity: str) -> list[str]:
    """Return [device, inode] of an identity; both stay when the file's bytes change."""
    return identity.split(":")[:2]


class BufferFile(MappedFile):
    """A file's bytes in memory, used in place of a MappedFile."""

    def __init__(self, buffer: Buffer, path: Path) -> None:
        """Take `buffer` as the bytes of a file; `path` is only for messages."""
        self.path = path
        self._map = None
        self.view = memoryview(buffer).toreadonly().cast("B")
        self.size = len(self.view)
        self.identity = ""


def checked_stop(info: TensorInfo, start: int, stop: int | None) -> int:
    """Return `stop`, or a tensor's size in bytes for None.

    Raises ValueError where bytes [start, stop) are not all inside the tensor.
    """
    stop = info.nbytes if stop is None else stop
    if not 0 <= start <= stop <= info.nbytes:
        raise ValueError(f"{info.name}: bytes {start}..{stop} of {info.nbytes}")
    return stop


class StoredTensor(LazyTensor):
    """A tensor whose bytes are one contiguous region of a mapped file."""

    __slots__ = ("_file", "info")

    info: TensorInfo

    def __init__(self, file: ByteSource, info: TensorInfo) -> None:
        self._file = file
        self.info = info

    @property
    def path(self) -> Path:
        """The file (shard) that has the bytes."""
        return self._file.path

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return a read-only view of stored bytes [start, stop), valid until the source closes.

        Raises ValueError for bytes outside the tensor, UsageError after the file was closed.
        """
        stop = checked_stop(self.info, start, stop)
        base = self.info.offset
        try:
            return self._file.view[base + start : base + stop]
        except ValueError:  # the view was released
            raise UsageError(
                f"{self._file.path}: is closed; read {self.info.name} before that"
            ) from None

    def location(self, start: int = 0) -> tuple[ByteSource, int] | None:
        """Return (file, offset in it of the tensor's byte `start`); here never None."""
        return self._file, self.info.offset + start

    def expect(self, start: int = 0, stop: int | None = None) -> None:
        """Announce that stored bytes [start, stop) will be read soon: they may be prefetched."""
        base = self.info.offset
        self._file.expect(base + start, base + (self.info.nbytes if stop is None else stop))

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the mapped pages of stored bytes [start, stop); a later read loads them again."""
        base = self.info.offset
        stop = self.info.nbytes if stop is None else stop
        self._file.drop(base + start, base + stop)


def in_mapped_file(tensor: LazyTensor) -> bool:
    """Return whether all bytes of a tensor are in mapped files, which any thread may read.

    A tensor computed from others, or packed as several, is judged by those.
    """
    beneath = (*tensor.made_of, *tensor.parts.values())
    if beneath:
        return all(map(in_mapped_file, beneath))
    place = None if tensor.spoilt else tensor.unwrapped.location()
    return place is not None and isinstance(place[0], MappedFile)


class DamagedTensor(StoredTensor):
    """A tensor whose offset, size or shape cannot be trusted: reading it raises."""

    __slots__ = ("_error",)

    spoilt = True

    def __init__(self, file: ByteSource, info: TensorInfo, error: FormatError) -> None:
        """Take the error that reading the tensor raises."""
        super().__init__(file, info)
        self._error = error

    @property
    def damage(self) -> str:
        """The error message that says what is wrong with the tensor."""
        return str(self._error)

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Raise the error that says what is wrong with the tensor."""
        raise type(self._error)(str(self._error))

    def expect(self, start: int = 0, stop: int | None = None) -> None:
        """Do nothing: reading this tensor raises."""

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Do nothing: this tensor has no pages that could have been read."""


class CutTensor(DamagedTensor):
    """A tensor whose bytes end beyond the end of a truncated file: reading it raises."""

    __slots__ = ()

    spoilt = False

    def __init__(self, file: ByteSource, info: TensorInfo) -> None:
        """Make the TruncatedError that reading the tensor raises: bytes needed, bytes there."""
        text = (
            f"{file.path}: tensor {shorten(info.name, 100)!r} needs bytes {info.offset}.."
            f"{info.offset + info.nbytes}, the file has {file.size}; get the file again"
        )
        super().__init__(file, info, TruncatedError(text))


def stored_tensor(
    file: ByteSource,
    info: TensorInfo,
    broken: Mapping[str, FormatError] = MappingProxyType({}),
    kind: type[StoredTensor] = StoredTensor,
) -> StoredTensor:
    """Return the lazy tensor of `info` in `file`, of class `kind` if its bytes are readable.

    A DamagedTensor if its name is in `broken` (tensor name to error), a CutTensor if it ends beyond
    the file: reading those raises.
    """
    if info.name in broken:
        return DamagedTensor(file, info, broken[info.name])
    there = info.offset + info.nbytes <= file.size or not info.nbytes
    return (kind if there else CutTensor)(file, info)


ParsedT = TypeVar("ParsedT", bound=Structure)
ShardT = TypeVar("ShardT", bound="Shard[Any]")


@dataclass(frozen=True, slots=True)
class Shard(Generic[ParsedT]):
    """One open file of a model, with its parsed structure."""

    file: ByteSource
    parsed: ParsedT

    @property
    def data(self) -> ByteSource:
        """The bytes in which the tensors' offsets count: the file itself."""
        return self.file

    @property
    def tensor_class(self) -> type[StoredTensor]:
        """The class of an undamaged tensor of this file."""
        return StoredTensor

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        """{tensor name: lazy tensor}, in the file's order; damaged and cut ones raise when read."""
        data, broken, whole = self.data, self.parsed.faults.broken, self.tensor_class
        infos = self.parsed.infos
        end = max((info.offset + info.nbytes for info in infos.values()), default=0)
        if not broken and end <= data.size:
            return {name: whole(data, info) for name, info in infos.items()}
        return {name: stored_tensor(data, info, broken, whole) for name, info in infos.items()}


class MappedSource(Generic[ShardT]):
    """Base of an open model of one or more files: paths, notes, damage and closing."""

    def __init__(self, path: Path, shards: Sequence[ShardT], notes: Sequence[Note] = ()) -> None:
        """Take the open shards; `notes` are those on the set, which come before the shards' own."""
        self.path = path
        self.shards = tuple(shards)
        self.files: tuple[Path, ...] = tuple(shard.file.path for shard in shards)
        found = [note for shard in shards for note in shard.parsed.notes]
        self.notes: Sequence[Note] = [*notes, *found]
        self.damage: Sequence[Damage] = [d for shard in shards for d in shard.parsed.faults.damage]

    def close(self) -> None:
        """Unmap all files; lazy values and raw views are invalid from then on."""
        for shard in self.shards:
            shard.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MemoryTensor(LazyTensor):
    """A tensor whose bytes are in memory: computed ones, and tensors of tests."""

    __slots__ = ("_data", "info")

    info: TensorInfo

    def __init__(self, info: TensorInfo, data: bytes | bytearray | memoryview) -> None:
        """Take the bytes of a tensor; ValueError unless there are as many as its info says."""
        view = memoryview(data).cast("B")
        if len(view) != info.nbytes:
            raise ValueError(f"{info.name}: {len(view)} bytes given, its info says {info.nbytes}")
        self._data = view.toreadonly()
        self.info = info

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return a read-only view of bytes [start, stop)."""
        return self._data[start:stop]

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Do nothing: the bytes are not mapped pages."""
