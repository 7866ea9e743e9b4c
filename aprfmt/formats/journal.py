"""Renames several files of one folder together; after a kill, the next run completes the renaming.

Before the first rename a journal `.aprfmt-journal-<hash>.json` is written and synced. It lists the
renames; repeating them is harmless, so any later run can complete them, and readers can tell a
mixed set from a whole one. A rename that fails is undone in the same way: hard links keep the old
files until the end, and a second journal lists the way back. Without hard links (FAT) the journal
stays and the next run completes it.

    {"schema": "aprfmt.journal/1", "moves": [[temporary, final], ...], "removes": [name, ...]}
"""

import errno
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprfmt.errors import FormatError, OutputError
from aprfmt.formats import jsonio
from aprfmt.formats.temporary import (
    LockedFolder,
    as_output_error,
    is_temporary,
    locked,
    output_error,
    remove,
    temporary_name,
    uninterrupted,
)
from aprfmt.remote.paths import RemotePath

SCHEMA = "aprfmt.journal/1"
_PREFIX, _SUFFIX = ".aprfmt-journal-", ".json"
_MAX_BYTES = 64 << 20  # 100,000 shards with names of 255 bytes

# The file system has no hard links, or forbids this one: then a failed rename cannot be undone.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


@dataclass(frozen=True)
class Journal:
    """Work left in one folder: `moves` are (temporary, final) names, `removes` plain names."""

    name: str
    moves: Sequence[tuple[str, str]]
    removes: Sequence[str]

    def dumps(self) -> bytes:
        """Return the journal file's bytes."""
        value = {"schema": SCHEMA, "moves": self.moves, "removes": self.removes}
        return jsonio.dumps(value).encode("utf-8")


