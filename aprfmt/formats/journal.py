"""Renames several files of one folder together; after a kill, the next run completes the renaming.

Before the first rename a journal `.aprfmt-journal-<hash>.json` is written and synced. It lists
the renames; repeating them is harmless, so any later run can complete them, and readers can tell
a mixed set from a complete one. A rename that fails is undone in the same way: hard links keep
the old files until the end, and a second journal lists the way back. Without hard links (FAT)
the journal stays and the next run completes it.

    {"schema": "aprfmt.journal/1", "moves": [[temporary, final], ...], "removes": [name, ...],
     "files": {name: identity, ...}, "signature": HMAC}

A journal may have been planted. It is completed only where it is signed by this user's key, the
file is this user's, and every file that it moves is the one that was written: its inode, size
and owner, on the folder's device. (The device's own number may change when the system starts
again.) A file to be removed is left if it is another one now. Any other journal, with the files
it names, is left alone with a warning.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import Note
from aprfmt.errors import FormatError, OutputError
from aprfmt.formats import bounded_json
from aprfmt.formats.notices import announce
from aprfmt.formats.positional_io import read_at
from aprfmt.formats.signature import is_owned_by_user, is_signed, key_path, sign
from aprfmt.formats.temporary_files import (
    LockedFolder,
    as_output_error,
    delay_signals,
    is_temporary,
    lock_folder,
    os_reason,
    output_error,
    remove,
    remove_leftovers,
    status_of,
    temporary_name,
)
from aprfmt.formats.unfinished_writes import (
    JOURNAL_PREFIX,
    JOURNAL_SUFFIX,
    journal_names,
    known_journal_names,
)

SCHEMA = "aprfmt.journal/1"
_MAX_BYTES = 64 << 20  # 100,000 shards with names of 255 bytes

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

# The file system has no hard links, or forbids this one: then a failed rename cannot be undone.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


@dataclass(frozen=True)
class Journal:
    """The renames and removals that are still to be done in one folder.

    `moves` are (temporary, final) names, `removes` plain names. `files` has the identity of every
    temporary and of every file to remove. `signature` is that of the file it was read from.
    """

    name: str
    moves: Sequence[tuple[str, str]]
    removes: Sequence[str]
    files: Mapping[str, str]
    signature: str = ""

    def dumps(self) -> bytes:
        """Return the bytes of the journal file, with the signature."""
        value = self._unsigned_value() | {"signature": sign(SCHEMA, self._signed_payload())}
        return bounded_json.dumps(value).encode("utf-8")

    def is_signed(self) -> bool:
        """Return whether this user's key signed the journal."""
        return is_signed(SCHEMA, self._signed_payload(), self.signature)

    def is_file(self, name: str, facts: os.stat_result | None) -> bool:
        """Return whether the status `facts` is that of the file recorded as `name`."""
        return facts is not None and self.files.get(name) in (
            _identity(facts),
            _identity(facts, stable=False),
        )

    def _unsigned_value(self) -> dict[str, Any]:
        """Return the journal's JSON object without its signature."""
        return {
            "schema": SCHEMA,
            "moves": [list(move) for move in self.moves],
            "removes": list(self.removes),
            "files": dict(self.files),
        }

    def _signed_payload(self) -> bytes:
        """Return the bytes that the signature covers."""
        return bounded_json.dumps(self._unsigned_value()).encode("utf-8")


def _identity(facts: os.stat_result, *, stable: bool = True) -> str:
    """Return inode, size and owner of a file as text, which a rename does not change.

    `stable=False` leaves the inode out, as FAT gives new ones when it is mounted again.
    """
    return f"{facts.st_ino if stable else 0}:{facts.st_size}:{facts.st_uid}"


def _identities(folder: Path, names: Iterable[str], *, stable: bool = True) -> dict[str, str]:
    """Return {name: inode, size and owner as one text} of those files of `folder` that exist.

    `stable=False` leaves the inode out.
    """
    found = ((name, status_of(folder / name)) for name in names)
    return {name: _identity(facts, stable=stable) for name, facts in found if facts is not None}


def pending_journals(folder: Path) -> list[Path]:
    """Return the paths of files that an interrupted run left half published, sorted.

    They are the final paths in the journals of `folder`. Empty for a folder that cannot be listed.
    Raises FormatError for a damaged journal.
    """
    names = known_journal_names(folder)
    return sorted(
        {folder / final for name in names for _, final in _read_journal(folder, name).moves}
    )


def complete_renames(folder: Path) -> None:
    """Complete the renames that a killed run left unfinished in `folder`, if there are any.

    A warning is announced for what was completed, and for a journal of somebody else, which is
    left alone. Raises OutputError if it cannot be completed, FormatError for a damaged journal.
    """
    with as_output_error(folder, "cannot be listed"):
        names = journal_names(folder)
    if not names:
        return
    what = "an interrupted write in this folder cannot be completed"
    with as_output_error(folder, what), lock_folder(folder) as lock, delay_signals():
        for name in journal_names(folder):  # again: another run may have been faster
            journal = _read_journal(folder, name)
            why = _distrust_reason(lock, journal)
            if why:
                announce(_foreign_journal_note(folder, journal, why))
                continue
            _run_journal(lock, journal, again=True)
            _remove_journal(lock, journal)
            announce(_completed_note(folder, journal))


