"""Hidden temporary file names, their owners, and the few system calls that publishing needs.

A temporary name is `.NAME.<pid>-<host>-<random>.aprfmt-tmp`, in the folder of the file it will
become. By `pid` and `host_id` (host and process namespace) a later run knows which files a killed
run left, and which ones a running process still writes.
"""

import errno
import hashlib
import os
import re
import signal
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import FrameType

from aprfmt.errors import AprfmtError, OutputError

SUFFIX = ".aprfmt-tmp"
STALE_SECONDS = 24 * 3600  # age of files of another host or container, whose pids cannot be checked
LOCK_SECONDS = 30  # a folder is locked for a few renames only
_OPENINGS = 100
_MAX_STEM = 150  # bytes of the name kept; with everything else stays below the usual 255
_NAME = re.compile(
    r"\..*\.(?P<pid>[0-9]{1,9})-(?P<place>[0-9a-f]{8})-[0-9a-f]{8}" + re.escape(SUFFIX), re.DOTALL
)

# What the user can do about an error.
_TODO = {
    errno.ENOSPC: "free some space or write elsewhere",
    errno.EDQUOT: "your quota is used up: free some space or write elsewhere",
    errno.EROFS: "write elsewhere",
    errno.EACCES: "allow writing in that folder or write elsewhere",
    errno.EPERM: "allow writing in that folder or write elsewhere",
    errno.ENOENT: "make the folder first",
    errno.ELOOP: "remove it",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EFBIG: "the file system or a limit (ulimit -f) forbids files of this size",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EIO: "the disk reports a fault",
}


def output_error(path: Path | str, what: str, error: OSError | ValueError) -> OutputError:
    """Return the OutputError of a failed system call: which output, what, why, what to do."""
    number = error.errno if isinstance(error, OSError) else None
    reason = os_reason(error)
    todo = f"; {_TODO[number]}" if number in _TODO else ""
    result = OutputError(f"{path}: {what}: {reason}{todo}")
    if number:
        result.errno = number
    return result


def os_reason(error: OSError | ValueError) -> str:
    """Return the reason of a failed system call in words; names a link that was not followed."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, OSError) and number == errno.ELOOP:  # what O_NOFOLLOW gives for a link
        return f"{error.filename} is a link, which is not followed" if error.filename else "a link"
    return os.strerror(number) if number else str(error)


@contextmanager
def as_output_error(path: Path | str, what: str) -> Iterator[None]:
    """Turn OSError, and ValueError for a NUL in the name, into OutputError inside the block."""
    try:
        yield
    except AprfmtError:
        raise
    except (OSError, ValueError) as error:
        raise output_error(path, what, error) from error


@lru_cache(maxsize=1)
def host_id() -> str:
    """Return 8 hex digits for this host and process namespace; pids are unique only within it."""
    import platform

    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{platform.node()}\0{namespace}".encode()).hexdigest()[:8]


def temporary_name(name: str) -> str:
    """Return a new temporary name, in the same folder, for a file or folder called `name`."""
    raw = os.fsencode(name)
    if len(raw) > _MAX_STEM:
        name = raw[:_MAX_STEM].decode("utf-8", "ignore")
    return f".{name}.{os.getpid()}-{host_id()}-{os.urandom(4).hex()}{SUFFIX}"


def is_temporary(name: str) -> bool:
    """Return whether `name` is one that `temporary_name` makes."""
    return _NAME.fullmatch(name) is not None


def status_of(path: Path, *, follow: bool = False) -> os.stat_result | None:
    """Return the status of a path; None if it does not exist.

    `follow`: of the file that a link leads to, else of the link itself.
    """
    try:
        return os.stat(path, follow_symlinks=follow)
    except FileNotFoundError:
        return None


def _is_running(pid: int) -> bool:
    """Return whether a process with this id may be running; True where it cannot be known."""
    if os.name == "nt":
        return True  # on Windows os.kill(pid, 0) ends the process: go by the age instead
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _is_leftover(name: str, status: os.stat_result) -> bool:
    """Return whether the run that made a temporary file has ended: its process is gone.

    A file of another host or container counts as left over when it is old.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    if match["place"] == host_id():  # not by age: the first shards of a long run are old
        return not _is_running(int(match["pid"]))
    return time.time() - status.st_mtime > STALE_SECONDS


