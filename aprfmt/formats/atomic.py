"""Output files that are published whole or not at all.

Data goes to hidden temporary files in the target's folder. Leaving the `with` block cleanly
syncs them, renames them and syncs the folder; leaving it in any other way removes them:

    with FileSet(force=force) as files:
        out = files.create(path)
        out.write(data)

One file is one rename. Several files of one folder go through a journal
(`aprfmt.formats.journal`). A folder as output (`folder=`) is built as a hidden sibling and
published by one rename, or swapped with the old one in one step where the system can, else
through a journal inside the folder.
"""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from aprfmt.errors import OutputError
from aprfmt.formats.cleanup import OPEN
from aprfmt.formats.in_place_patch import complete_patches
from aprfmt.formats.journal import (
    clean_leftovers,
    complete_renames,
    pending_journals,
    publish_set,
    reserved_names,
)
from aprfmt.formats.mapped_file import file_identity
from aprfmt.formats.output_file import OutputFile
from aprfmt.formats.temporary_files import (
    as_output_error,
    delay_signals,
    is_temporary,
    output_error,
    remove,
    status_of,
    sync_folder,
    temporary_name,
)
from aprfmt.formats.unfinished_writes import is_journal
from aprfmt.remote.paths import RemotePath, is_address

__all__ = [
    "FileSet", "NullFileSet", "OutputFile", "clean_folder", "complete_renames", "pending_journals",
]  # fmt: skip

_SPECIAL = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

# The journal lists names of one folder.
_NOT_AT_ONCE = "cannot be replaced in one step here; give the name of a new folder"