def clean_leftovers(folder: Path) -> None:
    """Remove temporary files of ended runs in a folder, except those that a journal still names."""
    needed = reserved_names(folder)
    if needed is not None:
        remove_leftovers(folder, needed)


def _distrust_reason(lock: LockedFolder, journal: Journal) -> str:
    """Return why a journal must not be executed; "" if this user signed it and its files fit."""
    facts = status_of(lock.path / journal.name)
    if facts is None or not is_owned_by_user(facts):
        return "it is another user's"
    if not journal.is_signed():
        return f"it is not signed by the key of this user ({key_path()})"
    device = os.stat(lock.path).st_dev
    for temporary, _ in journal.moves:
        found = status_of(lock.path / temporary)
        if found is not None and not (journal.is_file(temporary, found) and found.st_dev == device):
            return f"{temporary} is not the file that was written"
    return ""


def _completed_note(folder: Path, journal: Journal) -> Note:
    """Return the warning that an earlier run's renames were completed."""
    names = ", ".join(final for _, final in journal.moves)
    text = f"an earlier run was ended while it published here; completed: {names}"
    return Note("warning", str(folder), text, "completed_write")


def _foreign_journal_note(folder: Path, journal: Journal, why: str) -> Note:
    """Return the warning that a journal was left alone, and `why`."""
    text = (
        f"is left alone, with the files it names: {why}; who wrote it can complete it, else check "
        "the files and remove it"
    )
    return Note("warning", str(folder / journal.name), text, "foreign_journal")


def reserved_names(folder: Path) -> set[str] | None:
    """Return the temporary names that journals of `folder` still need.

    None if the folder cannot be listed.
    """
    names: set[str] = set()
    try:
        for name in journal_names(folder):
            with suppress(FormatError):  # no run can complete a damaged journal
                names.update(source for source, _ in _read_journal(folder, name).moves)
    except OSError:
        return None
    return names