def remove_leftovers(folder: Path, needed: Collection[str]) -> None:
    """Remove temporary files of ended runs in `folder`, except those in `needed`."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if not entry.name.endswith(SUFFIX) or entry.name in needed:
                    continue
                if _is_leftover(entry.name, entry.stat(follow_symlinks=False)):
                    remove(Path(entry.path))


def remove(path: Path) -> None:
    """Remove a temporary file, or a temporary folder with its files; never raises OSError.

    A folder is emptied one level deep, as outputs are; deeper folders belong to other programs. If
    a transient error leaves something, removing is tried once more.
    """
    _remove_tree(path, depth=1)
    if os.path.lexists(path):
        _remove_tree(path, depth=1)


def _remove_tree(path: Path, depth: int) -> None:
    """Remove a file, or a folder down to `depth` folders below it; ignores OSError."""
    with suppress(OSError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        folder = _open_for_emptying(path)
        if folder is not None:
            _empty_folder(folder, depth)
        else:
            for name in os.listdir(path):
                with suppress(OSError):
                    if depth:
                        _remove_tree(path / name, depth - 1)
                    else:
                        os.unlink(path / name)
        os.rmdir(path)


_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_BY_DESCRIPTOR = hasattr(os, "O_DIRECTORY") and {os.open, os.unlink, os.rmdir} <= os.supports_dir_fd


def open_inside(path: Path, flags: int, mode: int) -> int:
    """Return a descriptor of a file opened in its folder, which may not be a symbolic link.

    The folder is opened first, so that exchanging it for a link meanwhile has no effect. Raises
    OSError.
    """
    if not _BY_DESCRIPTOR or os.open not in os.supports_dir_fd:
        return os.open(path, flags, mode)
    # A folder may be written to without being read.
    folder = os.open(path.parent, _FOLDER | getattr(os, "O_PATH", 0))
    try:
        return os.open(path.name, flags, mode, dir_fd=folder)
    finally:
        os.close(folder)


def _open_for_emptying(path: Path) -> int | None:
    """Return a descriptor of a folder to be emptied, so that swapping it for a link does no harm.

    None where the system cannot do that, or has no descriptor left. Raises OSError for a link.
    """
    try:
        return os.open(path, _FOLDER) if _BY_DESCRIPTOR else None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise
        return None


def _empty_folder(folder: int, depth: int) -> None:
    """Remove the contents of an open folder, `depth` folders deep, and close it."""
    try:
        for name in os.listdir(folder):
            with suppress(OSError):
                if depth and stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                    _empty_folder(os.open(name, _FOLDER, dir_fd=folder), depth - 1)
                    os.rmdir(name, dir_fd=folder)
                else:
                    os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries (names) to disk, if the system can sync folders."""
    fd = _open_folder(folder)
    if fd is not None:
        try:
            _sync_entries(fd)
        finally:
            os.close(fd)


def _open_folder(folder: Path) -> int | None:
    """Return a descriptor of a folder; None on systems that open no folders."""
    directory = getattr(os, "O_DIRECTORY", None)  # absent on Windows, which opens no folders
    return None if directory is None else os.open(folder, os.O_RDONLY | directory)


def _sync_entries(fd: int) -> None:
    """Fsync a folder's descriptor; file systems that cannot do it are ignored."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without folder sync
            raise


class LockedFolder:
    """A folder in which only this run renames; `sync` writes its entries to disk."""

    def __init__(self, path: Path, fd: int | None) -> None:
        self.path = path
        self._fd = fd

    def sync(self) -> None:
        """Fsync the folder, if it could be opened."""
        if self._fd is not None:
            _sync_entries(self._fd)


@contextmanager
def lock_folder(folder: Path) -> Iterator[LockedFolder]:
    """Hold the folder's advisory lock during the block and yield the LockedFolder.

    On file systems without locks nothing is locked. Raises OutputError if another run holds it for
    `LOCK_SECONDS`. The lock is not reentrant.
    """
    fd = open_locked(folder, lambda: _open_folder(folder), lambda fd: _lock_descriptor(fd, folder))
    try:
        yield LockedFolder(folder, fd)
    finally:
        if fd is not None:
            os.close(fd)  # closing releases the lock


def open_locked(
    path: Path, open_it: Callable[[], int | None], lock: Callable[[int], None]
) -> int | None:
    """Return the descriptor that `open_it` opens at `path`, locked by `lock`.

    None where `open_it` gives None, which is where the system opens no folders. The run that held
    the lock before may have removed or replaced what is at `path`: then the lock protects nothing,
    and it is opened again, at most `_OPENINGS` times. OutputError after that.
    """
    for _ in range(_OPENINGS):
        fd = open_it()
        if fd is None:
            return None
        try:
            lock(fd)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise OutputError(f"{path}: is removed or exchanged again and again; end the run that does it")


def _lock_descriptor(fd: int, folder: Path) -> None:
    """Lock an open folder, waiting up to LOCK_SECONDS; OutputError if another run has it."""
    try:
        import fcntl
    except ImportError:
        return
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OutputError(
                    f"{folder}: another run has been publishing into this folder for "
                    f"{LOCK_SECONDS} s; wait for it or end it, then run again"
                ) from None
            time.sleep(0.02)
        except OSError:
            return
        else:
            return


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP until the block is done, then deliver them.

    It uses handlers, not a signal mask: a mask covers one thread, and numpy or torch start others.
    Outside the main thread Python raises no signals, so nothing needs to be delayed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        """Append the number of a signal that came during the block to `held`."""
        held.append(number)

    # Signals that are ignored, or handled outside Python, stay so.
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            handler = signal.getsignal(number)
            if number not in before and handler not in (None, signal.SIG_IGN):
                before[number] = handler
                signal.signal(number, remember)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(held):
            signal.raise_signal(number)