def is_journal(name: str) -> bool:
    """Say whether a file of that name is a journal."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def pending(folder: Path) -> list[Path]:
    """Return the files of `folder` that an interrupted run left half published, sorted.

    Empty for a folder that cannot be listed. Raises FormatError for a damaged journal.
    """
    if isinstance(folder, RemotePath):
        return []  # nothing is written there
    try:
        names = _journals(folder)
    except OSError:
        return []
    return sorted({folder / final for name in names for _, final in _read(folder, name).moves})


def recover(folder: Path) -> None:
    """Complete renames that a killed run left unfinished in `folder`, if there are any.

    Raises OutputError if it cannot be completed, FormatError for a damaged journal.
    """
    with as_output_error(folder, "cannot be listed"):
        names = _journals(folder)
    if not names:
        return
    what = "an interrupted write in this folder cannot be completed"
    with as_output_error(folder, what), locked(folder) as lock, uninterrupted():
        for name in _journals(folder):  # again: another run may have been faster
            journal = _read(folder, name)
            _apply(lock, journal, again=True)
            _finish(lock, journal)


def reserved(folder: Path) -> set[str] | None:
    """Return the temporary names that journals of `folder` still need; None if not known."""
    names: set[str] = set()
    try:
        for name in _journals(folder):
            with suppress(FormatError):  # no run can complete a damaged journal
                names.update(source for source, _ in _read(folder, name).moves)
    except OSError:
        return None
    return names


def publish_set(
    folder: Path, moves: Sequence[tuple[str, str]], removes: Iterable[str] = ()
) -> None:
    """Rename every (temporary, final) name of `folder` and remove `removes`, or do nothing at all.

    The temporary files are synced already. Raises OutputError; the old files are then in place,
    unless the message says that a journal was left for the next run.
    """
    finals = [final for _, final in moves]
    removes = [name for name in removes if name not in finals]
    with locked(folder) as lock, uninterrupted():
        if len(moves) == 1 and not removes:
            _replace_one(lock, *moves[0])
            return
        name = f"{_PREFIX}{hashlib.sha256(os.fsencode('/'.join(sorted(finals)))).hexdigest()[:16]}"
        journal = Journal(name + _SUFFIX, moves, removes)
        backups = _back_up(folder, [*finals, *removes])
        kept = list((backups or {}).values())
        try:
            lock.sync()  # after a power cut there must be no journal without its files
            _commit(lock, Journal(journal.name, moves, [*removes, *kept]))
        except OSError as error:
            for litter in (journal.name, *kept):
                remove(folder / litter)
            raise output_error(folder, "cannot be published into", error) from error
        try:
            _apply(lock, journal, again=False)
        except OSError as error:
            if backups is None:
                raise _stuck(folder, journal, error) from error
            _roll_back(lock, journal, backups, error)
            raise output_error(
                folder, "the files could not be put in place, the old ones are back", error
            ) from error
        for backup in kept:
            remove(folder / backup)
        try:
            _finish(lock, journal)
        except OSError as error:
            raise _stuck(folder, journal, error) from error


def _replace_one(lock: LockedFolder, temporary: str, final: str) -> None:
    path = lock.path / final
    with as_output_error(path, "cannot be put in place"):
        os.replace(lock.path / temporary, path)
    with as_output_error(path, "is written, but its folder could not be synced"):
        lock.sync()


def _back_up(folder: Path, finals: Sequence[str]) -> dict[str, str] | None:
    """Keep every old file under a second name (hard link); None if hard links are not possible."""
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
    moves = [(backup, final) for final, backup in backups.items()]
    new = [final for _, final in journal.moves if final not in backups]
    # The backups are listed too: renaming one link over another of the same file keeps both.
    litter = [*new, *(temporary for temporary, _ in journal.moves), *backups.values()]
    back = Journal(journal.name, moves, litter)
    try:
        _commit(lock, back)
        _apply(lock, back, again=False)
        _finish(lock, back)
    except OSError:
        raise _stuck(lock.path, journal, cause) from cause


def _stuck(folder: Path, journal: Journal, error: OSError) -> OutputError:
    return output_error(
        folder,
        f"{len(journal.moves)} files are partly in place, {journal.name} lists what is left; the "
        "next write into this folder completes it, until then the files are not read",
        error,
    )


def _commit(lock: LockedFolder, journal: Journal) -> None:
    """Write the journal so that it is either whole and durable or not there (OSError)."""
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


def _apply(lock: LockedFolder, journal: Journal, *, again: bool) -> None:
    """Do the journal's work; `again`: parts of it may be done already."""
    for source, final in journal.moves:
        try:
            os.replace(lock.path / source, lock.path / final)
        except FileNotFoundError:
            if not again:
                raise
    for name in journal.removes:
        with suppress(FileNotFoundError):
            os.unlink(lock.path / name)
    lock.sync()


def _finish(lock: LockedFolder, journal: Journal) -> None:
    """Remove the journal; if a power cut brings it back, its work is repeated without harm."""
    with suppress(FileNotFoundError):
        os.unlink(lock.path / journal.name)
    with suppress(OSError):
        lock.sync()


def _journals(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if is_journal(name))


def _read(folder: Path, name: str) -> Journal:
    """Read a journal; it is untrusted, so it may only name files inside its folder."""
    path = folder / name
    return parse_journal(jsonio.load_file(path, _MAX_BYTES, surrogates=True), path)


def parse_journal(value: Any, path: Path) -> Journal:
    """Return the journal in a JSON value read from `path`. Raises FormatError."""
    moves = value.get("moves") if isinstance(value, dict) else None
    removes = value.get("removes") if isinstance(value, dict) else None
    if not (
        isinstance(moves, list)
        and isinstance(removes, list)
        and value.get("schema") == SCHEMA
        and all(isinstance(move, list) and len(move) == 2 for move in moves)
        and all(_is_plain(name) for move in (*moves, removes) for name in move)
        and all(is_temporary(source) for source, _ in moves)
    ):
        raise FormatError(
            f"{path}: is not a journal of {SCHEMA} with plain file names; no run can complete it: "
            "check the files of this folder, then remove it"
        )
    return Journal(path.name, [(source, final) for source, final in moves], removes)


def _is_plain(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and os.path.basename(name) == name
        and "\0" not in name
    )