def publish_set(
    folder: Path,
    moves: Sequence[tuple[str, str]],
    removes: Iterable[str] = (),
    *,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Rename every (temporary, final) name of `folder` and remove `removes`, or do nothing at all.

    The temporary files are synced already. `check` is called while no other run can publish here,
    right before the first rename, and raises where nothing may be renamed. Raises OutputError; the
    old files are then in place, unless the message says that a journal was left for the next run.
    """
    finals = [final for _, final in moves]
    removes = [name for name in removes if name not in finals]
    with lock_folder(folder) as lock, delay_signals():
        check()
        if len(moves) == 1 and not removes:
            _replace_one(lock, *moves[0])
            return
        digest = hashlib.sha256(os.fsencode("/".join(sorted(finals)))).hexdigest()
        name = f"{JOURNAL_PREFIX}{digest[:16]}"
        backups = _back_up(folder, [*finals, *removes])
        kept = list((backups or {}).values())
        files = _identities(
            folder, [*(new for new, _ in moves), *removes, *kept], stable=backups is not None
        )
        journal = Journal(name + JOURNAL_SUFFIX, moves, removes, files)
        try:
            lock.sync()  # after a power cut there must be no journal without its files
            _write_journal(lock, Journal(journal.name, moves, [*removes, *kept], files))
        except OSError as error:
            for litter in (journal.name, *kept):
                remove(folder / litter)
            raise output_error(folder, "cannot be published into", error) from error
        try:
            _run_journal(lock, journal, again=False)
        except OSError as error:
            if backups is None:
                raise _unfinished_error(folder, journal, error) from error
            _roll_back(lock, journal, backups, error)
            raise output_error(
                folder, "the files could not be put in place, the old ones are back", error
            ) from error
        for backup in kept:
            remove(folder / backup)
        try:
            _remove_journal(lock, journal)
        except OSError as error:
            raise _unfinished_error(folder, journal, error) from error


def _replace_one(lock: LockedFolder, temporary: str, final: str) -> None:
    """Rename one temporary file to its final name and sync the folder. Raises OutputError."""
    path = lock.path / final
    with as_output_error(path, "cannot be put in place"):
        os.replace(lock.path / temporary, path)
    with as_output_error(path, "is written, but its folder could not be synced"):
        lock.sync()


def _back_up(folder: Path, finals: Sequence[str]) -> dict[str, str] | None:
    """Give every old file a second name (hard link); return {final name: second name}.

    None if the file system has no hard links. Raises OutputError for other errors.
    """
    backups: dict[str, str] = {}
    try:
        for final in finals:
            if os.path.lexists(folder / final):
                backups[final] = temporary_name(final)
                os.link(folder / final, folder / backups[final], follow_symlinks=False)
    except OSError as error:
        for backup in backups.values():
            remove(folder / backup)
        if error.errno in _NO_LINKS:
            return None
        raise output_error(folder, "cannot be published into", error) from error
    return backups


def _roll_back(
    lock: LockedFolder, journal: Journal, backups: Mapping[str, str], cause: OSError
) -> None:
    """Put the old files back and remove the new ones, through a second journal.

    `backups` are {final name: second name}, `cause` the error of the rename. Raises OutputError if
    that fails too.
    """
    moves = [(backup, final) for final, backup in backups.items()]
    new = [final for _, final in journal.moves if final not in backups]
    # The backups are listed too: renaming one link over another of the same file keeps both.
    litter = [*new, *(temporary for temporary, _ in journal.moves), *backups.values()]
    files = dict(journal.files)
    files |= {final: files.get(temporary, "") for temporary, final in journal.moves if final in new}
    back = Journal(journal.name, moves, litter, files)
    try:
        _write_journal(lock, back)
        _run_journal(lock, back, again=False)
        _remove_journal(lock, back)
    except OSError:
        raise _unfinished_error(lock.path, journal, cause) from cause


def _unfinished_error(folder: Path, journal: Journal, error: OSError) -> OutputError:
    """Return the OutputError of a set that is partly renamed: the next run has to complete it."""
    todo = "the next write into this folder completes it"
    if not sign(SCHEMA, b""):
        todo = "without a state folder (XDG_STATE_HOME) no run can complete it: rename them by hand"
    return output_error(
        folder,
        f"{len(journal.moves)} files are partly in place, {journal.name} lists what is left; "
        f"{todo}, until then the files are not read",
        error,
    )


def _write_journal(lock: LockedFolder, journal: Journal) -> None:
    """Write the journal so that it is either complete and synced or does not exist (OSError)."""
    draft = lock.path / temporary_name(journal.name)
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            left = memoryview(journal.dumps())
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(draft, lock.path / journal.name)
    except OSError:
        remove(draft)
        raise
    lock.sync()


def _run_journal(lock: LockedFolder, journal: Journal, *, again: bool) -> None:
    """Do the journal's renames and removals; `again` says that some of them may be done already."""
    for source, final in journal.moves:
        try:
            os.replace(lock.path / source, lock.path / final)
        except FileNotFoundError:
            if not again:
                raise
    for name in journal.removes:
        if again and not journal.is_file(name, status_of(lock.path / name)):
            continue  # removed already, or another file now
        with suppress(FileNotFoundError):
            os.unlink(lock.path / name)
    lock.sync()


def _remove_journal(lock: LockedFolder, journal: Journal) -> None:
    """Remove the journal; if a power cut brings it back, repeating its work does no harm."""
    with suppress(FileNotFoundError):
        os.unlink(lock.path / journal.name)
    with suppress(OSError):
        lock.sync()


def _read_journal(folder: Path, name: str) -> Journal:
    """Return the journal in a file of `folder`; FormatError if it is none.

    It is untrusted, so it may only name files inside its folder.
    """
    path = folder / name
    try:
        fd = os.open(path, os.O_RDONLY | _NO_FOLLOW)
    except OSError as error:
        raise FormatError(f"{path}: cannot be opened: {os_reason(error)}; remove it") from error
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_BYTES:
            raise FormatError(f"{path}: is no journal; check the files of this folder, remove it")
        data = read_at(fd, facts.st_size, 0)
    finally:
        os.close(fd)
    try:
        value = bounded_json.loads(data, str(path), max_bytes=_MAX_BYTES, surrogates=True)
    except FormatError as error:
        raise FormatError(f"{error}; check the files of this folder, then remove it") from None
    return parse_journal(value, path)


def parse_journal(value: Any, path: Path) -> Journal:
    """Return the journal in a JSON value read from `path`. Raises FormatError."""
    found = value if isinstance(value, dict) else {}
    moves, removes, files = found.get("moves"), found.get("removes"), found.get("files", {})
    signature = found.get("signature", "")
    if not (
        isinstance(moves, list)
        and isinstance(removes, list)
        and isinstance(files, dict)
        and isinstance(signature, str)
        and found.get("schema") == SCHEMA
        and all(isinstance(move, list) and len(move) == 2 for move in moves)
        and all(is_plain_name(name) for move in (*moves, removes) for name in move)
        and all(is_temporary(source) for source, _ in moves)
        and all(isinstance(identity, str) for identity in files.values())
    ):
        raise FormatError(
            f"{path}: is not a journal of {SCHEMA} with plain file names; no run can complete it: "
            "check the files of this folder, then remove it"
        )
    pairs = [(source, final) for source, final in moves]
    return Journal(path.name, pairs, removes, files, signature)


def is_plain_name(name: Any) -> bool:
    """Return whether a value is a file name without a folder, and not "." or ".."."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and os.path.basename(name) == name
        and "\0" not in name
    )
