"""The writer of one output file; `aprfmt.formats.atomic` makes it, publishes it or discards it."""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from aprfmt.errors import ConversionError, FormatError, OutputError
from aprfmt.formats.mapped_file import (
    file_identity,
    mapped_origin,
    truncated_files,
    truncation_line,
)
from aprfmt.formats.positional_io import write_at
from aprfmt.formats.temporary_files import as_output_error, open_inside

_DIRECT = 64 << 10  # larger pieces are not copied into the buffer
_BUFFER = 256 << 10
_EARLY = 16 << 20  # from so many bytes on, the disk takes them while more are written
_WINDOW = 16 << 20  # bytes per system call, so that an interrupt does not wait long
_IN_SYSTEM = 1 << 20  # from so many bytes of a mapped file on, the system copies them itself
# What it says where it cannot: between these files, on this system, or at this place.
_CANNOT = frozenset((errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM,
                     errno.EBADF, errno.ETXTBSY, errno.EOVERFLOW))  # fmt: skip


def copy_mode(fd: int, old: os.stat_result) -> None:
    """Give an open file the permissions and group of the file that it replaces.

    `old` are that file's facts. Set-id bits are not given. If the group cannot be set, the group's
    bits are no wider than everybody's, as other people are in it.
    """
    if not hasattr(os, "fchmod"):
        return
    mode = stat.S_IMODE(old.st_mode) & 0o777
    if os.fstat(fd).st_gid != old.st_gid:
        try:
            os.fchown(fd, -1, old.st_gid)
        except OSError:
            mode = mode & ~0o070 | (mode & mode << 3 & 0o070)
    os.fchmod(fd, mode)