class FileSet:
    """Files that appear together when the `with` block ends, or not at all.

    `force` allows replacing what exists. `folder` makes the set a folder of its own that replaces
    the old one. Then `ours(name)` must be true of every name in the old one, or nothing is touched.
    With `nested` files may be one folder deeper (`ours` is asked for `SUB` and `SUB/NAME`).
    """

    def __init__(
        self,
        *,
        force: bool = False,
        folder: Path | None = None,
        ours: Callable[[str], bool] = lambda name: False,
        nested: bool = False,
    ) -> None:
        """Make an empty set; nothing is written before `create`.

        `force`: old files may be replaced. `folder` is the output folder if the set makes a whole
        one, `ours` says of a file name in it whether it may be removed, `nested` allows subfolders.
        """
        self._force = force
        self._folder = None if folder is None else Path(folder)
        self._ours = ours
        self._nested = nested
        self._files: list[OutputFile] = []
        self._target: Path | None = None  # the folder that will hold the files, links followed
        self._staging: Path | None = None  # the hidden sibling, if the folder is built as one
        self._closed = False
        self.pid = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Publish the files if the block ended cleanly; remove what was not published."""
        try:
            if kind is None:
                self.publish()
        finally:
            try:
                self.discard()
            except BaseException:  # an interrupt may come before `discard` blocks interrupts
                self.discard()
                raise

    def create(self, path: Path) -> OutputFile:
        """Return a new open file of the set, to be published as `path`.

        Raises OutputError at once for an existing file without `force`, for a folder, device or
        pipe as destination, for a missing parent and for a folder that cannot be written.
        ValueError after the set was published or discarded.
        """
        if self._closed:
            raise ValueError(f"{path}: the set of files is published or discarded already")
        path = path if isinstance(path, RemotePath) else Path(path)
        if is_address(path):
            raise OutputError(f"{path}: is an address; outputs are files on this machine")
        OPEN.add(self)
        with as_output_error(path, "cannot be written"):
            if self._folder is not None:
                self._prepare_folder(self._folder)
                final = self._final_in_folder(path, self._folder)
                old = status_of(final, follow=True)
            else:
                final, old = self._prepare_file(path)
            if any(file.final == final for file in self._files):
                raise OutputError(f"{path}: is written twice by one run; give two names")
            temporary = final.parent / temporary_name(final.name)
            if self._staging is not None and self._target is not None:
                temporary = self._staging / final.relative_to(self._target)
                if temporary.parent != self._staging:
                    temporary.parent.mkdir(exist_ok=True)
            file = self._new_file(path, temporary, final)
            self._files.append(file)  # before it is made, as an interrupt may come right after
            try:
                file.open(old)
            except OSError:
                self._files.remove(file)
                made = file.is_open
                file.abandon()
                if made:  # what could not be opened is not ours
                    remove(temporary)
                raise
        return file

    def sync(self) -> None:
        """Sync what was written so far to disk, so that publishing has little to wait for."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Sync and close every file; the bytes on disk are then those that will be published."""
        for file in self._files:
            file.close()

    def temporary_path(self, path: Path) -> Path:
        """Return the temporary path of the file that will be published as `path`."""
        return next(file.temporary for file in self._files if file.path == path)

    def publish(self) -> None:
        """Sync all files, rename them to their final names, sync the folder. Raises OutputError."""
        if self._closed:
            return
        self.close()
        with delay_signals():
            if self._target is not None and self._files:
                with as_output_error(self._folder or self._target, "cannot be put in place"):
                    if self._staging is None or not self._swap_folder(self._staging, self._target):
                        self._publish_inside(self._target)
            self._files = []
            self._closed = True
            OPEN.discard(self)

    def check(self) -> None:
        """Raise OutputError where publishing would overwrite or publish another program's file.

        Without `force`, a file that another run made at a final path would be lost. A temporary
        file that is no longer the one written here would be published.
        """
        for file in self._files:
            if not self._force and not file.existed and os.path.lexists(file.final):
                raise OutputError(
                    f"{file.path}: was made by somebody else meanwhile and is left as it is; "
                    "use --force to replace it"
                )
            facts = status_of(file.temporary)
            if facts is None or not _same_file(facts, file.identity):
                raise OutputError(
                    f"{file.path}: {file.temporary.name} was removed or exchanged by somebody else "
                    "while it was written; nothing is published"
                )

    def discard(self) -> None:
        """Close and remove all files that were not published; never raises OSError."""
        with delay_signals():
            self._closed = True
            OPEN.discard(self)
            needed: set[str] | None = set()
            if self._files and self._target is not None:
                needed = reserved_names(self._target)
            for file in self._files:
                file.abandon()
                # What lies in the hidden sibling goes with it: there it has a plain name, which a
                # link in the sibling's place would make another's file.
                alone = self._staging is None or not file.temporary.is_relative_to(self._staging)
                if alone and needed is not None and file.temporary.name not in needed:
                    remove(file.temporary)
            if self._staging is not None:
                remove(self._staging)
            self._files = []
            self._staging = None

    def _new_file(self, path: Path, temporary: Path, final: Path) -> OutputFile:
        """Return a new OutputFile; subclasses make their own kind."""
        return OutputFile(path, temporary, final)

    def _prepare_file(self, path: Path) -> tuple[Path, os.stat_result | None]:
        """Check where a file is to be written; return (final path, the old file's status or None).

        It is for a file outside an output folder. Raises OutputError if it cannot be written there.
        """
        old = status_of(path, follow=True)  # of the link's target
        if old is not None and not stat.S_ISREG(old.st_mode):
            what = _SPECIAL.get(stat.S_IFMT(old.st_mode), "no regular file")
            raise OutputError(f"{path}: is {what}; give the name of a file to write")
        final = Path(os.path.realpath(path))
        if not final.parent.is_dir():
            raise OutputError(f"{path}: there is no folder {final.parent}; make it first")
        if self._target is None:
            clean_folder(final.parent)
            self._target = final.parent
        elif self._target != final.parent:
            raise OutputError(
                f"{path}: lies in {final.parent}, other files of the set in {self._target}; files "
                "that belong together are written into one folder (is one of them a link?)"
            )
        if final.name in ("", ".", "..") or final.is_symlink():
            raise OutputError(f"{path}: is a link that leads nowhere; remove it")
        old = status_of(path, follow=True)  # again: completing an interrupted set may have made it
        if old is not None and not self._force:
            raise OutputError(f"{path}: exists; use --force to replace it")
        return final, old

    def _final_in_folder(self, path: Path, folder: Path) -> Path:
        """Return the final path of a file of the folder; an old link of that name is not followed.

        OutputError for a path that is not directly inside `folder` (or one deeper with `nested`).
        """
        assert self._target is not None
        parent, name = path.parent, Path(path.name)
        if self._nested and path.is_relative_to(folder) and parent != folder:
            parent, name = parent.parent, Path(parent.name, path.name)
        if os.path.realpath(parent) != os.path.realpath(folder) or {"", ".."} & {*name.parts}:
            raise OutputError(f"{path}: is not a file directly inside {folder}")
        return self._target / name

    def _prepare_folder(self, folder: Path) -> None:
        """Check the output folder, once, and stage it if it can be replaced as a whole.

        Sets `_target`, and `_staging` if staged. Raises OutputError if it cannot be written.
        """
        if self._target is not None:
            return
        target = Path(os.path.realpath(folder))
        old = status_of(target, follow=True)
        if old is not None:
            if not stat.S_ISDIR(old.st_mode):
                raise OutputError(f"{folder}: exists and is not a folder; give another name")
            clean_folder(target)
            self._check_old(folder, target)
        elif target.is_symlink():
            raise OutputError(f"{folder}: is a link that leads nowhere; remove it")
        elif not target.parent.is_dir():
            raise OutputError(f"{folder}: there is no folder {target.parent}; make it first")
        # A mount point or the working folder stays, and gets its files by a journal.
        if old is None or not _is_unswappable(target):
            self._make_staging_folder(target, old)
        if self._nested and self._staging is None:
            raise OutputError(f"{folder}: {_NOT_AT_ONCE}")
        self._target = target

    def _make_staging_folder(self, target: Path, old: os.stat_result | None) -> None:
        """Make the hidden sibling folder, if the old folder can be replaced as a whole.

        `old` is the old folder's status, or None. Sets `_staging`.
        """
        clean_folder(target.parent)
        self._staging = target.parent / temporary_name(target.name)
        try:
            os.mkdir(self._staging, 0o777 if old is None else stat.S_IMODE(old.st_mode) | 0o700)
            if old is not None:
                os.chmod(self._staging, stat.S_IMODE(old.st_mode))
        except OSError as error:
            remove(self._staging)
            self._staging = None
            passable = not self._nested and old is not None
            if not passable or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise

    def _check_old(self, folder: Path, target: Path) -> None:
        """Raise OutputError if the old folder has files that may not be replaced.

        Without `force` that is any file, with it one that aprfmt would not write.
        """
        names = [name for name in sorted(os.listdir(target)) if not _is_hidden(name)]
        if names and not self._force:
            raise OutputError(f"{folder}: exists and is not empty; use --force to replace it")
        foreign = next((name for name in names if not self._is_replaceable(target, name)), None)
        if foreign is not None:
            raise OutputError(
                f"{folder}: holds {foreign}, which is not part of a model as written here and "
                "would be lost; move it away or choose another folder"
            )

    def _is_replaceable(self, folder: Path, name: str) -> bool:
        """Return whether an old file or subfolder of the folder may be removed.

        The set's `ours` says so by name; a subfolder also needs a nested set and nothing else in
        it.
        """
        if not self._ours(name) or not stat.S_ISDIR(os.lstat(folder / name).st_mode):
            return self._ours(name)
        return self._nested and all(
            self._ours(f"{name}/{inner}")
            and not stat.S_ISDIR(os.lstat(folder / name / inner).st_mode)
            for inner in os.listdir(folder / name)
        )

    def _swap_folder(self, staging: Path, target: Path) -> bool:
        """Swap the hidden sibling with the output folder in one step; return whether that was done.

        False if the system cannot swap them at once: nothing has changed then.
        """
        self.check()
        for folder in {staging, *(file.temporary.parent for file in self._files)}:
            sync_folder(folder)
        swapped = False
        try:
            os.rename(staging, target)  # new, or over an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self._force:
                raise
            swapped = swap_names(staging, target)
            if not swapped:
                return False
        try:
            sync_folder(target.parent)
        except OSError:
            if not swapped or not swap_names(staging, target):
                os.rename(target, staging)
            raise
        self._staging = None
        if swapped:
            self._remove_old_folder(staging, target)
        return True

    def _remove_old_folder(self, old: Path, new: Path) -> None:
        """Remove the old folder; files of other programs in it go to the new one first."""
        try:
            for name in os.listdir(old):
                if not _is_hidden(name) and not self._is_replaceable(old, name):
                    os.rename(old / name, new / name)
        except OSError as error:
            kept = Path(f"{new}.old-{os.urandom(4).hex()}")
            os.rename(old, kept)
            raise output_error(
                new, f"is written; the old folder, kept as {kept}, cannot be removed", error
            ) from error
        remove(old)

    def _publish_inside(self, target: Path) -> None:
        """Rename the files into an existing folder together; its old files are removed.

        Raises OutputError for a set with subfolders, which cannot be renamed together.
        """
        if self._nested:
            raise OutputError(f"{target}: {_NOT_AT_ONCE}")
        if self._staging is not None:
            self._move_into_target(
                target, [temporary_name(file.final.name) for file in self._files]
            )
        moves = [(file.temporary.name, file.final.name) for file in self._files]
        gone: list[str] = []
        if self._folder is not None:
            gone = [
                name
                for name in sorted(os.listdir(target))
                if not _is_hidden(name) and self._is_replaceable(target, name)
            ]
        publish_set(target, moves, gone, check=self.check)

    def _move_into_target(self, target: Path, names: Sequence[str]) -> None:
        """Move the staged files into `target`, under the hidden names `names`."""
        for file, name in zip(self._files, names, strict=True):
            os.rename(file.temporary, target / name)
            file.temporary = target / name