class OutputFile:
    """Sequential writer of one file of a set; made by `FileSet.create`.

    `path` is the requested name, `final` the same with links resolved, `temporary` the file that is
    written. `identity`, of the closed file, changes when its bytes do. `existed`: it replaces a
    file.
    """

    identity = ""

    def __init__(self, path: Path, temporary: Path, final: Path) -> None:
        """Take the file's paths; `open` creates it."""
        self.path = path
        self.temporary = temporary
        self.final = final
        self.existed = False
        self._failed = False  # after a failed write the file is never published
        self._buffer = bytearray()
        self._written = 0
        self._fd: int | None = None
        self._unsynced = 0
        self._early = BackgroundSync()
        self._in_system = hasattr(os, "copy_file_range")
        # Where there is no pwrite, writing at an offset moves the position that others write at.
        self._turn = nullcontext() if hasattr(os, "pwrite") else threading.Lock()

    def open(self, old: os.stat_result | None) -> None:
        """Create the temporary file with the mode of the `old` file, or the default mode.

        `old` is the status of the file to be replaced, or None. Sets `existed`.
        """
        self.existed = old is not None
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        # Never more than the old file allows: who opens it now could read what is written later.
        mode = 0o666 if old is None else stat.S_IMODE(old.st_mode) & 0o777
        self._fd = open_inside(self.temporary, flags, mode)
        if old is not None:
            copy_mode(self._fd, old)

    @property
    def is_open(self) -> bool:
        """Whether the temporary file is open, which means that this run created it."""
        return self._fd is not None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append the bytes of a contiguous buffer; large ones are not copied.

        Raises OutputError, with `errno`, for everything the system refuses. ValueError after it was
        closed.
        """
        if self._fd is None:
            raise ValueError(f"{self.path}: is closed")
        view = memoryview(data)
        if not view.nbytes:
            return  # an empty view of several dimensions cannot be cast
        view = view.cast("B")
        self._written += len(view)
        if len(view) < _DIRECT:
            self._buffer += view
            if len(self._buffer) >= _BUFFER:
                self._flush()
        else:
            self._flush()
            self._send(view)

    def patch(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Overwrite bytes from `offset` on that were written already; the end position stays.

        Raises ValueError for bytes that were not written yet, and after the file was closed.
        """
        if self._fd is None:
            raise ValueError(f"{self.path}: is closed")
        view = memoryview(data).cast("B")
        if not 0 <= offset <= offset + len(view) <= self._written:
            raise ValueError(f"{self.path}: bytes {offset}+{len(view)} of {self._written}")
        self._flush()
        with self._errors("cannot be written"), self._turn:
            write_at(self._fd, view, offset)

    def skip(self, nbytes: int) -> int:
        """Move past `nbytes` that will be written later; return the offset at which they begin.

        Raises ValueError after the file was closed.
        """
        if self._fd is None:
            raise ValueError(f"{self.path}: is closed")
        self._flush()
        start = self._written
        with self._errors("cannot be written"), self._turn:
            os.lseek(self._fd, nbytes, os.SEEK_CUR)
        self._written += nbytes
        return start

    def reserve(self, nbytes: int) -> "ReservedRange":
        """Move past `nbytes` that other threads will fill; return the range to give them."""
        return ReservedRange(self, self.skip(nbytes), nbytes)

    def place(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset that was reserved; several threads may, each its own bytes.

        Raises ValueError after the file was closed.
        """
        if self._fd is None:
            raise ValueError(f"{self.path}: is closed")
        if data:
            self._send(data, offset)

    def skip_finished(self, nbytes: int, crc: int) -> bool:
        """Return False: a new file has no bytes of an earlier run (ResumableFile may have)."""
        return False

    def tell(self) -> int:
        """Return the offset of the next byte, which is the count of those written or skipped."""
        return self._written

    def flush(self) -> None:
        """Hand the buffer to the system, so that another descriptor reads the bytes."""
        self._flush()

    def sync(self) -> None:
        """Sync to disk what was written so far; later calls may still change it."""
        if self._fd is not None and not self._failed:
            self._flush()
            with self._errors("cannot be synced"):
                os.fsync(self._fd)

    def close(self) -> None:
        """Sync and close the file, and set `identity`. OutputError if an earlier write failed."""
        if self._failed:
            raise OutputError(f"{self.path}: an earlier write failed; the file is not published")
        if self._fd is not None:
            self._flush()
            with self._errors("cannot be synced"):
                self._early.end()
                os.fsync(self._fd)
                self.identity = file_identity(os.fstat(self._fd))
            self.abandon()

    def abandon(self) -> None:
        """Close the file without syncing it."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                self._early.end()
            with suppress(OSError):
                os.close(fd)

    def _flush(self) -> None:
        """Send the buffered bytes to the system and empty the buffer."""
        if self._buffer:
            buffer, self._buffer = self._buffer, bytearray()
            self._send(memoryview(buffer))

    def _send(self, view: memoryview, offset: int | None = None) -> None:
        """Write bytes at the end, or at `offset`; the latter does not move the end."""
        assert self._fd is not None
        with self._errors("cannot be written"):
            while view:
                count = self._copy_in_system(view, offset) or self._write_some(
                    view[:_WINDOW], offset
                )
                view = view[count:]
                offset = None if offset is None else offset + count
                self._unsynced += count
                if self._unsynced >= _EARLY and self._early.begin(self._fd):
                    self._unsynced = 0

    def _write_some(self, view: memoryview, offset: int | None) -> int:
        """Write at the end or at `offset` with one system call; return how many bytes it took.

        FormatError if the bytes are those of a mapped file that was truncated meanwhile.
        """
        assert self._fd is not None
        try:
            with self._turn:
                if offset is None:
                    return os.write(self._fd, view)
                write_at(self._fd, view, offset)
                return len(view)
        except OSError as error:
            found = truncated_files() if error.errno == errno.EFAULT else []
            if not found:
                raise
            path, had, has = found[0]
            raise FormatError(truncation_line(path, had, has)) from error

    def _copy_in_system(self, view: memoryview, offset: int | None) -> int:
        """Have the system copy the first bytes of a mapped file; return how many it copied.

        0 if the bytes are not mapped, are few, or the system cannot copy them.
        """
        origin = mapped_origin(view) if self._in_system and len(view) >= _IN_SYSTEM else None
        if origin is None or self._fd is None:
            return 0
        size = min(len(view), _WINDOW)
        try:
            return os.copy_file_range(origin[0], self._fd, size, origin[1], offset)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            self._in_system = False
            return 0

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn system errors in the block into OutputError, and mark the file as failed."""
        try:
            with as_output_error(self.path, what):
                yield
        except BaseException:
            self._failed = True
            raise


@dataclass(frozen=True, slots=True)
class ReservedRange:
    """Reserved bytes of an output file, `nbytes` from `start` on, that any thread may write.

    Threads may write at the same time, each its own bytes. Errors are those of `OutputFile.write`.
    """

    file: OutputFile
    start: int
    nbytes: int

    def put(self, offset: int, data: bytes | memoryview) -> None:
        """Write a buffer at an offset of the reserved range; ConversionError beyond it."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        if not 0 <= offset <= offset + len(view) <= self.nbytes:
            raise ConversionError(
                f"{self.file.path}: bytes {offset}+{len(view)} were given of a tensor of "
                f"{self.nbytes}"
            )
        self.file.place(self.start + offset, view)


_SYNC = getattr(os, "fdatasync", None)


class BackgroundSync:
    """Syncs of one open file, one at a time, in a thread other than those that write."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._running: threading.Thread | None = None
        self._error: OSError | None = None

    def begin(self, fd: int) -> bool:
        """Start a thread that syncs the file, unless one is running; return whether it started.

        True where the system cannot do it. Raises the OSError of the sync before: the system
        reports a lost write once.
        """
        if _SYNC is None:
            return True
        with self._turn:
            if self._running is not None and self._running.is_alive():
                return False
            self._raise_error()
            self._running = threading.Thread(
                target=self._sync, args=(fd,), name="aprfmt-sync", daemon=True
            )
            self._running.start()
            return True

    def end(self) -> None:
        """Wait for the running sync, so that the file can be closed; raises its OSError."""
        with self._turn:
            if self._running is not None:
                self._running.join()
            self._raise_error()

    def _sync(self, fd: int) -> None:
        """Sync the file; an OSError is stored, to be raised by the next call."""
        assert _SYNC is not None
        try:
            _SYNC(fd)
        except OSError as error:
            self._error = error

    def _raise_error(self) -> None:
        """Raise the stored OSError of an earlier sync, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