def _same_file(facts: os.stat_result, identity: str) -> bool:
    """Return whether a file has the device, inode and size of an identity; its time may differ."""
    return file_identity(facts).split(":")[:3] == identity.split(":")[:3]


def _is_unswappable(folder: Path) -> bool:
    """Return whether a folder may not be swapped for a new one: a mount point, the working folder.

    After a swap, a shell in this folder would still be in the removed one.
    """
    try:
        here = Path(os.path.realpath(os.curdir))
    except FileNotFoundError:  # it was removed
        return os.path.ismount(folder)
    return os.path.ismount(folder) or here.is_relative_to(folder)


def clean_folder(folder: Path) -> None:
    """Complete what killed runs left half published in `folder`, then remove their leftovers."""
    complete_renames(folder)
    complete_patches(folder)
    clean_leftovers(folder)


def _is_hidden(name: str) -> bool:
    """Return whether a name is a temporary file's or a journal's."""
    return is_temporary(name) or is_journal(name)


class _NullFile(OutputFile):
    """An output file that discards what is written to it."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Discard the bytes."""


class NullFileSet(FileSet):
    """A set of files that writes nothing, for a sink that only makes its plan."""

    def create(self, path: Path) -> OutputFile:
        """Return an output file that discards what is written to it."""
        return _NullFile(path, path, path)


_AT_FDCWD = -100  # fcntl.h: relative names count from the current folder
_RENAME_EXCHANGE = 2  # linux/fs.h

# Errors that mean: not possible on this system or file system (EINVAL; overlayfs: EXDEV), or for a
# mount point (EBUSY).
_UNABLE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV, errno.EBUSY}


def swap_names(a: Path, b: Path) -> bool:
    """Swap the names `a` and `b`; return False if the system cannot do it in one step.

    Raises OSError if the swap failed.
    """
    import ctypes

    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # no such call in this C library
        return False
    renameat2.argtypes = (
        ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint,
    )  # fmt: skip
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))
